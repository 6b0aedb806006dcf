"""Positions of Lightning's fit loop: read and written counter by counter, and re-entered in the middle of an epoch.

Lightning's own way to restart a loop is not exact in the middle of an epoch; only its switch that keeps
`on_train_epoch_start` from running again is used, everything else is set directly.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from itertools import chain, islice
from operator import attrgetter, call
from typing import Any

_SEEN = "_seen_batches_per_dataloader"
"""Of validation loops: what they log in each batch gets this count, which goes on through a fit, as its step."""
_FLAGS = ("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint")


def _parts(progress: Any) -> Iterator[Any]:
    """A progress object and all progress objects inside it."""
    yield progress
    for field in fields(progress):
        child = getattr(progress, field.name)
        if is_dataclass(child):
            yield from _parts(child)


def _loops(loop: Any, base: type) -> Iterator[Any]:
    yield loop
    for value in vars(loop).values():
        if isinstance(value, base):
            yield from _loops(value, base)


class FitPosition:
    """All counters of a fit loop.

    Args:
        trainer: The Trainer, with its fit loop set up.
        loop_class: Lightning's loop base class.
        progress_class: Lightning's progress base class.
    """

    def __init__(self, trainer: Any, loop_class: type, progress_class: type) -> None:
        self._trainer = trainer
        self._loops = list(_loops(trainer.fit_loop, loop_class))
        self._trackers: list[dict[str, Any]] = []
        self._counters: list[tuple[Any, str]] = []
        for loop in self._loops:
            for value in vars(loop).values():
                if isinstance(value, progress_class):
                    for part in _parts(value):
                        plain = [f.name for f in fields(part) if not is_dataclass(getattr(part, f.name))]
                        if len(plain) == len(vars(part)):
                            self._trackers.append(vars(part))
                        else:
                            self._counters += [(part, name) for name in plain]
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._counters += [(epoch, "_batches_that_stepped"), (fit, "max_epochs"), (fit, "min_epochs")]
        self._counters += [(epoch, "max_steps"), (epoch, "min_steps"), (epoch, "_skip_next_val")]
        self._counters += [(trainer, "should_stop"), (trainer, "accumulate_grad_batches")]
        self._counters += [(fit, "_last_train_dl_reload_epoch"), (epoch.val_loop, "_last_val_dl_reload_epoch")]
        self._counters = [(owner, name) for owner, name in self._counters if hasattr(owner, name)]
        self._owners = [owner for owner, _ in self._counters]
        self._getters = [attrgetter(name) for _, name in self._counters]
        self._evaluations = [loop for loop in self._loops if hasattr(loop, _SEEN)]

    def capture(self) -> tuple[Any, ...]:
        """The values of all counters."""
        # Loops in C: while a model trains, Python code and its constants have left the caches at every step.
        trackers = tuple(chain.from_iterable(map(dict.values, self._trackers)))
        seen = tuple(map(dict, map(attrgetter(_SEEN), self._evaluations)))
        return trackers, tuple(map(call, self._getters, self._owners)), seen

    def restore(self, values: tuple[Any, ...]) -> None:
        """Set all counters."""
        trackers, counters, seen = values
        numbers = iter(trackers)
        for tracker in self._trackers:
            tracker.update(zip(tracker, islice(numbers, len(tracker)), strict=True))
        for (owner, name), value in zip(self._counters, counters, strict=True):
            setattr(owner, name, value)
        for loop, batches in zip(self._evaluations, seen, strict=True):
            getattr(loop, _SEEN).clear()
            getattr(loop, _SEEN).update(batches)

    def restore_for_fetch(self, values: tuple[Any, ...]) -> None:
        """Set all counters to what they are before a batch is fetched.

        `is_last_batch` is set before the START record is taken; left true it would end the epoch at once.
        """
        self.restore(values)
        self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = False

    def enter_epoch(self, values: tuple[Any, ...], then: Callable[[], None]) -> None:
        """Let the next run of the fit loop go straight to the recorded batch of the recorded epoch.

        Args:
            values: The recorded counters.
            then: Called when the epoch loop has started, just before the batch is fetched.
        """
        fit, epoch = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        accumulated = self._trainer.accumulate_grad_batches
        self.restore_for_fetch(values)
        self._trainer.accumulate_grad_batches = accumulated  # start hooks check what the user has set
        fit._restarting = fit._resuming_from_checkpoint = True  # no on_train_epoch_start, no second iter()
        epoch.val_loop._restarting = True  # no sanity check
        start: Callable[[Any], None] = epoch.on_run_start

        def on_run_start(data_fetcher: Any) -> None:
            del epoch.on_run_start
            self.restore_for_fetch(values)
            start(data_fetcher)
            for loop in self._loops:
                for flag in _FLAGS:
                    setattr(loop, flag, False)
                loop.reset_restart_stage()
            then()

        epoch.on_run_start = on_run_start
