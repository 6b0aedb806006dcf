"""Protections that are wrong in one place: the crash harness must find each, or it proves nothing."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from leto_strategy import erasures
from leto_strategy.erasures import Page
from leto_strategy.progress import Marker, Phase
from leto_strategy.update import coded, rebuilding
from leto_strategy.update.coded import CodedProtection
from update.coded_rig import STEP, CodedRig
from update.test_coded_crash import Trial, all_cases


class MarksDrainFirst(CodedProtection):
    """`hostpar` before H and S."""

    def _drain_as_of(self, group: int, done: Marker) -> None:
        self._words.mark_drained(group, done)
        super()._drain_as_of(group, done)


class MarksDrainBeforeSecondTier(CodedProtection):
    """`hostpar` after H and before S."""

    def _drain_as_of(self, group: int, done: Marker) -> None:
        reach = self._reach
        self._reach = lambda point, step=0, chunk=0: (  # type: ignore[assignment]
            self._words.mark_drained(group, done) if point == "parity_first" else None
        )
        try:
            super()._drain_as_of(group, done)
        finally:
            self._reach = reach


class LoadsTooLate(CodedProtection):
    """Q <- H behind the UNDO of the group's first chunk."""

    def load(self, group: int) -> None:
        pass

    def delta(self, group: int, chunk: int) -> None:
        if chunk == self._memory.shape.groups[group].first_chunk:
            super().load(group)
        super().delta(group, chunk)


class DeltaAfterCommit(CodedProtection):
    """Q' behind the word that puts it in force."""

    def delta(self, group: int, chunk: int) -> None:
        pass

    def committed(self, group: int, chunk: int) -> None:
        super().delta(group, chunk)
        super().committed(group, chunk)


class SealsGradientsLate(CodedProtection):
    """R behind READY."""

    def seal_gradients(self, step: int) -> None:
        pass

    def begin(self, step: int, timeline: int) -> None:
        super().begin(step, timeline)
        super().seal_gradients(step)


class DrainsLate(CodedProtection):
    """DONE before the last group is drained."""

    def finish(self) -> None:
        self._late = list(self._pending)
        self._pending.clear()


class ForgetsHostMarks(CodedProtection):
    """A drain leaves the marks of the host pages that it wrote."""

    def _marked_on_host(self, group: int) -> list[Page]:
        return []


def _in_place(group: int, num_committed: int) -> int:
    return 2 * (group % 2)


def _one_pair(group: int, num_committed: int) -> int:
    return num_committed % 2


def _clears_before_it_rebuilds(rig: CodedRig, patch: pytest.MonkeyPatch) -> None:
    words = rig.protection._words
    lost = words.lost

    def forget() -> set[Page]:
        pages = lost()
        words.clear(pages)
        return pages

    patch.setattr(words, "lost", forget)


def _copies_after_the_mark(rig: CodedRig, patch: pytest.MonkeyPatch) -> None:
    chunks = rig.updater._chunks
    publish = rig.words.publish
    saves = [pieces.save for pieces in chunks]

    def late(marker: Marker) -> None:
        publish(marker)
        if marker.phase is Phase.UNDO and marker.step == STEP:
            saves[marker.chunk]()

    patch.setattr(rig.words, "publish", late)
    for pieces in chunks:
        patch.setattr(pieces, "save", lambda: None)


def _ignores(kinds: Iterable[str]) -> Callable[[CodedRig, pytest.MonkeyPatch], None]:
    """Recovery does not believe marks of these kinds."""

    def apply(rig: CodedRig, patch: pytest.MonkeyPatch) -> None:
        words = rig.protection._words
        lost = words.lost
        patch.setattr(words, "lost", lambda: {page for page in lost() if page.kind not in kinds})

    return apply


def _found(build: Callable[[], CodedRig], seed: int) -> str | None:
    """What is wrong, first in an undisturbed step, then with crashes; None if nothing was found."""
    try:
        trial = Trial(build())
    except AssertionError as error:
        return str(error)
    return _found_in(trial, seed)


def _found_in(trial: Trial, seed: int) -> str | None:
    cases = islice(all_cases(trial, seed, rounds=1), 0, None, 7)
    return next((wrong for case in cases if (wrong := trial.replay(case)) is not None), None)


def test_nothing_is_found_where_nothing_is_wrong(seed: int) -> None:
    assert _found(CodedRig, seed) is None


@pytest.mark.parametrize(
    "wrong",
    [
        MarksDrainFirst,
        MarksDrainBeforeSecondTier,
        LoadsTooLate,
        DeltaAfterCommit,
        SealsGradientsLate,
        DrainsLate,
        ForgetsHostMarks,
    ],
)
def test_a_store_in_the_wrong_place_is_found(wrong: type[CodedProtection], seed: int) -> None:
    assert _found(lambda: CodedRig(protection=wrong), seed) is not None


@pytest.mark.parametrize("buffers", [_in_place, _one_pair])
def test_parity_in_place_or_in_too_few_buffers_is_found(
    buffers: Callable[[int, int], int], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (erasures, coded):
        monkeypatch.setattr(module, "device_buffer", buffers)
    assert _found(CodedRig, seed) is not None


@pytest.mark.parametrize(
    "change",
    [_clears_before_it_rebuilds, _copies_after_the_mark, *(_ignores([kind]) for kind in erasures.PageKind)],
)
def test_a_recovery_in_the_wrong_order_is_found(
    change: Callable[[CodedRig, pytest.MonkeyPatch], None], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(CodedRig())
    change(trial.rig, monkeypatch)
    assert _found_in(trial, seed) is not None


def test_an_undo_page_that_is_not_refilled_is_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    solve: Any = rebuilding._Rebuilding.solve

    def without_undo(self: Any, index: int, position: Any, repair: Any) -> None:
        solve(self, index, position, replace(repair, undo=()))

    monkeypatch.setattr(rebuilding._Rebuilding, "solve", without_undo)
    assert _found(CodedRig, seed) is not None
