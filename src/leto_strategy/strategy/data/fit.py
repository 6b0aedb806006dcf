"""The data of one trainer's fit: adopts its loaders, says in each step where they stand, reopens them there.

Lightning fetches a batch ahead where it does not know an epoch's length, and one batch may come from several loaders.
So the moment that counts is the top of the epoch loop's `advance`; what was fetched ahead then is fetched again in the
new process, from the state before its fetch.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from leto_strategy.errors import StateChangedError
from leto_strategy.strategy.capture.packing import pack, unpack
from leto_strategy.strategy.capture.rng import RngState, capture_rng, fingerprints, restore_rng
from leto_strategy.strategy.data.draws import generators_of
from leto_strategy.strategy.data.loaders import evaluated, resumable, state_of, twin
from leto_strategy.strategy.data.states import LoaderState, ReplayedState
from leto_strategy.strategy.flavour import Flavour

_TRAINING, _EVALUATION = "train", "val"


class FitData:
    """All loaders of a fit.

    Args:
        trainer: The Trainer, before its loaders are set up.
        flavour: Its distribution.
    """

    def __init__(self, trainer: Any, flavour: Flavour) -> None:
        self._trainer, self._fit = trainer, trainer.fit_loop
        self._set_sampler_epoch: Callable[[Any, int], None] = flavour.fabric_module("utilities.data")._set_sampler_epoch
        self._training: list[LoaderState] = []
        self._evaluation: list[LoaderState | None] = []
        self._training_generators: list[torch.Generator] = []
        self._evaluation_generators: list[torch.Generator] = []
        self._sources: dict[str, tuple[int, RngState | None]] = {}
        self._packed_sources = b""
        self._loaded: bytes | None = None  # states of loaders that a checkpoint brought
        self._note: dict[str, Any] | None = None
        self._pending: dict[str, Any] | None = None
        self._pending_place: dict[str, Any] | None = None
        self._pending_rng: RngState | None = None
        self._pending_sources: dict[str, tuple[int, RngState | None]] = {}
        self._beat: Callable[[], None] = lambda: None
        self._hook_source(_TRAINING, self._fit)
        self._hook_source(_EVALUATION, self._fit.epoch_loop.val_loop)
        self._hook_combined()

    # Loaders are set up.

    def _hook_source(self, name: str, loop: Any) -> None:
        """Note what `train_dataloader()` and `val_dataloader()` saw when they were called last."""
        source = loop._data_source
        request: Callable[[], Any] = source.dataloader

        def dataloader() -> Any:
            if name == _TRAINING:
                self._training, self._training_generators = [], []
            else:
                self._evaluation, self._evaluation_generators = [], []
            pending = self._pending_sources.pop(name, None)
            return self._request(name, request) if pending is None else self._request_again(name, request, *pending)

        source.dataloader = dataloader

    def _request(self, name: str, request: Callable[[], Any]) -> Any:
        rng, before = capture_rng(), fingerprints()
        loaders = request()
        drew = fingerprints() != before
        self._note_source(name, self._trainer.current_epoch, rng if drew else None)
        return loaders

    def _request_again(self, name: str, request: Callable[[], Any], epoch: int, rng: RngState | None) -> Any:
        """Ask for the loaders as they were asked for last: in that epoch, with that random state."""
        progress = self._fit.epoch_progress.current
        now, rng_now = (progress.processed, progress.completed), capture_rng()
        progress.processed = progress.completed = epoch
        if rng is not None:
            restore_rng(rng)
        try:
            return request()
        finally:
            progress.processed, progress.completed = now
            restore_rng(rng_now)
            self._note_source(name, epoch, rng)

    def _note_source(self, name: str, epoch: int, rng: RngState | None) -> None:
        self._sources[name] = (epoch, rng)
        self._packed_sources = pack(self._sources)

    def _hook_combined(self) -> None:
        """Lightning calls this when all training loaders are processed, just before it opens them."""
        load: Callable[[], None] = self._fit._load_combined_loader_states

        def load_states() -> None:
            combined = self._fit._combined_loader
            if not hasattr(combined, "leto"):
                combined.leto = self
                combined.__class__ = _noting(type(combined))  # type: ignore[arg-type]  # a type is hashable
            states = list(self._fit._combined_loader_states_to_load)
            load()
            if states and not self._fit._combined_loader_states_to_load:
                self._loaded = pack(states)
            place = self._pending_place
            if place is not None and self._loaded is not None and all(p["iterations"] == 1 for p in place["loaders"]):
                combined._load_state_dicts(unpack(self._loaded))  # they were loaded before the first iteration

        self._fit._load_combined_loader_states = load_states

    def adopt(self, dataloader: Any) -> Any:
        """Make a loader resumable, and let it open where the record says.

        Args:
            dataloader: A training or validation loader, whichever the Trainer sets up now.

        Returns:
            What takes its place; the same object where that is possible.

        Raises:
            UnsupportedFeatureError: Its place can't be restored exactly.
        """
        if not self._trainer.training:
            return self._adopt_for_evaluation(dataloader)
        index = len(self._training)
        dataloader = resumable(dataloader, index)
        state = state_of(dataloader)
        assert state is not None
        if any(state is other for other in self._training):
            dataloader = resumable(twin(dataloader), index)  # given twice: each has a place of its own
            state = state_of(dataloader)
            assert state is not None
        self._training.append(state)
        self._training_generators += state.generators
        if self._pending_place is None:
            self._say_price(state)
        else:
            places = self._pending_place["loaders"]
            if index >= len(places):
                raise StateChangedError(_other_loaders("training", len(places)))
            epoch = self._fit.epoch_progress.current.processed
            if epoch > 0:  # in the first epoch loaders are opened before their samplers are told the epoch
                self._set_sampler_epoch(dataloader, epoch)
            state.beat = self._beat
            state.reopen(places[index])
        return dataloader

    def _say_price(self, state: LoaderState) -> None:
        if isinstance(state, ReplayedState) and self._trainer.global_rank == 0 and state.iterations == 0:
            warnings.warn(state.price(), stacklevel=2)

    def _adopt_for_evaluation(self, dataloader: Any) -> Any:
        index = len(self._evaluation)
        dataloader = evaluated(dataloader, index)
        state = state_of(dataloader)
        self._evaluation.append(state)
        self._evaluation_generators += generators_of(dataloader)
        if state is not None and self._pending is not None and index < len(self._pending["evaluation"]):
            place = self._pending["evaluation"][index]
            if place is not None:
                state.reopen(place)
        return dataloader

    def generators(self) -> list[torch.Generator]:
        """The users' generators of all loaders, those of training loaders first."""
        return [*self._training_generators, *self._evaluation_generators]

    # A step begins.

    def intercept(self, before_fetch: Callable[[], None]) -> None:
        """Have `before_fetch` called whenever a training batch is about to be fetched."""
        epoch_loop = self._fit.epoch_loop
        advance: Callable[[Any], None] = epoch_loop.advance

        def advance_noted(data_fetcher: Any) -> None:
            before_fetch()
            advance(data_fetcher)

        epoch_loop.advance = advance_noted

    def record(self) -> dict[str, Any]:
        """What a new process needs to return the batch that is about to be returned, and all that follow."""
        fetcher = self._fit._data_fetcher
        ahead = bool(getattr(fetcher, "batches", None))
        return {
            "train": self._place_before_fetch() if ahead else self._place(),
            "attributes": [state.attributes.changes() for state in self._training],
            "sources": self._packed_sources,
            "loaded": self._loaded,
            "evaluation": [state if state is None else state.record() for state in self._evaluation],
        }

    def _place_before_fetch(self) -> dict[str, Any]:
        """Where loaders stood before the batch was fetched that is about to be returned."""
        assert self._note is not None
        if len(self._note["loaders"]) != len(self._training):
            return self._note
        loaders = zip(self._note["loaders"], self._training, strict=True)
        return {**self._note, "loaders": [{**record, **state.record_ahead()} for record, state in loaders]}

    def _place(self) -> dict[str, Any]:
        iterator = self._fit._combined_loader._iterator
        return {
            "loaders": [state.record() for state in self._training],
            "consumed": tuple(getattr(iterator, "_consumed", ())),
            "index": iterator._idx,
        }

    def before_combined_fetch(self) -> None:
        """All loaders that have one are about to be asked for a batch."""
        if self._fit._data_fetcher.length is not None:
            return
        if self._pending_rng is not None:
            restore_rng(self._pending_rng, self.generators())
            self._pending_rng = None
        self._note = {**self._place(), "rng": capture_rng(self.generators())}

    # A promoted trainer.

    def reopen(self, record: dict[str, Any], beat: Callable[[], None]) -> None:
        """Let loaders be set up as `record` says; called before the fit loop is entered in the middle.

        Args:
            record: What `record` returned.
            beat: Called again and again where batches are fetched once more: that may take long.
        """
        self._beat = beat
        fit, val_loop = self._fit, self._fit.epoch_loop.val_loop
        if fit._combined_loader is not None:  # set up early (estimated_stepping_batches): at the wrong place
            if fit._data_fetcher is not None:
                fit._data_fetcher.teardown()
            fit._data_fetcher = fit._combined_loader = None
        self._pending, self._pending_place = record, record["train"]
        self._pending_rng = record["train"].get("rng")
        self._loaded = record["loaded"]
        self._pending_sources = unpack(record["sources"])
        had_evaluation = _EVALUATION in self._pending_sources
        setup: Callable[[], None] = fit.setup_data

        def setup_data() -> None:
            del fit.setup_data
            setup()
            if self._pending_place is not None:
                raise StateChangedError(_other_loaders("training", len(record["train"]["loaders"])))
            for state, changes in zip(self._training, record["attributes"], strict=True):
                state.attributes.restore(changes)
            if had_evaluation and val_loop._combined_loader is None:
                self._trainer.validating = True
                val_loop.setup_data()
                self._trainer.training = True
            self._pending = None

        fit.setup_data = setup_data

    def opened(self, iterator: Any) -> None:
        """All training loaders are open.

        Args:
            iterator: Lightning's iterator over all of them.
        """
        place, self._pending_place = self._pending_place, None
        if place is None:
            return
        if len(place["loaders"]) != len(self._training):
            raise StateChangedError(_other_loaders("training", len(place["loaders"])))
        iterator._idx = place["index"]
        if place["consumed"]:
            iterator._consumed = list(place["consumed"])


@cache
def _noting(base: Any) -> Any:
    """Subclass of a CombinedLoader class that says when it is opened and when it fetches."""

    class Noting(base):  # type: ignore[misc]
        leto: FitData

        def __iter__(self) -> Any:
            super().__iter__()
            self.leto.opened(self._iterator)
            return self

        def __next__(self) -> Any:
            self.leto.before_combined_fetch()
            return super().__next__()

    Noting.__name__, Noting.__qualname__, Noting.__module__ = base.__name__, base.__qualname__, base.__module__
    return Noting


def _other_loaders(kind: str, num_before: int) -> str:
    return (
        f"After a failure the script made other {kind} loaders than the {num_before} that it had made before. With"
        " strategy='leto' it must make the same ones each time."
    )
