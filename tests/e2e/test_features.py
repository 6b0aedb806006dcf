"""What a script may use: each row is a run that is killed, and equals the undisturbed run; some equal plain `ddp`."""

from dataclasses import replace
from pathlib import Path

import pytest

from leto_strategy.faults import FaultPlan
from tests.e2e.harness import UserProcess, Workshop, compare, reap_adopted, recoveries
from tests.e2e.tiny import Case

SLOW = 0.1

KILLED: dict[str, Case] = {
    "RandomSampler of the user": Case(sampler="random"),
    "a sampler that draws lazily": Case(sampler="lazy"),
    "a sampler with set_epoch and workers": Case(sampler="epoch", num_workers=1, epochs=3),
    "random augmentation in the main process": Case(augment=True),
    "checkpoints every n steps, never deleted": Case(callbacks=["checkpoint_steps", "lr_monitor"]),
    "logging every third step": Case(log_every_n_steps=3),
}


def plan_for(case: Case) -> FaultPlan:
    last = case.devices - 1
    return FaultPlan().kill_at(rank=last, point="forward", step=2).kill_at(rank=0, point="chunk_updating", step=5)


def require_equal(workshop: Workshop, ddp: UserProcess, leto: UserProcess) -> None:
    reap_adopted(workshop.server)  # ranks of plain ddp
    differences = compare(Path(ddp.case.out), Path(leto.case.out), leto.case)
    assert not differences, "\n".join(differences[:8])


@pytest.mark.parametrize("name", KILLED)
def test_a_killed_run_equals_the_undisturbed_one(workshop: Workshop, name: str) -> None:
    case = KILLED[name]
    process = workshop.run(replace(case, slow=SLOW), plan_for(case))
    workshop.check(process)
    assert len(recoveries(process)) == 2
    workshop.forget(process)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_an_undisturbed_run_equals_plain_ddp(workshop: Workshop, devices: int, optimizer: str) -> None:
    case = Case(devices=devices, optimizer=optimizer)
    leto, ddp = workshop.run_together((case, None), (replace(case, strategy="ddp"), None))
    require_equal(workshop, ddp, leto)


WAYS = {
    "accumulation": Case(trainer={"accumulate_grad_batches": 3}),
    "GradScaler": Case(plugins=["scaler"]),
    "RMSprop": Case(model="RMSprop"),
    "gradients mixed by hand": Case(model="manual_gradient_surgery", clip=None),
    "two optimizers": Case(model="manual_two_optimizers", clip=None, options={"find_unused_parameters": True}),
    "weight averaging": Case(callbacks=["ema", "checkpoint"]),
}


@pytest.mark.parametrize("name", WAYS)
def test_other_ways_of_training_undisturbed_equal_plain_ddp(workshop: Workshop, name: str) -> None:
    case = WAYS[name]
    strategy = "ddp_find_unused_parameters_true" if case.options else "ddp"
    leto, ddp = workshop.run_together((case, None), (replace(case, strategy=strategy, options={}), None))
    require_equal(workshop, ddp, leto)


def test_fit_then_test_runs_in_trainers_and_returns_their_results(workshop: Workshop) -> None:
    case = Case(test_after=True, slow=SLOW)
    process = workshop.run(case, FaultPlan().kill_at(rank=1, point="forward", step=4))
    workshop.check(process)
    assert len(recoveries(process)) == 1
    ddp = workshop.run(replace(case, strategy="ddp", slow=0.0, options={}))
    require_equal(workshop, ddp, process)


def test_weights_written_when_training_is_over_are_written_once(workshop: Workshop) -> None:
    case = Case(model="writes_at_the_end", epochs=1)
    process = workshop.run(replace(case, slow=SLOW), FaultPlan().kill_at(rank=0, point="train_end"))
    workshop.check(process)
    assert len(recoveries(process)) == 1


def test_a_step_that_adds_a_parameter_group_is_finished(workshop: Workshop) -> None:
    case = Case(model="thaws_in_a_step", schedulers=[], options={"updater": "sync_snapshot"})
    process = workshop.run(replace(case, slow=SLOW), FaultPlan().kill_at(rank=0, point="start_before", step=4))
    workshop.check(process)
    assert [r["mode"] for r in recoveries(process)] == ["finish"]


def test_a_second_fit_goes_on_from_the_first(workshop: Workshop) -> None:
    case = Case(fits=2, slow=SLOW, epochs=1)
    process = workshop.run(case, FaultPlan().kill_at(rank=0, point="chunk_updating", step=3))
    workshop.check(process)
    assert [e["event"] for e in process.events()].count("recovered") >= 1
