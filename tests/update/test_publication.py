import copy
import io

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from leto_strategy.errors import StateChangedError
from leto_strategy.update import StatePublisher, pack_steps, unpack_steps
from update.rig import Rig, assert_same_state, bytes_of, give_torch, random_gradients


def build_adam() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10))
    return module, Adam(module.parameters(), amsgrad=True)


def build_sgd() -> tuple[nn.Module, Optimizer]:
    module, _ = build_adam()
    return module, SGD(module.parameters(), lr=0.1, momentum=0.9)


def both(build: object, steps: int) -> tuple[Rig, nn.Module, Optimizer]:
    rig, (module, optimizer) = Rig(build), build()  # type: ignore[arg-type, operator]
    advance(rig, module, optimizer, range(steps))
    return rig, module, optimizer


def advance(rig: Rig, module: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        gradients = random_gradients(module, step)
        rig.set_gradients(gradients)
        give_torch(module, gradients)
        optimizer.step()
        rig.update(step)


@pytest.mark.parametrize("build", [build_adam, build_sgd])
def test_a_saved_checkpoint_is_torchs_own_byte_for_byte(build: object) -> None:
    rig, _, optimizer = both(build, 3)
    files = [io.BytesIO(), io.BytesIO()]
    torch.save(rig.optimizer.state_dict(), files[0])
    torch.save(optimizer.state_dict(), files[1])
    assert files[0].getvalue() == files[1].getvalue()


@pytest.mark.parametrize("build", [build_adam, build_sgd])
def test_a_checkpoint_is_taken_over_and_training_goes_on_as_with_torch(build: object) -> None:
    _, module, optimizer = both(build, 3)
    rig = Rig(build)  # type: ignore[arg-type]
    rig.module.load_state_dict(module.state_dict())
    rig.optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    rig.steps = rig.publisher.adopt_state(rig.optimizer)
    assert_same_state(rig, module, optimizer)
    slot = rig.layout.slots[0]
    for name, moment in rig.state.moments(slot).items():
        assert rig.optimizer.state[slot.parameter][name].data_ptr() == moment.data_ptr()
    advance(rig, module, optimizer, range(3, 5))
    assert_same_state(rig, module, optimizer)


def test_taking_over_an_empty_state_starts_anew() -> None:
    rig, _, _ = both(build_adam, 2)
    rig.optimizer.state.clear()
    assert rig.publisher.adopt_state(rig.optimizer) == rig.publisher.initial_steps()
    assert not rig.optimizer.state
    assert all(not moment.any() for slot in rig.layout.slots for moment in rig.state.moments(slot).values())


def test_a_promoted_trainer_publishes_the_same_from_retained_memory() -> None:
    rig, module, optimizer = both(build_adam, 3)
    _, promoted = build_adam()
    promoted.param_groups[0]["params"] = rig.optimizer.param_groups[0]["params"]
    StatePublisher(rig.layout, rig.state, rig.adapter).publish_state(promoted, rig.steps)
    rig.optimizer = promoted
    assert_same_state(rig, module, optimizer)


def test_a_state_replaced_by_the_user_is_an_error_that_names_the_parameter() -> None:
    rig, module, _ = both(build_adam, 1)
    rig.optimizer.state[module[0].weight] = {}  # of another model: not ours
    rig.publisher.publish_state(rig.optimizer, rig.steps)
    rig.optimizer.state[rig.module[1].weight] = {}  # type: ignore[index]
    with pytest.raises(StateChangedError, match=r"1\.weight"):
        rig.publisher.publish_state(rig.optimizer, rig.steps)


@pytest.mark.parametrize("build", [build_adam, build_sgd])
def test_an_entry_written_by_the_user_is_an_error_and_an_update_is_none(build: object) -> None:
    rig, module, optimizer = both(build, 2)
    advance(rig, module, optimizer, range(2, 4))
    rig.publisher.require_unchanged(rig.optimizer)
    with torch.no_grad():
        rig.module[1].weight.add_(0)  # type: ignore[operator, union-attr]
    rig.publisher.require_unchanged(rig.optimizer)
    entries = [tensor for entry in rig.optimizer.state.values() for tensor in entry.values()]
    for tensor in entries:
        tensor.view(-1)[:1].mul_(1)
        with pytest.raises(StateChangedError, match="was written"):
            rig.publisher.require_unchanged(rig.optimizer)
        rig.publisher.publish_state(rig.optimizer, rig.steps)
        rig.publisher.require_unchanged(rig.optimizer)


def test_a_moment_replaced_by_the_user_is_an_error_too() -> None:
    rig, _, _ = both(build_adam, 1)
    rig.optimizer.state[rig.module[1].bias]["exp_avg"] = torch.zeros(10)  # type: ignore[index]
    with pytest.raises(StateChangedError, match=r"1\.bias"):
        rig.publisher.publish_state(rig.optimizer, rig.steps)


def test_a_checkpoint_of_other_options_or_shapes_is_refused_before_anything_is_overwritten() -> None:
    rig, _, _ = both(build_adam, 1)
    before = rig.content()
    del rig.optimizer.state[rig.module[0].weight]["max_exp_avg_sq"]  # type: ignore[index]
    with pytest.raises(ValueError, match=r"state of 0\.weight has step, exp_avg, exp_avg_sq; this optimizer keeps"):
        rig.publisher.adopt_state(rig.optimizer)
    rig, _, _ = both(build_adam, 1)
    rig.optimizer.state[rig.module[0].bias]["exp_avg"] = torch.zeros(3)  # type: ignore[index]
    with pytest.raises(ValueError, match=r"exp_avg of 0\.bias has the shape \(3,\)"):
        rig.publisher.adopt_state(rig.optimizer)
    assert rig.content() == before


def test_steps_are_packed_to_one_number_where_all_are_equal() -> None:
    assert pack_steps([3.0, 3.0]) == 3.0
    assert unpack_steps(3.0, 2) == [3.0, 3.0]
    assert unpack_steps(pack_steps([3.0, 4.0]), 2) == [3.0, 4.0]
    assert unpack_steps(pack_steps([]), 0) == []
    with pytest.raises(ValueError, match="2 step counts for 3"):
        unpack_steps([1.0, 2.0], 3)


def test_bytes_of_a_published_step_are_those_of_a_float() -> None:
    rig, _, _ = both(build_adam, 2)
    step = rig.optimizer.state[rig.layout.slots[0].parameter]["step"]
    assert step.dtype == torch.float32
    assert bytes_of(step) == bytes_of(torch.tensor(2.0))
