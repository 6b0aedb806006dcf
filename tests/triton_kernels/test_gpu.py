"""The checks of benchmarks/kernel_checks.py, on a GPU: in a process of their own, as kernels are interpreted here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_every_check_passes_on_this_gpu(request: pytest.FixtureRequest) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "benchmarks/kernel_checks.py"]
    subprocess.run([*command, "--compile-only"], cwd=ROOT, env=environment, timeout=300, check=False)
    seed = str(request.config.getoption("--seed"))
    done = subprocess.run(
        [*command, "--seed", seed], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert results, done.stderr
    assert not [result for result in results if not result["ok"]]
    assert done.returncode == 0
