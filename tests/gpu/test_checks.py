"""The table of the matrix is complete; this needs no GPU."""

import subprocess
import sys

import pytest

from leto_strategy.faults import POINTS
from tests.gpu.checks import ON_RANK_0, Check, all_checks
from tests.gpu.rig import ROOT

CHECKS = all_checks(1)
PARITY_POINTS = {point for point, meaning in POINTS.items() if "option protection" in meaning}
"""Nothing is protected on a GPU yet."""


def points_of(check: Check) -> set[tuple[int, int, str]]:
    """Number of ranks, rank and point of every fault of a check."""
    arguments = getattr(check.run, "keywords", {})
    devices = arguments["case"].devices if "case" in arguments else 0
    kills = {(devices, rank, point) for rank, point, _ in arguments.get("kills", ())}
    return kills | {(devices, fault.rank, fault.point) for fault in arguments.get("faults", ())}


def test_every_point_is_met_by_one_rank_and_by_two_and_by_rank_1_where_it_gets_there() -> None:
    met = set().union(*(points_of(check) for check in CHECKS.values() if not check.wide))
    during_recovery = {"gate", "restored"}
    points = set(POINTS) - PARITY_POINTS
    assert {point for devices, _, point in met if devices == 1} == points
    assert {point for devices, _, point in met if devices == 2} == points
    of_rank_1 = {point for devices, rank, point in met if (devices, rank) == (2, 1)}
    assert of_rank_1 >= points - ON_RANK_0 - during_recovery - {"snapshot_middle"}


def test_what_only_a_gpu_shows_is_in_the_core() -> None:
    core = {name for name, check in CHECKS.items() if not check.wide}
    assert {"trap (1)", "trap (2)", "random kills (1)", "random kills (2)", "forked workers", "all ranks"} <= core
    assert {"flat memory (2)", "no supervisor", "no user"} == {
        name for name, check in CHECKS.items() if check.alone and not check.wide
    }
    assert any("16-mixed" in name for name in core)


@pytest.mark.parametrize("only", ["^trap", "no check has this name"])
def test_names_are_listed_and_nothing_is_run(only: str) -> None:
    command = [sys.executable, str(ROOT / "tests" / "gpu" / "matrix.py"), "--list", "--only", only]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == (["trap (1)", "trap (2)", ""] if only == "^trap" else ["", ""])
