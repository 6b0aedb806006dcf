"""What training data share with module and callbacks after a recovery."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from leto_strategy.errors import StateChangedError
from leto_strategy.strategy.capture.sharing import attributes_of, share_again


class Replayed(Dataset[Any]):
    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


def restore(module: Any, data: Any) -> None:
    """As a recovery does: the module's buffer comes back as another object."""
    trainer: Any = SimpleNamespace(fit_loop=SimpleNamespace(_combined_loader=SimpleNamespace(flattened=[data])))
    owners = [("the LightningModule", module)]
    before = attributes_of(owners)
    module.buffer = deque([1, 2])
    share_again(trainer, before, attributes_of(owners))


def test_a_data_set_that_shares_an_object_with_the_module_gets_the_one_that_came_back() -> None:
    buffer: Any = deque()
    data = Replayed(buffer)
    module = SimpleNamespace(buffer=buffer, other=[1])
    restore(module, DataLoader(data))
    assert data.buffer is module.buffer


def test_a_data_set_with_an_object_of_its_own_keeps_it() -> None:
    own: Any = deque()
    data = Replayed(own)
    restore(SimpleNamespace(buffer=deque()), DataLoader(data))
    assert data.buffer is own


@pytest.mark.parametrize("wrap", [lambda b: SimpleNamespace(memory=b), lambda b: [b], lambda b: {"memory": b}])
def test_an_object_in_three_places_is_an_error(wrap: Any) -> None:
    buffer: Any = deque()
    module = SimpleNamespace(buffer=buffer, agent=wrap(buffer))
    with pytest.raises(StateChangedError, match="'buffer' of the LightningModule, 'agent' of the LightningModule"):
        restore(module, DataLoader(Replayed(buffer)))
