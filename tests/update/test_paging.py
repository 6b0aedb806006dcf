"""Pages are never shared between chunks, whatever the model, the optimizer and the sizes."""

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from leto_strategy.erasures import PageKind
from leto_strategy.geometry import align_up
from leto_strategy.progress import Marker, Phase
from leto_strategy.update import RetainedState, StateLayout, adapter_for
from leto_strategy.update.coded import CodedProtection
from leto_strategy.update.paging import Paging, RunSizes, chunk_bytes_in_groups, place
from leto_strategy.update.protected_memory import ProtectedMemory
from update.coded_rig import BlockPool
from update.rig import Rig, assert_same_state, give_torch, random_gradients

SMALL = Paging(page_bytes=4096, num_data=12, num_parity=3, num_second=2)


def mixed() -> tuple[nn.Module, Optimizer]:
    """Two dtypes, two groups of which one has no momentum, one tensor without elements, two that are frozen."""
    generator = torch.Generator().manual_seed(3)
    module = nn.Module()
    for index, shape in enumerate(((1500,), (40, 30), (0,), (7,), (2000,), (3, 3, 5), (1300,))):
        module.register_parameter(f"p{index}", nn.Parameter(torch.randn(shape, generator=generator)))
    module.p4.data = module.p4.data.bfloat16()
    module.p6.data = module.p6.data.bfloat16()
    module.frozen = nn.Parameter(torch.randn(2000, generator=generator), requires_grad=False)
    module.frozen_half = nn.Parameter(torch.randn(99, generator=generator).half(), requires_grad=False)
    some = [module.p1, module.p3]
    rest = [p for p in module.parameters() if p.requires_grad and all(p is not q for q in some)]
    return module, SGD([{"params": rest, "momentum": 0.9}, {"params": some}], lr=0.1, weight_decay=0.1)


def whole_tensors() -> tuple[nn.Module, Optimizer]:
    generator = torch.Generator().manual_seed(4)
    module = nn.Module()
    for index, size in enumerate((1500, 20, 900, 3000, 5, 1024, 2048)):
        module.register_parameter(f"p{index}", nn.Parameter(torch.randn(size, generator=generator)))
    module.bfloat16()
    return module, Adam(module.parameters(), lr=0.1, weight_decay=0.1)


def large_and_small() -> tuple[nn.Module, Optimizer]:
    generator = torch.Generator().manual_seed(5)
    module = nn.Module()
    for index, size in enumerate((9000, 1, 130, 5000)):
        module.register_parameter(f"p{index}", nn.Parameter(torch.randn(size, generator=generator)))
    return module, AdamW(module.parameters(), lr=0.1)


class CodedRig(Rig):
    """The ordinary rig with protection."""

    def __init__(self, build: Any, paging: Paging = SMALL, **plan: Any) -> None:
        module, optimizer = build()
        adapter, pool = adapter_for(optimizer), BlockPool()
        layout = StateLayout.plan(
            list(module.named_parameters()), optimizer, adapter, paging=paging, chunk_bytes=plan.get("chunk_bytes")
        )
        state = RetainedState(layout, pool)  # type: ignore[arg-type]
        self.memory = ProtectedMemory(layout, state, pool)  # type: ignore[arg-type]
        super().__init__(
            lambda: (module, optimizer), pool=pool, protection=CodedProtection(self.memory), paging=paging, **plan
        )
        self.updater._protection.encode()

    def verify(self) -> None:
        for group, code in enumerate(self.memory.codes):
            assert code.verify(self.memory.data[group], self.memory.first[group]) == ()
            assert self.memory.code.second.verify(self.memory.first[group], self.memory.second[group]) == ()


@pytest.mark.parametrize("build", [mixed, whole_tensors, large_and_small])
@pytest.mark.parametrize("chunk_bytes", [None, 1, 9000, 30_000])
def test_a_protected_update_has_torchs_bits_and_its_parity_follows(build: Any, chunk_bytes: int | None) -> None:
    rig = CodedRig(build, chunk_bytes=chunk_bytes)
    module, optimizer = build()
    for step in range(3):
        gradients = random_gradients(rig.module, step)
        rig.set_gradients(gradients)
        rig.updater._protection.seal_gradients(step)
        rig.page.publish(Marker(step, Phase.SYNCED))
        rig.update(step)
        give_torch(module, gradients)
        optimizer.step()
        rig.verify()
    assert_same_state(rig, module, optimizer)
    for group, code in enumerate(rig.memory.gradient_codes):
        assert code.verify(rig.memory.gradients[group], rig.memory.gradient_parity[group]) == ()


