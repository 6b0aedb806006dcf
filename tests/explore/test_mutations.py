"""The search can fail: every known wrong rule in the place of the right one is found (Cn of the protocol).

Some end as a fallback for nothing: the right ``decide`` sees on the next failure that the words contradict each
other. That is a broken promise too, though a loud one.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from explore.model import Rules, Scenario
from explore.search import Result, Search
from leto_strategy.progress import Marker, Phase
from leto_strategy.recovery.decision import (
    Decision,
    Mode,
    RankView,
    decide,
    lowered,
    ready_step,
    synced_step,
)

SMALL = Scenario(ranks=2, steps=3, chunks=1, slots=3, kills=2)


@cache
def search_with_the_right_rules(scenario: Scenario) -> Result:
    return Search(replace(scenario, fence=True, skipped_publish=True, undo_first=True)).run()


def search(rules: Rules, scenario: Scenario = SMALL) -> Result:
    right = search_with_the_right_rules(scenario)
    assert right.violation is None, f"the right rules fail as well: {right}"
    result = Search(scenario, rules).run()
    print(result)
    return result


def redo(step: int) -> Decision:
    return Decision(Mode.REDO, step, "wrong")


def test_c1_nobody_began_so_redo_the_next_step() -> None:
    def wrong(ranks: Sequence[RankView]) -> Decision:
        step = min(ready_step(view.marker) for view in ranks)
        began = any(view.marker is not None and view.marker > Marker(step, Phase.SYNCED) for view in ranks if step >= 0)
        return decide(ranks) if step < 0 or began else redo(step + 1)

    result = search(Rules(decide=wrong), replace(SMALL, slots=4))
    assert result.violation is not None
    assert "START" in result.violation or "another step" in result.violation


def test_c2_two_alternating_slots_with_a_host_that_runs_ahead() -> None:
    def lead_of_one(step: int, marker: Marker | None, slots: int) -> bool:
        return ready_step(marker) >= step - 2

    result = search(Rules(may_record_start=lead_of_one), replace(SMALL, slots=2))
    assert result.violation is not None


@pytest.mark.parametrize("slots", [2, 3])
def test_r4_a_bound_that_is_one_step_too_wide(slots: int) -> None:
    def wide(step: int, marker: Marker | None, num_slots: int) -> bool:
        return synced_step(marker) >= step - num_slots

    assert (
        search(Rules(may_record_start=wide), replace(SMALL, slots=slots, steps=slots + 1, kills=1)).violation
        is not None
    )


def test_r4_a_bound_that_is_one_step_too_narrow_for_two_slots_blocks_the_job() -> None:
    def narrow(step: int, marker: Marker | None, num_slots: int) -> bool:
        return synced_step(marker) >= step - num_slots + 2

    result = search(Rules(may_record_start=narrow), replace(SMALL, slots=2))
    assert result.violation is not None
    assert "deadlock" in result.violation


def test_r4_all_steps_in_one_slot() -> None:
    assert search(Rules(slot=lambda step, num_slots: 0)).violation is not None


def test_c3_words_that_are_not_lowered() -> None:
    result = search(Rules(lowered=lambda marker, decision: marker))
    assert result.violation is not None
    assert any("is lowered to READY" in line for line in result.story)


def test_r5_a_redo_that_lowers_to_done_of_its_own_step() -> None:
    def wrong(marker: Marker | None, decision: Decision) -> Marker | None:
        return (
            lowered(marker, replace(decision, mode=Mode.FINISH))
            if decision.mode is Mode.REDO
            else lowered(marker, decision)
        )

    assert search(Rules(lowered=wrong)).violation is not None


def test_r5_a_finish_that_lowers_one_step_too_far() -> None:
    def wrong(marker: Marker | None, decision: Decision) -> Marker | None:
        return (
            lowered(marker, replace(decision, mode=Mode.REDO))
            if decision.mode is Mode.FINISH
            else lowered(marker, decision)
        )

    assert search(Rules(lowered=wrong)).violation is not None


def test_r5_every_word_set_to_done() -> None:
    def wrong(marker: Marker | None, decision: Decision) -> Marker | None:
        return Marker(decision.step, Phase.DONE) if decision.mode is Mode.FINISH else lowered(marker, decision)

    assert search(Rules(lowered=wrong)).violation is not None


def test_c4_words_read_before_the_fence() -> None:
    result = search(Rules(), replace(SMALL, kills=1, fence=False))
    assert result.violation is not None


def test_c7_a_skipped_step_that_publishes_nothing() -> None:
    result = search(Rules(), replace(SMALL, skipped=frozenset({1}), skipped_publish=False))
    assert result.violation is not None


def test_r1_the_maximum_instead_of_the_minimum() -> None:
    def wrong(ranks: Sequence[RankView]) -> Decision:
        step = max(ready_step(view.marker) for view in ranks)
        return decide(ranks) if step < 0 else Decision(Mode.FINISH, step, "wrong")

    assert search(Rules(decide=wrong)).violation is not None


def test_r1_always_redo() -> None:
    def wrong(ranks: Sequence[RankView]) -> Decision:
        right = decide(ranks)
        return redo(right.step) if right.mode is Mode.FINISH else right

    assert search(Rules(decide=wrong)).violation is not None


def test_r2_without_every_start() -> None:
    def wrong(ranks: Sequence[RankView]) -> Decision:
        step = min(ready_step(view.marker) for view in ranks)
        done = step >= 0 and all(view.marker is not None and view.marker >= Marker(step, Phase.DONE) for view in ranks)
        some = any(step + 1 in view.start_steps for view in ranks)
        return redo(step + 1) if done and some else decide(ranks)

    result = search(Rules(decide=wrong))
    assert result.violation is not None
    assert "START" in result.violation


def test_r2_without_every_rank_done() -> None:
    def wrong(ranks: Sequence[RankView]) -> Decision:
        step = min(ready_step(view.marker) for view in ranks)
        some = step >= 0 and any(step + 1 in view.start_steps for view in ranks)
        return redo(step + 1) if some else decide(ranks)

    assert search(Rules(decide=wrong)).violation is not None


def test_r1_a_fresh_start_whenever_some_rank_has_nothing() -> None:
    def wrong(ranks: Sequence[RankView]) -> Decision:
        return (
            Decision(Mode.FRESH, 0, "wrong")
            if any(view.marker is None or view.marker.step == 0 for view in ranks)
            else decide(ranks)
        )

    assert search(Rules(decide=wrong)).violation is not None


def test_c6_values_of_the_synchronisation_made_again() -> None:
    def wrong(ranks: Sequence[RankView]) -> Decision:
        return replace(decide(ranks), values_from=None)

    result = search(Rules(decide=wrong), replace(SMALL, values=True))
    assert result.violation is not None


def test_r7_values_that_no_word_vouches_for() -> None:
    def wrong(ranks: Sequence[RankView]) -> Decision:
        right = decide(ranks)
        if right.mode is not Mode.FINISH:
            return right
        stored = [rank for rank, view in enumerate(ranks) if right.step in (view.sync_steps or ())]
        return replace(right, values_from=min(stored, key=lambda rank: synced_step(ranks[rank].marker), default=None))

    # Only a step that was redone after its synchronisation (R14) leaves such values.
    scenario = replace(SMALL, steps=1, values=True, gradient_losses=1)
    result = search(Rules(decide=wrong), scenario)
    assert result.violation is not None
    assert "drift" in result.violation


def test_r14_lost_gradients_that_are_ignored() -> None:
    def wrong(ranks: Sequence[RankView]) -> Decision:
        return decide([replace(view, gradients_lost=False) for view in ranks])

    result = search(Rules(decide=wrong), replace(SMALL, gradient_losses=1))
    assert result.violation is not None
    assert "not final" in result.violation


def test_r14_a_redo_although_a_rank_began() -> None:
    def wrong(ranks: Sequence[RankView]) -> Decision:
        right = decide(ranks)
        step = min(ready_step(view.marker) for view in ranks)
        return redo(step) if right.mode is Mode.FALLBACK and step >= 0 else right

    assert search(Rules(decide=wrong), replace(SMALL, gradient_losses=1)).violation is not None


def test_r14_a_fallback_that_nobody_needs() -> None:
    def wrong(ranks: Sequence[RankView]) -> Decision:
        lost = any(view.gradients_lost for view in ranks)
        return Decision(Mode.FALLBACK, 0, "gradients were lost") if lost else decide(ranks)

    assert search(Rules(decide=wrong), replace(SMALL, gradient_losses=1)).violation is not None


def test_t2_an_undo_mark_without_an_undo_copy() -> None:
    result = search(Rules(), replace(SMALL, kills=1, undo_first=False))
    assert result.violation is not None
    assert "undo" in result.violation
