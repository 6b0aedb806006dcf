"""Loggers, callbacks and what users keep: each row is a run that is killed, and compared with the undisturbed one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leto_strategy.faults import FaultPlan
from tests.e2e import callback_cases, logging_cases
from tests.e2e.harness import (
    UserProcess,
    Workshop,
    compare_checkpoints,
    compare_events,
    compare_rows,
    reap_adopted,
    recoveries,
)
from tests.e2e.tiny import Case

SLOW = 0.1

ROWS = logging_cases.ROWS | callback_cases.ROWS


@pytest.mark.parametrize("name", ROWS)
def test_a_killed_run_leaves_what_the_undisturbed_one_leaves(workshop: Workshop, name: str) -> None:
    row = ROWS[name]
    case, plan = Case(**row.case), FaultPlan()
    for rank, point, step in row.kills:
        plan.kill_at(rank=rank, point=point, step=step)
    process = workshop.run(replace(case, slow=SLOW), plan)
    workshop.check(process)
    killed = [event for event in process.events() if event["event"] == "recovered"]
    assert len(killed) == len(row.kills) * case.fits  # each call is a job of its own
    assert process.output().count("Trainable params") == (1 if "summary" in case.callbacks else 0)
    if row.status == "at least once":
        require_each_call_at_least_once(workshop.reference(process.case), process)
    workshop.forget(process)


@pytest.mark.parametrize(
    "case",
    [
        Case(loggers=["tensorboard", "csv"], hparams=True, callbacks=["checkpoint", "lr_monitor", "draws"]),
        Case(loggers=["csv", "csv_often"], hparams=True, log_around=True, fits=2, epochs=1, test_after=True),
    ],
    ids=["TensorBoard and CSV", "CSV, with calls of the script itself"],
)
def test_logs_of_an_undisturbed_run_equal_those_of_plain_ddp(workshop: Workshop, case: Case) -> None:
    leto, ddp = workshop.run_together((case, None), (replace(case, strategy="ddp"), None))
    reap_adopted(workshop.server)
    expected, actual = Path(ddp.case.out), Path(leto.case.out)
    assert compare_rows(expected, actual) == []
    assert compare_events(expected, actual) == []


def test_checkpoints_that_are_written_on_an_exception_are_those_of_an_undisturbed_run(workshop: Workshop) -> None:
    callbacks = ["on_exception", "exception", "last_link"]
    case = Case(callbacks=callbacks, misbehave="exception@training_step:0:8", loggers=["tensorboard"])
    undisturbed = workshop.start(case)
    killed = workshop.start(
        replace(case, slow=SLOW),
        FaultPlan().kill_at(rank=0, point="checkpoint_middle", step=2).kill_at(rank=1, point="chunk_updating", step=6),
    )
    assert (undisturbed.wait(110), killed.wait(110)) == (1, 1)
    assert [event["event"] for event in killed.events()].count("recovered") == 2
    expected, actual = Path(undisturbed.case.out), Path(killed.case.out)
    assert len(list(expected.glob("checkpoints-*/*"))) == 5
    assert compare_checkpoints(expected, actual) == []
    assert compare_events(expected, actual) == []


def require_each_call_at_least_once(undisturbed: Path, process: UserProcess) -> None:
    """In order, and nothing was opened but by the trainers that trained."""
    killed = Path(process.case.out)
    want, have = (calls_of(directory / "recorded" / "calls.jsonl") for directory in (undisturbed, killed))
    rest = iter(have)
    missing = [call for call in want if call not in rest]
    assert not missing, f"never came, or too early: {missing[:3]}"
    assert {json.dumps(call) for call in have} == {json.dumps(call) for call in want}
    opened = (killed / "recorded" / "opened.txt").read_text().split()
    assert len(opened) == len(set(opened)) == 1 + len(recoveries(process))
    assert process.output().count("Recording, OwnCsv gets each call at least once") == 1
    lines = [(directory / "own-csv.txt").read_text().splitlines() for directory in (undisturbed, killed)]
    assert set(lines[0]) == set(lines[1])
    assert len(lines[1]) >= len(lines[0])


def calls_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]
