"""One trainer's part of a fit on retained memory: its records, words and update, from promotion to the last step.

The strategy calls it at fixed places of Lightning's loop; everything that decides about exactness is here, free of
Lightning's class hierarchy. Rules: R1-R5, R8, R13.
"""

import time
from collections.abc import Callable
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
from leto_strategy.recovery.decision import Mode
from leto_strategy.recovery.records import RecordKind, RecordRing
from leto_strategy.strategy.capture.checkpoints import CheckpointJournal
from leto_strategy.strategy.capture.packing import pack, unpack
from leto_strategy.strategy.capture.snapshot import FitSnapshot, hyper_parameters, require_same_groups
from leto_strategy.strategy.loaders import LoaderState
from leto_strategy.strategy.reducer import GradientReducer
from leto_strategy.update.layout import StateLayout
from leto_strategy.update.optimizers import adapter_for
from leto_strategy.update.publication import StatePublisher, pack_steps, unpack_steps
from leto_strategy.update.state import RetainedState
from leto_strategy.update.transaction import ResumableModelUpdater

_LAYOUT_REGION = "layout"
_CONNECT_TIMEOUT = timedelta(seconds=30)


class FitSession:
    """State of one rank's fit.

    Args:
        identity: Who this trainer is.
        config: The user's options.
        module: The model.
        optimizer: Its optimizer.

    Raises:
        UnsupportedOptimizerError: Before anything is allocated.
        LayoutMismatchError: This generation built another model than the one before.
    """

    def __init__(
        self, identity: TrainerIdentity, config: LetoConfig, module: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        adapter = adapter_for(optimizer)
        bucket_bytes = int(config.bucket_cap_mb * (1 << 20))
        self.layout = StateLayout.plan(
            list(module.named_parameters()),
            optimizer,
            adapter,
            chunk_bytes=config.chunk_bytes,
            bucket_bytes=bucket_bytes,
        )
        self.identity, self.config, self.optimizer = identity, config, optimizer
        self.pool = ResilientMemoryPool.connect(
            identity.manager_address, timeout=_CONNECT_TIMEOUT, writable=identity.role == "active"
        )
        (self._page_region,) = self.pool.allocate([RegionSpec("progress", PAGE_BYTES, Kind.RECORD)])
        self._layout_region = self._check_layout()
        self.state = RetainedState(self.layout, self.pool)
        RecordRing(self.pool)  # maps the records now, not in the middle of a recovery
        self._adapter = adapter
        self._num_parameters = [len(group["params"]) for group in optimizer.param_groups]
        self._publisher = StatePublisher(self.layout, self.state, adapter)
        self.reducer: GradientReducer | None = None
        self.snapshot: FitSnapshot | None = None
        self.loaders: list[LoaderState] = []
        self.step = 0
        self.steps_before = self._publisher.initial_steps()
        self._start: dict[str, Any] | None = None
        self._mid: dict[str, Any] | None = None
        self._entering: Callable[[int], None] | None = None
        self._before_fetch: tuple[dict[str, Any], bytes] | None = None
        self._started = -1

    def _check_layout(self) -> Region:
        """The region that holds the layout's signature; compared before anything of this layout is allocated."""
        signature = self.layout.signature()
        try:
            region = self.pool.attach(_LAYOUT_REGION)
        except PoolError:
            size_bytes = max(4096, 1 << len(signature).bit_length())
            (region,) = self.pool.allocate([RegionSpec(_LAYOUT_REGION, size_bytes, Kind.RECORD)])
        stored = bytes(self.pool.buffer(region)).rstrip(b"\0").decode()
        if stored:
            self.layout.require_signature(stored)
        return region

    @property
    def resuming(self) -> bool:
        """Whether this trainer enters a step that another generation has begun."""
        return self._start is not None

    @property
    def finishing(self) -> bool:
        """Whether the step that is entered needs its update finished only."""
        return self._mid is not None

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
        self.reach = CrashPoints(page_buffer, generation=self.identity.generation)
        self.records = RecordRing(self.pool, reach=self.reach)
        self.journal = CheckpointJournal(self.records if self.identity.rank == 0 else None)
        self.updater = ResumableModelUpdater(self.layout, self.state, self.page, self._adapter, reach=self.reach)
        self.page.generation = self.identity.generation
        self.step, self._entering = step, entered
        self.heartbeat(Activity.STARTING)
        self.reach("gate", step)
        if mode == Mode.FRESH:
            signature = self.layout.signature().encode()
            self.pool.buffer(self._layout_region)[: len(signature)] = signature
            return
        self._start = unpack(self.records.read(RecordKind.START, step))
        if mode == Mode.FINISH:
            self._mid = unpack(self.records.read(RecordKind.MID, step))
        self.journal.reenter_step(step)

    def start_record(self) -> dict[str, Any]:
        """The START record of the step that is entered."""
        assert self._start is not None
        return self._start

    def attach(self) -> None:
        """Let parameters be retained memory; at the very beginning copy their values there first."""
        if not self.resuming:
            self.state.copy_parameters_in()
            self.steps_before = self._publisher.adopt_state(self.optimizer)
        self.state.attach_parameters()
        slots = self.layout.slots
        self._gradients = [self.state.gradient(slot) for slot in slots]
        index_of = {slot.name: i for i, slot in enumerate(slots)}
        self.reducer = GradientReducer(
            [slot.parameter for slot in slots],
            self._gradients,
            [[index_of[slot.name] for slot in bucket.slots] for bucket in self.layout.buckets],
            [self.state.bucket(i) for i in range(len(self.layout.buckets))],
            launch_order=self.layout.launch_order,
            world=self.identity.world,
            find_unused=self.config.find_unused_parameters,
            on_first_gradient=lambda: self.reach("backward", self.step),
            names=[slot.name for slot in slots],
        )
        assert self.snapshot is not None
        self.snapshot.user.accept_start_hooks()
        self.snapshot.note_parameters()
        self.reach("attached", self.step)

    def heartbeat(self, activity: Activity) -> None:
        """Tell the watchdog that this trainer lives and what it does."""
        self.page.activity = activity
        self.page.heartbeat += 1

    def enter_resumed_step(self) -> None:
        """Apply START of the step that is entered, just before its batch is fetched."""
        assert self.snapshot is not None
        start = self.start_record()
        assert self.reducer is not None
        self.snapshot.restore(start["snapshot"], before_fetch=True, logs=not self.finishing)
        self.reducer.restore(start["touched"])  # zero_grad finds what it would have found
        self.steps_before = unpack_steps(start["steps"], len(self.layout.slots))
        self._publisher.publish_state(self.optimizer, self.steps_before)
        self.page.step = self.step
        self.heartbeat(Activity.STEP)
        self.reach("restored", self.step)

    def before_fetch(self) -> None:
        """A training batch is about to be fetched: from here on everything happens again if the step is redone."""
        if self._start is None and self.snapshot is not None and self.reducer is not None:
            touched = bytes([slot.parameter.grad is not None for slot in self.layout.slots])
            self._before_fetch = (self.snapshot.capture(), touched)

    def batch_fetched(self) -> None:
        """A training batch is here: begin the next step, or go on with the one that was entered."""
        if self._start is not None:
            self._start, self._started = None, self.step
            return
        assert self.snapshot is not None
        assert self._before_fetch is not None
        if self._started == self.step and self.identity.world > 1:
            raise UnsupportedFeatureError(
                "A training batch went by without an optimizer step (on_train_batch_start returned -1, or"
                " optimizer_step did not step). With several ranks strategy='leto' can't restore that exactly yet."
            )
        self._started = self.step
        snapshot, touched = self._before_fetch
        self.snapshot.require_untouched_parameters()
        require_same_groups(self.optimizer, self._num_parameters)
        self.page.step = self.step
        self.heartbeat(Activity.STEP)
        self.reach("start_before", self.step)
        record = {
            "snapshot": snapshot,
            "touched": touched,
            "steps": pack_steps(self.steps_before),
            "loaders": [loader.record() for loader in self.loaders],
        }
        self.records.write(RecordKind.START, self.step, pack(record))
        self.journal.enter_step(self.step)
        self.reach("start_after", self.step)

    def quieten(self, closure: Any, result_class: type) -> None:
        """Where only an update is to be finished, nobody may compute gradients again: half the parameters are new.

        A user's `optimizer_step` may call the closure itself, ahead of the optimizer.
        """
        if self._mid is None:
            return
        mid = self._mid
        closure._step_fn = lambda: result_class(mid["loss"], extra=mid["extra"])
        closure._zero_grad_fn = closure._backward_fn = None

    def before_backward(self) -> None:
        """Gradients must be absent or zero: what an earlier step left in them is not in its record.

        Raises:
            UnsupportedFeatureError: They are not.
        """
        for slot in self.layout.slots:
            gradient = slot.parameter.grad
            if gradient is not None and bool(gradient.any()):
                raise UnsupportedFeatureError(
                    f"The gradient of {slot.name!r} is carried over from one step to the next (zero_grad was not"
                    " called); strategy='leto' can't restore that yet."
                )

    def before_forward(self) -> None:
        """The user's training step is about to run."""
        assert self.reducer is not None
        self.reducer.begin_step()
        self._tell_entered()
        self.heartbeat(Activity.STEP)
        self.reach("forward", self.step)

    def _tell_entered(self) -> None:
        if self._entering is not None:
            self.page.entered_ns = time.monotonic_ns()
            self._entering(self.step)
            self._entering = None

    def update(self, run_closure: Callable[[], Any], closure: Any, result_class: type) -> Any:
        """One optimizer step: gradients, records, synchronisation, chunked update.

        Args:
            run_closure: Runs forward, backward and clipping.
            closure: Lightning's closure object, which carries the outputs of the training step.
            result_class: Lightning's `ClosureResult`.

        Returns:
            What the closure returned: the loss or None.
        """
        if self._mid is None:
            marker, touched, loss = self._compute_gradients(run_closure, closure)
        else:
            marker, touched, loss = self._recall_gradients(closure, result_class)
        self.heartbeat(Activity.STEP)
        self._synchronise()
        if marker.phase < Phase.SYNCED:
            marker = Marker(self.step, Phase.SYNCED)
            self.page.publish(marker)
        self.reach("synced", self.step)
        self.steps_before = self.updater.run(
            self.step,
            groups=hyper_parameters(self.optimizer),
            steps_before=self.steps_before,
            touched=[bool(value) for value in touched],
            resume=marker,
        )
        self._publisher.publish_state(self.optimizer, self.steps_before)
        self.step += 1
        return loss

    def _compute_gradients(self, run_closure: Callable[[], Any], closure: Any) -> tuple[Marker, bytes, Any]:
        """Forward and backward; on return gradients, MID and READY survive this process (R1)."""
        assert self.snapshot is not None
        loss = run_closure()
        self.reach("gradients", self.step)
        touched = self._adopt_gradients()
        result = closure._result
        mid = {
            "snapshot": self.snapshot.capture(),
            "loss": None if result is None else result.loss,
            "extra": {} if result is None else result.extra,
            "touched": touched,
        }
        self.records.write(RecordKind.MID, self.step, pack(mid))
        self.reach("mid_after", self.step)
        marker = Marker(self.step, Phase.READY)
        self.page.publish(marker)
        self.reach("ready", self.step)
        return marker, touched, loss

    def _recall_gradients(self, closure: Any, result_class: type) -> tuple[Marker, bytes, Any]:
        """What `_compute_gradients` of a dead generation left behind, with its side effects from MID."""
        assert self.reducer is not None
        assert self.snapshot is not None
        assert self._mid is not None
        mid, self._mid = self._mid, None
        self.snapshot.restore(mid["snapshot"], before_fetch=False, logs=True)
        closure._result = result_class(mid["loss"], extra=mid["extra"])
        self.reducer.restore(mid["touched"])
        marker = self.page.marker
        if marker is None or marker.step != self.step:
            raise RecordError(f"the word of step {self.step} says {marker}")
        return marker, mid["touched"], closure._result.loss

    def _adopt_gradients(self) -> bytes:
        """Bring gradients that a hook replaced back to retained memory; one byte a parameter: whether it has one."""
        touched = bytearray()
        for slot, view in zip(self.layout.slots, self._gradients, strict=True):
            gradient = slot.parameter.grad
            touched.append(int(gradient is not None))
            if gradient is not None and gradient is not view and gradient.data_ptr() != view.data_ptr():
                with torch.no_grad():
                    view.copy_(gradient)
                slot.parameter.grad = view
        return bytes(touched)

    def _synchronise(self) -> None:
        """The global synchronisation: no rank begins an update before every rank's gradients are final (R6)."""
        if self.identity.world > 1:
            self.page.waits += 1
            dist.all_reduce(torch.zeros(1))
