"""One rank of the recovery protocol as a state machine, moved store by store by ``moves.py``.

Values are symbolic: a chunk holds the number of updates applied to it, or TORN while a kernel writes it; the
gradients hold the step of which they are final. A host thread runs ahead of its stream as far as R4 lets it. The
rules come from outside (:class:`Rules`); by default they are the functions that the supervisor itself calls.

What a model of a rank leaves out, and why nothing is missed:

* Collectives inside backward (gradient reduction) only hold ranks back: without them there are more interleavings.
* A record with one part complete is no record after a kill: re-entry needs both parts, and for the missing one to
  appear the new host must first have written its own part again.
* Undo content is forgotten at a kill unless the word says UNDO: re-entry reads it only then, and otherwise it is
  written before the next UNDO mark.
* Re-entry at s (``moves.reenter``) forgets the records of earlier steps: every word is then at DONE(s-1) or later, and
  a decision looks at no record below the step after the lowest word. Were one needed, it would be reported as missing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from leto_strategy.progress import Marker, Phase
from leto_strategy.recovery import decision as real
from leto_strategy.recovery.decision import Decision, RankView

TORN = -1
NOTHING = -1


class Violation(Exception):
    """A promise of the protocol is broken; the message says which."""


@dataclass(frozen=True)
class Rules:
    """The rules under exploration."""

    decide: Callable[[Sequence[RankView]], Decision] = real.decide
    lowered: Callable[[Marker | None, Decision], Marker | None] = real.lowered
    slot: Callable[[int, int], int] = real.slot
    may_record_start: Callable[[int, Marker | None, int], bool] = real.may_record_start


@dataclass(frozen=True)
class Scenario:
    """What happens to the job. The last three switch parts of the protocol off, to see them missed."""

    ranks: int = 2
    steps: int = 3
    chunks: int = 2
    slots: int = 3
    kills: int = 1
    skipped: frozenset[int] = frozenset()
    values: bool = False  # the synchronisation makes values that must be the same on all ranks (R7)
    gradient_losses: int = 0  # how often a kill may also cost one rank its gradients (R14)
    fence: bool = True  # R3: words are read when everybody is dead
    skipped_publish: bool = True  # R8
    undo_first: bool = True  # T2

    def applied(self, step: int) -> int:
        """Number of updates applied before a step."""
        return step - sum(s < step for s in self.skipped)


class Host(IntEnum):
    DEAD = 0  # killed: waits for its word to be lowered
    LOWERED = 1  # waits for all words to be lowered
    ENTER = 2
    START_BEGIN = 3
    START_END = 4
    MID_BEGIN = 5
    MID_END = 6


class Stream(IntEnum):
    START_BEGIN = 0
    START_END = 1
    ZERO = 2
    BACKWARD = 3
    MID_BEGIN = 4
    MID_END = 5
    READY = 6
    SYNC = 7
    VALUES_BEGIN = 8
    VALUES_END = 9
    SYNCED = 10
    UNDO_COPY = 11
    UNDO_MARK = 12
    UPDATE_BEGIN = 13
    UPDATE_END = 14
    COMMIT = 15
    DONE = 16
    RESTORE_BEGIN = 17
    RESTORE_END = 18


class Rank(NamedTuple):
    """Retained memory of a rank, then the positions of its two threads."""

    word: Marker | None
    start_host: tuple[int, ...]  # per slot: the step of a complete host part
    start_stream: tuple[int, ...]
    mid_host: tuple[int, ...]
    mid_stream: tuple[int, ...]
    values: tuple[tuple[int, int], ...]  # per slot: step, value made by the synchronisation
    gradients: int  # step of which they are final
    gradients_lost: bool
    chunks: tuple[int, ...]  # per chunk: number of updates applied
    undo: tuple[int, int]  # chunk, what it held
    used: tuple[int, int]  # last step updated and the value used for it: a note of the model, read by no rule
    completed: int  # last step that was DONE: a note of the model
    host_step: int
    host: Host
    step: int
    stream: Stream
    chunk: int
    value: int
    decision: Decision | None  # until re-entry


def first(scenario: Scenario) -> Rank:
    """A rank of the first generation before its first store."""
    empty = (NOTHING,) * scenario.slots
    values = ((NOTHING, NOTHING),) * (scenario.slots if scenario.values else 0)
    chunks, none = (0,) * scenario.chunks, (NOTHING, NOTHING)
    memory = (None, empty, empty, empty, empty, values, NOTHING, False, chunks, none, none, NOTHING)
    return Rank(*memory, 0, Host.START_BEGIN, 0, Stream.START_BEGIN, 0, NOTHING, None)


def put(slots: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*slots[:index], value, *slots[index + 1 :])


def check(holds: bool, promise: str) -> None:
    if not holds:
        raise Violation(promise)


def ended(rank: Rank, scenario: Scenario) -> bool:
    return rank.decision is None and rank.step >= scenario.steps and rank.host_step >= scenario.steps


def arrived(rank: Rank) -> int:
    """The last step whose synchronisation this rank has come to in its generation."""
    if rank.host <= Host.ENTER:
        return NOTHING
    return rank.step if rank.stream >= Stream.SYNC else rank.step - 1


def waits_for_all(rank: Rank, scenario: Scenario) -> bool:
    """The next operation of the stream is the collective of the synchronisation."""
    return rank.host > Host.ENTER and rank.step < scenario.steps and rank.stream is Stream.SYNC


def killed(rank: Rank) -> Rank:
    """What a SIGKILL leaves of a rank: retained memory, and of its records those with both parts."""
    starts = tuple(h if h == s else NOTHING for h, s in zip(rank.start_host, rank.start_stream, strict=True))
    mids = tuple(h if h == s else NOTHING for h, s in zip(rank.mid_host, rank.mid_stream, strict=True))
    undo = rank.undo if rank.word is not None and rank.word.phase is Phase.UNDO else (NOTHING, NOTHING)
    memory = (
        rank.word,
        starts,
        starts,
        mids,
        mids,
        rank.values,
        rank.gradients,
        rank.gradients_lost,
        rank.chunks,
        undo,
    )
    return Rank(*memory, rank.used, rank.completed, 0, Host.DEAD, 0, Stream.START_BEGIN, 0, NOTHING, None)


def view(rank: Rank) -> RankView:
    """What the supervisor reads of a rank."""
    starts = frozenset(h for h, s in zip(rank.start_host, rank.start_stream, strict=True) if h == s != NOTHING)
    mids = frozenset(h for h, s in zip(rank.mid_host, rank.mid_stream, strict=True) if h == s != NOTHING)
    values = frozenset(step for step, _ in rank.values if step != NOTHING) if rank.values else None
    return RankView(rank.word, starts, mids, values, gradients_lost=rank.gradients_lost)
