"""The update as a resumable transaction: chunk by chunk, each undone or committed, whatever kills the process.

Order of stores (rule T2), each finished before the next begins::

    U <- C_j  |  UNDO(j)  |  C_j updated in place  |  Q' <- Q xor delta  |  COMMIT(j)          ... last: DONE

From it follows what each word says of memory: until UNDO(j) chunk j is whole and old; from UNDO(j) to COMMIT(j) its old
content is whole in U; from COMMIT(j) on it is whole and new. Gradients are only read, so redoing chunk j from its old
content gives the same bits. Step counts live in records, outside protected memory (T1). Paper, section 5.2.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from leto_strategy.faults import Reach, reach_nothing
from leto_strategy.progress import Marker, Phase
from leto_strategy.update.layout import StateLayout
from leto_strategy.update.optimizers import OptimizerAdapter
from leto_strategy.update.pieces import ChunkPieces
from leto_strategy.update.protection import NoProtection, Protection
from leto_strategy.update.words import Words


class ResumableModelUpdater:
    """Updates the parameters and moments of one rank in place, and finishes what a dead process began.

    Args:
        layout: The plan of the state.
        chunks: The pieces of each chunk (`pieces_of`), writable from the first `run` on.
        words: The rank's words.
        adapter: The optimizer's.
        reach: Crash points: chunk_before_undo, chunk_undo_copied, chunk_undo_marked, chunk_updating (between two writes
            of one chunk), chunk_updated, chunk_committed, update_done.
        protection: Parity of the state; None protects nothing.
    """

    def __init__(
        self,
        layout: StateLayout,
        chunks: Sequence[ChunkPieces],
        words: Words,
        adapter: OptimizerAdapter,
        *,
        reach: Reach = reach_nothing,
        protection: Protection | None = None,
    ) -> None:
        self._layout = layout
        self._words = words
        self._adapter = adapter
        self._reach = reach
        self._protection = protection or NoProtection()
        self._groups = list(self._protection.groups(layout))
        covered = [chunk for group in self._groups for chunk in group]
        assert covered == list(range(len(layout.chunks))), f"protection groups cover chunks {covered}"
        self._chunks = chunks

    def run(
        self,
        step: int,
        *,
        groups: Sequence[Mapping[str, Any]],
        steps_before: Sequence[float],
        touched: Sequence[bool],
        resume: Marker | None = None,
        timeline: int = 0,
    ) -> list[float]:
        """Update all chunks with the retained gradients, or those that are left, and publish DONE(step).

        The arguments of an interrupted update must be given again when it is resumed, after `Protection.recover`.

        Args:
            step: Transaction number.
            groups: Hyper-parameters of each parameter group, `optimizer.param_groups` or their record.
            steps_before: Step count of each slot before this update (`StatePublisher`).
            touched: Whether each slot has a gradient this step; the others stay as they are, as with torch.
            resume: The rank's word after a failure; None, READY or SYNCED where nothing was begun.
            timeline: Number of checkpoint fallbacks so far; it goes into every word.

        Returns:
            The step count of each slot after the update.

        Raises:
            ValueError: the hyper-parameters need moments that were not allocated.
        """
        update = _Update(step, groups, steps_before, touched, self._mixed(steps_before, touched), timeline)
        self._check(update, resume)
        if resume is not None:
            self._words.publish(resume)  # T9: both copies are rewritten before anything else
        if resume is None or resume.phase is not Phase.DONE:
            with torch.no_grad():
                self._run_chunks(update, resume)
            self._words.publish(Marker(step, Phase.DONE, timeline=timeline))
            self._reach("update_done", step, max(0, len(self._chunks) - 1))
        return [
            self._adapter.next_step(groups[slot.group], before) if was_touched else before
            for slot, before, was_touched in zip(self._layout.slots, steps_before, touched, strict=True)
        ]

    def _run_chunks(self, update: "_Update", resume: Marker | None) -> None:
        step, timeline = update.step, update.timeline
        saved, committed = _position(resume)
        self._protection.begin(step, timeline)
        for index, members in enumerate(self._groups):
            if members and members.start > max(saved, committed):
                self._protection.load(index)
            for chunk in members:
                if chunk <= committed:
                    continue
                pieces = self._chunks[chunk]
                if chunk == saved:
                    pieces.restore()
                else:
                    self._reach("chunk_before_undo", step, chunk)
                    pieces.save()
                    self._reach("chunk_undo_copied", step, chunk)
                    self._words.publish(Marker(step, Phase.UNDO, chunk, timeline))
                self._reach("chunk_undo_marked", step, chunk)
                self._update_chunk(update, chunk)
                self._reach("chunk_updated", step, chunk)
                self._protection.delta(index, chunk)
                self._words.publish(Marker(step, Phase.COMMIT, chunk, timeline))
                self._reach("chunk_committed", step, chunk)
                self._protection.committed(index, chunk)
        self._protection.finish()

    def _update_chunk(self, update: "_Update", chunk: int) -> None:
        for index, write in enumerate(self._chunks[chunk].writes(update.steps, update.touched)):
            if index:
                self._reach("chunk_updating", update.step, chunk)
            self._adapter.update(
                write.run.group,
                update.groups[write.run.group],
                write.parameters,
                write.gradients,
                write.moments,
                [update.steps[slot] for slot in write.slots],
                mixed=(write.run.group, write.run.dtype) in update.mixed,
            )

    def _mixed(self, steps: Sequence[float], touched: Sequence[bool]) -> set[tuple[int, torch.dtype]]:
        """Return the groups and dtypes in which some, but not all, parameters are updated for the first time."""
        first = {
            (slot.group, slot.dtype) for slot in self._layout.slots if touched[slot.index] and not steps[slot.index]
        }
        later = {(slot.group, slot.dtype) for slot in self._layout.slots if touched[slot.index] and steps[slot.index]}
        return first & later

    def _check(self, update: "_Update", resume: Marker | None) -> None:
        num_slots, num_chunks = len(self._layout.slots), len(self._chunks)
        given = len(update.steps), len(update.touched)
        assert given == (num_slots, num_slots), f"{given} step counts and flags for {num_slots} slots"
        if resume is not None:
            assert (resume.step, resume.timeline) == (update.step, update.timeline), f"{resume} for step {update.step}"
            assert self._words.newest == resume, f"the word is {self._words.newest}, the caller says {resume}"
            assert resume.chunk < max(1, num_chunks), f"{resume} of {num_chunks} chunks"
        for run in self._layout.runs:
            needed = self._adapter.moment_names(update.groups[run.group])
            if not set(needed) <= set(run.moments):
                raise ValueError(
                    f"{self._layout.optimizer_name}, parameter group {run.group}: its options now need "
                    f"{', '.join(set(needed) - set(run.moments))}, which they did not when training began; set them so "
                    "from the start"
                )


@dataclass(frozen=True, slots=True)
class _Update:
    """The arguments of one `run`, which do not change while it goes on; see there."""

    step: int
    groups: Sequence[Mapping[str, Any]]
    steps: Sequence[float]
    touched: Sequence[bool]
    mixed: Collection[tuple[int, torch.dtype]]
    timeline: int


def _position(resume: Marker | None) -> tuple[int, int]:
    """Return the chunk whose old content is in the undo buffer, or -1, and the last committed chunk, or -1."""
    if resume is None or resume.phase in (Phase.READY, Phase.SYNCED):
        return -1, -1
    return (resume.chunk, resume.chunk - 1) if resume.phase is Phase.UNDO else (-1, resume.chunk)
