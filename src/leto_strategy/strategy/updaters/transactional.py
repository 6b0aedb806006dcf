"""The optimizer step as a transaction: state lives in retained memory and is updated there, chunk by chunk.

For one Adam, AdamW or SGD. What a kill interrupts is finished by the next generation from the gradients that are there.
"""

import warnings
from operator import is_
from typing import Any

import torch

from leto_strategy.config import LetoConfig
from leto_strategy.errors import LayoutMismatchError, UnsupportedFeatureError
from leto_strategy.faults import CrashPoints
from leto_strategy.memory.pool import ResilientMemoryPool
from leto_strategy.progress import Marker, ProgressPage
from leto_strategy.recovery.records import RecordRing
from leto_strategy.strategy.capture.packing import note_retained
from leto_strategy.strategy.capture.snapshot import hyper_parameters
from leto_strategy.strategy.reducer import GradientReducer
from leto_strategy.strategy.updaters.base import Updater
from leto_strategy.strategy.updaters.versions import ParameterVersions
from leto_strategy.update.coded import CodedProtection
from leto_strategy.update.layout import StateLayout
from leto_strategy.update.losing import destroy
from leto_strategy.update.optimizers import OptimizerAdapter, adapter_for
from leto_strategy.update.paging import Paging
from leto_strategy.update.pieces import pieces_of
from leto_strategy.update.protected_memory import ProtectedMemory
from leto_strategy.update.protection import NoProtection, Protection
from leto_strategy.update.publication import StatePublisher, pack_steps, unpack_steps
from leto_strategy.update.state import RetainedState
from leto_strategy.update.transaction import ResumableModelUpdater
from leto_strategy.update.words import Words


