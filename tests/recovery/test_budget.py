"""When the supervisor stops trying."""

from leto_strategy.recovery.budget import SAME_CAUSE_MAX, Budget, Failure


def failure(*, step=7, cause="SIGSEGV", internal=True, rank=1):
    return Failure(rank, step, cause, internal, f"crashed ({cause})")


def spend(budget, *failures, ready=6):
    return [budget.spend(f, ready_step=ready) is None for f in failures]


def test_the_same_step_may_not_fail_three_times_from_the_same_internal_cause():
    budget = Budget(max_restarts=20)
    assert spend(budget, failure(), failure()) == [True, True]
    reason = budget.spend(failure(), ready_step=6)
    for part in ("3 times", "step 7", "rank 1", "SIGSEGV", "strategy='ddp'"):
        assert part in reason


def test_another_rank_with_the_same_cause_is_the_same_poison():
    assert spend(Budget(max_restarts=20), *(failure(rank=rank) for rank in range(3))) == [True, True, False]


def test_a_ready_between_refills():
    budget = Budget(max_restarts=20)
    assert spend(budget, failure(), failure(), ready=6) == [True, True]
    assert spend(budget, failure(), failure(), ready=7) == [True, True]
    assert spend(budget, failure(), ready=7) == [False]


def test_other_causes_and_other_steps_are_counted_apart():
    budget = Budget(max_restarts=20)
    assert all(spend(budget, failure(), failure(cause="hang"), failure(step=8), failure(cause="exit 1"), failure()))


def test_external_signals_are_no_poison():
    assert all(spend(Budget(max_restarts=20), *[failure(cause="SIGKILL", internal=False)] * 20))


def test_external_signals_count_toward_max_restarts():
    budget = Budget(max_restarts=4)
    assert spend(budget, *[failure(cause="SIGKILL", internal=False)] * 5) == [True] * 4 + [False]


def test_the_reason_names_the_option():
    budget = Budget(max_restarts=1)
    assert budget.spend(failure(step=None)) is None
    reason = budget.spend(failure(step=None, cause="exit 1"))
    for part in ("2 failures in a row", "before it entered a step", "exit 1", "max_restarts"):
        assert part in reason


def test_each_ready_refills_max_restarts():
    budget = Budget(max_restarts=2)
    for step in range(50):
        assert budget.spend(failure(step=step, internal=False), ready_step=step) is None
    assert budget.num_failures == 1


def test_a_lowered_word_refills_nothing():
    budget = Budget(max_restarts=2)
    assert spend(budget, failure(cause="a"), ready=6) == [True]
    assert spend(budget, failure(cause="b"), ready=5) == [True]
    assert spend(budget, failure(cause="c"), ready=6) == [False]


def test_failures_before_any_step_are_counted_together():
    budget = Budget(max_restarts=20)
    results = [budget.spend(failure(step=None, cause="exit 1")) is None for _ in range(SAME_CAUSE_MAX)]
    assert results == [True] * (SAME_CAUSE_MAX - 1) + [False]
