"""Every kind of training data: killed in the first epoch and inside the update in the second, a run leaves the same."""

from pathlib import Path

import pytest

from leto_strategy.faults import FaultPlan
from tests.e2e.data import KINDS
from tests.e2e.harness import Workshop, recoveries
from tests.e2e.test_bad_input import run_script
from tests.e2e.tiny import Case

SLOW = 0.1

OFTEN = {
    "map-style, persistent workers", "map-style, spawned workers", "map-style, generator and persistent workers",
    "batch sampler", "no automatic batching", "iterable", "iterable, persistent workers", "iterable with a state",
    "StatefulDataLoader, workers", "StatefulDataLoader, iterable with a state", "a DataLoader with its own __iter__",
    "a class of the user's", "dict of loaders", "CombinedLoader, max_size_cycle", "CombinedLoader, min_size",
    "several validation loaders", "validation with persistent workers", "limit_train_batches", "overfit_batches",
    "loaders reloaded every second epoch",
}  # fmt: skip
"""Rows that are killed in every run of the tests; nightly all. `tests/strategy/test_data.py` enters each row at every
step in every run.
"""


def case_of(name: str) -> Case:
    kind = KINDS[name]
    return Case(
        data=name,
        devices=kind.devices,
        epochs=kind.epochs,
        val_check_interval=kind.val_check_interval,
        callbacks=["checkpoint"],
        schedulers=[],
        sampler="default" if kind.trainer.get("use_distributed_sampler", True) else "user",
        trainer={k: v for k, v in kind.trainer.items() if k != "use_distributed_sampler"},
    )


def names(status: str) -> list[str]:
    return [name for name, kind in KINDS.items() if kind.status == status]


@pytest.mark.parametrize(
    "name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.nightly) for n in names("exact")]
)
def test_a_run_that_is_killed_twice_equals_the_undisturbed_one(workshop: Workshop, name: str) -> None:
    case = case_of(name)
    epoch = KINDS[name].batches
    plan = FaultPlan().kill_at(rank=case.devices - 1, point="forward", step=epoch - 2)
    plan.kill_at(rank=0, point="chunk_updating", step=2 * epoch - 2)
    case.slow = SLOW
    process = workshop.run(case, plan)
    workshop.check(process)
    assert len(recoveries(process)) == 2
    workshop.forget(process)


@pytest.mark.parametrize("name", names("refused"))
def test_what_is_refused_says_so_before_the_first_step(workshop: Workshop, name: str) -> None:
    process = workshop.start(case_of(name))
    assert process.wait(90) == 1
    assert KINDS[name].reason in process.output()
    assert process.steps() == 0


def test_rows_that_run_often_exist() -> None:
    assert set(names("exact")) >= OFTEN


def test_kills_in_the_last_batch_of_each_epoch_with_workers(workshop: Workshop) -> None:
    case = case_of("map-style, workers")
    case.slow = SLOW
    last = KINDS["map-style, workers"].batches - 1
    plan = FaultPlan().kill_at(rank=1, point="update_done", step=last)
    plan.kill_at(rank=0, point="forward", step=2 * last + 1)
    process = workshop.run(case, plan)
    workshop.check(process)
    assert len(recoveries(process)) == 2
    workshop.forget(process)


def test_spawned_workers_in_trainers_that_are_new_interpreters(workshop: Workshop) -> None:
    case = case_of("iterable, spawned workers")
    case.options = {"zygote": "off"}
    process = workshop.run(case, FaultPlan().kill_at(rank=1, point="forward", step=6))
    workshop.check(process)
    assert len(recoveries(process)) == 1
    workshop.forget(process)


def test_the_other_distribution_with_several_loaders(workshop: Workshop) -> None:
    case = case_of("CombinedLoader, max_size")
    case.flavour = "pytorch_lightning"
    process = workshop.run(case, FaultPlan().kill_at(rank=1, point="chunk_updating", step=3))
    workshop.check(process)
    assert len(recoveries(process)) == 1
    workshop.forget(process)


UNGUARDED = """
import torch, lightning.pytorch as pl
from torch.utils.data import DataLoader
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
class Model(BoringModel):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
loader = DataLoader(RandomDataset(32, 8), num_workers=1, multiprocessing_context="spawn")
trainer = pl.Trainer(strategy="leto", accelerator="cpu", devices=1, max_epochs=1, logger=False, limit_val_batches=0,
                     enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Model(), loader)
"""


@pytest.mark.nightly  # three trainers in a row import torch
def test_a_script_without_a_guard_is_told_why_its_spawned_workers_end(tmp_path: Path) -> None:
    result = run_script(UNGUARDED, tmp_path)
    assert result.returncode == 1
    assert "A spawned DataLoader worker runs the script's top level" in result.stderr
    assert "UnrecoverableError" in result.stderr
