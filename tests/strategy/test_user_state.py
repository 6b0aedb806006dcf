"""Attributes of a user's objects: what a step changed comes back, whatever the promoted trainer's own setup made."""

import copy
import re
from collections import defaultdict, deque
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from leto_strategy.strategy.capture.packing import pack, unpack
from leto_strategy.strategy.capture.sameness import Sight
from leto_strategy.strategy.capture.user_state import UserState


class Colour(Enum):
    RED = 1
    BLUE = 2


class Mine:
    """A user's object with one attribute of many kinds."""

    def __init__(self) -> None:
        self.number = 1
        self.text = "a"
        self.nothing: Any = None
        self.outputs: list[Any] = []
        self.names = {"a": [1.0]}
        self.counts: Any = defaultdict(int)
        self.window: Any = deque([1, 2], maxlen=3)
        self.tags = {"x"}
        self.tensor = torch.zeros(3)
        self.scalar = torch.tensor(1.0)
        self.colour = Colour.RED
        self.path = Path("/a")
        self.nested = {"deep": [{"t": torch.zeros(2)}]}
        self.going = 5
        self.function = lambda: 1
        self.opaque = open("/dev/null")  # noqa: SIM115

    def close(self) -> None:
        self.opaque.close()


CHANGES: dict[str, Any] = {
    "number": lambda o: setattr(o, "number", 2),
    "a number becomes another type": lambda o: setattr(o, "number", 1.0),
    "text": lambda o: setattr(o, "text", "b"),
    "nothing becomes something": lambda o: setattr(o, "nothing", [1]),
    "something becomes nothing": lambda o: setattr(o, "text", None),
    "append": lambda o: o.outputs.append(1.5),
    "append a tensor": lambda o: o.outputs.append(torch.ones(2)),
    "value of a dict": lambda o: o.names["a"].append(2.0),
    "new key": lambda o: o.names.update(b=[]),
    "defaultdict": lambda o: o.counts.__setitem__("k", 3),
    "deque": lambda o: o.window.append(9),
    "set": lambda o: o.tags.add("y"),
    "tensor in place": lambda o: o.tensor.add_(1),
    "tensor through .data": lambda o: o.tensor.data.add_(1),
    "tensor through numpy": lambda o: o.tensor.numpy().__iadd__(1),
    "scalar tensor": lambda o: o.scalar.mul_(2),
    "enum": lambda o: setattr(o, "colour", Colour.BLUE),
    "path": lambda o: setattr(o, "path", Path("/b")),
    "deep inside": lambda o: o.nested["deep"][0]["t"].add_(1),
    "deleted": lambda o: delattr(o, "going"),
    "added": lambda o: setattr(o, "late", {"k": 1}),
}


def seen(owner: Mine) -> dict[str, Any]:
    values = {k: v for k, v in vars(owner).items() if k not in ("function", "opaque")}
    return {k: re.sub(r"0x[0-9a-f]+", "", repr(v)) for k, v in sorted(values.items())}


@pytest.fixture
def two() -> Any:
    owners = [Mine(), Mine()]
    yield owners
    for owner in owners:
        owner.close()


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_found_and_restored(two: list[Mine], name: str) -> None:
    """The state is captured before, after, and after once more, as a run does at every step."""
    here, there = two
    source, target = (UserState([("mine", owner)], skip=()) for owner in two)
    for state in (source, target):
        state.accept_start_hooks()
    unchanged = unpack(pack(source.capture()))
    assert unchanged == [{}]
    CHANGES[name](here)
    captured = unpack(pack(source.capture()))
    assert captured != [{}], "the change was not seen"
    again = unpack(pack(source.capture()))
    there.number, there.late = 77, "what a start hook left"
    target.restore(captured)
    assert seen(there) == seen(here)
    target.restore(again)
    assert seen(there) == seen(here)
    target.restore(unchanged)
    assert seen(there) == seen(Mine())


