"""What is compiled ahead is what is launched: compared variant by variant."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from benchmarks.kernel_data import Place, table
from benchmarks.update_checks import STEPS, Chunk

from leto_strategy.triton_kernels import chunk_update, parity
from leto_strategy.triton_kernels.ahead import Compilation
from leto_strategy.triton_kernels.chunk_update import restore
from leto_strategy.triton_kernels.launch_shapes import Way
from leto_strategy.triton_kernels.pages import PageTable
from leto_strategy.triton_kernels.warm_up import Needs, compilations

Variant = tuple[str, tuple[str, ...], frozenset[tuple[str, Any]]]


def variant(one: Compilation) -> Variant:
    """What makes two compilations one: numbers count by their kind only."""
    types = tuple(arg if isinstance(arg, str) else "number" for arg in one.args)
    return one.kernel, types, frozenset(one.options.items())


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[Variant]:
    """The variants that wrappers launch; nothing is run."""
    found: set[Variant] = set()

    def record(kernel: Any, grid: tuple[int, ...], args: Sequence[Any], options: Mapping[str, Any]) -> None:
        found.add(variant(Compilation.of(kernel, args, options)))

    for module in (parity, chunk_update):
        monkeypatch.setattr(module, "launch", record)
    return found


@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("step", [STEPS[0], STEPS[7]])
def test_updates(place: Place, launched: set[Variant], rotates: bool, bf16: bool, step: Any) -> None:
    needs = Needs(16, step, rotates=rotates, bf16_grad=bf16, bf16_copy=bf16)
    dtype = torch.bfloat16 if bf16 else torch.float32
    whole, ragged = (Chunk(place, num, rotate=rotates, dtype=dtype, copy=bf16) for num in (16, 17))
    for chunk, way in ((whole, Way.FUSED), (ragged, Way.PAGES)):
        chunk.update(step, 1.0, 1, way)
        restore(chunk.pages, chunk.flags, 1, way)
    ahead = {variant(one) for one in _interpreted(needs)}
    assert len(launched) == 5
    assert launched <= ahead


@pytest.mark.parametrize("height", [16, 1, 5, 20])
def test_parity(place: Place, launched: set[Variant], height: int) -> None:
    pages, out = table(place.poisoned(19)), table(place.poisoned(height))
    other, matrix = table(place.poisoned(height)), None if height == 16 else place.matrix(19, height)
    parity.encode(pages, out, matrix_PH=matrix)
    parity.update(pages, table(place.poisoned(19)), other, out, matrix_PH=matrix)
    parity.xor(pages, table(place.poisoned(1)))
    if height == 16:
        parity.reconstruct(pages.without([3]), out, torch.zeros((1, 16), dtype=torch.int64), table(place.poisoned(1)))
    for lost in range(1, height + 1) if height != 16 else ():
        zeros = torch.zeros((19, lost), dtype=torch.int64)
        parity.apply_matrix(pages.without([0]), zeros, table(place.poisoned(lost)))
    assert launched <= {variant(one) for one in _interpreted(Needs(height, STEPS[0]))}


def test_scattered_pages_need_more(place: Place, launched: set[Variant]) -> None:
    rows = place.poisoned(6)
    pages = PageTable.of_tensors([rows[4], rows[0], rows[2]])
    parity.encode(pages, table(place.poisoned(16)))
    assert not launched <= {variant(one) for one in _interpreted(Needs(16, STEPS[0]))}
    assert launched <= {variant(one) for one in _interpreted(Needs(16, STEPS[0], scattered=True))}


def _integers(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: False if name == "CLMAD" else value for name, value in options.items()}


def _interpreted(needs: Needs) -> list[Compilation]:
    """With the products that the interpreter has."""
    found = compilations(needs, clmad=False)
    if needs.num_parity == 16:
        fused = [one for one in compilations(needs, clmad=True) if one.kernel.endswith((":_fused_update", "_tiles"))]
        found += [Compilation(one.kernel, one.args, _integers(one.options)) for one in fused]
    return found
