"""Words of the protection of one rank: which parity is drained, which pages are lost.

A region of host memory with two copies of every word, on different memory pages, each word with a check field (rule
T9). A word of 0 was never written or is lost, so no value is 0. Of two copies the larger value holds: a loss mark is
set with its first store and cleared with its last, and a drain counts from its first. Marks are set before a page is
mapped anew and cleared after its content is back (R12). This module decides nothing. Leto paper, section 5.3.
"""

from binascii import crc_hqx
from collections.abc import Iterable

from leto_strategy.erasures import Page, Shape
from leto_strategy.errors import PagesLostError
from leto_strategy.progress import Marker, Phase

_CHECK_BITS = 16
_CHECK_SEED = 0xFFFF
_VALUE_BYTES = 6
_MEMORY_PAGE_BYTES = 4096

WORDS_REGION = "parity/words"
"""Name of the region."""

SHAPE_REGION = "parity/shape"
"""Name of the region with the `Shape` as text; empty until the words are written."""

NEVER_DRAINED = 1
"""Of a group whose parity is that of the initial state; smaller than the position of any DONE."""
_FINE = 1
_LOST = 2


def encode_value(value: int) -> int:
    """Return the word of a value of 48 bits, with its check field below; 0 only for 0, which is no value."""
    return value << _CHECK_BITS | _check(value)


def decode_value(word: int) -> int | None:
    """Return the value of a word; None where it holds none."""
    value = word >> _CHECK_BITS
    return value if value and word & 0xFFFF == _check(value) else None


def _check(value: int) -> int:
    return crc_hqx(value.to_bytes(_VALUE_BYTES, "big"), _CHECK_SEED)


class ProtectionWords:
    """The words, over their memory.

    Args:
        buffer: At least `size_bytes(shape)` bytes of shared memory, 8-byte aligned.
        shape: How the rank's pages are divided.
    """

    def __init__(self, buffer: memoryview, shape: Shape) -> None:
        self._pages = shape.pages()
        self._index = {page: len(shape.groups) + place for place, page in enumerate(self._pages)}
        self._num_groups = len(shape.groups)
        self._num_words = self._num_groups + len(self._pages)
        self._distance = _copy_bytes(self._num_words) // 8
        self._words = buffer.cast("B").cast("Q")
        self._all_fine = encode_value(_FINE).to_bytes(8, "little") * len(self._pages)

    @staticmethod
    def size_bytes(shape: Shape) -> int:
        """Size of the region."""
        return 2 * _copy_bytes(len(shape.groups) + len(shape.pages()))

    def initialise(self) -> None:
        """Write every word: nothing is drained, no page is lost."""
        for index in range(self._num_groups):
            self._store(index, NEVER_DRAINED)
        self.clear(self._pages)

    def rewrite(self) -> None:
        """Make both copies of every word the one that holds (T9).

        Raises:
            PagesLostError: Both copies of a word are damaged.
        """
        first, second = self._copies(0, self._num_words)
        if first == second:
            self._values(0, self._num_words)
            return
        for index, value in enumerate(self._values(0, self._num_words)):
            self._store(index, value)

    def drained(self) -> list[int]:
        """For each group the position of DONE of the step of which its parity in host memory is.

        Raises:
            PagesLostError: Both copies of a word are damaged.
        """
        return self._values(0, self._num_groups)

    def mark_drained(self, group: int, marker: Marker) -> None:
        """Say that host parity of a group is that of a step, whose DONE this is."""
        assert marker.phase is Phase.DONE, f"{marker} is no end of a step"
        self._store(group, marker.position)

    def lost(self) -> set[Page]:
        """The pages that are marked as lost.

        Raises:
            PagesLostError: Both copies of a mark are damaged.
        """
        first, second = self._copies(self._num_groups, self._num_words)
        if first == second == self._all_fine:
            return set()
        values = self._values(self._num_groups, self._num_words)
        return {page for page, value in zip(self._pages, values, strict=True) if value == _LOST}

    def mark_lost(self, pages: Iterable[Page]) -> None:
        """Mark pages, before they are mapped anew."""
        for page in pages:
            self._store(self._index[page], _LOST)

    def clear(self, pages: Iterable[Page]) -> None:
        """Take marks back, after the content is there again or when nothing needs it."""
        for page in pages:
            self._store(self._index[page], _FINE)

    def _store(self, index: int, value: int) -> None:
        word = encode_value(value)
        self._put(index, word)
        self._put(self._distance + index, word)

    def _put(self, place: int, word: int) -> None:
        self._words[place] = word  # one native store

    def _values(self, start: int, stop: int) -> list[int]:
        values = []
        for index in range(start, stop):
            copies = decode_value(self._words[index]), decode_value(self._words[self._distance + index])
            value = max(copies[0] or 0, copies[1] or 0)
            if not value:
                what = f"the parity of group {index}" if index < self._num_groups else self._named(index)
                raise PagesLostError(f"all copies of the word about {what} are damaged")
            values.append(value)
        return values

    def _named(self, index: int) -> str:
        page = self._pages[index - self._num_groups]
        return f"{page.kind} page {page.place} of group {page.group}"

    def _copies(self, start: int, stop: int) -> tuple[bytes, bytes]:
        return tuple(bytes(self._words[at + start : at + stop]) for at in (0, self._distance))  # type: ignore[return-value]


def _copy_bytes(num_words: int) -> int:
    return -(-8 * num_words // _MEMORY_PAGE_BYTES) * _MEMORY_PAGE_BYTES
