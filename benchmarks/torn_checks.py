"""Updates that are cut off: any part of what may have been written is there; restored and done again, the bits agree.

Rule T8 lets be there, tile by tile: nothing; some words of the undo copy; all of it and some flags; both
flags and some words of the data. Where moments rotate, words of the new ones may be there at any time;
words of the bf16 copy and of the next parity always. A page of flags may be lost as well.
"""

from enum import IntEnum

import torch
from torch import Tensor

from benchmarks.kernel_data import POISON, Place
from benchmarks.update_checks import Chunk
from leto_strategy.triton_kernels.adam import AdamStep
from leto_strategy.triton_kernels.chunk_update import num_tiles, restore
from leto_strategy.triton_kernels.launch_shapes import PAGE_TILE_WORDS, FusedShape, Way

STEP = AdamStep(1e-3, (0.9, 0.95), 1e-8, 0.1, 5)


class Phase(IntEnum):
    """How far a tile came."""

    NOTHING = 0
    SOME_UNDO = 1
    SAVED = 2
    FLAGGED = 3
    SOME_DATA = 4
    WHOLE = 5


def tile_of_word(chunk: Chunk, way: Way, shape: FusedShape) -> Tensor:
    """Index of the tile of each word of a column, [num, words]."""
    words, device = chunk.place.words, chunk.place.device
    pages = torch.arange(chunk.num, device=device)
    width, rows = (shape.block, pages // 16) if way is Way.FUSED else (PAGE_TILE_WORDS, pages)
    return rows[:, None] * (words // width) + torch.arange(words, device=device) // width


def check_torn(
    place: Place, *, num: int, way: Way, rotate: bool, lost: str = "", copy: bool = True, height: int = 16,
    shape: FusedShape | None = None, phases: list[Phase] | None = None,
) -> str:  # fmt: skip
    """An update cut off at random, restored from what flags are left, and done again under a new number.

    Args:
        place: Where.
        num: Pages a column.
        way: Of updating.
        rotate: Moments rotate.
        lost: "flags" or "other_flags": that copy is zeros, as after its page was lost.
        copy: With a bf16 working copy.
        height: Parity pages.
        shape: Of the fused kernel.
        phases: Of the tiles; random where not given.
    """
    shape = shape or FusedShape()
    number, later = 41, 42
    seed = int(torch.randint(2**31, (1,)))
    torch.manual_seed(seed)
    whole = Chunk(place, num, rotate=rotate, copy=copy, height=height)
    torch.manual_seed(seed)
    torn = Chunk(place, num, rotate=rotate, copy=copy, height=height)
    assert torch.equal(whole.old, torn.old), "the two begin alike"
    whole.update(STEP, 0.5, number, way, shape)
    whole.verify(STEP, 0.5, number, way, shape)
    count = num_tiles(torn.pages, way, shape)
    phase = torch.randint(len(Phase), (count,)) if phases is None else torch.tensor(phases)
    _tear(torn, whole, phase.to(place.device), tile_of_word(torn, way, shape), number)
    if lost:
        getattr(torn.flags, lost).zero_()
    restore(torn.pages, torn.flags, number, way, shape=shape)
    columns = 1 if rotate else 3
    same = torn.now[:columns].view(torch.int32) == torn.old[:columns].view(torch.int32)
    assert bool(same.all()), f"{int((~same).sum())} words not restored, seed {seed}, lost {lost or 'nothing'}"
    for flags in (torn.flags.flags, torn.flags.other_flags):
        assert not bool((flags == later).any()), "a number that was never used"
    torn.update(STEP, 0.5, later, way, shape)
    torn.verify(STEP, 0.5, later, way, shape)
    for got, want in zip(torn.result(), whole.result(), strict=True):
        assert torch.equal(got.view(torch.int32), want.view(torch.int32)), f"not the undisturbed bits, seed {seed}"
    assert torch.equal(torn.out, whole.out), f"not the undisturbed parity, seed {seed}"
    return f"{num} pages a column, {count} tiles, lost {lost or 'nothing'}, seed {seed}"


def _tear(torn: Chunk, whole: Chunk, phase: Tensor, tiles: Tensor, number: int) -> None:
    """Make `torn` what a crash in the middle of the update leaves; `whole` has what it would have written."""
    at = phase[tiles]

    def written(first: Phase, last: Phase, target: Tensor, source: Tensor, *, phases: Tensor = at) -> None:
        """Words of `source`: all where a tile is past `last`, some from `first` on."""
        some = torch.rand(target.shape, device=target.device) < torch.rand((), device=target.device)
        target.copy_(torch.where((phases > last) | ((phases >= first) & some), source, target))

    for i in range(1 if torn.rotate else 3):
        written(Phase.SOME_UNDO, Phase.SOME_UNDO, torn.undo[i], whole.undo[i])
        written(Phase.SOME_DATA, Phase.SOME_DATA, torn.now[i], whole.now[i])
    if torn.rotate:
        for i in range(2):
            written(Phase.NOTHING, Phase.SOME_DATA, torn.moved[i], whole.moved[i])
    written(Phase.NOTHING, Phase.SOME_DATA, torn.copy, whole.copy)
    torn.out.copy_(torch.where(torch.rand(torn.out.shape, device=at.device) < 0.5, whole.out, POISON))
    for flags in (torn.flags.flags, torn.flags.other_flags):
        flags[: len(phase) : 3] = number - 1  # left over from an update before
        written(Phase.SAVED, Phase.SAVED, flags[: len(phase)], torch.full_like(phase, number), phases=phase)


def check_flags_matter(place: Place, *, num: int, way: Way, rotate: bool) -> str:
    """A tile whose data changed and whose flags are both gone can't be told from one that was not saved."""
    chunk = Chunk(place, num, rotate=rotate)
    chunk.update(STEP, 0.5, 41, way)
    chunk.flags.flags.zero_()
    chunk.flags.other_flags.zero_()
    restore(chunk.pages, chunk.flags, 41, way)
    assert not torch.equal(chunk.now[0], chunk.old[0]), "restored without a flag"
    return f"{num} pages a column"
