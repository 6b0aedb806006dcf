"""A fit that is entered at any step, with loaders made anew, gets the batches that the undisturbed fit got."""

import copy
import gc
import importlib
import multiprocessing
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from tests.e2e.data import (
    BATCH_SIZE,
    BATCHES,
    KINDS,
    PERSISTENT,
    Kind,
    Numbers,
    Place,
    Shelf,
    SizedStream,
    Stream,
    alone,
    collate,
    flatten,
    mapped,
    noise,
    sample,
    streamed,
)
from torch.utils.data import DataLoader, IterDataPipe, Sampler

from leto_strategy.errors import StateChangedError, UnsupportedFeatureError
from leto_strategy.strategy.capture.loops import FitPosition
from leto_strategy.strategy.capture.packing import pack, unpack
from leto_strategy.strategy.capture.rng import capture_rng, restore_rng
from leto_strategy.strategy.data.attributes import AttributeWatch
from leto_strategy.strategy.data.digests import add_batch
from leto_strategy.strategy.data.fit import FitData
from leto_strategy.strategy.data.loaders import resumable
from leto_strategy.strategy.data.randomness import OwnStream
from leto_strategy.strategy.flavour import Flavour
from leto_strategy.strategy.launch.checks import check_fit

pl = importlib.import_module("lightning.pytorch")
FLAVOUR = Flavour("lightning.pytorch", "lightning.fabric")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def workers_end() -> Iterator[None]:
    """Iterators end when they are collected; torchdata kills a worker that does not end at once, and does not wait."""
    yield
    gc.collect()
    for worker in multiprocessing.active_children():
        worker.join(10)


