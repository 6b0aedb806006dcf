import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from leto_strategy.errors import LayoutMismatchError, LetoError, UnsupportedOptimizerError
from leto_strategy.memory.backend import Kind
from leto_strategy.update import RetainedState, StateLayout, adapter_for
from leto_strategy.update.cutting import is_cuttable
from update.rig import LocalPool, Rig


def model(width: int = 40, depth: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def plan(module: nn.Module, optimizer: Optimizer, **kwargs: Any) -> StateLayout:
    return StateLayout.plan(list(module.named_parameters()), optimizer, adapter_for(optimizer), **kwargs)


def test_order_is_dtype_then_group_then_reverse_registration() -> None:
    module = model()
    module[1].bfloat16()
    first = list(module[0].parameters())
    rest = [p for p in module.parameters() if all(p is not q for q in first)]
    layout = plan(module, Adam([{"params": rest}, {"params": first}]))
    names = ["1.bias", "1.weight", "2.bias", "2.weight", "0.bias", "0.weight"]
    assert [slot.name for slot in layout.slots] == names
    assert [slot.index for slot in layout.slots] == list(range(6))
    assert [(run.dtype, run.group, len(run.slots)) for run in layout.runs] == [
        (torch.bfloat16, 0, 2),
        (torch.float32, 0, 2),
        (torch.float32, 1, 2),
    ]


def test_the_same_script_plans_the_same_and_a_changed_model_is_named() -> None:
    module = model()
    signature = plan(module, AdamW(module.parameters())).signature()
    again = model()
    plan(again, AdamW(again.parameters())).require_signature(signature)
    json.loads(signature)
    wider = model(width=41)
    with pytest.raises(LayoutMismatchError, match=r"parameter 2\.bias was .*40.* when training began and is .*41"):
        plan(wider, AdamW(wider.parameters())).require_signature(signature)
    deeper = model(depth=4)
    with pytest.raises(LayoutMismatchError, match=r"parameter 3\.bias was not there"):
        plan(deeper, AdamW(deeper.parameters())).require_signature(signature)
    with pytest.raises(LayoutMismatchError, match="the optimizer was AdamW when training began and is Adam now"):
        plan(module, Adam(module.parameters())).require_signature(signature)
    with pytest.raises(LayoutMismatchError, match="chunks of the training state differ"):
        plan(module, AdamW(module.parameters()), chunk_bytes=4096).require_signature(signature)


def test_frozen_tied_and_foreign_parameters() -> None:
    module = model()
    module[0].weight.requires_grad_(False)
    module.tied = module[2].weight
    optimizer = SGD([p for p in module.parameters() if p is not module[1].bias], lr=0.1, momentum=0.9)
    named = list(module.named_parameters(remove_duplicate=False))
    layout = StateLayout.plan(named, optimizer, adapter_for(optimizer))
    assert [slot.name for slot in layout.frozen] == ["0.weight", "1.bias"]
    assert [slot.name for slot in layout.slots] == ["2.bias", "1.weight", "0.bias", "tied"]
    specs = {spec.name: spec for spec in layout.region_specs()}
    assert {"parameter/0.weight", "parameter/1.bias"} < set(specs)
    assert not {name for name in specs if name.endswith("0.weight")} - {"parameter/0.weight"}
    assert {spec.kind for name, spec in specs.items() if not name.startswith(("gradient/", "undo"))} == {Kind.PROTECTED}
    assert specs["gradient/2.bias"].kind is specs["undo"].kind is Kind.RETAINED


def test_buckets_are_contiguous_and_launched_as_backward_completes_them() -> None:
    module = model(depth=4)
    early = list(module[0].parameters())
    late = [p for p in module.parameters() if all(p is not q for q in early)]
    rig = Rig(
        lambda: (module, Adam([{"params": early}, {"params": late}])), bucket_bytes_first=6000, bucket_bytes=14_000
    )
    layout = rig.layout
    assert [slot for bucket in layout.buckets for slot in bucket.slots] == list(layout.slots)
    assert sorted(layout.launch_order) == list(range(len(layout.buckets)))
    assert layout.launch_order[-1] == 0  # the first layers' gradients come last, though their group is the first
    for bucket in layout.buckets:
        flat = rig.state.bucket(bucket.index)
        flat.zero_()
        for slot in bucket.slots:
            rig.state.gradient(slot).fill_(slot.index + 1)
        assert float(flat.sum()) == sum((slot.index + 1) * slot.num_elements for slot in bucket.slots)
        assert flat.untyped_storage().nbytes() == flat.numel() * 4


def test_tensors_have_their_own_storage_and_are_no_views() -> None:
    module = model()
    version = module[2].weight._version
    rig = Rig(lambda: (module, AdamW(module.parameters())))
    slot = rig.layout.slots[1]
    for tensor in (rig.state.parameter(slot), rig.state.gradient(slot), *rig.state.moments(slot).values()):
        assert tensor.untyped_storage().nbytes() == slot.size_bytes
        assert not tensor._is_view()
        assert tensor.data_ptr() % 512 == 0
    assert slot.parameter.data_ptr() == rig.state.parameter(slot).data_ptr()
    assert slot.parameter is module[2].weight
    assert slot.parameter._version == version


def test_names_that_the_pool_can_not_take_are_hashed() -> None:
    module = nn.Module()
    module.register_parameter("größe mit leerzeichen", nn.Parameter(torch.ones(3)))
    module.register_parameter("x" * 300, nn.Parameter(torch.ones(3)))
    rig = Rig(lambda: (module, SGD(module.parameters(), lr=0.1)))
    assert len({spec.name for spec in rig.layout.region_specs()}) == 5


class Tuned(AdamW):
    pass


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda p: torch.optim.RMSprop(p), r"torch\.optim\.rmsprop\.RMSprop"),
        (lambda p: torch.optim.NAdam(p), "NAdam"),
        (lambda p: Tuned(p), r"Tuned.*subclass of Adam"),
    ],
)
def test_another_optimizer_is_refused_by_name_with_the_supported_ones(make: Any, named: str) -> None:
    with pytest.raises(UnsupportedOptimizerError, match=named) as caught:
        adapter_for(make([nn.Parameter(torch.ones(2))]))
    assert "torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD" in str(caught.value)
    assert isinstance(caught.value, (LetoError, ValueError))


