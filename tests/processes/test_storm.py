"""Random SIGKILLs of everything but the supervisor, often several at once, while trainers come and go."""

import os
import signal

import pytest

from leto_strategy.processes.messages import Script
from tests.processes.harness import STAND_IN, Job

WEIGHTS = {"active": 6, "shadow": 3, "manager": 1, "zygote": 1}
MANAGER_KILLS_MAX = 8  # of one rank; a few more and the supervisor gives up


@pytest.mark.nightly
@pytest.mark.parametrize("zygote", [False, True])
@pytest.mark.parametrize("number", range(5))
def test_training_survives_a_storm(tmp_path, rng, zygote, number):
    faults = [{"at": "forward", "step": step, "rank": 0, "do": "children"} for step in (50, 150)]
    world = rng.choice([1, 2, 3])
    job = Job(tmp_path, world=world, steps=400, faults=faults, max_restarts=1000, zygote=zygote)
    script = Script(STAND_IN, None, (STAND_IN, job.spec.argv[2]), os.path.dirname(STAND_IN))
    object.__setattr__(job.spec, "script", script)
    manager_kills = [0] * world
    with job:
        job.event("entered")
        for _ in range(150):
            for _ in range(rng.randrange(1, 20)):
                if job.end is None:
                    job.pump(rng.random() * 0.03)
            if job.end is not None:
                break
            try:
                status = job.ask(op="status")
            except (OSError, EOFError):  # the job has just ended
                continue
            processes = [p for p in status.get("processes", ()) if p["role"] in WEIGHTS and p["pid"]]
            weights = [WEIGHTS[process["role"]] for process in processes]
            for process in rng.choices(processes, weights, k=rng.choice([1, 1, 1, 2])) if processes else ():
                if process["role"] == "manager":
                    manager_kills[process["rank"]] += 1
                    if manager_kills[process["rank"]] > MANAGER_KILLS_MAX:
                        continue
                try:
                    os.kill(process["pid"], signal.SIGKILL)
                except ProcessLookupError:
                    pass
        job.finished(seconds=60)
        assert job.processes() == {}
