"""The demo says "identical" because it compared, and what it starts is gone when it is."""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from examples.comparison import NUM_RANKS, Check, compare, compare_weights
from examples.demo import CPU, GPU, plan_kills

ROOT = Path(__file__).resolve().parents[2]
DEMO = [sys.executable, str(ROOT / "examples" / "demo.py"), "--accelerator", "cpu"]
STEPS = 30


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """One short demo, killed four times."""
    out = tmp_path_factory.mktemp("demo")
    command = [*DEMO, "--steps", str(STEPS), "--out", str(out), "--no-ddp", "--seed", "1"]
    return out, subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_that_is_killed_four_times_is_identical(demo: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, result = demo
    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["identical"] is True
    assert summary["all_kills_recovered"] is True
    assert [kill["where"] for kill in summary["kills"]] == ["forward", "outside", "chunk_updating", "backward"]
    assert summary["kills"][-1]["step"] == STEPS - 1
    for kill in summary["kills"]:
        assert sum(kill["phases_ms"].values()) == pytest.approx(kill["total_ms"], abs=0.01)
    (checks,) = summary["comparisons"].values()
    assert [(check["what"], check["num_compared"]) for check in checks][:2] == [
        ("losses", STEPS * NUM_RANKS),
        ("batches", STEPS * NUM_RANKS),
    ]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "\x1b" not in result.stdout, "no escape sequences without a terminal"
    assert result.stdout.count("SIGKILL") >= 4


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("what", ["losses", "batches", "weights"])
def test_a_tampered_run_is_reported_as_different(
    demo: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path, what: str
) -> None:
    out = tmp_path / "copy"
    shutil.copytree(demo[0], out)
    tamper(out / "killed", what)
    command = [*DEMO, "--steps", str(STEPS), "--out", str(out), "--no-ddp", "--compare-only"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    (line,) = [line for line in result.stdout.splitlines() if "differs" in line]
    assert f" {what} " in line
    assert result.stdout.count("identical") == 2


def tamper(directory: Path, what: str) -> None:
    """Change one bit of a weight, or of one rank's last note."""
    if what == "weights":
        weights = torch.load(directory / "weights.pt", weights_only=True)
        weights["head.bias"].view(torch.int32)[3] ^= 1
        torch.save(weights, directory / "weights.pt")
        return
    path = directory / "steps.r1.jsonl"
    *notes, last = path.read_text().splitlines()
    note = json.loads(last)
    if what == "losses":
        note["loss"] = one_bit_more(float.fromhex(note["loss"])).hex()
    else:
        note["ids"] = note["ids"][::-1]
    path.write_text("\n".join([*notes, json.dumps(note)]) + "\n")


def one_bit_more(value: float) -> float:
    (bits,) = struct.unpack("q", struct.pack("d", value))
    (changed,) = struct.unpack("d", struct.pack("q", bits ^ 1))
    return float(changed)


def write_run(directory: Path, steps: int, *, skip: int | None = None, twice: dict[int, str] | None = None) -> Path:
    directory.mkdir()
    for rank in range(NUM_RANKS):
        with open(directory / f"steps.r{rank}.jsonl", "w") as file:
            for step in range(steps):
                losses = [(1.0 / (step + 1)).hex()] + ([twice[step]] if twice and step in twice else [])
                for loss in losses if step != skip else ():
                    file.write(json.dumps({"step": step, "loss": loss, "ids": [step, rank], "batch": "b"}) + "\n")
    torch.save({"w": torch.tensor([0.0, -0.0, float("nan")])}, directory / "weights.pt")
    return directory


def test_equal_runs_are_identical_not_a_number_included(tmp_path: Path) -> None:
    checks = compare(write_run(tmp_path / "a", 4), write_run(tmp_path / "b", 4), steps=4)
    assert [check.identical for check in checks] == [True, True, True]
    assert [check.num_compared for check in checks] == [8, 8, 3]


def test_a_missing_step_and_a_repeated_one_with_another_loss_are_differences(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "a", 4)
    assert compare(whole, write_run(tmp_path / "b", 4, skip=2), steps=4)[0].num_different == 2
    assert compare(whole, write_run(tmp_path / "c", 4, twice={1: (0.5).hex()}), steps=4)[0].num_different == 0
    assert compare(whole, write_run(tmp_path / "d", 4, twice={1: (0.6).hex()}), steps=4)[0].num_different == 2
    assert compare(whole, write_run(tmp_path / "e", 3), steps=4)[1].first == "step 3 of rank 0"


def test_the_sign_of_zero_is_a_difference(tmp_path: Path) -> None:
    for name, value in (("a", 0.0), ("b", -0.0)):
        torch.save({"w": torch.full((5,), value)}, tmp_path / name)
    assert compare_weights(tmp_path / "a", tmp_path / "b") == Check("weights", 5, 5, "w")


def test_nothing_compared_is_not_identical() -> None:
    assert not Check("losses", 0, 0).identical


def test_kills_are_of_ranks_that_there_are() -> None:
    for place in (CPU, GPU):
        kills = plan_kills(place.steps, place.num_ranks)
        assert {kill.rank for kill in kills} == set(range(place.num_ranks))
        assert all(kill.text.startswith(f"rank {kill.rank}, ") for kill in kills)
        steps = [kill.step for kill in kills]
        assert steps == sorted(set(steps))
        assert steps[-1] == place.steps - 1


def test_one_rank_is_compared_as_one(tmp_path: Path) -> None:
    checks = compare(write_run(tmp_path / "a", 4), write_run(tmp_path / "b", 4), steps=4, num_ranks=1)
    assert [check.num_compared for check in checks] == [4, 4, 3]


def hear_ctrl_c() -> None:
    """A shell that runs the tests in the background lets them ignore SIGINT, and users don't."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path, signum: int) -> None:
    """The guard of conftest.py finds every process of it that is left."""
    process = subprocess.Popen(
        [*DEMO, "--out", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=hear_ctrl_c
    )
    notes = tmp_path / "killed" / "steps.r0.jsonl"
    try:
        deadline = time.monotonic() + 80
        while not notes.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        began = time.monotonic()
        os.kill(process.pid, signum)
        output, _ = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + signum, output
    assert time.monotonic() - began < 15