@pytest.mark.parametrize("option", ["differentiable", "capturable"])
def test_options_that_can_not_be_kept_exact_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"Adam, parameter group 0: {option}=True"):
        adapter_for(Adam([nn.Parameter(torch.ones(2))], **{option: True}))


def refused(parameter: nn.Parameter, match: str) -> None:
    module = nn.Module()
    module.register_parameter("bad", parameter)
    with pytest.raises(ValueError, match=match):
        plan(module, SGD(module.parameters(), lr=0.1))


def test_parameters_that_can_not_be_kept_exact_are_refused_by_name() -> None:
    refused(nn.Parameter(torch.ones(3, dtype=torch.complex64)), r"parameter bad is torch\.complex64.*trains")
    refused(nn.Parameter(torch.ones(6)[::2]), "parameter bad is a view with gaps")
    refused(nn.Parameter(torch.ones(1).expand(4)), "parameter bad is a view with gaps or repeated")
    refused(nn.Parameter(torch.ones(3, device="meta")), "parameter bad has no values yet")
    refused(nn.UninitializedParameter(), "parameter bad has no values yet")
    module = model()
    module.alias = nn.Parameter(module[0].weight.data[:10])
    with pytest.raises(ValueError, match=r"parameters 0\.weight and alias share memory|alias and 0\.weight share"):
        plan(module, SGD(module.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="is not a parameter of the module"):
        plan(model(), SGD(model().parameters(), lr=0.1))


def test_a_complex_parameter_that_is_frozen_is_kept() -> None:
    module = model()
    module.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=False)
    rig = Rig(lambda: (module, SGD(module.parameters(), lr=0.1)))
    assert torch.equal(module.phase, torch.ones(3, dtype=torch.complex64))
    assert rig.layout.frozen[0].parameter.data_ptr() == rig.state.parameter(rig.layout.frozen[0]).data_ptr()


def test_nothing_is_allocated_before_a_refusal_and_one_call_allocates_all() -> None:
    rig = Rig(lambda: ((m := model()), AdamW(m.parameters())))
    assert rig.pool.num_allocations == 1
    again = RetainedState(rig.layout, rig.pool)
    assert again.parameter(rig.layout.slots[0]).data_ptr() == rig.state.parameter(rig.layout.slots[0]).data_ptr()
    assert isinstance(rig.pool, LocalPool)


def test_what_may_be_cut_is_measured_and_known_for_this_cpu() -> None:
    cpu = torch.device("cpu")

    def cuttable(optimizer: Optimizer, dtype: torch.dtype) -> bool:
        return is_cuttable(adapter_for(optimizer), 0, optimizer.param_groups[0], dtype, cpu)

    parameters = [nn.Parameter(torch.ones(2))]
    for dtype in (torch.float32, torch.float64):
        for optimizer in (Adam(parameters), AdamW(parameters, foreach=True), SGD(parameters, lr=0.1, momentum=0.9)):
            assert cuttable(optimizer, dtype)
        assert not cuttable(Adam(parameters, fused=True), dtype)


def test_too_many_chunks_for_a_marker_are_refused() -> None:
    module = nn.Linear(1000, 1000)
    with pytest.raises(ValueError, match=r"chunk_bytes=512 makes .* chunks"):
        plan(module, AdamW(module.parameters()), chunk_bytes=512)
