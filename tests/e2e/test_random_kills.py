"""Kills at random moments, many in one run: identical, and nothing grows. The seed is printed and replays the plan."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from leto_strategy import system
from tests.e2e.harness import UserProcess, Workshop, recoveries
from tests.e2e.test_processes import pids, status_of
from tests.e2e.tiny import Case


@dataclass(frozen=True)
class Footprint:
    """What a job holds: of supervisor and managers the descriptors and resident KiB, of all the processes."""

    processes: int
    fds: dict[str, int]
    rss_kib: dict[str, int]
    shared_memory_files: int

    @classmethod
    def of(cls, process: UserProcess) -> "Footprint":
        long_lived = [p for p in status_of(process)["processes"] if p["role"] in ("supervisor", "manager", "zygote")]
        names = {f"{p['role']} {p['rank']}": p["pid"] for p in long_lived}
        names["user"] = process.pid
        job = process.events()[0]["job"]
        processes = [p for p in system.all_processes() if system.process_environ_has(p.pid, f"LETO_JOB={job}".encode())]
        return cls(
            processes=len([p for p in processes if not p.ended]),
            fds={name: _num_fds(pid) for name, pid in names.items()},
            rss_kib={name: _rss_kib(pid) for name, pid in names.items()},
            shared_memory_files=len(os.listdir("/dev/shm")),
        )


def _num_fds(pid: int) -> int:
    """The fewest of some looks: the connection over which it was just asked for its status may not be closed yet."""
    found = []
    for _ in range(10):
        found.append(len(os.listdir(f"/proc/{pid}/fd")))
        time.sleep(0.02)
    return min(found)


def _rss_kib(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])


def kill_at_random(
    process: UserProcess, rng: random.Random, num_kills: int, *, seconds: float, look: Callable[[], None] = lambda: None
) -> tuple[list[dict[str, Any]], Footprint, Footprint]:
    """Kill random active ranks at random moments, each after the recovery from the one before.

    Args:
        process: Trains long enough.
        rng: Draws moments and victims.
        num_kills: How many.
        seconds: For all of it.
        look: Called before each kill and after the last recovery, when new shadows are waiting.

    Returns:
        The kills, and the footprint after the first recovery and after the last.
    """
    deadline = time.monotonic() + seconds
    kills: list[dict[str, Any]] = []
    first: Footprint | None = None
    while len(kills) < num_kills:
        process.wait_for(lambda events: _settled(events, len(kills)), seconds=deadline - time.monotonic())
        look()
        if first is None and len(kills) == 1:
            first = Footprint.of(process)
        time.sleep(rng.random() * 0.35)
        victims = pids(process, "active")
        victim = rng.randrange(len(victims))
        os.kill(victims[victim], signal.SIGKILL)
        kills.append({"rank": victim, "steps": process.steps()})
    process.wait_for(lambda events: _settled(events, len(kills)), seconds=deadline - time.monotonic())
    look()
    assert first is not None
    return kills, first, Footprint.of(process)


def _settled(events: list[dict[str, Any]], num_kills: int) -> bool:
    """As many failures as kills, and since the last one a shadow was promoted and a new one is waiting."""
    names = [e["event"] for e in events]
    if names.count("trainer_failed") < num_kills:
        return False
    since = len(names) - names[::-1].index("trainer_failed") if num_kills else 0
    rest = names[since:]
    return "promoted" in rest and "shadow_ready" in rest[rest.index("promoted") :]


def run_plan(
    workshop: Workshop,
    seed: int,
    num_kills: int,
    case: Case,
    *,
    seconds: float,
    look: Callable[[], None] = lambda: None,
) -> None:
    rng = random.Random(seed)
    process = workshop.start(case)
    try:
        kills, first, last = kill_at_random(process, rng, num_kills, seconds=seconds, look=look)
    except BaseException:
        process.kill()
        raise
    process.hurry()
    print(json.dumps({"seed": seed, "kills": kills}))
    assert process.wait(seconds) == 0, process.output()[-4000:]
    workshop.check(process)
    assert len(recoveries(process)) == num_kills, [r["cause"] for r in recoveries(process)]
    assert last.processes == first.processes
    assert last.fds == first.fds, f"{first.fds}, and now {last.fds}"
    assert last.shared_memory_files <= first.shared_memory_files
    for name, before in first.rss_kib.items():
        assert last.rss_kib[name] < before * 1.1 + 2048, f"{name} grew from {before} to {last.rss_kib[name]} KiB"
    workshop.forget(process)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fifteen_random_kills_change_nothing_and_leak_nothing(workshop: Workshop, pytestconfig: pytest.Config) -> None:
    case = Case(slow=0.05, batches=40, epochs=3, val_check_interval=13)
    run_plan(workshop, pytestconfig.getoption("seed"), 15, case, seconds=200)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_hundred_random_kills_change_nothing_and_leak_nothing(
    workshop: Workshop, pytestconfig: pytest.Config
) -> None:
    case = Case(slow=0.05, batches=120, epochs=6, val_check_interval=37)
    run_plan(workshop, pytestconfig.getoption("seed"), 100, case, seconds=1500)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("devices", [1, 3, 4])
def test_random_kills_with_other_numbers_of_ranks(
    workshop: Workshop, pytestconfig: pytest.Config, devices: int
) -> None:
    case = Case(slow=0.05, batches=60, epochs=2, devices=devices, num_workers=devices % 2)
    run_plan(workshop, pytestconfig.getoption("seed") + devices, 12, case, seconds=600)
