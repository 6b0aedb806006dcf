"""One trainer's part of a fit on retained memory: its records and words, from promotion to the last step.

A step is a transaction: from the first batch after the last attempt to update, to the next attempt. With accumulated
gradients it has several batches; an attempt that is skipped ends it, too. The strategy calls this at fixed places of
Lightning's loop; how state survives is the updater's. Rules: R1-R5, R8, R9, R13.
"""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from leto_strategy.config import LetoConfig, TrainerIdentity
from leto_strategy.errors import PoolError, RecordError, UnsupportedFeatureError
from leto_strategy.faults import CrashPoints
from leto_strategy.memory.backend import Kind, Region, RegionSpec
from leto_strategy.memory.pool import ResilientMemoryPool
from leto_strategy.progress import PAGE_BYTES, Activity, Marker, Phase, ProgressPage
from leto_strategy.recovery.decision import Mode, may_record_start
from leto_strategy.recovery.records import RecordKind, RecordRing
from leto_strategy.strategy.capture.checkpoints import CheckpointJournal
from leto_strategy.strategy.capture.packing import pack_record, unpack_record
from leto_strategy.strategy.capture.snapshot import FitSnapshot
from leto_strategy.strategy.capture.tensors import freeze, thaw
from leto_strategy.strategy.data.fit import FitData
from leto_strategy.strategy.flavour import Flavour
from leto_strategy.strategy.rehearsal.rehearsal import Rehearsal
from leto_strategy.strategy.streams import trap_of, words_of
from leto_strategy.strategy.updaters.base import Updater
from leto_strategy.strategy.updaters.choice import choose_updater

_LAYOUT_REGION = "layout"
_CONNECT_TIMEOUT = timedelta(seconds=30)
_STREAM_TIMEOUT = timedelta(days=1)  # whether a step hangs is the watchdog's to say


