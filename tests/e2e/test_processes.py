"""SIGKILL of everything that is not an active trainer, from outside: nothing is lost, or everything is gone in 2 s."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from leto_strategy import system
from leto_strategy.cli import jobs
from leto_strategy.faults import Fault, FaultPlan
from tests.e2e.harness import UserProcess, Workshop, reap_adopted, recoveries
from tests.e2e.tiny import Case, chosen_device

SLOW = 0.12
HANG_SECONDS = 2.0 if chosen_device() == "cpu" else 6.0  # a CUDA context takes its time


def status_of(process: UserProcess) -> dict[str, Any]:
    """What `leto status` says of a job, through the CLI's own client."""
    job = process.wait_for(lambda events: events and events[0]["job"])
    return jobs.ask(job, {"op": "status"}, timeout=timedelta(seconds=5))


def pids(process: UserProcess, role: str) -> list[int]:
    """Pids of a role, by rank."""
    found = [p for p in status_of(process)["processes"] if p["role"] == role]
    return [p["pid"] for p in sorted(found, key=lambda p: (p["rank"] is not None, p["rank"]))]


def wait_for_step(process: UserProcess, number: int) -> None:
    process.wait_for(lambda _: process.steps() >= number)


def wait_for_shadow(process: UserProcess, number: int = 1) -> None:
    process.wait_for(lambda events: sum(e["event"] == "shadow_ready" for e in events) >= number)


def of_this_job(process: UserProcess) -> list[int]:
    """Processes of a job that are left."""
    job = process.events()[0]["job"]
    return [
        pid
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit())
        if system.process_environ_has(pid, f"LETO_JOB={job}".encode())
    ]


def finish(workshop: Workshop, process: UserProcess) -> None:
    assert process.wait(120) == 0, process.output()[-4000:]
    workshop.check(process)
    assert of_this_job(process) == []
    workshop.forget(process)


def test_all_ranks_killed_at_once_cost_one_recovery(workshop: Workshop) -> None:
    process = workshop.start(Case(slow=SLOW))
    wait_for_shadow(process)
    system.kill_processes(pids(process, "active"))
    assert process.wait(120) == 0, process.output()[-4000:]
    assert len(recoveries(process)) == 1
    finish(workshop, process)


def test_a_kill_while_no_shadow_is_ready_waits_for_one(workshop: Workshop) -> None:
    process = workshop.start(Case(slow=SLOW))
    active = process.wait_for(lambda events: [e for e in events if e["event"] == "generation_started"])[0]["pids"]
    process.wait_for(lambda events: any(e["event"] == "entered" for e in events))
    os.kill(active[0], signal.SIGKILL)
    names = [
        e["event"] for e in process.wait_for(lambda events: any(e["event"] == "fenced" for e in events) and events)
    ]
    assert process.wait(120) == 0, process.output()[-4000:]
    print("a shadow was ready" if "shadow_ready" in names[: names.index("trainer_failed")] else "no shadow was ready")
    assert len(recoveries(process)) == 1
    finish(workshop, process)


def test_a_cold_start_on_retained_memory_is_exact(workshop: Workshop) -> None:
    case = Case(slow=0.02, options={"shadows": 0})
    process = workshop.run(case, FaultPlan().kill_at(rank=0, point="chunk_updating", step=3))
    assert [r["level"] for r in recoveries(process)] == ["cold"]
    finish(workshop, process)


def test_a_new_interpreter_instead_of_the_zygote_is_exact(workshop: Workshop) -> None:
    case = Case(devices=1, options={"zygote": "off", "shadows": 0})
    process = workshop.run(case, FaultPlan().kill_at(rank=0, point="forward", step=3))
    assert [r["level"] for r in recoveries(process)] == ["cold"]
    finish(workshop, process)


def test_a_killed_shadow_is_replaced_and_the_next_takes_over(workshop: Workshop) -> None:
    process = workshop.start(Case(slow=SLOW, batches=12))
    wait_for_shadow(process)
    os.kill(pids(process, "shadow")[1], signal.SIGKILL)
    wait_for_shadow(process, 2)
    os.kill(pids(process, "active")[0], signal.SIGKILL)
    assert process.wait(120) == 0, process.output()[-4000:]
    assert len(recoveries(process)) == 1
    finish(workshop, process)


