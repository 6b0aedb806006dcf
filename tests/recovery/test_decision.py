from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from leto_strategy.progress import Marker, Phase
from leto_strategy.recovery.decision import (
    NUM_SLOTS,
    Decision,
    Mode,
    RankView,
    decide,
    lowered,
    may_record_start,
    ready_step,
    slot,
    synced_step,
)

CHUNKS = 3


def at(step: int, phase: Phase, chunk: int = 0) -> Marker | None:
    return Marker(step, phase, chunk) if step >= 0 else None


def ready(step: int) -> Marker | None:
    return at(step, Phase.READY)


def synced(step: int) -> Marker | None:
    return at(step, Phase.SYNCED)


def done(step: int) -> Marker | None:
    return at(step, Phase.DONE)


def rank(
    marker: Marker | None, starts: set[int] | None = None, mids: set[int] | None = None, **more: object
) -> RankView:
    """A rank with the records that a word implies, unless they are given."""
    last = ready_step(marker)
    held = set(range(max(0, last - 2), last + 1))
    return RankView(
        marker,
        frozenset(held if starts is None else starts),
        frozenset(held if mids is None else mids),
        **more,  # type: ignore[arg-type]
    )


@st.composite
def words_within(draw: st.DrawFn, step: int) -> Marker | None:
    """Any word from READY(step) to READY(step + 1)."""
    phase = draw(st.sampled_from(Phase))
    if phase in (Phase.UNDO, Phase.COMMIT):
        return at(step, phase, draw(st.integers(0, CHUNKS - 1)))
    return at(step, phase) if draw(st.booleans()) else ready(step + 1)


@st.composite
def reachable(draw: st.DrawFn) -> list[RankView]:
    """What a kill may leave: some ranks are READY for one more step than the others, and none has begun it."""
    step = draw(st.integers(-1, 5))
    num_ranks = draw(st.integers(1, 4))
    if step < 0:
        words = draw(st.lists(st.sampled_from([None, ready(0)]), min_size=num_ranks, max_size=num_ranks))
        words[0] = None
    else:
        words = draw(st.lists(words_within(step), min_size=num_ranks, max_size=num_ranks))
    views = []
    for word in words:
        may_have_next = word is None or (step >= 0 and word >= Marker(step, Phase.DONE))
        starts = set(range(max(0, step - 1), step + 1)) | (
            {step + 1} if may_have_next and draw(st.booleans()) else set()
        )
        starts |= {ready_step(word)} - {-1}
        mids = {step, ready_step(word)} - {-1}
        views.append(rank(word, starts, mids))
    return views


anything = st.builds(
    RankView,
    st.none() | st.builds(at, st.integers(0, 4), st.sampled_from(Phase)),
    st.frozensets(st.integers(0, 6)),
    st.frozensets(st.integers(0, 6)),
    st.none() | st.frozensets(st.integers(0, 6)),
    st.booleans(),
    st.booleans(),
)


@given(reachable())
def test_r1_every_rank_enters_at_the_lowest_ready_step_unless_all_can_begin_the_next(views: list[RankView]) -> None:
    step = min(ready_step(view.marker) for view in views)
    decision = decide(views)
    if step < 0:
        assert decision.mode in (Mode.FRESH, Mode.REDO)
        assert decision.step == 0
    else:
        assert (decision.mode, decision.step) in ((Mode.FINISH, step), (Mode.REDO, step + 1))


def test_r1_c1_a_step_that_nobody_began_is_finished_and_not_skipped() -> None:
    decision = decide([rank(ready(4)), rank(ready(4))])
    assert (decision.mode, decision.step) == (Mode.FINISH, 4)
    decision = decide([rank(ready(4)), rank(ready(5))])
    assert (decision.mode, decision.step) == (Mode.FINISH, 4)


def test_r1_without_a_ready_step_the_job_begins_at_step_0() -> None:
    assert decide([rank(None), rank(None)]).mode is Mode.FRESH
    assert decide([rank(None, {0}), rank(None)]).mode is Mode.FRESH
    assert decide([rank(None, {0}), rank(ready(0))]) == decide([rank(None, {0}), rank(None, {0})])
    decision = decide([rank(None, {0}, {0}), rank(ready(0), {0})])
    assert (decision.mode, decision.step) == (Mode.REDO, 0)


def test_r2_the_next_step_is_entered_only_when_all_are_done_and_hold_its_start() -> None:
    held, bare = rank(done(4), {3, 4, 5}), rank(done(4), {3, 4})
    assert (decide([held, held]).mode, decide([held, held]).step) == (Mode.REDO, 5)
    assert (decide([held, bare]).mode, decide([held, bare]).step) == (Mode.FINISH, 4)
    unfinished = rank(at(4, Phase.COMMIT, 2), {3, 4, 5})
    assert (decide([held, unfinished]).mode, decide([held, unfinished]).step) == (Mode.FINISH, 4)
    ahead = rank(ready(5), {4, 5})
    assert (decide([held, ahead]).mode, decide([held, ahead]).step) == (Mode.REDO, 5)


