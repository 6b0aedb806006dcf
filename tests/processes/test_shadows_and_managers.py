"""Deaths that end no generation: of shadows and of state managers. And hangs, which do."""

import ctypes
import os
import signal
import time

import pytest

from leto_strategy import system
from tests.processes.harness import Job


def actives(job):
    return [e["pids"] for e in job.events if e["event"] == "promoted"]


def test_a_dead_shadow_is_replaced_and_training_goes_on(tmp_path):
    with Job(tmp_path, steps=20, hold=5) as job:
        shadows = job.event("shadow_ready")["pids"]
        os.kill(shadows[1], signal.SIGKILL)
        failed = job.event("shadow_failed")
        assert (failed["rank"], failed["cause"], failed["log"]) == (1, "SIGKILL", None)
        job.event("shadow_ready", count=2)
        job.go()
        job.finished()
        assert len(actives(job)) == 1


def test_what_a_dead_shadow_started_is_gone_and_nothing_else(tmp_path):
    faults = [
        {"at": "forward", "step": 1, "rank": 1, "generation": 0, "do": "children"},
        {"at": "before_ready", "rank": 0, "generation": 1, "do": "children"},
    ]
    with Job(tmp_path, steps=20, hold=5, faults=faults) as job:
        shadows = job.event("shadow_ready")["pids"]
        kinds = ("forked", "setsid", "orphan")
        lines = [job.traced(kind, generation=number) for kind in kinds for number in (0, 1)]
        os.kill(shadows[0], signal.SIGKILL)
        job.event("shadow_ready", count=2)
        alive = {line["generation"] for line in lines if os.path.exists(f"/proc/{line['pid']}")}
        assert alive == {0}
        job.go()
        job.finished()
        assert job.processes() == {}


def test_a_shadow_that_fails_keeps_its_log_and_others_leave_none(tmp_path):
    faults = [{"at": "before_ready", "rank": 0, "generation": 1, "do": "print lost my way"}]
    faults += [{"at": "before_ready", "rank": 0, "generation": 1, "do": "exit"}]
    faults += [{"at": "before_ready", "rank": 0, "generation": 2, "do": "print all is well"}]
    with Job(tmp_path, steps=20, hold=5, faults=faults) as job:
        failed = job.event("shadow_failed")
        assert failed["log"] == str(tmp_path / "leto" / "shadow-g1-r0.log")
        job.event("shadow_ready")
        job.go()
        job.finished()
    assert sorted(path.name for path in (tmp_path / "leto").iterdir()) == ["events.jsonl", "shadow-g1-r0.log"]
    assert (tmp_path / "leto" / "shadow-g1-r0.log").read_text() == "lost my way\n"


def test_shadows_that_always_fail_are_given_up_once_and_training_goes_on(tmp_path):
    faults = [{"at": "begin", "role": "shadow", "do": "exit"}]
    timings = {"shadow_backoff": 0.01}
    with Job(tmp_path, steps=20, hold=5, faults=faults, timings=timings) as job:
        job.event("shadows_off")
        assert job.count("shadow_failed") == 5
        job.kill(0)
        job.go()
        job.finished()
        assert job.end["recoveries"][0]["level"] == "cold"
        assert job.count("shadows_off") == 1


def test_an_exception_in_a_shadow_is_no_exception_of_the_users(tmp_path):
    faults = [{"at": "before_ready", "rank": 0, "generation": 1, "do": "raise"}]
    with Job(tmp_path, steps=20, hold=5, faults=faults) as job:
        assert "ValueError" in job.event("shadow_failed")["text"]
        job.event("shadow_ready")
        job.go()
        job.finished()


def test_a_dead_manager_is_replaced_and_retained_memory_lives_on(tmp_path):
    with Job(tmp_path, steps=20, hold=5) as job:
        job.event("shadow_ready")
        (pid,) = [p["pid"] for p in job.ask(op="status")["processes"] if (p["role"], p["rank"]) == ("manager", 1)]
        os.kill(pid, signal.SIGKILL)
        assert job.event("manager_failed")["rank"] == 1
        assert job.event("manager_replaced")["pid"] != pid
        assert len(actives(job)) == 1
        system.kill_processes(job.pids())
        job.go()
        assert job.event("recovered")["level"] == "shadow"
        job.finished()
        assert job.end["recoveries"][0]["mode"] == "redo"


def test_manager_and_trainers_may_die_together(tmp_path):
    with Job(tmp_path, steps=20, hold=5) as job:
        job.event("shadow_ready")
        for process in job.ask(op="status")["processes"]:
            if process["role"] in ("manager", "active"):
                os.kill(process["pid"], signal.SIGKILL)
        job.go()
        job.finished()
        assert job.count("manager_replaced") == 2


def test_managers_that_always_die_stop_the_job(tmp_path):
    with Job(tmp_path, steps=20, hold=5) as job:
        job.event("entered")
        while job.end is None:
            for process in job.ask(op="status").get("processes", ()):
                if (process["role"], process["rank"]) == ("manager", 0) and job.end is None:
                    try:
                        os.kill(process["pid"], signal.SIGKILL)
                    except ProcessLookupError:
                        continue
            job.pump(0.02)
            if job.count("manager_failed") > 10:
                break
        assert "state manager of rank 0" in job.wait("failed")["reason"]


@pytest.mark.parametrize("do", ["hang", "stop"])
def test_a_rank_without_progress_is_a_failure(tmp_path, do):
    faults = [{"at": "forward", "step": 3, "rank": 1, "generation": 0, "do": "hang"}] if do == "hang" else []
    with Job(tmp_path, steps=8, hold=5 if do == "stop" else None, faults=faults, hang_timeout=0.6) as job:
        if do == "stop":
            job.event("shadow_ready")
            job.kill(1, signal.SIGSTOP)
            job.go()
        hang = job.event("hang")
        assert hang["activity"] == "step"
        assert hang["limit_seconds"] == 0.6
        job.finished()
        (record,) = job.end["recoveries"]
        assert record["cause"] == "hang"
        if do == "stop":
            assert record["rank"] == 1


def test_a_debugger_turns_hang_detection_off(tmp_path):
    with Job(tmp_path, steps=20, hold=5, hang_timeout=0.3) as job:
        job.event("entered")
        job.traced("forward", step=5)
        libc = ctypes.CDLL(None, use_errno=True)
        pid = job.pids()[0]
        attach, detach = 0x4206, 17  # PTRACE_SEIZE does not stop it
        libc.ptrace.argtypes = [ctypes.c_ulong, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_void_p]
        if libc.ptrace(attach, pid, None, None) != 0:
            job.go()
            pytest.skip("this user may not trace")
        time.sleep(1.0)
        job.pump(0)
        assert job.count("hang") == 0
        job.go()
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        libc.ptrace(detach, pid, None, signal.SIGCONT)
        job.finished()
