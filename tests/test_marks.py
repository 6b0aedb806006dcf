import random

import pytest

from leto_strategy.erasures import Group, Page, PageKind, Shape
from leto_strategy.errors import PagesLostError
from leto_strategy.marks import NEVER_DRAINED, ProtectionWords, decode_value, encode_value
from leto_strategy.progress import Marker, Phase

SHAPE = Shape((Group(4, 0, (2, 2)), Group(2, 2, (2,))), (Group(3, 0, (1, 1, 1)),), num_parity=2, num_second=1)
PAGES = SHAPE.pages()
NUM_BYTES = 8 * (len(SHAPE.groups) + len(PAGES))


def new_words() -> tuple[bytearray, ProtectionWords]:
    memory = bytearray(ProtectionWords.size_bytes(SHAPE))
    words = ProtectionWords(memoryview(memory), SHAPE)
    words.initialise()
    return memory, words


def test_no_value_is_zero_and_one_wrong_bit_is_seen() -> None:
    assert decode_value(0) is None
    for value in (1, 2, Marker(123, Phase.DONE).position):
        word = encode_value(value)
        assert decode_value(word) == value
        assert all(decode_value(word ^ 1 << bit) is None for bit in range(64))


def test_marks_and_drains_are_read_back() -> None:
    _, words = new_words()
    assert words.lost() == set()
    assert words.drained() == [NEVER_DRAINED] * 2
    lost = {PAGES[0], PAGES[7], Page(PageKind.UNDO, 0, 1)}
    words.mark_lost(lost)
    words.mark_drained(1, Marker(4, Phase.DONE))
    assert words.lost() == lost
    assert words.drained() == [NEVER_DRAINED, Marker(4, Phase.DONE).position]
    words.clear([PAGES[7]])
    assert words.lost() == lost - {PAGES[7]}


@pytest.mark.parametrize("copy", [0, 1])
def test_either_copy_of_everything_may_be_lost(copy: int, rng: random.Random) -> None:
    memory, words = new_words()
    lost = set(rng.sample(PAGES, 5))
    words.mark_lost(lost)
    words.mark_drained(0, Marker(9, Phase.DONE))
    for content in (bytes(4096), rng.randbytes(4096), b"\xff" * 4096):
        memory[copy * 4096 : copy * 4096 + 4096] = content
        assert words.lost() == lost
        assert words.drained()[0] == Marker(9, Phase.DONE).position
        words.rewrite()
        assert memory[:NUM_BYTES] == memory[4096 : 4096 + NUM_BYTES]


def test_a_word_of_which_all_copies_are_damaged_is_named() -> None:
    memory, words = new_words()
    place = 8 * (len(SHAPE.groups) + PAGES.index(Page(PageKind.FIRST, 1, 0)))
    for copy in (0, 4096):
        memory[copy + place] ^= 1
    for read in (words.lost, words.rewrite):
        with pytest.raises(PagesLostError, match="host parity page 0 of group 1 are damaged"):
            read()
    for copy in (0, 4096):
        memory[copy] ^= 1
    with pytest.raises(PagesLostError, match="the parity of group 0 are damaged"):
        words.drained()


@pytest.mark.parametrize("lose", [True, False])
def test_between_two_copies_a_page_counts_as_lost(lose: bool) -> None:
    memory, words = new_words()
    page = PAGES[3]
    if not lose:
        words.mark_lost([page])
    before = bytes(memory)
    (words.mark_lost if lose else words.clear)([page])
    memory[4096:] = before[4096:]  # the second store did not happen
    assert words.lost() == {page}
    words.rewrite()
    assert words.lost() == {page}
