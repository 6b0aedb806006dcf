"""The guard against leaks catches what it is there for, and lets a clean test pass."""

import os
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).parent / "conftest.py"
SHARED_MEMORY = f"/dev/shm/leto-test-leak-{os.getpid()}"

ORPHAN = "subprocess.run([sys.executable, '-c', 'import os, time\\nif os.fork() == 0: time.sleep(30)'], check=True)"

LEAKS = {
    "env": "os.environ['LEFT_BEHIND'] = '1'",
    "threads": "threading.Thread(target=time.sleep, args=(3,), daemon=True).start()",
    "processes": "globals()['p'] = subprocess.Popen(['sleep', '30'])",
    "processes_orphan": ORPHAN,
    "fds": "globals()['s'] = socket.socket()",
    "shm": f"open({SHARED_MEMORY!r}, 'w').close()",
}


class Run:
    """A run of pytest on `body` with the project's conftest, in a process of its own."""

    def __init__(self, pytester: pytest.Pytester, body: str, *arguments: str) -> None:
        pytester.makeconftest(CONFTEST.read_text().replace("SETTLE_SECONDS = 2.0", "SETTLE_SECONDS = 0.1"))
        pytester.makeini("[pytest]\nmarkers =\n  leaks\n  nightly\n  gpu\n")
        pytester.makepyfile(f"import os, socket, subprocess, sys, threading, time, pytest\n{body}")
        result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-rs", *arguments)
        self.text = result.stdout.str()
        counts = result.parseoutcomes()
        self.counts = {key: counts[key] for key in ("passed", "failed", "errors", "skipped") if key in counts}


def test_a_test_that_leaves_something_behind_fails_and_the_next_starts_clean(pytester: pytest.Pytester) -> None:
    body = "".join(f"def test_{kind}():\n    {code}\ndef test_after_{kind}(): pass\n" for kind, code in LEAKS.items())
    try:
        run = Run(pytester, body)
    finally:
        os.unlink(SHARED_MEMORY)
    assert run.counts == {"passed": 2 * len(LEAKS), "errors": len(LEAKS)}, run.text
    for kind in LEAKS:
        report = run.text.partition(f"ERROR at teardown of test_{kind} ")[2].partition("__ ERROR at")[0]
        assert f"  {kind.partition('_')[0]}: " in report, run.text


def test_a_clean_test_and_a_wider_fixture_pass(pytester: pytest.Pytester) -> None:
    body = """
@pytest.fixture(scope="module")
def child():
    process = subprocess.Popen(["sleep", "30"])
    yield process
    process.kill()
    process.wait()

def test_uses_it(child): assert child.poll() is None
def test_own_child(): subprocess.run(["true"], check=True)
@pytest.mark.leaks("env")
def test_allowed(): os.environ["ALLOWED"] = "1"
"""
    assert Run(pytester, body).counts == {"passed": 3}


def test_nightly_and_gpu_tests_are_skipped_with_a_reason(pytester: pytest.Pytester) -> None:
    body = "@pytest.mark.nightly\ndef test_long(): pass\n"
    run = Run(pytester, body)
    assert run.counts == {"skipped": 1}
    assert "make nightly" in run.text
    assert Run(pytester, body, "--nightly").counts == {"passed": 1}


def test_the_seed_is_printed_and_replays(pytester: pytest.Pytester) -> None:
    body = "def test_draw(rng, seed):\n    print('drew', rng.random())\n    assert seed == 7\n"
    runs = [Run(pytester, body, "--seed", "7", "-s") for _ in range(2)]
    for run in runs:
        assert run.counts == {"passed": 1}
        assert "seed: 7 (replay with --seed 7)" in run.text
    first, second = ([line for line in run.text.splitlines() if "drew" in line] for run in runs)
    assert first == second != []
