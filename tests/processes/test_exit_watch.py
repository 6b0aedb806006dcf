"""A dying trainer is seen before it can be reaped, and its shadow told once."""

import os
import subprocess
import time
from types import SimpleNamespace
from typing import Any

from leto_strategy.processes.exit_watch import ExitWatch


class Shadows:
    def __init__(self) -> None:
        self.told = 0

    def prepare(self) -> None:
        self.told += 1


def job_of(pids: list[int], *, gpus: tuple[int, ...] = (0,), finished: bool = False) -> Any:
    pending: list[Any] = []
    return SimpleNamespace(
        spec=SimpleNamespace(gpus=gpus, shadows=1),
        timings=SimpleNamespace(exits=0.01),
        loop=SimpleNamespace(after=lambda seconds, call: pending.append(call)),
        active=SimpleNamespace(number=3, promoted=True, pids=pids, all_finished=finished),
        shadows=Shadows(),
        ending=False,
        pending=pending,
    )


def test_a_killed_trainer_that_is_not_reaped_yet_is_told_once() -> None:
    process = subprocess.Popen(["sleep", "60"])
    job = job_of([os.getpid(), process.pid])
    ExitWatch(job).start()
    assert job.shadows.told == 0
    process.kill()
    deadline = time.monotonic() + 5
    while not job.shadows.told:
        job.pending.pop()()
        assert time.monotonic() < deadline
    for _ in range(3):
        job.pending.pop()()
    assert job.shadows.told == 1
    process.wait()


def test_nothing_is_looked_at_without_gpus_and_nothing_is_told_at_a_good_end() -> None:
    process = subprocess.Popen(["true"])
    time.sleep(0.1)  # a zombie
    ExitWatch(without := job_of([process.pid], gpus=())).start()
    assert without.pending == []
    ExitWatch(ended := job_of([process.pid], finished=True)).start()
    assert (ended.shadows.told, len(ended.pending)) == (0, 1)
    process.wait()
