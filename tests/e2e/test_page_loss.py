"""Trainers die and lose memory pages with that, at random places of groups; what is left equals the undisturbed run."""

import time
from datetime import timedelta

import pytest

from leto_strategy.cli import jobs
from leto_strategy.cli.inject import Injection
from leto_strategy.faults import Fault, FaultPlan
from tests.e2e.harness import PROTECTION, Workshop, recoveries
from tests.e2e.tiny import Case

SLOW = 0.12
H1 = PROTECTION["parity_pages"]
WIDE = {"width": 512, "options": PROTECTION}
"""Several groups."""


def losses(*faults: tuple[int, str, int], pages: int = H1, host_pages: int = 1) -> FaultPlan:
    """Every group loses so many pages when a rank dies at a point of a step."""
    plan = FaultPlan()
    for rank, point, step in faults:
        plan.at(Fault(rank=rank, point=point, step=step, fault="page-loss", pages=pages, host_pages=host_pages))
    return plan


LOSSES = {
    "outside an update": [(0, "forward", 2), (1, "backward", 4), (0, "batch_end", 6), (1, "validation", 9)],
    "between gradients and update": [(1, "gradients_encoded", 1), (0, "ready", 4), (1, "synced", 7)],
    "inside an update": [(0, "parity_updated", 2), (1, "parity_first", 5), (0, "chunk_updating", 8)],
    "at its edges": [(0, "parity_loaded", 3), (1, "parity_drained", 6), (0, "update_done", 11)],
}


@pytest.mark.parametrize("name", LOSSES)
def test_as_many_lost_pages_as_there_is_parity_leave_the_run_as_undisturbed(workshop: Workshop, name: str) -> None:
    process = workshop.run(Case(slow=SLOW, **WIDE), losses(*LOSSES[name]))
    workshop.check(process)
    found = recoveries(process)
    assert len(found) == len(LOSSES[name])
    for recovery in found:
        # all groups lost as many as can be rebuilt, but a lost page of an open chunk is in the undo buffer
        assert recovery["pages"]["rebuilt"] >= 2 * H1
        assert recovery["pages"]["rebuild_ms"] > 0
    assert "Leto protects, on each rank like this one, " in process.output()
    workshop.forget(process)


def test_more_pages_lost_in_the_recovery_of_others_are_rebuilt_too(workshop: Workshop) -> None:
    plan = losses((0, "parity_updated", 4), pages=1)
    plan.at(Fault(rank=0, point="attached", step=4, generation=1, fault="page-loss", pages=2))
    process = workshop.run(Case(slow=SLOW, **WIDE), plan)
    workshop.check(process)
    assert sum(recovery["pages"]["rebuilt"] for recovery in recoveries(process)) > 3
    workshop.forget(process)


def test_more_lost_pages_than_parity_end_the_job_with_what_was_lost(workshop: Workshop) -> None:
    process = workshop.start(Case(slow=SLOW, **WIDE), losses((1, "forward", 3), pages=H1 + 1, host_pages=0))
    assert process.wait(60) != 0
    output = process.output()
    assert "rank 1 has lost memory, protection group 0: 4 data pages to rebuild, 3 can be" in output
    assert "UnrecoverableError" in output
    assert process.events()[-1]["outcome"] != "finished"
    workshop.forget(process)


def test_leto_inject_takes_pages_from_a_running_job(workshop: Workshop) -> None:
    process = workshop.start(Case(slow=0.2, **WIDE))
    process.wait_for(lambda events: any(event["event"] == "entered" for event in events))
    name = process.events()[0]["job"]
    for number, fault in enumerate(("page-loss", "host-page-loss"), start=1):
        request = Injection(rank=0, fault=fault, pages=2, group=1).request()
        assert jobs.ask(name, request, timeout=timedelta(seconds=5)) == {"ok": True}
        process.wait_for(lambda events, n=number: sum(event["event"] == "recovered" for event in events) == n)
        time.sleep(0.1)
    assert process.wait(60) == 0
    workshop.check(process)
    assert [recovery["pages"]["rebuilt"] for recovery in recoveries(process)] == [2, 2]
    workshop.forget(process)


def test_pages_of_a_job_that_is_not_protected_are_not_taken(workshop: Workshop) -> None:
    process = workshop.start(Case(slow=0.2))
    process.wait_for(lambda events: any(event["event"] == "entered" for event in events))
    name = process.events()[0]["job"]
    answer = jobs.ask(name, Injection(rank=0, fault="page-loss").request(), timeout=timedelta(seconds=5))
    assert not answer["ok"]
    assert "not protected: use LetoStrategy(protection='on')" in answer["error"]
    process.hurry()
    assert process.wait(60) == 0
    workshop.forget(process)
