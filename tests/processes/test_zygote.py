"""A script forked from the zygote can't tell that it was."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from leto_strategy import system
from leto_strategy.processes.messages import Script
from tests.processes.harness import STAND_IN, Job

FACTS = Path(__file__).with_name("facts.py")
DRIVER = Path(__file__).with_name("zygote_driver.py")


@pytest.fixture
def tree(tmp_path):
    """A script, and the same as a module of a package."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    for path in (tmp_path / "facts.py", tmp_path / "pkg" / "mod.py"):
        path.write_text(FACTS.read_text())
    return tmp_path


def environment():
    return {**{k: v for k, v in os.environ.items() if not k.startswith("COV_")}, "MARK": "1"}


def anew(tree, arguments):
    """What a new interpreter shows: facts, exit status, output."""
    facts = tree / "new.json"
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env={**environment(), "FACTS_FILE": str(facts)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
    )
    return json.loads(facts.read_text()), done


def forked(tree, arguments, script, *, count=1, modules=()):
    """The same from a zygote."""
    argv = [sys.executable, *arguments]
    plan = {"argv": argv, "cwd": str(tree), "script": script, "facts": str(tree / "z.json"), "count": count}
    done = subprocess.run(
        [sys.executable, str(DRIVER), json.dumps({**plan, "modules": modules})],
        cwd="/",
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((tree / f"z.json.{k}").read_text()) for k in range(count)], done


@pytest.mark.parametrize(
    "end", [[], ["raise"], ["exit", "7"], ["interrupt"]], ids=["returns", "raises", "exits", "int"]
)
def test_a_script_sees_what_it_would_see_in_a_new_interpreter(tree, end):
    arguments = ["facts.py", *end]
    (expected, _), new = anew(tree, arguments)
    script = {"path": "facts.py", "module": None, "argv": arguments, "path0": str(tree)}
    [(seen, _)], zygote = forked(tree, arguments, script)
    assert seen == expected
    assert seen["fork"] == seen["spawn"][:2] + [seen["fork"][2]]
    *output, result = zygote.stdout.splitlines()
    assert output == new.stdout.splitlines()
    assert zygote.stderr == new.stderr
    status = signal.Signals(-new.returncode).name if new.returncode < 0 else f"exit {new.returncode}"
    assert json.loads(result)["statuses"] == [status]


def test_a_module_works_too_and_so_do_interpreter_flags(tree):
    arguments = ["-O", "-X", "dev", "-m", "pkg.mod", "a", "b"]
    (expected, _), _ = anew(tree, arguments)
    script = {"path": None, "module": "pkg.mod", "argv": [str(tree / "pkg" / "mod.py"), "a", "b"], "path0": str(tree)}
    [(seen, _)], _ = forked(tree, arguments, script)
    assert seen == expected
    assert (seen["optimize"], seen["dev_mode"], seen["spec"]) == (1, True, "pkg.mod")


def test_each_child_draws_its_own_random_numbers(tree):
    script = {"path": "facts.py", "module": None, "argv": ["facts.py"], "path0": str(tree)}
    results, _ = forked(tree, ["facts.py"], script, count=3)
    drawn = [number for _, numbers in results for number in numbers if number is not None]
    assert len(set(drawn)) == len(drawn) == 6


def test_a_module_that_starts_threads_is_refused(tree):
    (tree / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    script = {"path": "facts.py", "module": None, "argv": ["facts.py"], "path0": str(tree)}
    with pytest.raises(FileNotFoundError):
        forked(tree, ["facts.py"], script, modules=["threads"])


def test_torchs_seed_is_another_in_each_child(tree):
    (tree / "seed.py").write_text(
        "import json, os, torch\n"
        "assert len(os.listdir('/proc/self/task')) == 1\n"
        "json.dump([torch.initial_seed(), torch.rand(1).item()], open(os.environ['FACTS_FILE'], 'w'))\n"
    )
    script = {"path": "seed.py", "module": None, "argv": ["seed.py"], "path0": str(tree)}
    results, _ = forked(tree, ["seed.py"], script, count=2, modules=["torch"])
    assert len({number for result in results for number in result}) == 4


# In a job.


def zygote_job(tmp_path, **options):
    job = Job(tmp_path, zygote=True, **options)
    script = Script(STAND_IN, None, (STAND_IN, job.spec.argv[2]), str(Path(STAND_IN).parent))
    object.__setattr__(job.spec, "script", script)
    return job


def starts(job):
    return [e["start"] for e in job.events if e["event"] == "generation_started"]


def test_a_job_forks_its_trainers_and_recovers(tmp_path):
    faults = [{"at": "forward", "step": 1, "rank": 1, "generation": 0, "do": "children"}]
    with zygote_job(tmp_path, steps=20, hold=5, faults=faults) as job:
        job.event("shadow_ready")
        children = [job.traced(kind)["pid"] for kind in ("forked", "setsid", "orphan")]
        job.kill(1)
        job.event("promoted", count=2)
        assert not any(os.path.exists(f"/proc/{pid}") for pid in children)
        job.event("shadow_ready", count=2)
        system.kill_processes(job.pids())
        job.go()
        job.finished()
        assert set(starts(job)) == {"zygote"}
        assert job.count("recovered") == 2
        assert job.processes() == {}


def test_a_dead_zygote_is_restarted_once_and_then_done_without(tmp_path):
    with zygote_job(tmp_path, steps=20, hold=5) as job:
        job.event("shadow_ready")
        for number in (1, 2):
            zygote = job.until(
                lambda: next((p for p in job.ask(op="status")["processes"] if p["role"] == "zygote"), None), "zygote"
            )
            os.kill(zygote["pid"], signal.SIGKILL)
            job.event("zygote_failed", count=number)
        job.kill(0)
        job.event("shadow_ready", count=2)
        job.go()
        job.finished()
        assert starts(job)[:2] == ["zygote"] * 2
        assert starts(job)[-1] == "stub"
        assert job.count("zygote_failed") == 2


def test_a_zygote_that_can_not_start_costs_nothing_but_time(tmp_path):
    job = zygote_job(tmp_path, steps=5, zygote_modules=("no_such_thing",))
    with job:
        job.finished()
        assert starts(job)[0] == "zygote"


def test_a_zygote_that_hangs_is_given_up(tmp_path):
    with zygote_job(tmp_path, steps=20, hold=5, timings={"fork": 0.5}) as job:
        job.event("shadow_ready")
        zygote = next(p for p in job.ask(op="status")["processes"] if p["role"] == "zygote")
        os.kill(zygote["pid"], signal.SIGSTOP)
        os.kill(job.event("shadow_ready")["pids"][0], signal.SIGKILL)
        assert "did not answer" in job.event("zygote_failed")["text"]
        job.event("shadow_ready", count=2)
        job.go()
        job.finished()


def test_forked_trainers_end_with_the_supervisor(tmp_path):
    with zygote_job(tmp_path, steps=20, hold=5) as job:
        job.event("shadow_ready")
        time.sleep(0.1)
        job.supervisor.kill()
        job.supervisor.wait()
        assert job.gone(2.0) < 2
