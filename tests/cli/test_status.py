"""`leto status` shows what supervisors answer, and copes with everything they may leave out."""

import json
from typing import Any

import pytest
from rich.console import Console

from leto_strategy.cli import main, status

NOW = 1_800_000_000.0

RECORDED: dict[str, Any] = {
    "job": "3f9c",
    "function": "fit",
    "world": 2,
    "started": NOW - 754.2,
    "root_dir": "/tmp/run",
    "argv": ["python", "train.py"],
    "state": "training",
    "processes": [
        {"role": "supervisor", "rank": None, "pid": 100},
        {"role": "manager", "rank": 0, "pid": 110},
        {"role": "manager", "rank": 1, "pid": 111},
        {"role": "zygote", "rank": None, "pid": 101},
        *(
            {
                "role": role,
                "rank": rank,
                "pid": pid + rank,
                "generation": generation,
                "state": state,
                "level": "L3",
                "step": 812 if role == "active" else None,
                "activity": "step" if role == "active" else None,
                "phase": "UNDO(3)" if role == "active" else None,
            }
            for role, pid, generation, state in (("active", 120, 1, "training"), ("shadow", 130, 2, "ready"))
            for rank in (0, 1)
        ),
    ],
    "recoveries": [
        {
            "step": 311,
            "rank": 1,
            "cause": "killed by SIGKILL",
            "level": "shadow",
            "mode": "finish",
            "phases_ms": {
                "first_step": 12.5,
                "detect": 0.4,
                "reap": 21.9,
                "restore": 31.02,
                "later": 1,
                "rebuild": None,
            },
            "steps_repeated": 0,
            "total_ms": 66.82,
        }
    ],
}


def render(recorded: dict[str, Any]) -> object:
    return status.render(recorded, now=NOW)


def text_of(renderable: object, *, width: int = 120) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_a_recorded_status_is_drawn_in_the_order_of_ranks() -> None:
    text = text_of(render(RECORDED))
    assert "job 3f9c · fit · 2 ranks · training · for 12 min 34 s" in text
    assert text.splitlines()[1].split() == list(status.COLUMNS)
    rows = [line.split() for line in text.splitlines()[2:10]]
    assert [(row[0], row[1]) for row in rows] == [
        ("supervisor", "–"),
        ("zygote", "–"),
        ("manager", "0"),
        ("active", "0"),
        ("shadow", "0"),
        ("manager", "1"),
        ("active", "1"),
        ("shadow", "1"),
    ]
    assert rows[3] == ["active", "0", "120", "1", "L3", "training", "812", "step", "UNDO(3)"]


def test_a_recovery_is_drawn_with_its_breakdown() -> None:
    lines = text_of(render(RECORDED), width=160).splitlines()
    header = next(line for line in lines if "cause" in line)
    row = lines[lines.index(header) + 1]
    assert header.split() == ["step", "rank", "cause", "level", "mode", "repeated", "ms", "phases", "(ms)"]
    assert row.split()[:9] == ["311", "1", "killed", "by", "SIGKILL", "shadow", "finish", "0", "66.8"]
    assert row.rstrip().endswith("detect 0.4, reap 21.9, restore 31, first step 12.5, later 1")


def test_on_a_narrow_terminal_no_number_is_cut() -> None:
    text = text_of(render(RECORDED), width=80)
    assert "…" not in text
    assert "66.8" in text


def test_only_the_last_recoveries_are_drawn() -> None:
    many = {**RECORDED, "recoveries": [{**RECORDED["recoveries"][0], "step": 7000 + step} for step in range(25)]}
    text = text_of(render(many))
    assert "recoveries: 25" in text
    assert "7014" not in text
    assert "7015" in text
    assert "7024" in text


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"job": None, "processes": None, "recoveries": "none"},
        {"job": "x", "processes": [3, None, {}, {"role": 5, "rank": "r"}], "recoveries": [{}, {"phases_ms": [1]}]},
        {"job": "x", "started": "long ago", "recoveries": [{"phases_ms": {"reap": None}}]},
    ],
)
def test_fields_that_are_missing_or_odd_are_dashes(odd: dict[str, Any]) -> None:
    assert "job" in text_of(render(odd))


def test_names_from_a_job_cannot_control_the_terminal() -> None:
    text = text_of(render({"job": "a\x1b[31mb", "processes": [{"activity": "[red]x[/red]\x07"}]}))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]x[/red]?" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.9, "1 min 0 s"), (3600, "1 h 0 min"), (200000, "2 d 7 h")]
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert status.duration(seconds) == text


def test_no_job_is_a_friendly_line(stand_in: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["status"]) == 0
    assert capsys.readouterr().out.strip() == status.NO_JOBS
    assert main.main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"jobs": [], "errors": {}}


def test_all_jobs_are_asked(stand_in: Any, job_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = {key: value for key, value in RECORDED.items() if key != "job"}
    stand_in.start(job_name + "a", lambda request: answer)
    stand_in.start(job_name + "b", lambda request: {"state": "starting"})
    assert main.main(["status", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [job["job"] for job in result["jobs"]] == [job_name + "a", job_name + "b"]
    assert result["jobs"][0]["processes"] == RECORDED["processes"]
    assert stand_in.requests == [{"op": "status"}] * 2
    assert main.main(["status", "--job", job_name + "b"]) == 0
    text = capsys.readouterr().out
    assert f"job {job_name}b · starting" in text
    assert f"{job_name}a" not in text


def test_a_job_that_does_not_answer_is_named(
    stand_in: Any, job_name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(job: str, *_: object, **__: object) -> None:
        raise status.jobs.JobUnreachable(f"job {job} did not answer")

    stand_in.start(job_name, lambda request: {})
    monkeypatch.setattr(status.jobs, "ask", fail)
    assert main.main(["status", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"jobs": [], "errors": {job_name: f"job {job_name} did not answer"}}
