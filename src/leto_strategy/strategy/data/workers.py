"""What a worker process sees: the user's dataset, seeded so that randomness depends on batch or epoch, not on the past.

Everything here is pickled to workers that are spawned.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import get_worker_info

from leto_strategy.strategy.data.randomness import mix, seed_worker


class NumberedBatch(list[Any]):
    """The indices of one batch with the batch's seed; a list to everybody else."""

    seed: int = 0

    def __reduce__(self) -> Any:
        return numbered, (list(self), self.seed)


def numbered(indices: list[Any], seed: int) -> NumberedBatch:
    """The indices of a batch and its seed."""
    batch = NumberedBatch(indices)
    batch.seed = seed
    return batch


class _Wrapped:
    """Passes everything through to the user's dataset."""

    def __init__(self, dataset: Any) -> None:
        self.__dict__["leto_dataset"] = dataset

    def __len__(self) -> int:
        return len(self.leto_dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "leto_dataset":
            raise AttributeError(name)
        return getattr(self.__dict__["leto_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.leto_dataset, name, value)


class SeededDataset(_Wrapped):
    """A map-style dataset that seeds before each batch."""

    def __getitems__(self, batch: NumberedBatch) -> Any:
        seed_worker(batch.seed)
        dataset = self.leto_dataset
        if getattr(dataset, "__getitems__", None):
            return dataset.__getitems__(list(batch))
        return [dataset[index] for index in batch]

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, NumberedBatch):  # a loader without automatic batching
            seed_worker(item.seed)
            return self.leto_dataset[item[0]]
        return self.leto_dataset[item]

    def __reduce__(self) -> Any:
        return type(self), (self.leto_dataset,)


class ReseededIterable(_Wrapped):
    """An iterable dataset in persistent workers: seeds at the start of each of its iterations.

    Args:
        dataset: The user's dataset.
        seed: The loader's seed.
        iteration: Number of the iteration that begins first.
    """

    def __init__(self, dataset: Any, seed: int, iteration: int) -> None:
        super().__init__(dataset)
        self.__dict__["leto_place"] = [seed, iteration]

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        place = self.__dict__["leto_place"]
        seed_worker(mix(mix(place[0], place[1]), 0 if info is None else info.id))
        place[1] += 1
        return iter(self.leto_dataset)

    def __reduce__(self) -> Any:
        return type(self), (self.leto_dataset, *self.__dict__["leto_place"])


class _Stateful:
    """The two methods by which torchdata recognises a dataset that has a state, on the class itself."""

    leto_dataset: Any

    def state_dict(self) -> dict[str, Any]:
        return self.leto_dataset.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.leto_dataset.load_state_dict(state)


class StatefulSeededDataset(_Stateful, SeededDataset):
    """`SeededDataset` of one that has a state."""


class StatefulReseededIterable(_Stateful, ReseededIterable):
    """`ReseededIterable` of one that has a state."""


class WorkerStart:
    """A loader's `worker_init_fn`: lets `get_worker_info().dataset` be the user's dataset, then calls the user's."""

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        """Called in the worker, before its dataset is used."""
        info = get_worker_info()
        dataset = getattr(info, "dataset", None)
        if isinstance(dataset, _Wrapped):
            object.__setattr__(info, "dataset", dataset.leto_dataset)
        if self._init is not None:
            self._init(worker)
