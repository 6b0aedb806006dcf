"""The event loop's clocks and reaping, and what the fence does where it can't pass."""

import os
import signal
import subprocess
import sys
import time

import pytest

from leto_strategy.processes.fence import Fence, own_children, tree
from leto_strategy.processes.loop import Loop
from leto_strategy.system import become_subreaper, is_resource_tracker


@pytest.fixture
def loop():
    loop = Loop()
    yield loop
    loop.close()


def turns(loop, seconds):
    """Turn the loop for a while."""
    timer = loop.after(seconds, lambda: None, always=True)
    while timer.callback is not None:
        loop.turn()


def test_timers_run_in_order_and_cancelled_ones_do_not(loop):
    ran = []
    loop.after(0.02, lambda: ran.append(2))
    loop.after(0.01, lambda: ran.append(1))
    loop.after(0.015, lambda: ran.append(9)).cancel()
    turns(loop, 0.05)
    assert ran == [1, 2]


def test_a_pause_stops_the_clock_but_for_timers_that_must_run(loop):
    ran = []
    loop.after(0.05, lambda: ran.append("paused"))
    loop.after(0.05, lambda: ran.append("always"), always=True)
    loop.pause()
    before = loop.now()
    turns(loop, 0.1)
    assert ran == ["always"]
    assert loop.now() == before
    loop.unpause()
    turns(loop, 0.02)
    assert ran == ["always"]
    turns(loop, 0.05)
    assert ran == ["always", "paused"]


def test_children_are_reaped_by_pid_and_told_to_their_owner(loop):
    ended, reaped = [], []
    loop.on_reaped = reaped.append
    for code in (0, 7):
        pid = os.posix_spawn("/bin/sh", ["sh", "-c", f"exit {code}"], {})
        loop.own(pid, lambda status: ended.append(str(status)))
    pid = os.posix_spawn("/bin/sleep", ["sleep", "100"], {})
    loop.own(pid, lambda status: ended.append(str(status)))
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while len(ended) < 3 and time.monotonic() < deadline:
        loop.turn()
    assert sorted(ended) == ["SIGKILL", "exit 0", "exit 7"]
    assert len(reaped) == 3
    assert loop.known_pids == set()


def test_a_child_that_ended_before_its_pid_was_known_is_told_all_the_same(loop):
    loop.keep_early = True
    pid = os.posix_spawn("/bin/true", ["true"], {})
    turns(loop, 0.2)
    ended = []
    loop.own(pid, ended.append)
    turns(loop, 0.01)
    assert [str(status) for status in ended] == ["exit 0"]


def make_fence(loop, pids, **changes):
    calls = []
    options = {
        "generation": 0,
        "spared": frozenset(),
        "spared_generations": frozenset(),
        "unknown_too": False,
        "is_pending": lambda: False,
        "others_pending": lambda: False,
        "timeout": 5.0,
        "on_passed": lambda num: calls.append(("passed", num)),
        "on_stuck": lambda left: calls.append(("stuck", left)),
    }
    fence = Fence(loop, pids, **{**options, **changes})
    loop.on_reaped = fence.reaped
    return fence, calls


def sleeper(loop):
    pid = os.posix_spawn("/bin/sleep", ["sleep", "100"], {}, setsid=True)
    loop.own(pid, lambda status: None)
    return pid


def test_a_fence_passes_when_every_process_is_reaped(loop):
    fence, calls = make_fence(loop, [sleeper(loop), sleeper(loop)])
    turns(loop, 0.1)
    assert calls == [("passed", 2)]
    fence.look()
    assert calls == [("passed", 2)]


def test_a_fence_waits_for_processes_on_their_way(loop):
    pending = [True]
    fence, calls = make_fence(loop, [sleeper(loop)], is_pending=lambda: pending[0])
    turns(loop, 0.1)
    assert calls == []
    pid = sleeper(loop)
    fence.add(pid)
    pending[0] = False
    turns(loop, 0.1)
    assert calls == [("passed", 2)]


def test_a_fence_that_can_not_pass_says_so_in_time(loop):
    _, calls = make_fence(loop, [sleeper(loop)], is_pending=lambda: True, timeout=0.1)
    turns(loop, 0.3)
    assert [name for name, _ in calls] == ["stuck"]


def test_the_tree_of_a_process_is_seen():
    code = "import subprocess, sys, time; subprocess.Popen(['sleep', '100']); print('x', flush=True); time.sleep(100)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as process:
        process.stdout.read(1)
        assert process.pid in own_children()
        assert len(tree(process.pid)) == 1
        os.killpg(process.pid, signal.SIGKILL)


SPAWNS = """
import multiprocessing, sys, time
context = multiprocessing.get_context("spawn")
locks = [context.Lock() for _ in range(3)]
print(*(lock._semlock.name for lock in locks), flush=True)
time.sleep(100)
"""


def test_a_fence_lets_the_resource_tracker_unlink_the_semaphores_of_spawned_workers(loop):
    become_subreaper()
    try:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SPAWNS], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        loop.own(process.pid, lambda status: None)
        paths = [f"/dev/shm/sem.{name.strip('/')}" for name in process.stdout.readline().split()]
        assert all(map(os.path.exists, paths)), paths
        deadline = time.monotonic() + 5  # it may not be more than forked yet
        while not (trackers := [pid for pid in tree(process.pid) if is_resource_tracker(pid)]):
            assert time.monotonic() < deadline
        assert len(trackers) == 1
        assert not is_resource_tracker(process.pid)
        _, calls = make_fence(loop, [process.pid], unknown_too=True)
        deadline = time.monotonic() + 10
        while not calls and time.monotonic() < deadline:
            loop.turn()
        assert [name for name, _ in calls] == ["passed"]
        assert not any(map(os.path.exists, paths))
        assert not os.path.exists(f"/proc/{trackers[0]}")
        process.stdout.close()
        process.returncode = -signal.SIGKILL  # the loop has reaped it
    finally:
        become_subreaper(False)


STUCK_TRACKER = "import time; time.sleep(100) # from multiprocessing.resource_tracker import main;main(3)"


def test_only_the_resource_tracker_itself_is_spared(loop):
    process = subprocess.Popen([sys.executable, "-c", STUCK_TRACKER], start_new_session=True)
    loop.own(process.pid, lambda status: None)
    assert not is_resource_tracker(process.pid)
    _, calls = make_fence(loop, [process.pid])
    turns(loop, 0.3)
    assert [name for name, _ in calls] == ["passed"]
    process.returncode = -signal.SIGKILL
