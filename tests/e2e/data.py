"""Kinds of training data: each row builds the loaders of one, as a user would, and says what is expected of it.

Every sample carries a number, so that order can be compared, and most draw from all global generators.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    get_worker_info,
    random_split,
)

BATCH_SIZE = 3
BATCHES = 5
"""Batches of an epoch on each rank."""


@dataclass(frozen=True)
class Place:
    """Where loaders are built.

    `combined` is Lightning's CombinedLoader, `datamodule` its LightningDataModule.
    """

    rank: int
    world: int
    combined: Any
    datamodule: Any


@dataclass(frozen=True)
class Kind:
    """One row of the table.

    Args:
        build: Makes training and validation loaders.
        status: "exact", or "refused" with `reason` in the error.
        reason: Why it is refused, as the error says it.
        trainer: Options of the Trainer.
        devices: Number of ranks.
        epochs: Number of epochs.
        batches: Batches of an epoch on each rank.
        val_check_interval: As in the Trainer.
    """

    build: Callable[[Place], tuple[Any, Any]]
    status: str = "exact"
    reason: str = ""
    trainer: dict[str, Any] = field(default_factory=dict)
    devices: int = 2
    epochs: int = 2
    batches: int = BATCHES
    val_check_interval: float | int = 3


def noise() -> torch.Tensor:
    """Drawn from every global generator."""
    return 0.1 * torch.randn(8) + 0.1 * random.gauss(0, 1) + 0.1 * float(numpy.random.rand())


def sample(number: int) -> tuple[torch.Tensor, int]:
    """Sample `number`, augmented."""
    return torch.randn(8, generator=torch.Generator().manual_seed(number)) + noise(), number


class Numbers(Dataset):
    """Map-style samples from `first` on; `factor` is what a user may change from epoch to epoch."""

    def __init__(self, length: int, first: int = 0, factor: float = 1.0) -> None:
        self.length, self.first, self.factor = length, first, factor

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        x, number = sample(self.first + index)
        return x * self.factor, number


class Stream(IterableDataset):
    """Another order each epoch, from the global generator; one shard a rank and worker."""

    def __init__(self, place: Place, length: int = BATCHES * BATCH_SIZE, first: int = 0) -> None:
        self.rank, self.world, self.count, self.first = place.rank, place.world, length, first

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for k in torch.randperm(self.count).tolist():
            if k % workers == worker:
                yield sample(self.first + 1000 * self.rank + k)


class SizedStream(Stream):
    """A stream that knows its length."""

    def __len__(self) -> int:
        return self.count


class EpochStream(Stream):
    """Counts its epochs by itself, and has a generator of its own."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.epoch = 0
        self.own = torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        for k in range(self.count):
            draw = int(torch.randint(100, (1,), generator=self.own))
            yield sample(100000 * self.epoch + 1000 * draw + k)


class StatefulStream(Stream):
    """Can say where it stands, and be set there."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.count:
            self.at += 1
            yield sample(self.first + 1000 * self.rank + self.at)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Batches:
    """An iterable of the user's own, without any class of torch's; another order each epoch."""

    def __init__(self, place: Place) -> None:
        self.rank, self.epoch = place.rank, 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        for k in torch.randperm(BATCHES).tolist():
            yield collate([sample(10000 * self.epoch + 1000 * self.rank + 10 * k + i) for i in range(BATCH_SIZE)])


class SizedBatches(Batches):
    """One that knows its length."""

    def __len__(self) -> int:
        return BATCHES


class Shelf(list[Any]):
    """Batches, in a type that Lightning does not take apart."""


class Halved(DataLoader):
    """Does something to every batch on its way, with randomness in the main process."""

    def __iter__(self) -> Iterator[Any]:
        for x, ids in super().__iter__():
            yield x * 0.5 + noise(), ids


class Batched(Dataset):
    """Each item is a batch already."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return collate([sample(100 * self.first + 10 * index + i) for i in range(BATCH_SIZE)])


class Pairs(Sampler):
    """A batch sampler of the user's own; another order each epoch, which it counts."""

    def __init__(self, place: Place) -> None:
        self.rank, self.world, self.calls = place.rank, place.world, 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[int]]:
        self.calls += 1
        order = numpy.random.RandomState(self.calls).permutation(BATCHES * BATCH_SIZE * self.world)[
            self.rank :: self.world
        ]
        return iter(order.reshape(BATCHES, BATCH_SIZE).tolist())


