"""How a run ends before its time: signals, exceptions, exits. As with Lightning, within 10 s, and nothing is left."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from leto_strategy.faults import Fault, FaultPlan
from tests.e2e.harness import UserProcess, Workshop
from tests.e2e.test_processes import of_this_job, wait_for_shadow, wait_for_step
from tests.e2e.tiny import Case


def end(process: UserProcess, *signums: int) -> int:
    """Send signals to the user's process; its status. Must take less than 10 s and leave nothing."""
    begin = time.monotonic()
    for signum in signums:
        os.kill(process.pid, signum)
        time.sleep(0.05)
    status = process.wait(30)
    assert time.monotonic() - begin < 10.0
    assert of_this_job(process) == []
    return status


@pytest.mark.parametrize("devices", [1, 2])
def test_ctrl_c_ends_with_lightnings_status(workshop: Workshop, devices: int) -> None:
    process = workshop.start(Case(slow=0.3, devices=devices))
    wait_for_shadow(process)
    wait_for_step(process, 1)
    assert end(process, signal.SIGINT) == 1
    assert "Detected KeyboardInterrupt" in process.output() or "KeyboardInterrupt" not in process.output()


def test_ctrl_c_twice_ends_at_once(workshop: Workshop) -> None:
    process = workshop.start(Case(slow=5.0))
    process.wait_for(lambda events: any(e["event"] == "entered" for e in events))
    assert end(process, signal.SIGINT, signal.SIGINT) == 1


@pytest.mark.parametrize("devices", [1, 2])
def test_sigterm_ends_as_lightning_does(workshop: Workshop, devices: int) -> None:
    process = workshop.start(Case(slow=0.3, devices=devices))
    wait_for_step(process, 2)
    steps = process.steps()
    assert end(process, signal.SIGTERM) == 0  # Lightning's SIGTERMException is a SystemExit without a code
    assert process.steps() <= steps + 3, "the run ended at the next step, not at its end"
    assert not Path(process.case.out, "result.json").exists()


def test_ctrl_c_during_start_leaves_nothing(workshop: Workshop) -> None:
    process = workshop.start(Case(slow=0.3))
    process.wait_for(lambda events: events)
    assert end(process, signal.SIGINT) == 1


@pytest.mark.parametrize(("rank", "where"), [(0, "training_step"), (1, "training_step"), (1, "on_train_batch_end")])
def test_a_users_exception_is_raised_in_the_users_process_once(workshop: Workshop, rank: int, where: str) -> None:
    process = workshop.start(Case(misbehave=f"exception@{where}:{rank}:2", slow=0.05))
    begin = time.monotonic()
    assert process.wait(60) == 1
    assert time.monotonic() - begin < 40
    output = process.output()
    assert "ZeroDivisionError: a bug of the user" in output
    assert "RemoteError" in output, "the trainer's traceback is the cause"
    assert not [e for e in process.events() if e["event"] == "recovered"], "not retried"
    assert of_this_job(process) == []


def test_sys_exit_in_a_hook_exits_with_its_status(workshop: Workshop) -> None:
    process = workshop.start(Case(misbehave="exit@on_train_batch_end:0:2", slow=0.05))
    assert process.wait(60) == 3
    assert of_this_job(process) == []


def test_a_poison_step_stops_with_a_clear_reason(workshop: Workshop) -> None:
    process = workshop.start(Case(misbehave="poison@training_step:0:3", slow=0.05))
    assert process.wait(90) == 1
    output = process.output()
    assert "UnrecoverableError" in output
    assert "step 3" in output
    assert "SIGSEGV" in output
    assert of_this_job(process) == []


def test_a_parameter_changed_outside_the_update_is_named(workshop: Workshop) -> None:
    process = workshop.start(Case(misbehave="write_parameter@on_train_batch_end:0:2", slow=0.0))
    assert process.wait(60) == 1
    assert "StateChangedError" in process.output()
    assert "head.bias" in process.output()


def test_optimizer_state_written_outside_the_update_is_named(workshop: Workshop) -> None:
    process = workshop.start(Case(model="writes_moments"))
    assert process.wait(90) == 1
    assert "was written outside the optimizer step" in process.output()
    assert "updater='sync_snapshot'" in process.output()


def test_an_exception_ahead_of_the_optimizers_is_the_last_thing_said(workshop: Workshop) -> None:
    process = workshop.start(Case(model="fails_in_setup"))
    assert process.wait(90) == 1
    assert process.output().rstrip().endswith("ZeroDivisionError: a bug of the user")


def test_stop_and_continue_stops_the_clocks(workshop: Workshop) -> None:
    process = workshop.start(Case(slow=0.1, options={"hang_timeout": 2.0}))
    wait_for_step(process, 2)
    os.kill(process.pid, signal.SIGTSTP)
    time.sleep(4.0)
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait(60) == 0, process.output()[-3000:]
    assert json.loads(Path(process.case.out, "recoveries.json").read_text()) == []
    workshop.check(process)


def test_an_injected_exception_names_itself(workshop: Workshop) -> None:
    process = workshop.start(Case(), FaultPlan().at(Fault(rank=1, point="forward", fault="raise", step=2)))
    assert process.wait(60) == 1
    assert "injected exception" in process.output()
