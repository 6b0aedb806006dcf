"""A real SIGKILL at every enumerated crash point; what is left equals the undisturbed run, bit for bit.

Several kills share one run, each at a step of its own, so that a failure is also met by a trainer that was itself
promoted. The last table kills during recovery: `generation` says that a fault waits for a later trainer.
"""

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from leto_strategy.faults import POINTS, Fault, FaultPlan
from tests.e2e.harness import PROTECTION, UserProcess, Workshop, recoveries
from tests.e2e.tiny import Case

SLOW = 0.12
"""Seconds a training step takes, so that shadows are there when the next kill comes."""

Kill = tuple[int, str, int]  # rank, point, step


def plan_of(kills: list[Kill]) -> FaultPlan:
    plan = FaultPlan()
    for rank, point, step in kills:
        plan.kill_at(rank=rank, point=point, step=step)
    return plan


def require_recoveries(process: UserProcess, kills: list[Kill]) -> None:
    """One recovery a kill; kills of two ranks in one step may come together and are one then."""
    assert len({step for _, _, step in kills}) <= len(recoveries(process)) <= len(kills), recoveries(process)


TWO_RANKS: dict[str, list[Kill]] = {
    "first step": [(0, "attached", 0), (1, "start_before", 0), (0, "start_middle", 0), (1, "start_after", 0)],
    "first step, computing": [(0, "forward", 0), (1, "backward", 0), (0, "mid_middle", 0), (1, "ready", 0)],
    "records": [(0, "start_before", 2), (1, "start_middle", 4), (0, "start_after", 7), (1, "mid_middle", 9)],
    "computing": [(0, "forward", 1), (1, "backward", 3), (0, "gradients", 6), (1, "mid_after", 8)],
    "between READY and SYNCED": [(0, "ready", 2), (1, "ready", 5), (0, "synced", 8), (1, "synced", 10)],
    "undo": [(0, "chunk_before_undo", 1), (1, "chunk_undo_copied", 4), (0, "chunk_undo_marked", 7)],
    "inside a chunk": [(0, "chunk_updating", 2), (1, "chunk_updating", 5), (1, "chunk_updated", 8)],
    "between chunks": [(0, "chunk_committed", 1), (1, "chunk_committed", 4), (0, "update_done", 7)],
    "after the update": [(0, "update_done", 2), (1, "update_done", 5), (0, "batch_end", 8), (1, "batch_end", 10)],
    "validation": [(0, "validation", 3), (1, "validation", 6), (0, "validation", 9)],
    "checkpoints": [(0, "checkpoint_before", 2), (0, "checkpoint_after", 5), (0, "checkpoint_before", 8)],
    "checkpoint files": [(0, "checkpoint_middle", 2), (0, "checkpoint_removed", 8), (0, "checkpoint_middle", 11)],
    "end of an epoch": [(0, "forward", 5), (1, "update_done", 5), (0, "epoch_end", 6)],
    "last step": [(0, "forward", 11), (1, "chunk_updating", 11), (0, "update_done", 11), (1, "epoch_end", 12)],
    "the very end": [(0, "train_end", 11), (1, "train_end", 11), (1, "finished", 11), (0, "finished", 11)],
}

OTHER_RANKS: dict[tuple[int, str], list[Kill]] = {
    (1, "computing"): [(0, "start_middle", 1), (0, "forward", 3), (0, "backward", 6), (0, "mid_after", 9)],
    (1, "updating"): [(0, "ready", 1), (0, "chunk_updating", 4), (0, "chunk_committed", 7), (0, "update_done", 11)],
    (3, "computing"): [(2, "forward", 1), (1, "backward", 4), (0, "mid_middle", 8)],
    (3, "updating"): [(2, "ready", 2), (0, "chunk_updating", 5), (1, "update_done", 8), (2, "chunk_committed", 11)],
    (4, "computing and updating"): [(3, "backward", 2), (1, "chunk_updating", 6), (2, "start_after", 9)],
    (4, "ends"): [(3, "validation", 3), (0, "checkpoint_after", 5), (2, "finished", 11)],
}

SNAPSHOTS: dict[str, list[Kill]] = {
    "first step": [(1, "attached", 0), (0, "start_middle", 0), (1, "gradients", 0), (0, "snapshot_middle", 0)],
    "around the copy": [(0, "gradients", 2), (1, "snapshot_middle", 4), (0, "mid_middle", 7), (1, "mid_after", 9)],
    "behind the copy": [(0, "ready", 1), (1, "ready", 3), (0, "synced", 5), (1, "update_done", 7)],
    "one rank ahead": [(1, "snapshot_middle", 3), (0, "update_done", 5), (1, "start_before", 7), (0, "forward", 9)],
}
"""With the updater sync_snapshot."""