def collate(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of samples."""
    return torch.stack([x for x, _ in samples]), torch.tensor([number for _, number in samples])


def flatten(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """All samples of a batch, whatever it is made of."""
    found: list[Any] = []

    def look(part: Any) -> None:
        if isinstance(part, dict):
            for key in sorted(part):
                look(part[key])
        elif isinstance(part, (list, tuple)) and len(part) == 2 and isinstance(part[0], torch.Tensor):
            found.append(part)
        elif isinstance(part, (list, tuple)):
            for item in part:
                look(item)

    look(batch)
    return torch.cat([x for x, _ in found]), torch.cat([ids for _, ids in found])


def mapped(place: Place, batches: int = BATCHES, first: int = 0, **options: Any) -> DataLoader:
    """A plain loader over a map-style dataset, to which Lightning gives a distributed sampler."""
    dataset = Numbers(batches * BATCH_SIZE * place.world, first)
    return DataLoader(dataset, BATCH_SIZE, shuffle=True, **options)


def checked(place: Place, **options: Any) -> DataLoader:
    """A validation loader."""
    return DataLoader(Numbers(4 * place.world, 5000), 2, **options)


def streamed(dataset: Any, **options: Any) -> DataLoader:
    """A loader over an iterable dataset."""
    return DataLoader(dataset, BATCH_SIZE, **options)


def own_sampler(place: Place, **options: Any) -> DataLoader:
    """A loader whose sampler and workers draw from a generator that the user passed."""
    dataset = Numbers(BATCHES * BATCH_SIZE)
    generator = torch.Generator().manual_seed(40 + place.rank)
    return DataLoader(dataset, BATCH_SIZE, sampler=RandomSampler(dataset, generator=generator), **options)


def stateful(dataset: Any, place: Place, **options: Any) -> Any:
    """torchdata's loader."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(dataset, BATCH_SIZE, **options)


def alone(build: Callable[[Place], Any]) -> Callable[[Place], tuple[Any, Any]]:
    """With the usual validation loader."""
    return lambda place: (build(place), checked(place))


def combined(mode: str, build: Callable[[Place], Any]) -> Callable[[Place], tuple[Any, Any]]:
    """Several loaders in a mode."""
    return lambda place: (place.combined(build(place), mode), checked(place))


def both(place: Place) -> dict[str, Any]:
    """A short loader over a map-style dataset and a long stream of unknown length."""
    return {"map": mapped(place, 2), "stream": streamed(Stream(place, first=500))}


def both_sized(place: Place) -> dict[str, Any]:
    """Three loaders of different lengths, two with workers."""
    return {
        "short": mapped(place, 2, num_workers=1),
        "long": mapped(place, first=300, num_workers=1, persistent_workers=True),
        "class": SizedBatches(place),
    }


def module_of(place: Place) -> tuple[Any, Any]:
    """A datamodule that makes its loaders anew each time, and depends on epoch and random state."""

    class Module(place.datamodule):  # type: ignore[name-defined, misc]
        def train_dataloader(self) -> Any:
            dataset = Numbers(BATCHES * BATCH_SIZE * place.world + 7, 1000 * self.trainer.current_epoch)
            kept, _ = random_split(dataset, [BATCHES * BATCH_SIZE * place.world, 7])
            return DataLoader(kept, BATCH_SIZE, shuffle=True)

        def val_dataloader(self) -> Any:
            kept, _ = random_split(
                Numbers(20, 5000 + 100 * self.trainer.current_epoch), [4 * place.world, 20 - 4 * place.world]
            )
            return DataLoader(kept, 2)

    return Module(), None


TWO: dict[str, Any] = {"num_workers": 2}
PERSISTENT: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
SPAWN: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "spawn"}
NO_SAMPLER: dict[str, Any] = {"use_distributed_sampler": False}

