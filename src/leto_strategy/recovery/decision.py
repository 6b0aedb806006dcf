"""The decision of a recovery, as pure functions: where the next generation re-enters, and how.

Rules R1, R2, R5, R7, R8, R14 and R16 of the recovery protocol. The supervisor calls :func:`decide` once per recovery,
behind the fence (R3), with what it read of every rank; then it lowers each word to :func:`lowered`, and only then
promotes. The exhaustive exploration in ``tests/explore`` drives these very functions.

No I/O, no clock, no guess: whatever does not fit together becomes a fallback with its reason. Leto paper, section
"In-place recovery".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from leto_strategy.progress import Marker, Phase

NUM_SLOTS = 4
"""Record slots per rank: a host may be two steps ahead of the synchronisation of its own stream (R4)."""


class Mode(StrEnum):
    """How the next generation begins."""

    FRESH = "fresh"
    """At step 0, as if nothing had run: no rank has final gradients, and some rank has no START(0)."""
    REDO = "redo"
    """At ``step`` from START(step), with nothing of it done yet."""
    FINISH = "finish"
    """At ``step`` from START(step) and MID(step): no forward, no backward, the update only where a rank is not DONE."""
    FALLBACK = "fallback"
    """From a checkpoint: what was retained can't be continued exactly."""


@dataclass(frozen=True, slots=True)
class RankView:
    """What the supervisor read of one rank behind the fence.

    Args:
        marker: Newest valid copy of the rank's word; None where nothing was published.
        start_steps: Steps whose START record is complete and valid in both parts, in the current timeline.
        mid_steps: The same for MID records.
        sync_steps: Steps for which the values made by the global synchronisation are stored completely (R7); None where
            the synchronisation of this job makes no values.
        word_lost: Every copy of the word is damaged (T9).
        gradients_lost: Gradients were lost beyond what their parity rebuilds (R14).
        state_lost: What of the state was lost beyond that, in words; "" for nothing.
    """

    marker: Marker | None
    start_steps: frozenset[int]
    mid_steps: frozenset[int]
    sync_steps: frozenset[int] | None = None
    word_lost: bool = False
    gradients_lost: bool = False
    state_lost: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks do next.

    Args:
        mode: How the next generation begins.
        step: Transaction number at which it begins; 0 for FRESH and FALLBACK.
        reason: One sentence for the log and for the user.
        timeline: Timeline in which the decision holds.
        values_from: FINISH only: the rank whose stored values of the synchronisation all ranks take over (R7); None:
            all synchronise again.
    """

    mode: Mode
    step: int
    reason: str
    timeline: int = 0
    values_from: int | None = None


def decide(ranks: Sequence[RankView], *, timeline: int = 0) -> Decision:
    """Decide where all ranks re-enter after a failure.

    Args:
        ranks: One view per rank of the job, in order of rank, all read behind the fence.
        timeline: Number of checkpoint fallbacks so far; words of an earlier timeline are void (R16).

    Returns:
        The one decision that holds for all ranks; FALLBACK where the views contradict each other, or a need is gone.
    """
    assert ranks, "a job has at least one rank"
    decision = _decide(ranks, [_in_timeline(view.marker, timeline) for view in ranks], timeline)
    lost = [f"rank {rank} has lost memory, {view.state_lost}" for rank, view in enumerate(ranks) if view.state_lost]
    if lost and decision.mode in (Mode.REDO, Mode.FINISH):  # a fresh start makes everything anew
        decision = Decision(Mode.FALLBACK, 0, lost[0], timeline)
    assert _holds(decision, ranks), f"{decision} does not follow from {ranks}"
    return decision


def lowered(marker: Marker | None, decision: Decision) -> Marker | None:
    """Return what a rank's word becomes before the next generation is promoted (R5).

    A rank may have run ahead: its READY(s+1) must not survive into a generation that is yet to write the gradients of
    s+1. Lowering never changes a word that says less, and the same decision follows from words of which only some are
    lowered, so it may be interrupted between ranks.
    """
    if decision.mode in (Mode.FRESH, Mode.FALLBACK):
        return None
    last_step = decision.step if decision.mode is Mode.FINISH else decision.step - 1
    marker = _in_timeline(marker, decision.timeline)
    if marker is None or last_step < 0:
        return None
    return min(marker, Marker(last_step, Phase.DONE, timeline=decision.timeline))


def slot(step: int, num_slots: int = NUM_SLOTS) -> int:
    """Return the record slot, from 0, that holds START(step) and MID(step)."""
    assert step >= 0, f"step {step} has no record"
    return step % num_slots


def may_record_start(step: int, marker: Marker | None, num_slots: int = NUM_SLOTS) -> bool:
    """Say whether a host may write START(step) now, over what its slot held; until then it waits (R4).

    Args:
        step: Transaction number that the host is about to begin.
        marker: The rank's own word. It passes SYNCED(s) only when every rank is READY(s), and then no recovery goes
            back before s.
        num_slots: Slots of the ring.
    """
    return synced_step(marker) >= step - num_slots + 1


def ready_step(marker: Marker | None) -> int:
    """Return the last step whose gradients are final on the rank of this word, -1 for none."""
    return -1 if marker is None else marker.step


def synced_step(marker: Marker | None) -> int:
    """Return the last step whose global synchronisation the rank of this word has passed, -1 for none."""
    return -1 if marker is None else marker.step - (marker.phase is Phase.READY)


def _decide(ranks: Sequence[RankView], markers: Sequence[Marker | None], timeline: int) -> Decision:
    step = min(map(ready_step, markers))  # s* of R1
    done = [_is_done(marker, step) for marker in markers]
    contradiction = _contradiction(ranks, markers, step, timeline)
    if contradiction is not None:
        return Decision(Mode.FALLBACK, 0, contradiction, timeline)
    if step < 0:
        if _rank_without(0, [view.start_steps for view in ranks]) is None:
            return Decision(Mode.REDO, 0, "no step has final gradients on every rank: redo step 0", timeline)
        return Decision(Mode.FRESH, 0, "step 0 was not begun on every rank: start again", timeline)
    if all(done) and _rank_without(step + 1, [view.start_steps for view in ranks]) is None:
        return Decision(Mode.REDO, step + 1, f"every rank is DONE({step}) and holds START({step + 1})", timeline)
    return _finish(ranks, markers, step, timeline)


def _contradiction(ranks: Sequence[RankView], markers: Sequence[Marker | None], step: int, timeline: int) -> str | None:
    """Say what in the views can't be true at once, None where they fit together."""
    for rank, (view, marker) in enumerate(zip(ranks, markers, strict=True)):
        if view.word_lost:
            return f"every copy of the progress word of rank {rank} is damaged"
        if view.marker is not None and view.marker.timeline > timeline:
            return f"rank {rank} is at {view.marker}, but the job is in timeline {timeline}"
        # The stream's part of START(s+1) follows DONE(s), and a word that was DONE(s) is never lowered below it.
        newest_record = max(view.start_steps | view.mid_steps, default=-1)
        if newest_record > ready_step(marker) + 1:
            return f"rank {rank} has a record of step {newest_record}, but its word says {marker}"
    # Nobody begins the update of a step before every rank is READY for it, so such a word or the lowest one is wrong.
    for rank, marker in enumerate(markers):
        if _began(marker, step + 1):
            return f"rank {rank} is at {marker}, but another rank is not READY for step {step + 1}"
    return None