PROTECTED: dict[str, list[Kill]] = {
    "before the update": [(0, "attached", 0), (1, "gradients_encoded", 2), (0, "mid_after", 5), (1, "synced", 8)],
    "parity": [(0, "parity_loaded", 1), (1, "parity_updated", 4), (0, "parity_first", 7), (1, "parity_drained", 9)],
    "inside a chunk": [(1, "chunk_updating", 2), (0, "chunk_committed", 5), (1, "parity_first", 11)],
}
"""With the option protection; lost pages are in `test_page_loss`."""

DURING_RECOVERY: dict[str, list[Fault]] = {
    "a second kill at the gate": [
        Fault(rank=0, point="forward", step=3),
        Fault(rank=1, point="gate", step=3, generation=1),
    ],
    "a second kill after the restore": [
        Fault(rank=1, point="chunk_updating", step=4),
        Fault(rank=0, point="restored", step=4, generation=1),
    ],
    "a second kill inside the update that is finished": [
        Fault(rank=0, point="chunk_updating", step=4, chunk=0),
        Fault(rank=0, point="chunk_updating", step=4, chunk=0, generation=1),
        Fault(rank=0, point="chunk_updating", step=4, chunk=1, generation=1),
    ],
    "three kills in a row, the last before its first forward": [
        Fault(rank=0, point="ready", step=5),
        Fault(rank=1, point="gate", step=5, generation=1),
        Fault(rank=0, point="attached", step=5, generation=2),
        Fault(rank=1, point="synced", step=5, generation=3),
    ],
    "all ranks at once": [
        Fault(rank=0, point="forward", step=6),
        Fault(rank=1, point="forward", step=6),
        Fault(rank=0, point="chunk_updated", step=9),
        Fault(rank=1, point="chunk_updated", step=9),
    ],
}


def require_equal_when_killed(workshop: Workshop, case: Case, kills: list[Kill]) -> None:
    """A run that is killed at some points equals the undisturbed one."""
    process = workshop.run(replace(case, slow=SLOW), plan_of(kills))
    workshop.check(process)
    require_recoveries(process, kills)
    workshop.forget(process)


def require_equal_when_faulty(workshop: Workshop, case: Case, faults: Iterable[Fault]) -> None:
    """A run in which faults happen, some of them during a recovery, equals the undisturbed one."""
    plan = FaultPlan()
    for fault in faults:
        plan.at(fault)
    process = workshop.run(replace(case, slow=SLOW), plan)
    workshop.check(process)
    assert recoveries(process)
    workshop.forget(process)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_a_kill_at_every_point_leaves_two_ranks_as_undisturbed(workshop: Workshop, name: str) -> None:
    require_equal_when_killed(workshop, Case(), TWO_RANKS[name])


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_a_kill_around_a_snapshot_leaves_the_run_as_undisturbed(workshop: Workshop, name: str) -> None:
    require_equal_when_killed(workshop, Case(model="RMSprop"), SNAPSHOTS[name])


@pytest.mark.parametrize("name", PROTECTED)
def test_a_kill_beside_parity_leaves_the_run_as_undisturbed(workshop: Workshop, name: str) -> None:
    kills = PROTECTED[name]
    process = workshop.run(Case(slow=SLOW, options=PROTECTION), plan_of(kills))
    workshop.check(process)
    require_recoveries(process, kills)
    workshop.forget(process)


@pytest.mark.parametrize(("devices", "name"), OTHER_RANKS)
def test_kills_leave_one_three_and_four_ranks_as_undisturbed(workshop: Workshop, devices: int, name: str) -> None:
    require_equal_when_killed(workshop, Case(devices=devices), OTHER_RANKS[devices, name])


def test_kills_around_removed_files_leave_the_same_names(workshop: Workshop) -> None:
    case = Case(callbacks=["checkpoint_newest"], slow=SLOW, logger=False)
    plan = FaultPlan().kill_at(rank=0, point="checkpoint_removed", step=3)
    plan.kill_at(rank=0, point="checkpoint_after", step=5).kill_at(rank=0, point="checkpoint_removed", step=9)
    before = set(Path(tempfile.gettempdir()).glob("tmp*"))
    process = workshop.run(case, plan)
    workshop.check(process)
    assert len(recoveries(process)) == 3
    assert set(Path(tempfile.gettempdir()).glob("tmp*")) <= before, "temporary files of killed writers are gone"
    workshop.forget(process)


@pytest.mark.parametrize("name", DURING_RECOVERY)
def test_kills_during_recovery_leave_everything_as_undisturbed(workshop: Workshop, name: str) -> None:
    require_equal_when_faulty(workshop, Case(), DURING_RECOVERY[name])


def test_every_point_is_in_a_table() -> None:
    used = {point for kills in TWO_RANKS.values() for _, point, _ in kills}
    used |= {point for kills in SNAPSHOTS.values() for _, point, _ in kills}
    used |= {point for kills in PROTECTED.values() for _, point, _ in kills}
    used |= {fault.point for faults in DURING_RECOVERY.values() for fault in faults}
    assert used == set(POINTS)
