"""Every row of the compatibility table: killed at a random point and inside the update, and equal; or refused."""

import random
from dataclasses import replace

import pytest

from leto_strategy.faults import FaultPlan
from tests.e2e.compatibility import DOCUMENT, ROWS, Row, Status, document
from tests.e2e.harness import Workshop, recoveries
from tests.e2e.test_bad_input import require_refusal

SLOW = 0.1
RANDOM_POINTS = (
    "start_before", "start_middle", "start_after", "forward", "backward", "gradients", "mid_middle", "mid_after",
    "ready", "synced", "update_done", "batch_end",
)  # fmt: skip

KILLED = {row.name: row for row in ROWS if row.case and row.status in (Status.EXACT, Status.SNAPSHOT)}
REFUSED = {row.name: row for row in ROWS if row.case and row.status is Status.REFUSED}


def plan_for(row: Row, rng: random.Random) -> FaultPlan:
    """A kill at a random point, then one inside the update."""
    assert row.case is not None
    ranks = range(row.case.devices)
    inside = "chunk_updating" if row.status is Status.EXACT else "snapshot_middle"
    plan = FaultPlan().kill_at(rank=rng.choice(ranks), point=rng.choice(RANDOM_POINTS), step=rng.choice((1, 2)))
    return plan.kill_at(rank=rng.choice(ranks), point=inside, step=row.last_step)


SELDOM = {"Optimisation: Adagrad", "Optimisation: NAdam", "Optimisation: Rprop"}
"""Rows that take the same way as another one."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.nightly) if n in SELDOM else n for n in KILLED])
def test_a_killed_run_equals_the_undisturbed_one(workshop: Workshop, rng: random.Random, name: str) -> None:
    row = KILLED[name]
    assert row.case is not None
    plan = plan_for(row, rng)
    print([fault.to_json() for fault in plan.faults])
    process = workshop.run(replace(row.case, slow=SLOW), plan)
    workshop.check(process)
    assert len(recoveries(process)) == 2, recoveries(process)
    said = "Leto copies the whole training state" in process.output()
    assert said == (row.status is Status.SNAPSHOT and "updater" not in row.case.options)
    workshop.forget(process)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_named_before_anything_starts(workshop: Workshop, name: str) -> None:
    row = REFUSED[name]
    assert row.case is not None
    assert row.texts
    require_refusal(workshop.start(row.case), list(row.texts))


def test_rows_without_a_run_name_the_test_that_shows_them() -> None:
    assert [row.name for row in ROWS if row.case is None and not row.test and row.status is not Status.OUTSIDE] == []


def test_the_document_is_made_from_the_table() -> None:
    assert DOCUMENT.read_text() == document(), "run `python -m tests.e2e.compatibility`"