class Model(pl.LightningModule):
    """Notes every batch; its training draws from all global generators, as dropout and the like do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("train", batch)
        return self.weight * noise().sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note("validate", batch)

    def note(self, what: str, batch: Any) -> None:
        x, ids = flatten(batch)
        epoch, step = self.trainer.current_epoch, self.trainer.global_step
        self.seen.append((what, epoch, step, ids.tolist(), x.tolist()))

    def on_train_end(self) -> None:
        for loader in self.trainer.fit_loop._combined_loader.flattened:
            iterator = getattr(loader, "_iterator", None)
            if hasattr(iterator, "_shutdown_workers"):  # Lightning knows torch's iterators only, not torchdata's
                iterator._shutdown_workers()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


class Fit:
    """A fit with `FitData`, in this process and without any other part of the strategy.

    Args:
        kind: What it is trained with.
        model: The module.
    """

    def __init__(self, kind: Kind, model: Any | None = None) -> None:
        torch.manual_seed(7), random.seed(7), numpy.random.seed(7)
        place = Place(0, 1, pl.utilities.CombinedLoader, pl.LightningDataModule)
        self.loaders = kind.build(place)
        self.model = model or Model()
        options = {"max_epochs": kind.epochs, "val_check_interval": kind.val_check_interval, **kind.trainer}
        self.trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=1,
            **options,
        )
        self.data = FitData(self.trainer, FLAVOUR)
        self.trainer.strategy.process_dataloader = self.data.adopt
        loop_class = FLAVOUR.pytorch("loops.loop")._Loop
        self.position = FitPosition(self.trainer, loop_class, FLAVOUR.pytorch("loops.progress")._BaseProgress)
        self.records: list[bytes] = []
        self.marks: list[int] = []
        self.beats: list[None] = []

    def before_fetch(self) -> None:
        state = (self.data.record(), self.position.capture(), capture_rng(self.data.generators()))
        self.records.append(pack(state))
        self.marks.append(len(self.model.seen))

    def run(self, **options: Any) -> list[Any]:
        """To its end; what was seen."""
        self.data.intercept(self.before_fetch)
        training, validation = self.loaders
        if isinstance(training, pl.LightningDataModule):
            self.trainer.fit(self.model, datamodule=training)
        else:
            self.trainer.fit(self.model, training, validation, **options)
        return self.model.seen

    def enter(self, record: bytes) -> None:
        """Go on where `record` was taken."""
        data, position, rng = unpack(record)
        self.data.reopen(data, lambda: self.beats.append(None))
        self.position.enter_epoch(position, lambda: restore_rng(rng, self.data.generators()))

    def run_from(self, record: bytes) -> list[Any]:
        """Entered where `record` was taken."""
        self.enter(record)
        torch.manual_seed(99), random.seed(99), numpy.random.seed(99)  # whatever the new process did before
        return self.run()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    gc.collect()  # torchdata's workers end with their iterator
    multiprocessing.active_children()  # reaps them


def positions(kind: Kind, name: str, num_records: int) -> list[int]:
    """Every step; where workers make a fit slow, those at the edges of epochs and one in the middle."""
    if "workers" in name or "max_size" in name or "both" in name or "no automatic" in name:
        return sorted({1, kind.batches - 1, kind.batches, num_records - 2})
    return list(range(num_records))


EXACT = [name for name, kind in KINDS.items() if kind.status == "exact" and "spawned" not in name]
"""Spawning would leave a helper of `multiprocessing` in this process; the end-to-end tests do it."""


@pytest.mark.parametrize("name", EXACT)
def test_a_fit_that_is_entered_at_a_step_sees_what_the_undisturbed_one_saw(name: str) -> None:
    kind = KINDS[name]
    whole = Fit(kind)
    seen = whole.run()
    assert sum(entry[0] == "train" for entry in seen) == len(whole.records) == kind.epochs * kind.batches
    for step in positions(kind, name, len(whole.records)):
        entered = Fit(kind)
        assert entered.run_from(whole.records[step]) == seen[whole.marks[step] :], f"entered at step {step}"
        # Its records lead to the same place: a trainer that was promoted may die, too.
    second = Fit(kind)
    last = len(entered.records) // 2
    assert second.run_from(entered.records[last]) == entered.model.seen[entered.marks[last] :]


def run_once(kind: Kind) -> Fit:
    fit = Fit(kind)
    fit.run()
    return fit


def error_of(fit: Fit, record: bytes) -> str:
    """What entering at a record says; Lightning's own clean-up may stumble over loaders that did not open."""
    with pytest.raises((RuntimeError, StateChangedError)) as caught:
        fit.run_from(record)
    error = caught.value
    while not isinstance(error, StateChangedError):
        error = error.__context__
    return str(error)


def require_exact_at(kind: Kind, steps: list[int], model: type = Model) -> None:
    whole = Fit(kind, model())
    seen = whole.run()
    for step in steps:
        entered = Fit(kind, model())
        assert entered.run_from(whole.records[step]) == seen[whole.marks[step] :], f"entered at step {step}"


def test_loaders_that_were_set_up_before_the_promotion_are_opened_anew_at_the_right_place() -> None:
    class Early(Model):
        def configure_optimizers(self) -> Any:
            self.expected = self.trainer.estimated_stepping_batches
            self.enter()
            return super().configure_optimizers()

        def enter(self) -> None:
            """In a promoted trainer: go on from a record."""

    kind = KINDS["map-style, generator and persistent workers"]
    whole = Fit(kind, Early())
    seen = whole.run()
    assert whole.model.expected == 2 * BATCHES
    for step in (1, BATCHES + 2):
        entered = Fit(kind, Early())
        entered.model.enter = lambda fit=entered, record=whole.records[step]: fit.enter(record)
        assert entered.run() == seen[whole.marks[step] :]


class Told(Model):
    """Tells its training data the epoch, as users of `datasets` do."""

    def on_train_epoch_start(self) -> None:
        self.trainer.train_dataloader.dataset.set_epoch(self.current_epoch)


