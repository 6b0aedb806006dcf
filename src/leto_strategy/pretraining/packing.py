"""Datasets of windows: sequences of C + 1 tokens, cut one after the other from a text that has no gaps.

Neighbouring windows share one token, the last target of one and the first input of the next, so that each token is
predicted exactly once.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from leto_strategy.errors import ConfigurationError


class Windows(Dataset[Tensor]):
    """Windows of tokens that are in memory.

    Args:
        tokens: One-dimensional, any integer type.
        context: C, in tokens.
    """

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.context
        return self.tokens[start : start + self.context + 1].long()


class GeneratedWindows(Dataset[Tensor]):
    """Windows of bytes from a random walk: each byte is one of `successors` that may follow the one before it.

    Nothing is stored: a window follows from the seed and its number. The loss can't fall below ln(successors) nats a
    token; with 256 successors the bytes are uniformly random.

    Args:
        num_windows: How many.
        context: C, in tokens.
        successors: Bytes that may follow a byte, 1 to 256.
        seed: Of the table of successors and all windows.
    """

    def __init__(self, num_windows: int, context: int, *, successors: int, seed: int) -> None:
        if not 1 <= successors <= 256:
            raise ConfigurationError(f"data.successors={successors} must be between 1 and 256.")
        generator = torch.Generator().manual_seed(seed)
        self._table = torch.stack([torch.randperm(256, generator=generator)[:successors] for _ in range(256)])
        self._num_windows, self._context, self._seed = num_windows, context, seed

    def __len__(self) -> int:
        return self._num_windows

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(index)
        generator = torch.Generator().manual_seed((self._seed << 32) + index + 1)
        choices = torch.randint(self._table.shape[1], (self._context,), generator=generator).tolist()
        walk = [int(torch.randint(256, (), generator=generator))]
        table = self._table
        for choice in choices:
            walk.append(int(table[walk[-1], choice]))
        return torch.tensor(walk)


class PackedStream(IterableDataset[Tensor]):
    """Windows packed from the documents of a stream, in blocks whose windows are shuffled.

    A document that does not end with a window goes on in the next one, and the next document follows it. The stream is
    read again from its beginning when it ends, since ranks whose documents differ in length must not end at different
    steps.

    `state_dict` says exactly which windows have been given out; after `load_state_dict` the next `iter()` goes on
    behind them, in this process or another. It is small: the place of the stream at which the block began, and the
    tokens that were left over there. An `iter()` without it begins with the first document.

    Args:
        rows: Documents: `datasets.IterableDataset`, or what has its `__iter__`, `set_epoch`, `state_dict` and
            `load_state_dict`.
        column: Name of the text in a row.
        encode: Tokens of a text, int32, one-dimensional.
        context: C, in tokens.
        shuffle_windows: Windows of a block, which come in random order; 1: the order of the stream.
        seed: Of that order.
        passes: How often the stream is read; None: without end.
        left_out: Fingerprints of texts that are passed over wherever they come, such as those that validate.

    Raises:
        ConfigurationError: While it is iterated: a row has no such column, or a pass over the stream fills no window.
    """

    def __init__(
        self,
        rows: Any,
        *,
        column: str,
        encode: Callable[[str], Tensor],
        context: int,
        shuffle_windows: int = 1,
        seed: int = 0,
        passes: int | None = None,
        left_out: frozenset[bytes] = frozenset(),
    ) -> None:
        if shuffle_windows < 1:
            raise ConfigurationError(f"data.shuffle_windows={shuffle_windows}: use a number of windows, or 1 for none.")
        self._rows, self._column, self._encode, self._context = rows, column, encode, context
        self._shuffle_windows, self._seed, self._passes = shuffle_windows, seed, passes
        self._left_out = left_out
        self._block_start: dict[str, Any] = _BEGINNING
        self._given = 0
        self._resume = False

    def state_dict(self) -> dict[str, Any]:
        """Which windows have been given out, with the newest iterator or before the one that is to come.

        `block`: Where the current block began: its number, passes, the state of the rows, left-over tokens.
        `given`: How many windows of the block have been given out.
        """
        return {"block": dict(self._block_start), "given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next `iter()` go on there."""
        self._block_start, self._given, self._resume = dict(state["block"]), state["given"], True

    def __iter__(self) -> Iterator[Tensor]:
        if not self._resume:
            self._block_start, self._given = _BEGINNING, 0
        self._resume = False
        reader = _Reader(self._rows, self._tokens_of, self._context, self._passes, self._block_start)
        while block := reader.read(self._shuffle_windows):
            order = self._order(len(block))
            for place in order[self._given :]:
                self._given += 1
                yield block[place].long()
            self._block_start, self._given = reader.place(self._block_start["number"] + 1), 0

    def _order(self, num_windows: int) -> list[int]:
        if self._shuffle_windows == 1:
            return [0]
        generator = torch.Generator().manual_seed((self._seed << 32) + self._block_start["number"] + 1)
        return torch.randperm(num_windows, generator=generator).tolist()

    def _tokens_of(self, row: dict[str, Any]) -> Tensor:
        text = text_of(row, self._column)
        if self._left_out and fingerprint(text) in self._left_out:
            return _NOTHING
        return self._encode(text)