class TransactionalUpdater(Updater):
    """See the module.

    Args:
        config: The user's options.
        module: The model.
        optimizer: Its optimizer.
        pool: The rank's retained memory.
        world: Number of ranks.

    Raises:
        UnsupportedOptimizerError: Before anything is allocated.
        ValueError: A parameter or an option that can't be kept exact; also before.
    """

    name = "transactional"
    steps_itself = True

    def __init__(
        self,
        config: LetoConfig,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        pool: ResilientMemoryPool,
        *,
        world: int,
    ) -> None:
        if config.protection == "on" and pool.on_device:
            raise UnsupportedFeatureError("LetoStrategy(protection='on') is not possible on a GPU yet; leave it out")
        self._adapter = adapter_for(optimizer)
        self._config, self._module, self._optimizer = config, module, optimizer
        self._layout = self._plan(self._adapter)
        self._pool, self._world = pool, world
        self._num_parameters = [len(group["params"]) for group in optimizer.param_groups]
        grouped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._frozen = [(slot.name, slot.parameter) for slot in self._layout.frozen if id(slot.parameter) in grouped]
        self._first_backward = False

    def _plan(self, adapter: OptimizerAdapter) -> StateLayout:
        return StateLayout.plan(
            list(self._module.named_parameters()),
            self._optimizer,
            adapter,
            chunk_bytes=self._config.chunk_bytes,
            bucket_bytes=int(self._config.bucket_cap_mb * (1 << 20)),
            paging=_paging(self._config),
        )

    def signature(self) -> str:
        """The layout's."""
        return self._layout.signature()

    def require_signature(self, expected: str) -> None:
        """Compare layouts."""
        self._layout.require_signature(expected)

    def allocate(self) -> None:
        """Parameters, moments, gradients, undo; all their tensors are made now, and not in a recovery."""
        self._state = RetainedState(self._layout, self._pool)
        self._chunks = pieces_of(self._layout, self._state)
        self._gradients = [self._state.gradient(slot) for slot in self._layout.slots]
        for slot in (*self._layout.slots, *self._layout.frozen):
            self._state.parameter(slot)
            self._state.moments(slot)
        self._memory: ProtectedMemory | None = None
        if self._layout.shape is not None:
            self._memory = ProtectedMemory(self._layout, self._state, self._pool)
        self._publisher = StatePublisher(self._layout, self._state, self._adapter)
        self._steps = self._publisher.initial_steps()

    @property
    def protected(self) -> str | None:
        """What is protected, in one sentence; None where nothing is."""
        if self._layout.shape is None or self._layout.paging is None:
            return None
        shape, page_bytes = self._layout.shape, self._layout.paging.page_bytes
        num_pages = sum(group.num_pages for group in shape.groups)
        parity = len(shape.groups) * (shape.num_parity + shape.num_second)
        return (
            f"{num_pages} pages of {page_bytes >> 10} KiB of parameters and optimizer state in {len(shape.groups)} "
            f"protection groups, any {shape.num_parity} pages of which can be rebuilt from {parity} pages of parity "
            "in host memory"
        )

    def rehearse(self) -> None:
        """Entries of the optimizer's state, and what computes parity."""
        self._publisher.prepare(self._optimizer)
        if self._memory is not None:
            self._memory.prepare()

    def promoted(self, page: ProgressPage, words: Words, records: RecordRing, reach: CrashPoints) -> None:
        """Make the transaction."""
        self._page, self._reach = page, reach
        self._protection: Protection = NoProtection()
        if self._memory is not None:
            memory = self._memory
            self._protection = CodedProtection(memory, reach=reach)
            reach.lose = lambda loss: destroy(memory, loss)
        self._transaction = ResumableModelUpdater(
            self._layout, self._chunks, words, self._adapter, reach=reach, protection=self._protection
        )

    def attach(self, *, resuming: bool) -> None:
        """Let parameters and gradients be retained memory; at the very beginning copy the values there first."""
        if resuming:
            self._recover()
        else:
            self._state.initialise()
            self._steps = self._publisher.adopt_state(self._optimizer)
            self._protection.encode()
        self._state.attach_parameters()
        slots = self._layout.slots
        self._trained = [slot.parameter for slot in slots]
        index_of = {slot.name: i for i, slot in enumerate(slots)}
        self.reducer = GradientReducer(
            self._trained,
            self._gradients,
            [[index_of[slot.name] for slot in bucket.slots] for bucket in self._layout.buckets],
            [self._state.bucket(i) for i in range(len(self._layout.buckets))],
            launch_order=self._layout.launch_order,
            world=self._world,
            find_unused=self._config.find_unused_parameters,
            on_first_gradient=lambda: self._reach("backward", self._page.step),
            names=[slot.name for slot in slots],
        )
        self._versions = ParameterVersions(self._module)
        note_retained([*self._gradients, *(slot.parameter for slot in (*slots, *self._layout.frozen))])

    def _recover(self) -> None:
        """Rebuild what is lost, before anything reads retained memory."""
        recovered = self._protection.recover(self._page.marker)
        self._page.pages_rebuilt = recovered.num_pages
        self._page.localise_us = int(1e6 * recovered.localise_seconds)
        self._page.rebuild_us = int(1e6 * recovered.rebuild_seconds)
        if recovered.gradients_zeroed:
            warnings.warn(
                f"leto: gradients of the groups {list(recovered.gradients_zeroed)} were lost after the update had used"
                " them; hooks of this step find zeros",
                stacklevel=2,
            )

    def check_loaded(self) -> None:
        """Plan again, with the options that were loaded."""
        if self._plan(adapter_for(self._optimizer)).signature() != self._layout.signature():
            raise LayoutMismatchError(
                f"The checkpoint's {type(self._optimizer).__name__} was saved with options that keep other state than"
                " those of configure_optimizers (momentum, amsgrad and the like); strategy='leto' needs the same ones:"
                " change configure_optimizers, or load only the weights with load_from_checkpoint."
            )

    def check_start(self) -> None:
        """Only the transaction may change a parameter, and only the parameters that it knows."""
        self._versions.require_untouched()
        self._publisher.require_unchanged(self._optimizer)
        if [len(group["params"]) for group in self._optimizer.param_groups] != self._num_parameters:
            raise UnsupportedFeatureError(
                "Parameters were added to the optimizer during training (add_param_group), which the transactional"
                " updater can't follow. Use LetoStrategy(updater='sync_snapshot'), or put all parameters into"
                " configure_optimizers."
            )
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise UnsupportedFeatureError(
                    f"The parameter {name!r} was frozen when training began and is trained now, which the transactional"
                    " updater can't follow. Use LetoStrategy(updater='sync_snapshot')."
                )

    def leave(self) -> None:
        """Let the hooks at the end of training write parameters: in copies, for they run again after a failure."""
        self.check_start()
        for slot in (*self._layout.slots, *self._layout.frozen):
            slot.parameter.data = slot.parameter.data.clone()

    def touched(self) -> bytes:
        """One byte a trained parameter."""
        return bytes([parameter.grad is not None for parameter in self._trained])

    def start_part(self, step: int, touched: bytes) -> dict[str, Any]:
        """Step counts, and which parameters have a gradient for zero_grad to find."""
        return {"touched": touched, "steps": pack_steps(self._steps)}

    def enter(self, step: int, start: dict[str, Any], *, finishing: bool) -> None:
        """Gradients and the optimizer's state as a user sees them."""
        self.reducer.restore(start["touched"])
        self._steps = unpack_steps(start["steps"], len(self._layout.slots))
        self._publisher.publish_state(self._optimizer, self._steps)

    def begin_step(self) -> None:
        """No parameter has a gradient of it yet."""
        self.reducer.begin_step()
        self._first_backward = True

    def before_backward(self) -> None:
        """Gradients must be absent or zero in the first pass: what an earlier step left there is not in its record.

        Raises:
            UnsupportedFeatureError: They are not.
        """
        if not self._first_backward:
            return
        self._first_backward = False
        for slot in self._layout.slots:
            gradient = slot.parameter.grad
            if gradient is not None and bool(gradient.any()):
                raise UnsupportedFeatureError(
                    f"The gradient of {slot.name!r} is carried over from one optimizer step to the next (zero_grad was"
                    " not called), which the transactional updater can't restore. Use"
                    " LetoStrategy(updater='sync_snapshot')."
                )

    def mid_part(self, step: int, *, skipped: bool) -> dict[str, Any]:
        """Bring gradients that a hook replaced back to retained memory; note which parameters have one."""
        self._publisher.require_unchanged(self._optimizer)
        gradients = [parameter.grad for parameter in self._trained]
        if not all(map(is_, gradients, self._gradients)):
            for parameter, gradient, view in zip(self._trained, gradients, self._gradients, strict=True):
                if gradient is not None and gradient is not view and gradient.data_ptr() != view.data_ptr():
                    with torch.no_grad():
                        view.copy_(gradient)
                    parameter.grad = view
        self._protection.seal_gradients(step)
        touched = bytes([gradient is not None for gradient in gradients])
        return {"touched": touched, "updated": bytes(len(touched)) if skipped else touched}

    def recall(self, step: int, mid: dict[str, Any]) -> None:
        """The gradients."""
        self.reducer.restore(mid["touched"])

    def finish(self, step: int, mid: dict[str, Any], marker: Marker) -> None:
        """Update all chunks, or those that are left."""
        self._steps = self._transaction.run(
            step,
            groups=hyper_parameters(self._optimizer),
            steps_before=self._steps,
            touched=[bool(value) for value in mid["updated"]],
            resume=marker,
        )
        self._publisher.publish_state(self._optimizer, self._steps)


def _paging(config: LetoConfig) -> Paging | None:
    if config.protection == "off":
        return None
    return Paging(config.page_kib << 10, config.protection_pages, config.parity_pages, config.parity_pages_second)