class EpochNumbers(Numbers):
    """Another sample in each epoch that it is told."""

    def set_epoch(self, epoch: int) -> None:
        self.first = 1000 * epoch


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}])
def test_an_epoch_that_a_map_style_dataset_was_told_is_carried_over(workers: dict[str, Any]) -> None:
    kind = Kind(
        alone(lambda place: DataLoader(EpochNumbers(BATCHES * BATCH_SIZE), BATCH_SIZE, shuffle=True, **workers))
    )
    require_exact_at(kind, [2, BATCHES, BATCHES + 3], Told)


class Curriculum(Model):
    """Changes its dataset at the start of the first epoch, when loaders are open already, and within each epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 0:
            self.data.factor = 2.0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.data.factor += 1.0

    @property
    def data(self) -> Any:
        return self.trainer.train_dataloader.dataset


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_what_a_hook_changes_in_a_map_style_dataset_is_carried_over(options: dict[str, Any]) -> None:
    kind = Kind(alone(lambda place: mapped(place, **options)))
    require_exact_at(kind, [0, 2, BATCHES, BATCHES + 3], Curriculum)


class LazyOrder(Sampler):
    """Counts its epochs when its first index is drawn."""

    def __init__(self) -> None:
        self.calls = 0

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE

    def __iter__(self) -> Iterator[int]:
        self.calls += 1
        yield from numpy.random.RandomState(self.calls).permutation(len(self)).tolist()


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_a_sampler_that_counts_its_epochs_lazily_gives_the_same_order(options: dict[str, Any]) -> None:
    kind = Kind(
        alone(lambda place: DataLoader(Numbers(BATCHES * BATCH_SIZE), BATCH_SIZE, sampler=LazyOrder(), **options))
    )
    require_exact_at(kind, [0, 2, BATCHES, BATCHES + 3])


def test_an_iterable_dataset_of_the_datasets_package_is_iterated_again_in_its_epoch() -> None:
    datasets = pytest.importorskip("datasets")

    def build(place: Place) -> Any:
        data = datasets.Dataset.from_dict({"id": list(range(BATCHES * BATCH_SIZE))}).to_iterable_dataset(num_shards=3)
        data = data.shuffle(seed=3, buffer_size=4).map(lambda row: dict(zip("xy", sample(row["id"]), strict=True)))
        return DataLoader(data, BATCH_SIZE, collate_fn=lambda rows: collate([(row["x"], row["y"]) for row in rows]))

    require_exact_at(Kind(alone(build)), [0, 2, BATCHES, BATCHES + 3], Told)


@pytest.mark.parametrize("name", ["StatefulDataLoader", "StatefulDataLoader, iterable with a state"])
def test_a_loader_whose_state_a_checkpoint_brought_is_iterated_again_from_there(name: str, tmp_path: Path) -> None:
    class Saves(Model):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1 and not (tmp_path / "middle.ckpt").exists():
                self.trainer.save_checkpoint(tmp_path / "middle.ckpt")

    kind = KINDS[name]
    Fit(kind, Saves()).run()
    whole = Fit(kind)
    seen = whole.run(ckpt_path=tmp_path / "middle.ckpt", weights_only=False)
    for step in (0, 1, BATCHES):
        entered = Fit(kind)
        assert entered.run_from(whole.records[step]) == seen[whole.marks[step] :], f"entered at step {step}"


def test_a_stateful_loader_with_persistent_workers_still_saves_its_sampler() -> None:
    stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")

    def state_of(adopted: bool) -> Any:
        torch.manual_seed(1)
        options = {"shuffle": True, "num_workers": 1, "persistent_workers": True}
        loader = stateful_dataloader.StatefulDataLoader(Numbers(9), BATCH_SIZE, **options)
        batches = iter(resumable(loader, 0) if adopted else loader)
        next(batches)
        state = loader.state_dict()["_snapshot"]["_main_snapshot"]["_sampler_iter_state"]
        loader._iterator = None  # torchdata's workers end in order where nothing else holds their iterator
        return state

    assert repr(state_of(adopted=True)) == repr(state_of(adopted=False))


def test_one_loader_given_twice_has_two_places() -> None:
    def build(place: Place) -> Any:
        loader = mapped(place)
        return {"a": loader, "b": loader}

    require_exact_at(Kind(alone(build)), [0, 3, BATCHES + 1])


def test_data_that_come_out_shorter_are_noticed() -> None:
    kind = KINDS["a list of the user's own type"]
    whole, shorter = run_once(kind), Fit(Kind(alone(lambda place: Shelf(kind.build(place)[0][:2]))))
    text = error_of(shorter, whole.records[4])
    assert "gave 4 batches before a failure and only 2" in text


class Experience(torch.utils.data.IterableDataset[Any]):
    """What a module's own weights make of numbers, as in reinforcement learning."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __iter__(self) -> Iterator[Any]:
        weight = next(self.module.parameters()).detach().reshape(-1)[:1].clone()
        for number in range(4 * BATCH_SIZE):
            yield weight + number, number


