"""How jobs end: results, the user's exceptions and signals, dead supervisors and launchers. Nothing is ever left."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes.harness import Job

STUBBORN = {"at": "forward", "step": 1, "do": "ignore_sigterm"}


def is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_job_ends_with_its_result_and_leaves_only_its_events(tmp_path):
    with Job(tmp_path, steps=5) as job:
        job.finished()
        assert job.processes() == {}
    assert [path.name for path in (tmp_path / "leto").iterdir()] == ["events.jsonl"]
    assert job.end["recoveries"] == []
    assert job.names()[0] == "job_started"
    assert job.names()[-1] == "job_finished"


def test_bye_comes_only_when_every_rank_has_finished(tmp_path):
    faults = [{"at": "end", "rank": 1, "do": "sleep"}]
    with Job(tmp_path, steps=3, shadows=0, faults=faults) as job:
        job.finished()
        times = {(line["what"].split()[0], line["rank"]): line["ns"] for line in job.trace()}
        assert times["bye", 0] > times["value", 1]


def test_a_trainer_that_does_not_go_is_killed_and_the_result_holds(tmp_path):
    faults = [{"at": "begin", "rank": 1, "do": "ignore_sigterm"}, {"at": "finished", "rank": 1, "do": "hang"}]
    with Job(tmp_path, steps=3, shadows=0, faults=faults, timings={"farewell": 0.3}) as job:
        job.finished()
        assert job.processes() == {}


def test_a_users_exception_on_one_rank_is_raised_once(tmp_path):
    faults = [{"at": "forward", "step": 3, "rank": 1, "do": "raise"}]
    with Job(tmp_path, steps=8, faults=faults) as job:
        job.wait("raise")
        assert job.result() == {"raised": "a bug at step 3 on rank 1"}
        assert job.count("recovered") == 0
        assert [line["rank"] for line in job.trace() if line["what"] == "raise"] == [1]
        assert job.processes() == {}


def test_of_an_exception_on_all_ranks_rank_0s_is_raised(tmp_path):
    with Job(tmp_path, world=3, steps=8, shadows=0, faults=[{"at": "forward", "step": 3, "do": "raise"}]) as job:
        job.wait("raise")
        assert job.result() == {"raised": "a bug at step 3 on rank 0"}
        assert [line["rank"] for line in job.trace() if line["what"] == "raise"] == [0]


def test_an_exception_before_the_gate_is_raised(tmp_path):
    with Job(tmp_path, steps=8, faults=[{"at": "before_ready", "rank": 0, "do": "raise"}]) as job:
        job.wait("raise")
        assert job.count("promoted") == 0


@pytest.mark.parametrize("do", ["hang", "kill"])
def test_an_exception_that_is_not_delivered_comes_as_text(tmp_path, do):
    faults = [{"at": "forward", "step": 3, "rank": 1, "do": "raise"}, {"at": "raising", "do": do}]
    with Job(tmp_path, steps=8, shadows=0, faults=faults, timings={"delivery": 0.4}) as job:
        reason = job.wait("failed")["reason"]
        assert "ValueError: a bug at step 3 on rank 1" in reason
        assert "Traceback" in reason
        assert job.processes() == {}


@pytest.mark.parametrize("signum", [signal.SIGINT])
def test_the_users_interrupt_lets_the_trainers_shut_down(tmp_path, signum):
    with Job(tmp_path, steps=1000) as job:
        job.event("shadow_ready")
        job.say("signal", signum=signum)
        job.wait("raise")
        assert job.end["signum"] == signum
        assert job.count("recovered") == job.count("trainer_failed") == 0
        assert job.processes() == {}


def test_sigterm_without_a_handler_ends_the_trainers_and_is_no_failure(tmp_path):
    with Job(tmp_path, steps=1000, shadows=0) as job:
        job.event("entered")
        job.say("signal", signum=signal.SIGTERM)
        assert "SIGTERM" in job.wait("failed")["reason"]
        assert job.count("trainer_failed") == 0


def test_a_second_interrupt_kills(tmp_path):
    with Job(tmp_path, steps=1000, faults=[STUBBORN]) as job:
        job.traced("forward", step=2)
        job.say("signal", signum=signal.SIGINT)
        job.event("signal")
        begin = time.monotonic()
        job.say("signal", signum=signal.SIGINT)
        job.wait("failed")
        assert time.monotonic() - begin < 2
        assert job.processes() == {}


def test_the_end_of_the_grace_kills(tmp_path):
    with Job(tmp_path, steps=1000, faults=[STUBBORN], stop_grace=0.3) as job:
        job.traced("forward", step=2)
        job.say("signal", signum=signal.SIGTERM)
        assert "stop_grace" in job.wait("failed", seconds=5)["reason"]
        assert job.processes() == {}


def test_an_interrupt_while_nothing_trains_ends_at_once(tmp_path):
    with Job(tmp_path, faults=[{"at": "begin", "do": "hang"}]) as job:
        job.event("generation_started")
        job.say("signal", signum=signal.SIGINT)
        assert "SIGINT" in job.wait("failed", seconds=5)["reason"]


def test_an_interrupt_behind_the_fence_ends_the_job(tmp_path):
    with Job(tmp_path, steps=1000, faults=[{"at": "begin", "generation": 1, "do": "hang"}]) as job:
        job.event("generation_started", generation=1)
        job.kill(0)
        job.event("trainer_failed")
        job.say("signal", signum=signal.SIGINT)
        job.wait("failed", seconds=5)
        assert job.processes() == {}


def test_sigusr1_reaches_the_active_trainers_only(tmp_path):
    with Job(tmp_path, steps=20, hold=5, shadows=0) as job:
        job.event("entered")
        job.say("signal", signum=signal.SIGUSR1)  # the stand-in has no handler: it dies of it
        assert job.event("trainer_failed")["cause"] == "SIGUSR1"
        job.go()
        job.finished()


def test_suspend_stops_everything_and_resume_goes_on(tmp_path):
    with Job(tmp_path, steps=20, hold=5, hang_timeout=0.5) as job:
        shadows = job.event("shadow_ready")["pids"]
        job.say("suspend")
        job.until(lambda: {"op": "suspended"} in job.replies, "suspended")
        job.until(lambda: all(map(is_stopped, (*job.pids(), *shadows))), "stop", seconds=1)
        time.sleep(1.0)
        assert job.count("hang") == 0
        job.say("resume")
        job.go()
        job.event("resumed")
        job.finished()


def test_a_kill_while_suspended_is_answered_after_resume(tmp_path):
    with Job(tmp_path, steps=20, hold=5) as job:
        job.event("shadow_ready")
        job.say("suspend")
        job.event("suspended")
        job.kill(1)
        job.event("fenced")
        assert job.count("promoted") == 1
        job.go()
        job.say("resume")
        job.finished()
        assert job.end["recoveries"][0]["level"] == "shadow"


def test_everything_ends_with_the_launchers_socket(tmp_path):
    faults = [{"at": "forward", "step": 2, "rank": 0, "generation": 0, "do": "children"}, STUBBORN]
    with Job(tmp_path, steps=1000, faults=faults) as job:
        job.event("shadow_ready")
        job.traced("orphan")
        job.connection.close()
        assert job.gone(2.0) < 2
        job.supervisor.wait(2)


LAUNCHER = """
import json, os, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.processes.harness import Job
job = Job(Path({tmp!r}), steps=10000).__enter__()
if os.fork() == 0:
    time.sleep(1000)  # a child of the user's process, which holds the socket