def test_r2_needs_no_record_of_the_step_before() -> None:
    assert decide([rank(done(4), {5}, set())]).mode is Mode.REDO


def test_r1_the_last_step_that_all_have_done_is_entered_with_nothing_to_do() -> None:
    decision = decide([rank(done(9)), rank(done(9))])
    assert (decision.mode, decision.step) == (Mode.FINISH, 9)


@pytest.mark.parametrize("word", [synced(5), at(5, Phase.UNDO), at(5, Phase.COMMIT, 2), done(5), ready(6)])
def test_a_rank_that_began_a_step_for_which_another_was_not_ready_is_no_guess(word: Marker) -> None:
    decision = decide([rank(done(4), {4, 5}), rank(word)])
    # SYNCED(5) alone is harmless: nothing is updated yet. It is what a redo of step 5 leaves when it is interrupted.
    assert (decision.mode is Mode.FALLBACK) == (word != synced(5))
    if word != synced(5):
        assert "rank 1" in decision.reason


@pytest.mark.parametrize("lost", ["START", "MID"])
def test_a_record_that_is_needed_and_gone_is_a_fallback_that_names_it(lost: str) -> None:
    bad = rank(ready(4), {3} if lost == "START" else None, {3} if lost == "MID" else None)
    decision = decide([rank(ready(4)), bad])
    assert decision.mode is Mode.FALLBACK
    assert decision.reason == f"rank 1 has no complete {lost}(4)"


def test_a_zeroed_word_beside_ranks_that_went_on_is_a_fallback() -> None:
    assert decide([rank(None, {3, 4}), rank(done(4))]).mode is Mode.FALLBACK
    assert decide([rank(None, set()), rank(done(4))]).mode is Mode.FALLBACK
    assert decide([rank(None, {0, 1}, {0})]).mode is Mode.FALLBACK, "one rank alone: its records tell"


def test_t9_a_word_of_which_every_copy_is_damaged_is_a_fallback() -> None:
    decision = decide([rank(done(4)), rank(None, {0}, word_lost=True)])
    assert decision.mode is Mode.FALLBACK
    assert "rank 1" in decision.reason


def test_r4_a_host_may_be_two_steps_ahead_of_its_synchronisation_with_four_slots() -> None:
    assert NUM_SLOTS == 4
    assert [may_record_start(step, synced(4)) for step in (5, 6, 7, 8)] == [True, True, True, False]
    assert [may_record_start(step, ready(5)) for step in (7, 8)] == [True, False], "READY is not yet SYNCED"
    assert [may_record_start(step, None) for step in (0, 1, 2, 3)] == [True, True, True, False]


@given(st.integers(0, 50), st.integers(2, 6), st.integers(-1, 50))
def test_r4_a_start_never_overwrites_a_step_that_a_recovery_may_need(step: int, num_slots: int, last: int) -> None:
    word = synced(last)
    if may_record_start(step, word, num_slots):
        overwritten = step - num_slots
        assert overwritten < max(last, 0), "a recovery enters at the last synchronised step, or later"
        needed = range(max(last, 0), step)
        assert slot(step, num_slots) not in {slot(other, num_slots) for other in needed}


@given(st.integers(0, 1000), st.integers(2, 6))
def test_r4_neighbouring_steps_have_slots_of_their_own(step: int, num_slots: int) -> None:
    assert len({slot(step + ahead, num_slots) for ahead in range(num_slots)}) == num_slots
    assert all(0 <= slot(step + ahead, num_slots) < num_slots for ahead in range(num_slots))


def test_r5_c3_a_word_that_ran_ahead_is_lowered() -> None:
    finish, redo = Decision(Mode.FINISH, 4, ""), Decision(Mode.REDO, 5, "")
    assert lowered(ready(5), finish) == lowered(ready(5), redo) == done(4)
    assert lowered(done(4), finish) == lowered(done(4), redo) == done(4)
    assert lowered(ready(0), Decision(Mode.REDO, 0, "")) is None
    assert lowered(ready(0), Decision(Mode.FRESH, 0, "")) is None


def test_r5_a_word_that_says_less_is_not_touched() -> None:
    for word in (ready(4), synced(4), at(4, Phase.UNDO, 1), at(4, Phase.COMMIT, 1), done(4)):
        assert lowered(word, Decision(Mode.FINISH, 4, "")) == word
    assert lowered(None, Decision(Mode.FINISH, 4, "")) is None