def test_batches_that_depend_on_weights_are_noticed_where_an_epoch_is_entered_late() -> None:
    def fit(weight: float) -> Fit:
        model = Model()
        torch.nn.init.constant_(next(model.parameters()), weight)
        loader = DataLoader(Experience(model), batch_size=BATCH_SIZE)
        return Fit(Kind(alone(lambda _: loader)), model)

    whole = fit(1.0)
    seen = whole.run()
    assert fit(1.0).run_from(whole.records[2])[0] == seen[whole.marks[2]]
    assert "gave other batches" in error_of(fit(2.0), whole.records[2])


def test_a_digest_of_batches_tells_what_they_hold() -> None:
    long = torch.arange(100_000.0)
    batches: list[Any] = [
        long, long.double(), long.reshape(10, -1), long.flip(0), long[:-1], torch.zeros(0), torch.tensor(1.0),
        torch.tensor(1.0, dtype=torch.bfloat16), numpy.arange(3), numpy.arange(4), [long], (long,), {"a": long},
        {"b": long}, [long, 1], [long, "1"], None, [None], object(), torch.eye(3).to_sparse(), numpy.float32(1.0),
    ]  # fmt: skip
    digests = [add_batch(0, batch) for batch in batches]
    assert len(set(digests)) == len(batches)
    assert digests == [add_batch(0, copy.deepcopy(batch)) for batch in batches]
    assert add_batch(add_batch(0, 1), 2) != add_batch(add_batch(0, 2), 1)


def test_each_batch_that_is_fetched_again_is_a_sign_of_life() -> None:
    whole, entered = run_once(KINDS["iterable, sized"]), Fit(KINDS["iterable, sized"])
    entered.run_from(whole.records[BATCHES + 3])
    assert len(entered.beats) == 3


def test_an_attribute_that_is_as_setup_made_it_is_left_to_the_new_process() -> None:
    def build(place: Place) -> Any:
        stream = SizedStream(place)
        stream.descriptor = next(descriptors)
        return streamed(stream)

    descriptors = iter(range(5, 50))
    kind = Kind(alone(build))
    whole, entered = run_once(kind), Fit(kind)
    entered.run_from(whole.records[3])
    assert entered.loaders[0].dataset.descriptor == 6


def test_other_loaders_than_before_are_noticed() -> None:
    two, one = run_once(KINDS["list of loaders"]), run_once(KINDS["map-style"])
    assert "other training loaders than the 2" in error_of(Fit(KINDS["map-style"]), two.records[2])
    assert "other training loaders than the 1" in error_of(Fit(KINDS["list of loaders"]), one.records[2])


@pytest.mark.filterwarnings("default")
def test_iterating_again_is_said_at_the_start_and_not_at_a_recovery() -> None:
    kind = KINDS["iterable"]
    with pytest.warns(UserWarning, match="can't set the place of Stream: after a failure it is iterated again"):
        whole = run_once(kind)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*iterated again")
        Fit(kind).run_from(whole.records[3])
        Fit(KINDS["map-style"]).run()