KINDS: dict[str, Kind] = {
    "map-style": Kind(alone(mapped)),
    "map-style, workers": Kind(alone(lambda p: mapped(p, **TWO))),
    "map-style, persistent workers": Kind(alone(lambda p: mapped(p, **PERSISTENT))),
    "map-style, spawned workers": Kind(alone(lambda p: mapped(p, **SPAWN))),
    "map-style, generator of the user": Kind(alone(own_sampler), trainer=NO_SAMPLER),
    "map-style, generator and persistent workers": Kind(
        alone(lambda p: own_sampler(p, **PERSISTENT, generator=torch.Generator().manual_seed(1))), trainer=NO_SAMPLER
    ),
    "batch sampler": Kind(
        alone(lambda p: DataLoader(Numbers(BATCHES * BATCH_SIZE * p.world), batch_sampler=Pairs(p))), trainer=NO_SAMPLER
    ),
    "batch sampler, persistent workers": Kind(
        alone(lambda p: DataLoader(Numbers(BATCHES * BATCH_SIZE * p.world), batch_sampler=Pairs(p), **PERSISTENT)),
        trainer=NO_SAMPLER,
    ),
    "torch's BatchSampler": Kind(
        alone(
            lambda p: DataLoader(
                Numbers(BATCHES * BATCH_SIZE),
                batch_sampler=BatchSampler(RandomSampler(range(BATCHES * BATCH_SIZE)), BATCH_SIZE, False),
            )
        ),
        trainer=NO_SAMPLER,
    ),
    "no automatic batching": Kind(
        alone(
            lambda p: DataLoader(
                ConcatDataset([Batched(p.rank), Batched(7 + p.rank)]), batch_size=None, shuffle=True, num_workers=1
            )
        ),
        trainer=NO_SAMPLER,
        batches=6,
    ),
    "iterable": Kind(alone(lambda p: streamed(Stream(p))), devices=3),
    "iterable, sized": Kind(alone(lambda p: streamed(SizedStream(p)))),
    "iterable, workers": Kind(alone(lambda p: streamed(Stream(p, 16), **TWO)), batches=6),
    "iterable, persistent workers": Kind(alone(lambda p: streamed(Stream(p, 16), **PERSISTENT)), batches=6),
    "iterable, sized, persistent workers": Kind(alone(lambda p: streamed(SizedStream(p, 12), **PERSISTENT)), batches=4),
    "iterable, spawned workers": Kind(alone(lambda p: streamed(Stream(p), **SPAWN))),
    "iterable with a counter and a generator": Kind(alone(lambda p: streamed(EpochStream(p)))),
    "iterable with a state": Kind(alone(lambda p: streamed(StatefulStream(p)))),
    "StatefulDataLoader": Kind(alone(lambda p: stateful(Numbers(BATCHES * BATCH_SIZE * p.world), p, shuffle=True))),
    "StatefulDataLoader, workers": Kind(
        alone(lambda p: stateful(Numbers(BATCHES * BATCH_SIZE), p, shuffle=True, **TWO)), trainer=NO_SAMPLER
    ),
    "StatefulDataLoader, persistent workers": Kind(
        alone(lambda p: stateful(Numbers(BATCHES * BATCH_SIZE), p, shuffle=True, **PERSISTENT)), trainer=NO_SAMPLER
    ),
    "StatefulDataLoader, iterable with a state": Kind(alone(lambda p: stateful(StatefulStream(p), p))),
    "StatefulDataLoader, iterable, workers": Kind(alone(lambda p: stateful(StatefulStream(p), p, **TWO)), batches=10),
    "StatefulDataLoader, iterable, persistent workers": Kind(
        alone(lambda p: stateful(StatefulStream(p), p, **PERSISTENT)), batches=10
    ),
    "a DataLoader with its own __iter__": Kind(
        alone(lambda p: Halved(Numbers(BATCHES * BATCH_SIZE * p.world), BATCH_SIZE, shuffle=True))
    ),
    "a DataLoader with its own __iter__, persistent workers": Kind(
        alone(lambda p: Halved(Numbers(BATCHES * BATCH_SIZE * p.world), BATCH_SIZE, shuffle=True, **PERSISTENT))
    ),
    "a class of the user's": Kind(alone(Batches)),
    "a class of the user's, sized": Kind(alone(SizedBatches)),
    "a list of the user's own type": Kind(
        alone(lambda p: Shelf(collate([sample(100 * p.rank + 10 * k + i) for i in range(3)]) for k in range(BATCHES)))
    ),
    "a generator": Kind(
        alone(lambda p: (collate([sample(1000 * p.rank + 10 * k + i) for i in range(BATCH_SIZE)]) for k in range(12))),
        trainer={"limit_train_batches": 5},
    ),
    "dict of loaders": Kind(lambda p: (both(p), checked(p)), devices=3),
    "list of loaders": Kind(lambda p: ([mapped(p), mapped(p, 3, first=300)], checked(p))),
    "CombinedLoader, max_size_cycle": Kind(combined("max_size_cycle", both_sized)),
    "CombinedLoader, max_size": Kind(combined("max_size", both)),
    "CombinedLoader, max_size, sized": Kind(combined("max_size", both_sized)),
    "CombinedLoader, min_size": Kind(
        combined("min_size", lambda p: {"stream": streamed(Stream(p)), "map": mapped(p, 4), "class": Batches(p)}),
        batches=4,
    ),
    "CombinedLoader, sequential": Kind(
        combined("sequential", both_sized),
        status="refused",
        reason='does not support the `CombinedLoader(mode="sequential")`',
    ),
    "several validation loaders": Kind(lambda p: (mapped(p), [checked(p), checked(p, num_workers=1)])),
    "validation with persistent workers": Kind(
        lambda p: (mapped(p), [checked(p, **PERSISTENT), streamed(SizedStream(p, 6), **PERSISTENT)])
    ),
    "validation from an iterable": Kind(lambda p: (streamed(Stream(p)), streamed(Stream(p, 6)))),
    "one loader for both": Kind(lambda p: (own_sampler(p, **PERSISTENT),) * 2, trainer=NO_SAMPLER),
    "limit_train_batches": Kind(
        alone(lambda p: streamed(Stream(p, 60))), trainer={"limit_train_batches": 4, "limit_val_batches": 1}, batches=4
    ),
    "overfit_batches": Kind(alone(mapped), trainer={"overfit_batches": 3}, batches=3),
    "datamodule": Kind(module_of),
    "loaders reloaded every epoch": Kind(module_of, trainer={"reload_dataloaders_every_n_epochs": 1}),
    "loaders reloaded every second epoch": Kind(
        module_of, trainer={"reload_dataloaders_every_n_epochs": 2, "check_val_every_n_epoch": 2}, epochs=3
    ),
    "workers that deliver in any order": Kind(
        alone(lambda p: mapped(p, num_workers=1, in_order=False)), status="refused", reason="in_order=False"
    ),
}