@given(reachable(), st.data())
def test_r5_a_recovery_that_is_interrupted_while_words_are_lowered_decides_the_same(
    views: list[RankView], data: st.DataObject
) -> None:
    decision = decide(views)
    some = data.draw(st.lists(st.booleans(), min_size=len(views), max_size=len(views)))
    after = [replace(v, marker=lowered(v.marker, decision)) if low else v for v, low in zip(views, some, strict=True)]
    again = decide(after)
    assert (again.mode, again.step) == (decision.mode, decision.step)
    for view in after:
        assert lowered(lowered(view.marker, decision), decision) == lowered(view.marker, decision)


def test_r7_c6_values_come_from_a_rank_whose_word_vouches_for_them() -> None:
    def views(*of: tuple[Marker | None, set[int]]) -> list[RankView]:
        return [rank(marker, sync_steps=frozenset(stored)) for marker, stored in of]

    assert decide(views((ready(4), set()), (synced(4), {4}))).values_from == 1
    assert decide(views((ready(4), {4}), (at(4, Phase.UNDO), {4}))).values_from == 1, "those of rank 0 may be older"
    assert decide(views((done(4), {3, 4}), (ready(5), {4}))).values_from == 0
    assert decide(views((ready(4), {4}), (ready(4), set()))).values_from is None, "nobody began: all synchronise again"
    assert decide([rank(ready(4)), rank(synced(4))]).values_from is None, "this job's synchronisation makes none"
    gone = decide(views((ready(4), {4}), (at(4, Phase.UNDO), set())))
    assert gone.mode is Mode.FALLBACK
    assert "synchronisation" in gone.reason


def test_r8_c7_a_skipped_step_publishes_like_any_other_and_is_not_entered_again() -> None:
    skipped_on_one = decide([rank(done(4)), rank(ready(4))])
    assert (skipped_on_one.mode, skipped_on_one.step) == (Mode.FINISH, 4)
    # Had the skipped step 5 published nothing, rank 1 would look two steps ahead.
    assert decide([rank(done(4)), rank(ready(6))]).mode is Mode.FALLBACK


def test_r14_lost_gradients_are_made_again_while_nobody_has_used_them() -> None:
    lost = rank(ready(4), gradients_lost=True)
    assert (decide([lost, rank(synced(4))]).mode, decide([lost, rank(synced(4))]).step) == (Mode.REDO, 4)
    assert lowered(synced(4), decide([lost, rank(synced(4))])) == done(3)
    assert decide([lost, rank(at(4, Phase.UNDO))]).mode is Mode.FALLBACK
    assert decide([rank(done(4), gradients_lost=True), rank(ready(4))]).mode is Mode.FINISH, "a DONE rank needs none"
    assert decide([rank(at(4, Phase.COMMIT, 2), gradients_lost=True), rank(done(4))]).mode is Mode.FALLBACK


def test_r16_words_of_an_earlier_timeline_are_void_and_of_a_later_one_contradict() -> None:
    old, new = Marker(9, Phase.DONE), Marker(2, Phase.READY, timeline=1)
    assert decide([rank(old, set(), set()), rank(None)], timeline=1).mode is Mode.FRESH
    decision = decide([rank(new), rank(new)], timeline=1)
    assert (decision.mode, decision.step, decision.timeline) == (Mode.FINISH, 2, 1)
    assert decide([rank(old, {0}, set()), rank(None, {0})], timeline=1).mode is Mode.REDO
    assert decide([rank(new), rank(new)], timeline=0).mode is Mode.FALLBACK
    assert lowered(old, decision) is None
    assert lowered(replace(new, step=3), decision) == Marker(2, Phase.DONE, timeline=1)
    assert lowered(new, Decision(Mode.FALLBACK, 0, "")) is None


@given(reachable(), st.randoms(use_true_random=False))
def test_no_rule_looks_at_the_number_of_a_rank(views: list[RankView], rng: object) -> None:
    shuffled = list(views)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = decide(views), decide(shuffled)
    assert (one.mode, one.step) == (other.mode, other.step)


@given(st.lists(anything, min_size=1, max_size=4), st.integers(0, 1))
@example([rank(done(3), {4}, set())], 0)
@example([rank(done(3), {5}, set())], 0)
def test_whatever_is_read_ends_in_a_decision_that_can_be_carried_out(views: list[RankView], timeline: int) -> None:
    decision = decide(views, timeline=timeline)
    assert decision == decide(views, timeline=timeline)
    assert decision.reason
    assert decision.timeline == timeline
    for view in views:
        current = view.marker if view.marker is not None and view.marker.timeline == timeline else None
        if decision.mode in (Mode.REDO, Mode.FINISH):
            assert decision.step in view.start_steps
        if decision.mode is Mode.REDO:
            assert current is None or current <= Marker(decision.step, Phase.SYNCED, timeline=timeline)
            assert ready_step(current) >= decision.step - 1
        if decision.mode is Mode.FINISH:
            assert decision.step in view.mid_steps
            assert ready_step(current) >= decision.step
            assert synced_step(current) <= decision.step
        after = lowered(view.marker, decision)
        assert after is None or after <= Marker(decision.step, Phase.DONE, timeline=timeline)