@pytest.mark.parametrize("build", [mixed, whole_tensors, large_and_small])
@pytest.mark.parametrize("chunk_bytes", [None, 1, 9000, 30_000])
def test_every_tensor_lies_in_pages_of_one_chunk_and_every_page_has_one_place(build: Any, chunk_bytes: int) -> None:
    rig = CodedRig(build, chunk_bytes=chunk_bytes)
    memory, page_bytes = rig.memory, SMALL.page_bytes
    owner: dict[int, int] = {}
    for index, group in enumerate(memory.shape.groups):
        assert group.num_pages <= SMALL.num_data
        for place_, address in enumerate(memory.data[index].addresses):
            assert address not in owner
            owner[address] = next((chunk for chunk in group.chunks if place_ in group.pages_of(chunk)), -1)
    for chunk, pieces in zip(rig.layout.chunks, rig.updater._chunks, strict=True):
        for data in pieces.data:
            assert {owner[data.data_ptr() + at] for at in range(0, data.numel(), page_bytes)} == {chunk.index}
    for slot in (*rig.layout.slots, *rig.layout.frozen):
        for tensor in (rig.state.parameter(slot), *rig.state.moments(slot).values()):
            if tensor.numel():
                first = tensor.data_ptr() // page_bytes * page_bytes
                end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
                assert all(address in owner for address in range(first, end, page_bytes))
    table = [memory.address(page) for page in memory.shape.pages()]
    assert len(set(table)) == len(table)
    assert memory.shape.num_undo * page_bytes == rig.layout.undo_bytes
    assert {page.kind for page in memory.shape.pages()} == set(PageKind)


def test_random_placements_keep_their_promises(rng: random.Random) -> None:
    for _ in range(200):
        runs = [
            RunSizes(
                rng.choice((2, 4)),
                rng.randint(1, 4),
                rng.random() < 0.6,
                tuple(rng.choice((1, 100, 1024, 5000, rng.randint(1, 9000))) for _ in range(rng.randint(1, 5))),
            )
            for _ in range(rng.randint(1, 4))
        ]
        chunk_bytes, page_bytes = rng.choice((1, 4096, 20_000, 100_000)), rng.choice((4096, 8192))
        result = place(runs, chunk_bytes=chunk_bytes, page_bytes=page_bytes)
        covered = {(run, tensor): 0 for run, sizes in enumerate(runs) for tensor in range(len(sizes.num_elements))}
        pages: dict[tuple[int, int], int] = {}
        for chunk, pieces in enumerate(result.chunks):
            for piece in pieces:
                run = runs[piece.run]
                assert covered[piece.run, piece.tensor] == piece.start < piece.stop
                covered[piece.run, piece.tensor] = piece.stop
                assert run.cuttable or (piece.start, piece.stop) == (0, run.num_elements[piece.tensor])
                offset = result.offsets[piece.run][piece.tensor]
                first, last = (offset + at * run.element_bytes for at in (piece.start, piece.stop))
                for page in range(first // page_bytes, -(-last // page_bytes)):
                    assert pages.setdefault((piece.run, page), chunk) == chunk
            used = sum(runs[run].num_copies for (run, _), owner in pages.items() if owner == chunk)
            head = pieces[0]  # what is larger than a chunk may be, opens one, in whose last page others may follow
            start, run = result.offsets[head.run][head.tensor], runs[head.run]
            first, last = start + head.start * run.element_bytes, start + head.stop * run.element_bytes
            of_head = (-(-last // page_bytes) - first // page_bytes) * run.num_copies
            assert used * page_bytes <= chunk_bytes or used == of_head
        assert covered == {(r, t): n for r, run in enumerate(runs) for t, n in enumerate(run.num_elements)}
        for starts, run in zip(result.offsets, runs, strict=True):
            assert starts[0] == 0
            for (start, after), size in zip(pairwise(starts), run.num_elements, strict=False):
                assert align_up(start + size * run.element_bytes) <= after
                assert after % 512 == 0


def test_a_whole_number_of_chunks_fills_a_group() -> None:
    paging = Paging(page_bytes=2 << 20, num_data=1024)
    for chunk_bytes in (1, 100 << 20, 437 << 20, 1 << 31, 1 << 40):
        size = chunk_bytes_in_groups(chunk_bytes, paging)
        assert 0 < size <= paging.group_bytes
        if chunk_bytes >= 100 << 20:
            assert paging.group_bytes // size * size > 0.999 * paging.group_bytes


def test_a_tensor_that_fills_no_group_is_refused_by_name_of_the_option() -> None:
    module = nn.Module()
    module.register_parameter("p", nn.Parameter(torch.zeros(40_000).bfloat16()))
    optimizer = Adam(module.parameters(), weight_decay=0.1)
    with pytest.raises(ValueError, match="protection_pages is 12: set protection_pages to at least 60"):
        StateLayout.plan(list(module.named_parameters()), optimizer, adapter_for(optimizer), paging=SMALL)


def test_without_protection_nothing_is_laid_out_by_pages() -> None:
    module, optimizer = mixed()
    layout = StateLayout.plan(list(module.named_parameters()), optimizer, adapter_for(optimizer))
    assert layout.shape is None
    assert not any(slot.opens_page for slot in layout.slots)
    assert not any(spec.name.startswith("end/") for spec in layout.region_specs())
    assert {spec.alignment_bytes for spec in layout.region_specs()} == {512}
