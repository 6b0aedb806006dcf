"""`leto inject` sends one request, and its errors say what to write instead."""

from typing import Any

import pytest

from leto_strategy.cli import inject, main
from leto_strategy.faults import POINTS

OK = {"ok": True}


@pytest.mark.parametrize(
    ("arguments", "request_sent", "sentence"),
    [
        (
            ["--rank", "1", "--fault", "kill"],
            {"rank": 1, "fault": "kill", "at_step": None, "point": None, "role": "active"},
            "kill the active trainer of rank 1, now",
        ),
        (
            ["--rank", "0", "--fault", "hang", "--at-step", "12"],
            {"rank": 0, "fault": "hang", "at_step": 12, "point": "forward", "role": "active"},
            "hang the active trainer of rank 0 at 'forward' of step 12",
        ),
        (
            ["--rank", "0", "--fault", "stop", "--point", "chunk_updating"],
            {"rank": 0, "fault": "stop", "at_step": None, "point": "chunk_updating", "role": "active"},
            "stop the active trainer of rank 0 at 'chunk_updating', the next time it is reached",
        ),
        (
            ["--rank", "0", "--fault", "hang"],
            {"rank": 0, "fault": "hang", "at_step": None, "point": "forward", "role": "active"},
            "hang the active trainer of rank 0 at 'forward', the next time it is reached",
        ),
        (
            ["--rank", "0", "--fault", "kill", "--role", "manager"],
            {"rank": 0, "fault": "kill", "at_step": None, "point": None, "role": "manager"},
            "kill the manager of rank 0, now",
        ),
        (
            ["--rank", "1", "--fault", "page-loss", "--pages", "16"],
            {"rank": 1, "fault": "page-loss", "at_step": None, "point": "forward", "role": "active"}
            | {"pages": 16, "group": None},
            "page-loss the active trainer of rank 1, which loses 16 data page(s) of each protection group, at "
            "'forward', the next time it is reached",
        ),
        (
            ["--rank", "0", "--fault", "host-page-loss", "--group", "2", "--point", "parity_first", "--at-step", "3"],
            {"rank": 0, "fault": "host-page-loss", "at_step": 3, "point": "parity_first", "role": "active"}
            | {"pages": None, "group": 2},
            "host-page-loss the active trainer of rank 0, which loses 1 host parity page(s) of protection group 2, at "
            "'parity_first' of step 3",
        ),
    ],
)
def test_a_request_is_sent_and_said(
    stand_in: Any,
    job_name: str,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    request_sent: dict[str, Any],
    sentence: str,
) -> None:
    stand_in.start(job_name, lambda request: OK)
    assert main.main(["inject", *arguments]) == 0
    assert stand_in.requests == [{"op": "inject", **request_sent}]
    assert capsys.readouterr().out.strip() == f"job {job_name}: {sentence}"


def test_a_refusal_is_told(stand_in: Any, job_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in.start(job_name, lambda request: {"ok": False, "error": "rank 9 does not exist; ranks are 0 to 1"})
    assert main.main(["inject", "--rank", "9", "--fault", "kill"]) == 1
    assert "refused: rank 9 does not exist; ranks are 0 to 1" in capsys.readouterr().err


def test_several_jobs_need_a_name(stand_in: Any, job_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for suffix in "ab":
        stand_in.start(job_name + suffix, lambda request: OK)
    assert main.main(["inject", "--rank", "0", "--fault", "kill"]) == 1
    assert "--job" in capsys.readouterr().err
    assert main.main(["inject", "--rank", "0", "--fault", "kill", "--job", job_name + "b"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rank", "0", "--fault", "kill", "--point", "chunk_updatin"], "did you mean 'chunk_updating'"),
        (["--rank", "0", "--fault", "kill", "--point", "zzz"], "--list-points"),
        (["--rank", "0", "--fault", "hang", "--role", "shadow"], "only --fault kill or stop"),
        (["--rank", "0", "--fault", "kill", "--role", "shadow", "--at-step", "3"], "no --at-step"),
        (["--rank", "-1", "--fault", "kill"], "ranks count from 0"),
        (["--rank", "0", "--fault", "kill", "--at-step", "-3"], "steps count from 0"),
        (["--rank", "0", "--fault", "kill", "--pages", "3"], "--pages and --group belong to --fault page-loss"),
        (["--rank", "0", "--fault", "page-loss", "--pages", "0"], "--pages 0: at least 1"),
        (["--rank", "0", "--fault", "page-loss", "--group", "-1"], "groups count from 0"),
        (["--rank", "0", "--fault", "page-loss", "--role", "shadow"], "only --fault kill or stop"),
    ],
)
def test_wrong_values_name_the_remedy(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main.main(["inject", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_missing_arguments_show_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main(["inject", "--rank", "1"])
    assert "for example: leto inject --rank 1 --fault kill" in capsys.readouterr().err


def test_the_points_are_listed_with_their_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["inject", "--list-points"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(POINTS)
    assert all(line.endswith(meaning) for line, meaning in zip(lines, POINTS.values(), strict=True))


def test_the_point_of_a_step_exists() -> None:
    assert inject.FIRST_POINT_OF_A_STEP in POINTS