class FitSession:
    """State of one rank's fit.

    Args:
        identity: Who this trainer is.
        config: The user's options.
        trainer: The Trainer, its model and callbacks set up.
        optimizers: Its optimizers.

    Raises:
        UnsupportedOptimizerError: Before anything is allocated.
        LayoutMismatchError: This generation built another model than the one before.
    """

    def __init__(self, identity: TrainerIdentity, config: LetoConfig, trainer: Any, optimizers: list[Any]) -> None:
        self.identity = identity
        self.pool = ResilientMemoryPool.connect(
            identity.manager_address, timeout=_CONNECT_TIMEOUT, writable=identity.role == "active"
        )
        self._device = torch.device(self.pool.device)
        self.updater, self.why_snapshots = choose_updater(config, trainer, optimizers, self.pool, world=identity.world)
        (self._page_region,) = self.pool.allocate([RegionSpec("progress", PAGE_BYTES, Kind.RECORD)])
        self._layout_region = self._check_layout(self.updater)
        self.updater.allocate()
        self.rehearsal = Rehearsal(self.pool, trainer.lightning_module, wanted=config.warm_up)
        RecordRing(self.pool)  # maps the records now, not in the middle of a recovery
        self.snapshot: FitSnapshot | None = None
        self.data: FitData | None = None
        self.step = 0
        self._attached = False
        self._start: dict[str, Any] | None = None
        self._mid: dict[str, Any] | None = None
        self._entering: Callable[[int], None] | None = None
        self._before_batch: dict[str, Any] = {}
        self._open = False  # a step has begun and not ended
        self._first_batch = True  # the batch at hand is the first of its step

    def _check_layout(self, updater: Updater) -> Region:
        """The region that holds the layout's signature; compared before anything of this layout is allocated."""
        signature = updater.signature()
        try:
            region = self.pool.attach(_LAYOUT_REGION)
        except PoolError:
            size_bytes = max(4096, 1 << len(signature).bit_length())
            (region,) = self.pool.allocate([RegionSpec(_LAYOUT_REGION, size_bytes, Kind.RECORD)])
        stored = bytes(self.pool.buffer(region)).rstrip(b"\0").decode()
        if stored:
            updater.require_signature(stored)
        return region

    @property
    def resuming(self) -> bool:
        """Whether this trainer enters a step that another generation has begun."""
        return self._start is not None

    @property
    def finishing(self) -> bool:
        """Whether the step that is entered needs its update finished only."""
        return self._mid is not None

    @property
    def attempted(self) -> bool:
        """Whether an attempt to update has ended the last step, so that none is open."""
        return not self._open

    def rehearse(self, flavour: Flavour) -> Iterator[float]:
        """What a shadow does while it waits, piece by piece; yields seconds until the next piece."""
        self.updater.rehearse()
        yield 0.0
        yield from self.rehearsal.work(flavour)

    def prepare(self) -> None:
        """The active generation is being killed: change the access of mappings now, while the fence is waited for."""
        self.pool.make_writable()

    def promoted(self, mode: str, step: int, entered: Callable[[int], None]) -> None:
        """This trainer is the active one from now on; memory may be written.

        Args:
            mode: How it begins; a `Mode`.
            step: Transaction number at which it begins.
            entered: Called with the step of the first forward pass that was not done yet.
        """
        self.pool.make_writable()
        page_buffer = self.pool.buffer(self._page_region)
        self.page = ProgressPage(page_buffer)
        self.words = words_of(self.page, self.pool, self._page_region)
        self.reach = CrashPoints(page_buffer, generation=self.identity.generation, trap=trap_of(self.pool))
        self.records = RecordRing(self.pool, reach=self.reach)
        self.journal = CheckpointJournal(self.records if self.identity.rank == 0 else None)
        self.updater.promoted(self.page, self.words, self.records, self.reach)
        self.page.generation = self.identity.generation
        self.step, self._entering = step, entered
        self.heartbeat(Activity.STARTING)
        self.reach("gate", step)
        if mode == Mode.FRESH:
            signature = self.updater.signature().encode()
            self.pool.buffer(self._layout_region)[: len(signature)] = signature
            return
        self._start = unpack_record(self.records.read(RecordKind.START, step), self._device)
        if mode == Mode.FINISH:
            self._mid = unpack_record(self.records.read(RecordKind.MID, step), self._device)
        self.journal.reenter_step(step)

    def entry_record(self) -> dict[str, Any]:
        """Where the loop is entered: before the first batch of the step, or before the last if only that is left."""
        assert self._start is not None
        if self._mid is not None and self._mid["enter"] is not None:
            entry: dict[str, Any] = self._mid["enter"]
            return entry
        return self._start

    def attach(self) -> None:
        """Take over the state; at the very beginning it becomes the retained one."""
        self.updater.attach(resuming=self.resuming)
        self._attached = True
        assert self.snapshot is not None
        self.snapshot.user.accept_start_hooks()
        self.reach("attached", self.step)

    def heartbeat(self, activity: Activity) -> None:
        """Tell the watchdog that this trainer lives and what it does."""
        self.page.beat(activity)

    def enter_resumed_step(self) -> None:
        """Apply the record at which the loop is entered, just before its batch is fetched."""
        assert self.snapshot is not None
        assert self._start is not None
        self.updater.enter(self.step, self._start["updater"], finishing=self.finishing)
        self.snapshot.restore(self.entry_record()["snapshot"], before_fetch=True, logs=not self.finishing)
        self.page.step = self.step
        self.heartbeat(Activity.STEP)
        self.reach("restored", self.step)

    def before_batch(self) -> None:
        """A training batch is about to be fetched: from here on everything happens again if the step is redone."""
        if self._start is None and self.snapshot is not None and self._attached:
            assert self.data is not None
            self._before_batch = {
                "snapshot": self.snapshot.capture(),
                "data": self.data.record(),
                "touched": b"" if self._open else self.updater.touched(),
            }

    def batch_fetched(self) -> None:
        """A training batch is here: begin the next step, go on with it, or go on with the one that was entered."""
        self._first_batch = not self._open
        if self._start is not None:
            self._start, self._open = None, True
            self.updater.begin_step()
            return
        if self._open:
            self.heartbeat(Activity.STEP)
            return
        self.updater.check_start()
        self.page.step = self.step
        self.heartbeat(Activity.STEP)
        self.reach("start_before", self.step)
        touched = self._before_batch.pop("touched")
        record = {**self._before_batch, "updater": self.updater.start_part(self.step, touched)}
        self._make_room()
        self._write(RecordKind.START, record)
        self.journal.enter_step(self.step)
        self._open = True
        self.updater.begin_step()
        self.reach("start_after", self.step)

    def quieten(self, closure: Any, result_class: type) -> None:
        """Where only an update is to be finished, nobody may compute gradients again: half the parameters are new.

        A user's `optimizer_step` may call the closure itself, ahead of the optimizer.
        """
        if self._mid is None:
            return
        mid = self._mid
        closure._step_fn = lambda: result_class(thaw(mid["loss"]), extra=mid["output"])
        closure._zero_grad_fn = closure._backward_fn = None

    def before_forward(self) -> None:
        """The user's training step is about to run."""
        if self._entering is not None:
            if self.pool.on_device:  # entered is when the device has come to this place, too
                torch.cuda.current_stream(self._device).synchronize()
            self.page.entered_ns = time.monotonic_ns()
            self._entering(self.step)
            self._entering = None
        self.heartbeat(Activity.STEP)
        self.reach("forward", self.step)

    def end_step(self, *, loss: Any, output: Any, skipped: bool = False, **more: Any) -> None:
        """All that can't be repeated of the step is done: record it, synchronise, finish the update (R1, R6).

        Args:
            loss: What the closure returned.
            output: Further outputs of the training step.
            skipped: The attempt changes nothing.
            more: What the caller wants to find in `recall`.

        Raises:
            UnsupportedFeatureError: The step of this batch has ended already.
        """
        if not self._open:
            raise UnsupportedFeatureError(
                "A second optimizer step in one batch, which the transactional updater can't follow. Use"
                " LetoStrategy(updater='sync_snapshot')."
            )
        assert self.snapshot is not None
        self.reach("gradients", self.step)
        part = self.updater.mid_part(self.step, skipped=skipped)
        mid = {
            "snapshot": self.snapshot.capture(),
            "loss": freeze(loss),
            "output": output,
            "updater": part,
            "enter": None if self._first_batch else self._before_batch,
            **more,
        }
        self._write(RecordKind.MID, mid)
        self.reach("mid_after", self.step)
        marker = Marker(self.step, Phase.READY)
        self.words.publish(marker)
        self.reach("ready", self.step)
        self._finish(part, marker)

    def recall(self) -> dict[str, Any]:
        """Finish the step that a dead generation left with its gradients done; its MID record, side effects applied."""
        assert self.snapshot is not None
        assert self._mid is not None
        mid, self._mid = self._mid, None
        self.updater.recall(self.step, mid["updater"])
        self.snapshot.restore(mid["snapshot"], before_fetch=False, logs=True)
        marker = self.page.marker
        if marker is None or marker.step != self.step:
            raise RecordError(f"the word of step {self.step} says {marker}")
        self._finish(mid["updater"], marker)
        return {**mid, "loss": thaw(mid["loss"])}

    def _finish(self, part: dict[str, Any], marker: Marker) -> None:
        self.heartbeat(Activity.STEP)
        self._synchronise()
        if marker.phase < Phase.SYNCED:
            marker = Marker(self.step, Phase.SYNCED)
            self.words.publish(marker)
        self.reach("synced", self.step)
        self.updater.finish(self.step, part, marker)
        self._open = False
        self.step += 1

    def _make_room(self) -> None:
        """R4: a record slot is used again only when the stream has left the step whose record it held."""
        if self.words.wait_until(lambda marker: may_record_start(self.step, marker), _STREAM_TIMEOUT):
            self.page.slot_waits += 1

    def _write(self, kind: RecordKind, value: dict[str, Any]) -> None:
        data, streamed = pack_record(value, self._device, self.pool.driver)
        self.records.write(kind, self.step, data, streamed)

    def _synchronise(self) -> None:
        """The global synchronisation: no rank begins an update before every rank's gradients are final (R6).

        On a GPU it must be ordered like READY, in the stream, so it is a collective of that device.
        """
        if self.identity.world > 1:
            self.page.waits += 1
            dist.all_reduce(torch.zeros(1, device=self._device))