class Pipe(IterDataPipe):
    """A data pipe of torch's."""

    def __iter__(self) -> Iterator[Any]:
        yield from map(sample, range(BATCHES * BATCH_SIZE))


class Hidden:
    """Has a loader inside."""

    def __init__(self, **options: Any) -> None:
        self.inner = DataLoader(Numbers(BATCHES * BATCH_SIZE), BATCH_SIZE, shuffle=True, **options)

    def __iter__(self) -> Iterator[Any]:
        yield from self.inner


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        (lambda: DataLoader(Numbers(9), num_workers=1, in_order=False), "in_order=False"),
        (lambda: DataLoader(Pipe(), **PERSISTENT), "persistent_workers=False"),
        (lambda: Hidden(**PERSISTENT), "inside Hidden"),
    ],
)
def test_what_cannot_be_exact_is_refused(loader: Any, text: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=text):
        resumable(loader(), 0)


def test_a_data_pipe_and_a_loader_inside_another_iterable_are_iterated_again() -> None:
    require_exact_at(Kind(alone(lambda place: DataLoader(Pipe().shuffle(), BATCH_SIZE))), [0, 3, BATCHES + 1])
    require_exact_at(Kind(alone(lambda place: Hidden())), [0, 3, BATCHES + 1])
    require_exact_at(Kind(alone(lambda place: Hidden(num_workers=1))), [3, BATCHES + 1])


def test_a_step_that_takes_the_iterator_is_refused() -> None:
    class Fetches(pl.LightningModule):
        def training_step(self, dataloader_iter: Any) -> None:
            next(dataloader_iter)

    with pytest.raises(UnsupportedFeatureError, match="training_step\\(self, batch, batch_idx\\)"):
        check_fit(SimpleNamespace(lightning_module=Fetches()))


def test_a_stream_of_its_own_leaves_the_global_generators_as_they_were() -> None:
    numpy.random.randn(), random.gauss(0, 1)  # both keep a spare variate
    expected = capture_rng()
    with OwnStream(5):
        first = noise()
    assert pack(capture_rng()) == pack(expected)
    noise()
    with OwnStream(5):
        assert torch.equal(noise(), first)


def test_attributes_of_all_plain_kinds_come_back() -> None:
    class Source:
        def __init__(self) -> None:
            self.count, self.name, self.order, self.table = 1, "a", [3, 4], {"k": 1.5}
            self.epoch = torch.tensor(2)
            self.torch, self.python = torch.Generator().manual_seed(1), random.Random(2)
            self.numpy, self.legacy = numpy.random.default_rng(3), numpy.random.RandomState(4)
            self.inner = Stream(Place(0, 1, None, None))
            self.parts = [Numbers(3), Numbers(4)]

        def draw(self) -> tuple[Any, ...]:
            shared = (self.count, self.name, tuple(self.order), self.table["k"], self.epoch.item(), self.inner.count)
            drawn = (self.python.random(), self.numpy.random(), self.legacy.rand(), self.parts[1].first)
            return (*shared, *drawn, torch.rand((), generator=self.torch).item())

    one, other = Source(), Source()
    watch, others = AttributeWatch(one), AttributeWatch(other)
    assert watch.changes() == {}
    epoch = other.epoch
    one.draw()
    one.late = 5
    one.count, one.name, one.inner.count, one.parts[1].first = 7, "b", 8, 9
    one.order.append(5), one.table.update(k=2.5), one.epoch.add_(1)
    changes = watch.changes()
    assert watch.changes() is changes
    others.restore(unpack(pack(changes)))
    assert other.draw() == one.draw()
    assert other.late == 5
    assert other.epoch is epoch, "in place: a worker may share it"
    one.order.append(6)
    assert watch.changes() != changes, "looked into what can change inside"