def test_a_change_that_is_taken_back_is_seen_too(two: list[Mine]) -> None:
    here, _ = two
    state = UserState([("mine", here)], skip=())
    for round_number in range(3):
        here.outputs.append(round_number)
        here.number = 5
        assert set(state.capture()[0]) == {"outputs", "number"}
        here.outputs.clear()
        here.number = 1
        assert state.capture() == [{}]


def test_what_cannot_be_carried_is_named_once(two: list[Mine]) -> None:
    here, _ = two
    state = UserState([("mine", here)], skip=())
    here.outputs.append(here.opaque)
    with pytest.warns(UserWarning, match="'outputs' of mine"):
        state.capture()
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.capture()


VALUES: list[Any] = [
    1, 1.0, "a", None, [1, 2], [1, [2]], {"a": 1}, {"a": [1]}, deque([1]), (1, [2]), torch.zeros(2), torch.tensor(1.0),
    {"a": torch.zeros(2)}, {1, 2}, bytearray(b"x"),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_sight_never_takes_another_object_for_the_same(value: Any) -> None:
    sight = Sight(value)
    other = copy.deepcopy(value)
    if isinstance(other, (list, deque)):
        other.append(3)
        value.append(3)
    elif isinstance(other, dict):
        value["b"] = 1
    elif isinstance(other, torch.Tensor):
        value.data.add_(1)
    elif isinstance(other, (set, bytearray, tuple)):
        assert not sight.same(value) or isinstance(value, tuple)
        return
    else:
        assert sight.same(value)
        return
    assert not sight.same(value)


def test_references_to_parameters_stay_references(two: list[Mine]) -> None:
    here, there = two
    layer = torch.nn.Linear(1, 1)
    here.outputs = there.outputs = [layer.weight]
    source, target = (UserState([("mine", owner)], skip=()) for owner in two)
    here.number = 9
    target.restore(unpack(pack(source.capture())))
    assert there.number == 9
    assert there.outputs[0] is layer.weight


def test_what_only_the_start_hooks_can_make_is_left_alone(two: list[Mine]) -> None:
    """Before them the attribute was None; what they made can't be packed."""
    here, there = two
    source, target = (UserState([("mine", owner)], skip=()) for owner in two)
    for owner, state in ((here, source), (there, target)):
        owner.nothing = lambda: 7
        state.accept_start_hooks()
    target.restore(unpack(pack(source.capture())))
    assert there.nothing() == 7


def test_an_unchanged_object_stays_the_same_object(two: list[Mine]) -> None:
    _, there = two
    source, target = (UserState([("mine", owner)], skip=()) for owner in two)
    held = there.names
    target.restore(unpack(pack(source.capture())))
    assert there.names is held


def test_signs_of_zero_are_told_apart(two: list[Mine]) -> None:
    here, _ = two
    here.number = 0.0
    state = UserState([("mine", here)], skip=())
    here.number = -0.0
    assert state.capture()[0] == {"number": 0.0}


def a_function() -> int:
    return 1


def another_function() -> int:
    return 2


class WithFunctions:
    def __init__(self) -> None:
        self.chosen: Any = a_function
        self.step: Any = a_function


def test_a_function_that_was_exchanged_comes_back_and_one_that_cannot_is_named() -> None:
    mine, other = WithFunctions(), WithFunctions()
    before, after = UserState([("mine", mine)], skip=()), UserState([("mine", other)], skip=())
    mine.chosen = another_function
    after.restore(unpack(pack(before.capture())))
    assert (other.chosen, other.step) == (another_function, a_function)
    mine.step = lambda: 3
    with pytest.warns(UserWarning, match="can't carry the attribute 'step'"):
        before.capture()


def test_an_iterator_that_a_start_hook_made_is_named_and_a_file_is_not() -> None:
    mine = WithFunctions()
    state = UserState([("mine", mine)], skip=())
    with open("/dev/null") as file:
        mine.chosen, mine.step = iter(x for x in [1, 2]), file
        with pytest.warns(UserWarning, match="'chosen' of mine is an iterator") as caught:
            state.accept_start_hooks()
    assert len(caught) == 1
