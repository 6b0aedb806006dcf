"""The host runs ahead of the GPU, as it does without Leto, and no further than there are slots for records (R4)."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from leto_strategy.recovery.decision import NUM_SLOTS
from tests.gpu.rig import MARKS, ROOT, run_python

pytestmark = [*MARKS, pytest.mark.slow, pytest.mark.timeout(240)]

SLOWER_MAX = 1.05
STEPS = 60


def train(how: str, out: Path) -> dict[str, Any]:
    path = out / f"{how}.json"
    done = run_python(str(ROOT / "tests" / "gpu" / "ahead.py"), how, str(path), seconds=110)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_the_host_runs_ahead_and_a_step_takes_no_longer_than_without_leto(tmp_path: Path) -> None:
    plain, leto = train("plain", tmp_path), train("leto", tmp_path)
    print(json.dumps({"plain": plain, "leto": leto}))
    assert 20 < plain["step_ms"] < 200, "the model is not of the size that this test is about"
    assert leto["step_ms"] <= SLOWER_MAX * plain["step_ms"]
    assert statistics.median(leto["behind"]) >= 2, "the host waits for the device in every step"
    assert max(leto["behind"]) <= NUM_SLOTS
    assert leto["slot_waits"] <= STEPS - NUM_SLOTS + 1, "the first steps find free slots"
