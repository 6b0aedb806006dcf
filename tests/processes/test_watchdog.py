"""Hang detection, with the time handed in."""

import pytest

from leto_strategy.processes.watchdog import LIMIT_SECONDS_FIRST, Watchdog
from leto_strategy.progress import Activity

STEP, VALIDATION, STARTING = Activity.STEP, Activity.VALIDATION, Activity.STARTING


def feed(watchdog, times, *, rank=0, activity=STEP, first=1):
    for beat, now in enumerate(times, start=first):
        watchdog.observe(rank, heartbeat=beat, activity=activity, debugged=False, now=now)


def test_an_activity_that_was_never_seen_has_half_an_hour():
    watchdog = Watchdog()
    feed(watchdog, [0.0])
    assert watchdog.hang(LIMIT_SECONDS_FIRST) is None
    hang = watchdog.hang(LIMIT_SECONDS_FIRST + 1)
    assert (hang.rank, hang.activity, hang.limit_seconds) == (0, STEP, LIMIT_SECONDS_FIRST)


def test_short_steps_have_thirty_seconds():
    watchdog = Watchdog()
    feed(watchdog, [0.0, 0.1, 0.2])
    assert watchdog.limit(STEP) == 30
    assert watchdog.hang(30.1) is None
    assert watchdog.hang(30.3).rank == 0


def test_long_steps_have_ten_times_the_longest():
    watchdog = Watchdog()
    feed(watchdog, [0.0, 20.0, 21.0])
    assert watchdog.limit(STEP) == 200
    assert watchdog.hang(220) is None
    assert watchdog.hang(222) is not None


def test_each_activity_has_its_own_limit():
    watchdog = Watchdog()
    feed(watchdog, [0.0, 1.0])
    feed(watchdog, [2.0], activity=VALIDATION, first=3)
    assert watchdog.limit(VALIDATION) == LIMIT_SECONDS_FIRST
    assert watchdog.hang(600) is None
    feed(watchdog, [700.0], first=4)
    assert watchdog.limit(VALIDATION) == 6980


def test_a_users_timeout_replaces_the_rule():
    watchdog = Watchdog(hang_timeout=2.5)
    feed(watchdog, [0.0, 50.0])
    assert [watchdog.limit(activity) for activity in Activity] == [2.5] * len(Activity)
    assert watchdog.hang(53).seconds == 3


def test_a_start_keeps_its_own_rule():
    watchdog = Watchdog(hang_timeout=1)
    assert watchdog.start_limit() == LIMIT_SECONDS_FIRST
    watchdog.note_start(5)
    assert watchdog.start_limit() == 50
    watchdog.note_start(1)
    assert watchdog.start_limit() == 50


def test_a_debugged_trainers_time_does_not_count():
    watchdog = Watchdog(hang_timeout=1)
    for now in (0.0, 5.0, 10.0):
        watchdog.observe(0, heartbeat=1, activity=STEP, debugged=True, now=now)
        assert watchdog.hang(now + 0.9) is None
    assert watchdog.hang(11.5) is not None


def test_the_rank_that_stopped_first_is_named():
    watchdog = Watchdog(hang_timeout=10)
    feed(watchdog, [0.0, 1.0, 2.0], rank=0)
    feed(watchdog, [0.0, 1.0], rank=1)
    feed(watchdog, [0.0, 1.0, 2.0], rank=2)
    assert watchdog.hang(50).rank == 1


def test_a_new_generation_starts_afresh_and_keeps_what_was_learned():
    watchdog = Watchdog()
    feed(watchdog, [0.0, 8.0])
    watchdog.restart()
    assert watchdog.hang(10_000) is None
    feed(watchdog, [10_000.0])
    assert watchdog.limit(STEP) == 80


def test_a_rank_that_has_finished_owes_nothing():
    watchdog = Watchdog(hang_timeout=1)
    feed(watchdog, [0.0])
    watchdog.forget(0)
    assert watchdog.hang(100) is None


@pytest.mark.parametrize("activity", list(Activity))
def test_a_change_of_activity_is_progress(activity):
    watchdog = Watchdog(hang_timeout=5)
    other = STARTING if activity is not STARTING else STEP
    watchdog.observe(0, heartbeat=1, activity=other, debugged=False, now=0)
    watchdog.observe(0, heartbeat=1, activity=activity, debugged=False, now=4)
    assert watchdog.hang(8) is None
