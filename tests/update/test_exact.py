"""Updates give torch's own bits, state and keys: every supported optimizer, option and dtype, on awkward shapes."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from update.rig import Rig, assert_same_state, give_torch, random_gradients

MakeOptimizer = Callable[[nn.Module], Optimizer]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.fixture(params=[1, 2], ids=["one_thread", "two_threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Awkward(nn.Module):
    """Scalars, empty tensors, channels_last, a transposed weight, odd lengths, a tied and a frozen parameter."""

    def __init__(self, dtype: torch.dtype, large: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)

        def values(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        self.scalar = nn.Parameter(values())
        self.empty = nn.Parameter(values(0, 3))
        self.image = nn.Parameter(values(5, 3, 3, 3).contiguous(memory_format=torch.channels_last))
        self.transposed = nn.Parameter(values(17, 9).t())
        self.odd = nn.Parameter(values(1031))
        self.frozen = nn.Parameter(values(13), requires_grad=False)
        self.tied = self.odd
        self.view = nn.Parameter(values(40)[3:20])
        if large:
            self.large = nn.Parameter(values(large))


def options(optimizer: type[Optimizer], **kwargs: Any) -> Any:
    words = [f"{key}={value}" for key, value in kwargs.items()]
    return pytest.param(lambda m: optimizer(m.parameters(), **kwargs), id="-".join([optimizer.__name__, *words]))


ADAM_OPTIONS = [
    options(kind, weight_decay=decay, amsgrad=amsgrad, maximize=maximize)
    for kind, decay, amsgrad, maximize in itertools.product((Adam, AdamW), (0.0, 0.1), (False, True), (False, True))
]
SGD_OPTIONS = [
    options(SGD, lr=0.1, **kwargs)
    for kwargs in (
        {},
        {"weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "maximize": True},
    )
]
KERNEL_OPTIONS = [
    options(kind, **kwargs, **way)
    for kind, kwargs in (
        (Adam, {"weight_decay": 0.1, "amsgrad": True}),
        (AdamW, {}),
        (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
        (SGD, {"lr": 0.1}),
    )
    for way in ({"foreach": True}, {"fused": True}, {"foreach": False})
]
TENSOR_OPTIONS = [
    options(Adam, lr=torch.tensor(0.01), weight_decay=0.1),
    options(AdamW, lr=torch.tensor([0.01]), fused=True),
    options(SGD, lr=torch.tensor(0.1), momentum=0.9),
    options(SGD, lr=0.1, weight_decay=torch.tensor(0.1), momentum=0.9),
    options(AdamW, betas=(torch.tensor(0.9), torch.tensor(0.99))),
    options(Adam, betas=(0.3, 0.9)),
    options(Adam, decoupled_weight_decay=True, weight_decay=0.1),
    options(AdamW, lr=0.0),
]


def compare(make: MakeOptimizer, dtype: torch.dtype, *, steps: int = 3, large: int = 0, **rig_options: Any) -> Rig:
    def build() -> tuple[nn.Module, Optimizer]:
        module = Awkward(dtype, large)
        return module, make(module)

    rig = Rig(build, **rig_options)
    module, optimizer = build()
    assert_same_state(rig, module, optimizer)
    versions = {name: parameter._version for name, parameter in rig.module.named_parameters()}
    for step in range(steps):
        gradients = random_gradients(module, seed=step)
        if step == 0 and not (isinstance(optimizer, SGD) and optimizer.defaults["fused"]):
            gradients["view"] = None  # a late first update; torch's fused SGD raises TypeError at it
        if step == 1:
            gradients["odd"] = None
        rig.set_gradients(gradients)
        give_torch(module, gradients)
        optimizer.step()
        rig.update(step)
        assert_same_state(rig, module, optimizer)
    assert versions == {name: parameter._version for name, parameter in rig.module.named_parameters()}
    return rig


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", ADAM_OPTIONS + SGD_OPTIONS + KERNEL_OPTIONS + TENSOR_OPTIONS)
def test_every_option_gives_torchs_bits_state_and_keys(make: MakeOptimizer, dtype: torch.dtype) -> None:
    optimizer = make(Awkward(torch.float32))
    if isinstance(optimizer, SGD) and optimizer.defaults["fused"] and dtype.itemsize == 2:
        with pytest.raises(ValueError, match="pytorch issue 191763"):
            compare(make, dtype)
        return
    compare(make, dtype, chunk_bytes=6000)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "make", [options(Adam, weight_decay=0.1), options(AdamW, fused=True), options(SGD, lr=0.1, momentum=0.9)]
)
def test_tensors_that_torch_divides_among_threads_are_exact(
    make: MakeOptimizer, dtype: torch.dtype, threads: int
) -> None:
    rig = compare(make, dtype, steps=2, large=100_003)
    assert len(rig.layout.chunks) > 1


@pytest.mark.parametrize("chunk_bytes", [1, 4096, 1 << 30])
def test_chunk_size_does_not_change_a_bit(chunk_bytes: int) -> None:
    compare(lambda m: AdamW(m.parameters()), torch.float32, chunk_bytes=chunk_bytes)


def two_groups(module: nn.Module) -> Optimizer:
    named = dict(module.named_parameters())
    return Adam(
        [
            {"params": [named["odd"], named["scalar"], named["empty"]], "lr": 0.1, "amsgrad": True},
            {"params": [named["image"], named["view"]], "weight_decay": 0.3, "betas": (0.5, 0.7)},
            {"params": [named["transposed"]], "foreach": True, "maximize": True},
        ]
    )


def two_groups_sgd(module: nn.Module) -> Optimizer:
    named = dict(module.named_parameters())
    return SGD(
        [
            {"params": [named["odd"], named["scalar"]], "momentum": 0.9},
            {"params": [named["image"], named["view"], named["transposed"], named["empty"]]},
        ],
        lr=0.1,
    )


@pytest.mark.parametrize("make", [two_groups, two_groups_sgd])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parameter_groups_with_different_options_are_exact(make: MakeOptimizer, dtype: torch.dtype) -> None:
    compare(make, dtype, chunk_bytes=2048)


def test_hyper_parameters_may_change_from_step_to_step() -> None:
    def build() -> tuple[nn.Module, Optimizer]:
        module = Awkward(torch.float32)
        return module, SGD(module.parameters(), lr=0.1, momentum=0.9)

    rig, (module, optimizer) = Rig(build, chunk_bytes=4096), build()
    changes: list[dict[str, Any]] = [{}, {"lr": 0.01}, {"weight_decay": 0.1}, {"momentum": 0}, {"momentum": 0.5}]
    for step, change in enumerate(changes):
        rig.optimizer.param_groups[0].update(change)
        optimizer.param_groups[0].update(change)
        gradients = random_gradients(module, seed=step)
        rig.set_gradients(gradients)
        give_torch(module, gradients)
        optimizer.step()
        rig.update(step)
        assert_same_state(rig, module, optimizer)


def test_moments_that_were_not_allocated_are_asked_for_clearly() -> None:
    def build() -> tuple[nn.Module, Optimizer]:
        module = nn.Linear(4, 3)
        return module, SGD(module.parameters(), lr=0.1)

    rig = Rig(build)
    rig.optimizer.param_groups[0]["momentum"] = 0.9
    rig.set_gradients(random_gradients(rig.module, 0))
    with pytest.raises(ValueError, match="momentum_buffer, which they did not when training began"):
        rig.update(0)


def test_mixed_dtypes_and_parameter_subclasses_are_exact() -> None:
    class Special(nn.Parameter):
        pass

    def build() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(3)
        module = nn.Module()
        module.low = nn.Parameter(torch.randn(700).bfloat16())
        module.special = Special(torch.randn(600))
        module.high = nn.Parameter(torch.randn(500).double())
        return module, Adam(module.parameters(), weight_decay=0.1)

    rig, (module, optimizer) = Rig(build, chunk_bytes=4000), build()
    for step in range(2):
        gradients = random_gradients(module, step)
        rig.set_gradients(gradients)
        give_torch(module, gradients)
        optimizer.step()
        rig.update(step)
        assert_same_state(rig, module, optimizer)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "make", [options(AdamW, weight_decay=0.1), options(SGD, lr=0.1, momentum=0.9), options(Adam, foreach=True)]
)
def test_a_view_at_any_address_is_exact(make: MakeOptimizer, dtype: torch.dtype) -> None:
    def build() -> tuple[nn.Module, Optimizer]:
        module = nn.Module()
        module.view = nn.Parameter(torch.linspace(-1, 1, 400).to(dtype)[3:204])
        return module, make(module)

    rig, (module, optimizer) = Rig(build), build()
    for step in range(2):
        gradients = random_gradients(module, step)
        rig.set_gradients(gradients)
        give_torch(module, gradients)
        optimizer.step()
        rig.update(step)
        assert_same_state(rig, module, optimizer)


def test_infinities_and_nans_pass_through_as_with_torch() -> None:
    def build() -> tuple[nn.Module, Optimizer]:
        module = Awkward(torch.float32)
        return module, AdamW(module.parameters(), amsgrad=True)

    rig, (module, optimizer) = Rig(build, chunk_bytes=4096), build()
    gradients = random_gradients(module, 0)
    odd = gradients["odd"]
    assert odd is not None
    odd[5], odd[700], odd[1030] = math.inf, math.nan, -math.inf
    rig.set_gradients(gradients)
    give_torch(module, gradients)
    optimizer.step()
    rig.update(0)
    assert_same_state(rig, module, optimizer)


def test_step_counts_saturate_where_torch_counts_no_further() -> None:
    def build() -> tuple[nn.Module, Optimizer]:
        module = nn.Linear(3, 2)
        return module, Adam(module.parameters())

    rig, (module, optimizer) = Rig(build), build()
    rig.steps = [float(2**24 - 1)] * 2
    gradients = random_gradients(module, 0)
    for step in range(3):
        give_torch(module, gradients)
        optimizer.step()
        if step == 0:
            for entry in optimizer.state.values():
                entry["step"].fill_(2**24)
        rig.set_gradients(gradients)
        rig.update(step)
    assert {float(entry["step"]) for entry in optimizer.state.values()} == set(rig.steps) == {float(2**24)}


def test_an_update_leaves_the_random_state_and_grad_mode_alone() -> None:
    before = torch.get_rng_state()
    compare(lambda m: Adam(m.parameters()), torch.float32, steps=1)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.is_grad_enabled()
