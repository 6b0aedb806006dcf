"""The counting rule as a table: H1 = 2, H2 = 1; group 0 has the chunks 0 and 1 of two pages each, group 1 chunk 2."""

import pytest

from leto_strategy.erasures import Assessment, Group, Page, PageKind, Shape, assess, device_buffer
from leto_strategy.marks import NEVER_DRAINED
from leto_strategy.progress import Marker, Phase

SHAPE = Shape(
    groups=(Group(4, 0, (2, 2)), Group(2, 2, (2,)), Group(3, 3, ())),
    gradient_groups=(Group(2, 0, (1, 1)), Group(1, 2, (1,))),
    num_parity=2,
    num_second=1,
)
STEP = 7
OLD = [Marker(STEP - 1, Phase.DONE).position] * 3
DRAINED = [Marker(STEP, Phase.DONE).position, *OLD[1:]]
READY, DONE, BEFORE = Marker(STEP, Phase.READY), Marker(STEP, Phase.DONE), Marker(STEP - 1, Phase.DONE)
UNDO_0, UNDO_1, UNDO_2 = (Marker(STEP, Phase.UNDO, chunk) for chunk in range(3))
COMMIT_0, COMMIT_1, COMMIT_2 = (Marker(STEP, Phase.COMMIT, chunk) for chunk in range(3))
_SHORT = {
    "D": PageKind.DATA,
    "H": PageKind.FIRST,
    "S": PageKind.SECOND,
    "Q": PageKind.DEVICE,
    "U": PageKind.UNDO,
    "G": PageKind.GRADIENT,
    "P": PageKind.GRADIENT_PARITY,
}


def judged(marker: Marker | None, drained: list[int], lost: str) -> Assessment:
    """Pages are written as kind, group or buffer, place: D01 is page 1 of group 0."""
    pages = {Page(_SHORT[word[0]], int(word[1]), int(word[2])) for word in lost.split()}
    assert pages <= set(SHAPE.pages())
    return assess(SHAPE, marker, drained, pages)


# word, drained, lost pages, erasures of group 0 and group 1
TABLE = [
    # closed: lost D + lost H that S can't repair
    (BEFORE, OLD, "D00 D03", 2, 0),
    (None, [NEVER_DRAINED] * 3, "D00 D01 D02", 3, 0),
    (READY, OLD, "D00 D01 H00", 2, 0),
    (READY, OLD, "D00 D01 H00 S00", 3, 0),
    (READY, OLD, "D00 H00 H01", 3, 0),
    (READY, OLD, "H00 H01 D10", 2, 1),
    (READY, OLD, "U00 U01 Q00 Q11 Q20", 0, 0),
    (DONE, DRAINED, "D00 S00", 1, 0),
    # open, nothing committed: a lost Q counts only if its H is lost too, and H only with its Q
    (UNDO_0, OLD, "Q00 Q01", 0, 0),
    (UNDO_0, OLD, "Q00 H01", 0, 0),
    (UNDO_0, OLD, "Q00 H00", 0, 0),
    (UNDO_0, OLD, "Q00 H00 S00", 1, 0),
    (UNDO_0, OLD, "Q00 Q01 H00 H01", 2, 0),
    (UNDO_0, OLD, "Q10 Q11 D02", 1, 0),
    # open chunk: after UNDO its U page is lost, and its D page costs nothing
    (UNDO_0, OLD, "D00 D01", 0, 0),
    (UNDO_0, OLD, "U00 D00", 1, 0),
    (UNDO_0, OLD, "U00 U01 D02", 3, 0),
    (UNDO_1, OLD, "D02 D03 D00 D01", 2, 0),
    # open, something committed: Q counts, H and S cost nothing
    (COMMIT_0, OLD, "Q10 D00", 2, 0),
    (COMMIT_0, OLD, "Q00 Q01 H00 H01 S00", 0, 0),
    (COMMIT_0, OLD, "U00 U01", 0, 0),
    (UNDO_1, OLD, "U01 Q11", 2, 0),
    # draining: lost D + lost Q in force; all of Q lost and no D lost: encode again
    (COMMIT_1, OLD, "Q00 Q01", 2, 0),
    (COMMIT_1, OLD, "Q00 Q01 D00", 3, 0),
    (COMMIT_1, OLD, "H00 H01 S00 Q10 Q11", 0, 0),
    (UNDO_2, OLD, "Q00 D00 Q20 H10", 2, 0),
    (UNDO_2, OLD, "D11 U00", 0, 1),
    # drained: closed again
    (COMMIT_1, DRAINED, "Q00 Q01 D00", 1, 0),
    (UNDO_2, DRAINED, "D00 H00", 1, 0),
    (COMMIT_2, DRAINED, "Q30 D10", 0, 2),
]


@pytest.mark.parametrize(("marker", "drained", "lost", "first", "second"), TABLE)
def test_erasures_are_counted(marker: Marker | None, drained: list[int], lost: str, first: int, second: int) -> None:
    result = judged(marker, drained, lost)
    assert [repair.num_erasures for repair in result.repairs] == [first, second, 0]
    assert len(result.state_beyond) == (first > 2) + (second > 2)
    assert not result.gradients_beyond


@pytest.mark.parametrize(
    ("marker", "lost", "beyond"),
    [
        (READY, "G00 G01", False),
        (READY, "G00 G01 P00", True),
        (READY, "G00 P00 P01", True),
        (READY, "G00 P00 P10 P11", False),
        (COMMIT_0, "G00 G01 P00", True),  # gradients of a committed chunk still help the others
        (COMMIT_1, "G00 G01 P00", False),
        (COMMIT_1, "G10 P10 P11", True),
        (UNDO_2, "G10 P10", False),
        (COMMIT_2, "G10 P10 P11", False),
        (DONE, "G00 G01 P00 P01", False),
        (BEFORE, "G00 G01 P00 P01", False),
        (None, "G00 G01 P00 P01", False),
    ],
)
def test_gradients_count_by_themselves_until_their_chunks_are_committed(
    marker: Marker, lost: str, beyond: bool
) -> None:
    result = judged(marker, OLD, lost)
    assert bool(result.gradients_beyond) is beyond
    assert not result.state_beyond
    counts = [sum(word[1] == group for word in lost.split()) for group in "01"]
    for repair, count in zip(result.gradient_repairs, counts, strict=True):
        rebuilt = marker not in (DONE, BEFORE, None) and count <= 2
        assert (repair.num_erasures if repair else None) == (count if rebuilt else None)


def test_what_is_lost_beyond_the_code_is_said() -> None:
    result = judged(UNDO_1, OLD, "D00 D01 U00 Q10 G00 G01 P01")
    assert result.state_beyond == ("protection group 0: 2 data and 1 undo and 1 parity pages to rebuild, 2 can be",)
    assert result.gradients_beyond == ("gradients of chunks 0 to 1: 2 data and 1 parity pages to rebuild, 2 can be",)


def test_neighbouring_groups_never_share_a_buffer_and_a_commit_changes_it() -> None:
    for group in range(4):
        mine = {device_buffer(group, committed) for committed in range(6)}
        assert len(mine) == 2
        assert not mine & {device_buffer(group + 1, committed) for committed in range(6)}
        assert all(device_buffer(group, k) != device_buffer(group, k + 1) for k in range(6))