def _finish(ranks: Sequence[RankView], markers: Sequence[Marker | None], step: int, timeline: int) -> Decision:
    """Decide for a step of which every rank has its gradients, and for which re-entry at the next step is no choice."""

    def fallback(reason: str) -> Decision:
        return Decision(Mode.FALLBACK, 0, reason, timeline)

    began = any(_began(marker, step) for marker in markers)
    done = [_is_done(marker, step) for marker in markers]
    without_start = _rank_without(step, [view.start_steps for view in ranks])
    without_mid = _rank_without(step, [view.mid_steps for view in ranks])
    without_gradients = next((rank for rank, view in enumerate(ranks) if view.gradients_lost and not done[rank]), None)
    if without_start is not None:
        return fallback(f"rank {without_start} has no complete START({step})")
    if without_gradients is not None:
        lost = f"rank {without_gradients} lost the gradients of step {step}"
        if began:
            return fallback(f"{lost}, whose update has begun")
        return Decision(Mode.REDO, step, f"{lost}, which nobody has used", timeline)
    if without_mid is not None:
        return fallback(f"rank {without_mid} has no complete MID({step})")

    values_from = None
    if any(view.sync_steps is not None for view in ranks):
        # Only a word that says SYNCED vouches for stored values: others may be left from before the step was redone.
        synced = [rank for rank, marker in enumerate(markers) if synced_step(marker) >= step]
        values_from = next((rank for rank in synced if step in (ranks[rank].sync_steps or ())), None)
        if values_from is None and began:
            return fallback(f"the update of step {step} has begun, but no rank holds the values of its synchronisation")
    reason = f"every rank is READY({step}), {sum(done)} of {len(ranks)} are DONE: finish its update"
    return Decision(Mode.FINISH, step, reason, timeline, values_from)


def _rank_without(step: int, steps_of_ranks: Sequence[frozenset[int]]) -> int | None:
    return next((rank for rank, steps in enumerate(steps_of_ranks) if step not in steps), None)


def _in_timeline(marker: Marker | None, timeline: int) -> Marker | None:
    return None if marker is None or marker.timeline < timeline else marker


def _began(marker: Marker | None, step: int) -> bool:
    """Say whether a rank may have changed parameters in the update of a step."""
    return marker is not None and (marker.step, marker.phase) > (step, Phase.SYNCED)


def _is_done(marker: Marker | None, step: int) -> bool:
    return marker is not None and (marker.step, marker.phase) >= (step, Phase.DONE)


def _holds(decision: Decision, ranks: Sequence[RankView]) -> bool:
    """Check a decision from its other end: every rank has what it needs, and nobody's finished work is repeated."""
    markers = [_in_timeline(view.marker, decision.timeline) for view in ranks]
    match decision.mode:
        case Mode.FALLBACK:
            return bool(decision.reason)
        case Mode.FRESH:
            return decision.step == 0 and None in markers
        case Mode.REDO:
            have = all(decision.step in view.start_steps for view in ranks)
            return have and not any(_began(marker, decision.step) for marker in markers)
        case Mode.FINISH:
            have = all(decision.step in view.start_steps and decision.step in view.mid_steps for view in ranks)
            return have and all(ready_step(marker) >= decision.step for marker in markers)