def text_of(row: dict[str, Any], column: str) -> str:
    """The text of a row.

    Raises:
        ConfigurationError: It has no text in this column.
    """
    text = row.get(column)
    if not isinstance(text, str):
        raise ConfigurationError(
            f"data.column={column!r} is no text of the data set; its columns are {', '.join(sorted(row))}."
        )
    return text


def fingerprint(text: str) -> bytes:
    """A hash that tells texts apart."""
    return hashlib.blake2b(text.encode("utf-8", errors="surrogatepass"), digest_size=16).digest()


_NOTHING = torch.empty(0, dtype=torch.int32)
_BEGINNING: dict[str, Any] = {"number": 0, "passes": 0, "rows": None, "rest": _NOTHING}


class _Reader:
    """Cuts windows from rows, in their order.

    Args:
        rows: See `PackedStream`.
        tokens_of: Tokens of a row.
        context: C, in tokens.
        passes: How often the rows are read; None: without end.
        place: Where to begin, see `place`.
    """

    def __init__(
        self, rows: Any, tokens_of: Callable[[Any], Tensor], context: int, passes: int | None, place: dict[str, Any]
    ) -> None:
        self._rows, self._tokens_of, self._context, self._num_passes = rows, tokens_of, context, passes
        self._rest: Tensor = place["rest"]
        self._passes: int = place["passes"]
        self._windows_in_pass = 0
        self._whole_pass = place["rows"] is None
        self._open(place["rows"])

    def _open(self, state: Any) -> None:
        self._rows.set_epoch(self._passes)
        self._rows.load_state_dict(state or {})
        self._iterator, self._started = iter(self._rows), state is not None

    def place(self, number: int) -> dict[str, Any]:
        """Where the next window begins.

        Args:
            number: Of the block that begins there.
        """
        rows = self._rows.state_dict() if self._started else None
        return {"number": number, "passes": self._passes, "rows": rows, "rest": self._rest.clone()}

    def read(self, num_windows: int) -> list[Tensor]:
        """The next windows; fewer only where the last pass ends."""
        block: list[Tensor] = []
        while len(block) < num_windows:
            if len(self._rest) > self._context:
                block.append(self._rest[: self._context + 1])
                self._rest = self._rest[self._context :]
                self._windows_in_pass += 1
            elif not self._read_row():
                break
        return block

    def _read_row(self) -> bool:
        """Append one document to what is left over; False at the end of the last pass."""
        if self._num_passes is not None and self._passes >= self._num_passes:
            return False
        row = next(self._iterator, None)
        if row is not None:
            self._started = True
            self._rest = torch.cat((self._rest, self._tokens_of(row)))
            return True
        if self._whole_pass and not self._windows_in_pass:
            raise ConfigurationError(
                f"The data of this rank have fewer than {self._context + 1} tokens, so they fill no window; use more"
                " data, fewer ranks, or a smaller model.context."
            )
        self._passes, self._windows_in_pass, self._whole_pass = self._passes + 1, 0, True
        if self._num_passes is None or self._passes < self._num_passes:
            self._open(None)
        else:
            self._started = False
        return True