def test_a_killed_manager_loses_nothing(workshop: Workshop) -> None:
    process = workshop.start(Case(slow=SLOW))
    wait_for_shadow(process)
    system.kill_processes(pids(process, "manager"))
    process.wait_for(lambda events: sum(e["event"] == "manager_replaced" for e in events) == 2)
    os.kill(pids(process, "active")[0], signal.SIGKILL)
    assert process.wait(120) == 0, process.output()[-4000:]
    assert len(recoveries(process)) == 1
    finish(workshop, process)


def test_a_killed_zygote_costs_nothing(workshop: Workshop) -> None:
    process = workshop.start(Case(slow=SLOW))
    wait_for_shadow(process)
    os.kill(pids(process, "zygote")[0], signal.SIGKILL)
    os.kill(pids(process, "active")[1], signal.SIGKILL)
    assert process.wait(120) == 0, process.output()[-4000:]
    assert len(recoveries(process)) == 1
    finish(workshop, process)


@pytest.mark.parametrize("who", ["supervisor", "user"])
def test_without_supervisor_or_user_everything_is_gone_in_two_seconds(workshop: Workshop, who: str) -> None:
    process = workshop.start(Case(slow=0.2, num_workers=1))
    wait_for_shadow(process)
    victims = of_this_job(process)
    supervisor = pids(process, "supervisor")[0]
    begin = time.monotonic()
    os.kill(supervisor if who == "supervisor" else process.pid, signal.SIGKILL)
    while left := [pid for pid in (*victims, supervisor) if Path(f"/proc/{pid}/cmdline").exists() and _alive(pid)]:
        assert time.monotonic() - begin < 2.0, f"still there: {left}"
        time.sleep(0.01)
    if who == "supervisor":
        assert process.wait(5) == 1
        assert "supervisor process ended" in process.output()
    else:
        process.wait(5)
    reap_adopted(workshop.server)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("persistent", [False, True])
def test_trainers_with_forked_workers_recover_exactly(workshop: Workshop, persistent: bool) -> None:
    case = Case(slow=0.05, num_workers=2, persistent=persistent, augment=True, epochs=3)
    plan = FaultPlan()
    for rank, point, step in ((0, "forward", 3), (1, "chunk_updating", 8), (0, "update_done", 11), (1, "forward", 15)):
        plan.kill_at(rank=rank, point=point, step=step)
    process = workshop.run(case, plan)
    assert len(recoveries(process)) == 4
    finish(workshop, process)


def test_a_killed_worker_is_a_fault_and_not_the_users_bug(workshop: Workshop) -> None:
    process = workshop.start(Case(slow=SLOW, num_workers=1))
    wait_for_shadow(process)
    rank0 = pids(process, "active")[0]
    workers = [pid for pid in system.descendants(rank0) if pid != rank0]
    os.kill(workers[0], signal.SIGKILL)
    assert process.wait(120) == 0, process.output()[-4000:]
    assert len(recoveries(process)) == 1
    finish(workshop, process)


def test_a_hanging_rank_is_found_and_replaced(workshop: Workshop) -> None:
    case = Case(slow=SLOW, options={"hang_timeout": HANG_SECONDS})
    plan = FaultPlan().at(Fault(rank=1, point="forward", fault="hang", step=4))
    plan.at(Fault(rank=0, point="validation", fault="stop", step=9))
    process = workshop.run(case, plan)
    assert {r["cause"] for r in recoveries(process)} == {"hang"}
    finish(workshop, process)


@pytest.mark.parametrize("fault", ["segv", "exit"])
def test_a_crash_from_inside_is_recovered_once(workshop: Workshop, fault: str) -> None:
    process = workshop.run(Case(slow=SLOW), FaultPlan().at(Fault(rank=0, point="forward", fault=fault, step=3)))
    assert len(recoveries(process)) == 1
    finish(workshop, process)