job.event("shadow_ready")
print(json.dumps([job.spec.job, job.supervisor.pid]), flush=True)
time.sleep(1000)
"""


def test_everything_ends_with_the_users_process_though_a_child_of_it_holds_the_socket(tmp_path):
    code = LAUNCHER.format(root=os.getcwd(), tmp=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as user:
        job = Job(tmp_path)
        name, supervisor = json.loads(user.stdout.readline())
        object.__setattr__(job.spec, "job", name)
        assert len(job.processes()) >= 6
        user.kill()
        assert job.gone(2.0) < 2
        for _ in range(100):
            if not os.path.exists(f"/proc/{supervisor}"):
                break
            time.sleep(0.02)
        assert not os.path.exists(f"/proc/{supervisor}")
        os.killpg(user.pid, signal.SIGKILL)


def test_everything_ends_with_the_supervisor(tmp_path):
    faults = [{"at": "forward", "step": 2, "rank": 0, "generation": 0, "do": "children"}, STUBBORN]
    with Job(tmp_path, steps=1000, faults=faults) as job:
        job.event("shadow_ready")
        job.traced("orphan")
        time.sleep(0.1)
        job.supervisor.kill()
        job.supervisor.wait()
        assert job.gone(2.0) < 2


def test_a_wrong_launch_is_answered(tmp_path):
    job = Job(tmp_path)
    object.__setattr__(job.spec, "world", 0)
    with job:
        assert "world" in job.wait("failed", seconds=5)["reason"]


def test_garbage_instead_of_a_launch_ends_the_supervisor(tmp_path):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-I", "-m", "leto_strategy.processes.supervisor", "--control-fd"]
        with subprocess.Popen([*command, str(theirs.fileno())], pass_fds=[theirs.fileno()]) as supervisor:
            ours.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert supervisor.wait(5) == 1


def test_an_unwritable_directory_never_stops_training(tmp_path):
    (tmp_path / "leto").write_text("in the way")
    with Job(tmp_path, steps=20, hold=5) as job:
        job.event("shadow_ready")
        job.kill(0)
        job.go()
        job.finished()
        assert job.count("warning") == 2  # of events and of logs, once each
