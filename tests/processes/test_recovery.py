"""Real SIGKILLs at every kind of moment: training must come out as if nothing had happened.

Each test compares the final value with one that was computed without processes: a lost, repeated or torn update, or
results of another generation, would change it.
"""

import os
import signal
import time

import pytest

from leto_strategy import system
from tests.processes.harness import Job


def forwards(job, step):
    """How often each rank entered the forward of a step."""
    entered = [line["rank"] for line in job.trace() if line["what"] == "forward" and line["step"] == step]
    return [entered.count(rank) for rank in range(job.world)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_killed_rank_is_answered_by_the_shadow(tmp_path, world):
    with Job(tmp_path, world=world, steps=20, hold=10) as job:
        job.event("shadow_ready")
        killed_ns = job.kill(world - 1)
        job.go()
        recovery = job.event("recovered")
        assert (recovery["level"], recovery["cause"], recovery["rank"]) == ("shadow", "SIGKILL", world - 1)
        job.finished()
        promoted = [e for e in job.events if e["event"] == "promoted"][1]
        assert (promoted["monotonic_ns"] - killed_ns) / 1e6 < 1000
        assert job.end["recoveries"] == [{k: recovery[k] for k in job.end["recoveries"][0]}]
        assert all(sum(forwards(job, step)) <= 2 * world for step in range(20))
        assert job.processes() == {}


def test_a_record_tells_every_phase(tmp_path):
    with Job(tmp_path, steps=20, hold=10) as job:
        job.event("shadow_ready")
        job.kill(0)
        job.go()
        record = job.event("recovered")
        job.finished()
    assert (record["completed"], record["number"], record["generation"]) == (True, 1, 1)
    assert set(record["phases_ms"]) == {"detect", "reap", "localise", "rebuild", "restore", "first_step"}
    assert all(value is not None and 0 <= value < 2000 for value in record["phases_ms"].values()), record
    parts = [record["phases_ms"][name] for name in ("detect", "reap", "localise", "rebuild", "restore")]
    assert record["total_ms"] == pytest.approx(sum(parts), abs=0.1)


@pytest.mark.parametrize(
    ("at", "shadows"),
    [("forward", 0), ("reduced", 1), ("ready", 0), ("undo", 1), ("updated", 0), ("done", 0)],
)
def test_a_kill_inside_a_step(tmp_path, at, shadows):
    faults = [{"at": at, "step": 3, "rank": 1, "generation": 0, "do": "kill"}]
    with Job(tmp_path, steps=8, faults=faults, shadows=shadows) as job:
        job.finished()
        assert job.count("recovered") == 1
        # Once every rank has its gradients, no forward is repeated; before, the interrupted step's only.
        assert max(map(max, (forwards(job, step) for step in range(3)))) == 1
        assert max(forwards(job, 3)) == (2 if at in ("forward", "reduced") else 1)
        # A rank that was not killed may have begun the forward of step 4.
        assert job.end["recoveries"][0]["steps_repeated"] >= max(max(forwards(job, step)) for step in range(8)) - 1


def test_all_ranks_killed_at_once(tmp_path):
    with Job(tmp_path, world=3, steps=20, hold=10) as job:
        job.event("shadow_ready")
        system.kill_processes(job.pids())
        job.go()
        job.finished()
        assert job.count("recovered") == 1


def test_a_kill_while_the_shadow_is_not_ready_waits_for_it(tmp_path):
    faults = [{"at": "before_ready", "role": "shadow", "generation": 1, "do": "sleep"}]
    with Job(tmp_path, steps=20, hold=10, faults=faults) as job:
        job.event("generation_started", generation=1)
        job.kill(1)
        job.go()
        job.finished()
        assert [record["level"] for record in job.end["recoveries"]] == ["shadow"]


def test_a_shadow_that_dies_while_it_is_waited_for_is_replaced_by_a_cold_start(tmp_path):
    faults = [{"at": "before_ready", "role": "shadow", "generation": 1, "do": "sleep"}]
    with Job(tmp_path, steps=20, hold=10, faults=faults) as job:
        pids = job.event("generation_started", generation=1)["pids"]
        job.kill(1)
        job.go()
        job.event("fenced")
        os.kill(pids[0], signal.SIGKILL)
        job.finished()
        (record,) = job.end["recoveries"]
        assert (record["level"], record["completed"], record["cause"]) == ("cold", True, "SIGKILL")


@pytest.mark.parametrize("at", ["gate", "forward"])
def test_a_promoted_generation_that_dies_again_and_again(tmp_path, at):
    faults = [{"at": at, "rank": 0, "role": "active", "generation": number, "do": "kill"} for number in (1, 2, 3)]
    with Job(tmp_path, steps=20, hold=10, faults=faults) as job:
        job.event("shadow_ready")
        job.kill(1)
        job.go()
        job.finished()
        assert len(job.end["recoveries"]) == 4
        assert job.end["recoveries"][-1]["completed"]
        assert [record["number"] for record in job.end["recoveries"]] == [1, 2, 3, 4]
        if at == "gate":
            assert [record["completed"] for record in job.end["recoveries"]] == [False, False, False, True]
        assert job.count("recovered") == 4


def test_both_generations_killed_at_once(tmp_path):
    with Job(tmp_path, steps=20, hold=10) as job:
        shadows = job.event("shadow_ready")["pids"]
        system.kill_processes([*job.pids(), *shadows])
        job.go()
        job.finished()
        assert job.end["recoveries"][-1]["level"] == "cold"


def test_a_failure_while_the_first_generation_starts(tmp_path):
    faults = [{"at": "begin", "rank": 1, "generation": 0, "do": "kill"}]
    with Job(tmp_path, steps=5, faults=faults) as job:
        job.finished()
        assert job.end["recoveries"][0]["mode"] == "fresh"


def test_a_failure_while_a_cold_generation_starts(tmp_path):
    faults = [{"at": "begin", "rank": 1, "generation": 1, "do": "exit"}]
    with Job(tmp_path, steps=20, hold=10, faults=faults, shadows=0) as job:
        job.event("entered")
        job.kill(0)
        job.go()
        job.finished()
        (record,) = job.end["recoveries"]
        assert (record["cause"], record["completed"], record["generation"]) == ("SIGKILL", True, 2)


def test_a_rank_killed_after_it_finished_is_recovered_and_results_hold_only_when_all_have_ended(tmp_path):
    faults = [
        {"at": "end", "rank": 1, "generation": 0, "do": "sleep"},
        {"at": "finished", "rank": 0, "generation": 0, "do": "kill"},
    ]
    with Job(tmp_path, steps=5, faults=faults) as job:
        job.finished()
        assert len(job.end["recoveries"]) == 1
        assert len([line for line in job.trace() if line["what"] == "bye"]) == 2


def test_a_kill_on_the_last_step(tmp_path):
    faults = [{"at": "done", "step": 4, "rank": 0, "generation": 0, "do": "kill"}]
    with Job(tmp_path, steps=5, faults=faults) as job:
        job.finished()
        assert job.end["recoveries"][0]["completed"]


def test_children_of_a_dead_trainer_are_gone_before_the_next_one_is_promoted(tmp_path):
    faults = [
        {"at": "forward", "step": 2, "rank": 1, "generation": 0, "do": "children"},
        {"at": "forward", "step": 2, "generation": 0, "do": "ignore_sigterm"},
    ]
    with Job(tmp_path, steps=20, hold=10, faults=faults) as job:
        job.event("shadow_ready")
        children = [job.traced(kind)["pid"] for kind in ("forked", "setsid", "orphan")]
        job.kill(1)
        job.go()
        job.event("promoted", count=2)
        for pid in children:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        assert job.event("fenced")["num_processes"] >= 6  # two trainers, three children and "sleep"
        job.finished()
        assert job.processes() == {}


def test_a_crash_from_inside_is_an_internal_cause(tmp_path):
    with Job(tmp_path, steps=8, faults=[{"at": "forward", "step": 3, "rank": 1, "generation": 0, "do": "segv"}]) as job:
        assert job.event("trainer_failed")["origin"] == "internal"
        job.finished()


def test_a_poison_step_stops_the_job_with_a_reason(tmp_path):
    faults = [{"at": "forward", "step": 3, "rank": 1, "do": "segv"}]
    with Job(tmp_path, steps=8, faults=faults) as job:
        end = job.wait("failed")
        for part in ("3 times", "step 3", "rank 1", "SIGSEGV"):
            assert part in end["reason"]
        assert len(end["recoveries"]) == 3
        assert job.processes() == {}


def test_a_poison_update_is_found_though_no_forward_comes_after_it(tmp_path):
    faults = [{"at": "updated", "step": 3, "rank": 1, "do": "segv"}]
    with Job(tmp_path, steps=8, faults=faults) as job:
        assert "3 times at step 3" in job.wait("failed")["reason"]
        assert [record["step"] for record in job.end["recoveries"]] == [3, 3, 3]


def test_a_trainer_that_never_starts_stops_the_job(tmp_path):
    with Job(tmp_path, argv=["/nonexistent/python"]) as job:
        end = job.wait("failed")
        assert "before it entered a step" in end["reason"]
        assert "exit" in end["reason"] or "exited" in end["reason"]


@pytest.mark.parametrize("do", ["exit", "exit0"])
def test_an_exit_without_a_result_is_a_failure(tmp_path, do):
    with Job(tmp_path, steps=8, faults=[{"at": "forward", "step": 3, "rank": 0, "generation": 0, "do": do}]) as job:
        job.finished()
        assert job.end["recoveries"][0]["cause"] == ("exit 0" if do == "exit0" else "exit 3")


def test_a_communicator_error_is_the_echo_of_a_peers_death(tmp_path):
    with Job(tmp_path, steps=20, hold=10, timings={"peer_grace": 5}) as job:
        job.event("shadow_ready")
        job.go()
        job.kill(1)
        job.finished()
        assert [record["cause"] for record in job.end["recoveries"]] == ["SIGKILL"]


def test_a_communicator_error_with_no_death_is_a_failure_of_its_own(tmp_path):
    faults = [{"at": "forward", "step": 3, "rank": 1, "generation": 0, "do": "communicator"}]
    with Job(tmp_path, steps=8, faults=faults, timings={"peer_grace": 0.2}) as job:
        job.finished()
        assert [(record["cause"], record["rank"]) for record in job.end["recoveries"]] == [("communicator", 1)]


def test_a_trainer_that_breaks_the_protocol_is_replaced(tmp_path):
    faults = [{"at": "forward", "step": 3, "rank": 1, "generation": 0, "do": "garbage"}]
    with Job(tmp_path, steps=8, faults=faults) as job:
        job.finished()
        assert len(job.end["recoveries"]) == 1


def test_a_call_without_retained_memory_starts_again(tmp_path):
    with Job(tmp_path, steps=10, hold=5, function="test", needs_memory=False) as job:
        job.event("entered")
        job.kill(1)
        job.go()
        job.finished()
        assert job.end["recoveries"][0]["mode"] == "fresh"
        assert {e["role"] for e in job.events if e["event"] == "generation_started"} == {"active"}
        assert max(forwards(job, 0)) == 2


def test_a_call_without_retained_memory_has_a_budget(tmp_path):
    faults = [{"at": "forward", "step": 2, "rank": 1, "do": "kill"}]
    with Job(tmp_path, steps=5, faults=faults, function="predict", needs_memory=False, max_restarts=2) as job:
        assert "max_restarts" in job.wait("failed")["reason"]
        assert len(job.end["recoveries"]) == 3


def test_many_kills_in_one_run_leave_no_growth(tmp_path, rng):
    with Job(tmp_path, steps=400) as job:
        supervisor = job.supervisor.pid
        fds = []
        job.go()
        for number in range(1, 7):
            job.event("shadow_ready", count=number)
            fds.append(len(os.listdir(f"/proc/{supervisor}/fd")))
            time.sleep(rng.random() * 0.02)
            job.kill(rng.randrange(2))
            job.event("recovered", count=number)
        job.finished()
        assert len(job.end["recoveries"]) == 6
        assert len(set(fds[1:])) == 1, fds  # the first recovery maps the memory
