"""The supervisor sees from marks alone what can't be rebuilt."""

import pytest

from leto_strategy.erasures import Group, Page, PageKind, Shape
from leto_strategy.marks import SHAPE_REGION, WORDS_REGION, ProtectionWords
from leto_strategy.progress import Marker, Phase
from leto_strategy.recovery.decision import Mode, RankView, decide
from leto_strategy.recovery.losses import losses_of

SHAPE = Shape((Group(4, 0, (2, 2)), Group(3, 2, ())), (Group(2, 0, (1, 1)),), num_parity=2, num_second=1)
READY = Marker(3, Phase.READY)


class Regions(dict[str, memoryview]):
    """A rank's regions with words that say that all is well."""

    def __init__(self) -> None:
        size_bytes = ProtectionWords.size_bytes(SHAPE)
        super().__init__({WORDS_REGION: memoryview(bytearray(size_bytes))})
        self.words = ProtectionWords(self[WORDS_REGION], SHAPE)
        self.words.initialise()
        self[SHAPE_REGION] = memoryview(bytearray(SHAPE.to_json().encode()))

    def __call__(self, name: str) -> memoryview:
        return self[name]


def data(group: int, *places: int) -> list[Page]:
    return [Page(PageKind.DATA, group, place) for place in places]


def test_a_shape_is_read_back() -> None:
    assert Shape.from_json(SHAPE.to_json()) == SHAPE


def test_nothing_is_lost_where_nothing_is_marked_or_nothing_is_protected() -> None:
    regions = Regions()
    assert losses_of(regions, READY) == ("", False)
    regions.words.mark_lost(data(0, 0, 3))
    assert losses_of(regions, READY) == ("", False), "two can be rebuilt"
    assert losses_of({}.__getitem__, READY) == ("", False)
    regions[SHAPE_REGION] = memoryview(bytearray(40))
    assert losses_of(regions, None) == ("", False), "the start is not over"


def test_what_is_beyond_the_parity_is_named() -> None:
    regions = Regions()
    regions.words.mark_lost(data(1, 0, 1, 2))
    assert losses_of(regions, READY) == ("protection group 1: 3 data pages to rebuild, 2 can be", False)
    for copy in (0, 4096):
        regions[WORDS_REGION][copy] ^= 1
    assert losses_of(regions, READY) == ("all copies of the word about the parity of group 0 are damaged", False)


@pytest.mark.parametrize(("phase", "lost"), [(Phase.READY, True), (Phase.UNDO, True), (Phase.DONE, False)])
def test_gradients_are_lost_while_they_are_needed(phase: Phase, lost: bool) -> None:
    regions = Regions()
    pages = [Page(PageKind.GRADIENT, 0, 0), Page(PageKind.GRADIENT, 0, 1), Page(PageKind.GRADIENT_PARITY, 0, 1)]
    regions.words.mark_lost(pages)
    assert losses_of(regions, Marker(3, phase)) == ("", lost)


def test_lost_state_ends_the_job_unless_it_starts_anew() -> None:
    steps = frozenset({2, 3})
    whole, lost = RankView(READY, steps, steps), RankView(READY, steps, steps, state_lost="protection group 1: ...")
    decision = decide([whole, lost])
    assert decision.mode is Mode.FALLBACK
    assert decision.reason == "rank 1 has lost memory, protection group 1: ..."
    assert decide([whole, whole]).mode is Mode.FINISH
    nothing = RankView(None, frozenset(), frozenset(), state_lost="protection group 1: ...")
    assert decide([nothing, nothing]).mode is Mode.FRESH
