"""Whether two runs of `gpt.py` are the same, computed from what they wrote: notes of every step, and final weights."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_RANKS = 2


@dataclass(frozen=True)
class Check:
    """What was compared in two runs.

    Args:
        what: Its name.
        num_compared: How many values.
        num_different: How many of them are not the same, bit for bit.
        first: The first difference in words.
    """

    what: str
    num_compared: int
    num_different: int
    first: str = ""

    @property
    def identical(self) -> bool:
        """Something was compared and nothing differed."""
        return self.num_compared > 0 and self.num_different == 0


def read_notes(directory: Path, rank: int) -> dict[int, list[dict[str, Any]]]:
    """What a rank noted, by step; more than one note where a recovered trainer ran the hook again."""
    notes: dict[int, list[dict[str, Any]]] = {}
    for note in Lines(directory / f"steps.r{rank}.jsonl").new():
        notes.setdefault(note["step"], []).append(note)
    return notes


def compare(expected: Path, actual: Path, *, steps: int, num_ranks: int = NUM_RANKS) -> list[Check]:
    """Compare two runs: losses and batches of every step and rank, and the final weights."""
    checks = []
    for what, names in (("losses", ("loss",)), ("batches", ("ids", "batch"))):
        num, different = 0, []
        for rank in range(num_ranks):
            want, have = read_notes(expected, rank), read_notes(actual, rank)
            for step in sorted(set(range(steps)) | set(want) | set(have)):
                num += 1
                seen = [[note[name] for name in names] for note in want.get(step, []) + have.get(step, [])]
                if step not in want or step not in have or any(values != seen[0] for values in seen):
                    different.append(f"step {step} of rank {rank}")
        checks.append(Check(what, num, len(different), different[0] if different else ""))
    return [*checks, compare_weights(expected / "weights.pt", actual / "weights.pt")]


def compare_weights(expected: Path, actual: Path) -> Check:
    """Compare two files of weights, tensor by tensor, byte by byte."""
    import torch

    want, have = (torch.load(path, weights_only=True) for path in (expected, actual))
    num, num_different, first = 0, 0, ""
    for name in sorted(set(want) | set(have)):
        if name not in want or name not in have or want[name].shape != have[name].shape:
            num, num_different, first = num + 1, num_different + 1, first or f"{name} is not in both"
            continue
        a, b = (state[name].contiguous().view(-1).view(torch.uint8).view(-1, 4) for state in (want, have))
        unequal = int((a != b).any(dim=1).sum())
        num, num_different = num + len(a), num_different + unequal
        first = first or (name if unequal else "")
    return Check("weights", num, num_different, first)


class Lines:
    """The JSON lines of a file, as far as they are complete."""

    def __init__(self, path: Path) -> None:
        self.path, self._offset = path, 0

    def new(self) -> list[dict[str, Any]]:
        """The lines that came since the last call."""
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        return [json.loads(line) for line in data.splitlines()]
