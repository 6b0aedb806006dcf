"""The checks of `matrix.py`: the end-to-end tests that a GPU must pass too, and what only it can show.

A check is a function of a Workshop that raises where something is wrong; what it returns is printed beside its result.
"""

import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu import MIB, MeasuredGpu

from leto_strategy.faults import POINTS, Fault, FaultPlan
from tests.e2e import test_compatibility, test_features, test_points, test_processes
from tests.e2e.harness import UserProcess, Workshop, reap_adopted, recoveries
from tests.e2e.test_random_kills import run_plan
from tests.e2e.tiny import Case

GROWTH_BYTES_MAX = 32 * MIB
NUM_KILLS_IN_ONE_RUN = 20


@dataclass(frozen=True)
class Check:
    """One line of the matrix.

    Args:
        run: Raises where something is wrong; returns figures or None.
        alone: It measures the GPU, on which nothing else may run meanwhile.
        wide: Only with `--wide`.
    """

    run: Callable[["RecordingWorkshop"], dict[str, Any] | None]
    alone: bool = False
    wide: bool = False


class RecordingWorkshop(Workshop):
    """A Workshop that remembers what a check has started, and how it recovered."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._started: list[UserProcess] = []
        self._recovered: list[dict[str, Any]] = []

    def start(self, case: Case, plan: FaultPlan | None = None) -> UserProcess:
        """Start a run."""
        process = super().start(case, plan)
        self._started.append(process)
        return process

    def forget(self, process: UserProcess) -> None:
        """Remove the files of a run that was as it should be."""
        self._recovered += recoveries(process)
        super().forget(process)

    def end(self, keep: Path | None) -> dict[str, Any]:
        """End what a check has left running; its recoveries.

        Args:
            keep: Where the files of its runs are copied to, for somebody who wants to see what went wrong.
        """
        for process in self._started:
            process.kill()
        self._companions = {key: p for key, p in self._companions.items() if p.poll() == 0}
        reap_adopted(self.server, seconds=30.0)
        found, self._recovered = self._recovered, []
        for process in self._started:
            if Path(process.case.out, "recoveries.json").exists():
                found += recoveries(process)
            if keep is not None and Path(process.case.out).exists():
                ignored = shutil.ignore_patterns("*.ckpt", "checkpoints*")
                shutil.copytree(process.case.out, keep / Path(process.case.out).name, ignore=ignored)
        self._started = []
        times = [record["total_ms"] for record in found if record["total_ms"] is not None]
        return {
            "recoveries": len(found),
            "levels": dict(Counter(record["level"] for record in found)),
            "modes": dict(Counter(record["mode"] for record in found)),
            "recovery_ms": {"median": median(times), "max": max(times)} if times else None,
        }


Kills = list[test_points.Kill]

ON_RANK_0 = {point for point in POINTS if point.startswith("checkpoint_")}
"""Only this rank gets there."""


def on_rank(rank: int, kills: Kills) -> Kills:
    """The same kills, all of one rank; some points only rank 0 gets to."""
    reached = (point for _, point, _ in kills if rank == 0 or point not in ON_RANK_0)
    steps = {point: step for _, point, step in kills}
    return [(rank, point, steps[point]) for point in dict.fromkeys(reached)]


def trapped(workshop: Workshop, devices: int) -> None:
    """A chunk is torn by a kernel that traps between two of its writes; the update is finished, and exactly."""
    plan = FaultPlan()
    for rank, step, chunk in ((devices - 1, 3, 0), (0, 8, 1)):
        plan.at(Fault(rank=rank, point="chunk_updating", fault="trap", step=step, chunk=chunk))
    process = workshop.run(Case(devices=devices, slow=test_points.SLOW), plan)
    workshop.check(process)
    modes = [record["mode"] for record in recoveries(process)]
    assert modes == ["finish", "finish"], recoveries(process)
    workshop.forget(process)


def random_kills(workshop: Workshop, seed: int, **case: Any) -> dict[str, Any]:
    """Kills at random moments of random ranks; nothing grows on the host."""
    long = Case(slow=0.15, batches=40, epochs=4, val_check_interval=33, **case)
    run_plan(workshop, seed, 6, long, seconds=150)
    return {"seed": seed}


def many_kills(workshop: Workshop, seed: int, devices: int) -> dict[str, Any]:
    """Many kills in one run: the memory of the GPU and the number of its contexts stay as they were."""
    gpu = MeasuredGpu()
    before, looks = gpu.settled_used_bytes(), list[tuple[int, int]]()

    def look() -> None:
        looks.append((gpu.settled_used_bytes(), len(gpu.context_pids())))

    long = Case(slow=0.3, batches=100, epochs=6, val_check_interval=77, devices=devices, callbacks=["checkpoint"])
    run_plan(workshop, seed, NUM_KILLS_IN_ONE_RUN, long, seconds=220, look=look)
    used, contexts = [one for one, _ in looks], [count for _, count in looks]
    first, last = max(used[:5]), max(used[-5:])
    found = {
        "seed": seed,
        "used_mib": [round((one - before) / MIB) for one in used],
        "contexts": contexts,
        "left_mib": round((gpu.settled_used_bytes() - before) / MIB),
    }
    assert last - first <= GROWTH_BYTES_MAX, f"HBM grew: {found}"
    assert len(set(contexts)) == 1, f"contexts: {found}"
    assert found["left_mib"] * MIB <= GROWTH_BYTES_MAX, f"HBM was not given back: {found}"
    return found


def points_of(devices: int) -> dict[str, Check]:
    """Kills at every point, during recovery too, with a number of ranks; and those of rank 1 where there are two."""
    killed, faulty = test_points.require_equal_when_killed, test_points.require_equal_when_faulty
    case, found = Case(devices=devices), dict[str, Check]()
    snapshots = Case(devices=devices, model="RMSprop")
    for name, kills in test_points.TWO_RANKS.items():
        first = kills if devices == 2 else on_rank(0, kills)
        found[f"points: {name}"] = Check(partial(killed, case=case, kills=first))
        if devices == 2 and (second := on_rank(1, kills)):
            found[f"points of rank 1: {name}"] = Check(partial(killed, case=case, kills=second))
    for name, kills in test_points.SNAPSHOTS.items():
        of_ranks = kills if devices == 2 else on_rank(0, kills)
        found[f"snapshots: {name}"] = Check(partial(killed, case=snapshots, kills=of_ranks))
    for name, faults in test_points.DURING_RECOVERY.items():
        of_both = dict.fromkeys(fault if devices == 2 else replace(fault, rank=0) for fault in faults)
        found[f"during recovery: {name}"] = Check(partial(faulty, case=case, faults=of_both))
    return {f"{name} ({devices})": check for name, check in found.items()}


def processes() -> dict[str, Check]:
    """What is killed beside the active trainers, and what they have started."""
    workers = test_processes.test_trainers_with_forked_workers_recover_exactly
    gone = test_processes.test_without_supervisor_or_user_everything_is_gone_in_two_seconds
    crash = test_processes.test_a_crash_from_inside_is_recovered_once
    return {
        "forked workers": Check(partial(workers, persistent=False)),
        "persistent workers": Check(partial(workers, persistent=True)),
        "a killed worker": Check(test_processes.test_a_killed_worker_is_a_fault_and_not_the_users_bug),
        "all ranks": Check(test_processes.test_all_ranks_killed_at_once_cost_one_recovery),
        "no shadow ready": Check(test_processes.test_a_kill_while_no_shadow_is_ready_waits_for_one),
        "cold": Check(test_processes.test_a_cold_start_on_retained_memory_is_exact),
        "new interpreter": Check(test_processes.test_a_new_interpreter_instead_of_the_zygote_is_exact),
        "a killed shadow": Check(test_processes.test_a_killed_shadow_is_replaced_and_the_next_takes_over),
        "killed managers": Check(test_processes.test_a_killed_manager_loses_nothing),
        "a killed zygote": Check(test_processes.test_a_killed_zygote_costs_nothing),
        "no supervisor": Check(
            partial(gone, who="supervisor"), alone=True
        ),  # in two seconds, which others would use up
        "no user": Check(partial(gone, who="user"), alone=True),
        "hang": Check(test_processes.test_a_hanging_rank_is_found_and_replaced),
        "segv": Check(partial(crash, fault="segv")),
        "exit": Check(partial(crash, fault="exit")),
    }


CORE = ("Precision: ", "Optimisation: fused", "Optimisation: LBFGS", "Model: ", "Optimisation: small chunks")
"""Rows of the table of what works that are always run."""


def features(seed: int) -> dict[str, Check]:
    """The table of what works, and equality with plain `ddp`."""

    def row(workshop: Workshop, name: str) -> None:
        rng = random.Random(f"{seed}:{name}")
        test_compatibility.test_a_killed_run_equals_the_undisturbed_one(workshop, rng, name)

    found = {
        f"row, {name}": Check(partial(row, name=name), wide=not name.startswith(CORE) and "GradScaler" not in name)
        for name in test_compatibility.KILLED
    }
    equal = test_features.test_an_undisturbed_run_equals_plain_ddp
    for devices in (1, 2):
        for optimizer in ("adamw", "sgd"):
            run = partial(equal, devices=devices, optimizer=optimizer)
            found[f"as plain ddp, {optimizer} ({devices})"] = Check(run)
    for name in test_features.WAYS:
        run = partial(test_features.test_other_ways_of_training_undisturbed_equal_plain_ddp, name=name)
        found[f"as plain ddp, {name}"] = Check(run, wide=True)
    return found


def all_checks(seed: int) -> dict[str, Check]:
    """Every check by name, the long ones first."""
    found: dict[str, Check] = {}
    for devices in (1, 2):
        found[f"random kills ({devices})"] = Check(partial(random_kills, seed=seed + devices, devices=devices))
    workers = partial(random_kills, seed=seed, num_workers=1)
    found["random kills, forked workers"] = Check(workers)
    found |= {f"trap ({devices})": Check(partial(trapped, devices=devices)) for devices in (1, 2)}
    found |= processes()
    found |= features(seed)
    for devices in (2, 1):
        found |= points_of(devices)
    for key, kills in test_points.OTHER_RANKS.items():
        if key[0] > 2:
            run = partial(test_points.require_equal_when_killed, case=Case(devices=key[0]), kills=kills)
            found[f"points: {key[1]} ({key[0]})"] = Check(run)
    for devices in (1, 2):
        run = partial(many_kills, seed=seed, devices=devices)
        found[f"flat memory ({devices})"] = Check(run, alone=True, wide=devices == 1)
    return found
