"""The optimizer's state as its user sees it: torch's own keys, order, dtypes and values, over retained memory.

Checkpoints, callbacks and `state_dict()` read `optimizer.state`; with the entries made here they find what torch itself
would have left there. Step counts are kept by the caller, in records; this module turns them into torch's tensors.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from leto_strategy.errors import StateChangedError
from leto_strategy.update.layout import StateLayout
from leto_strategy.update.optimizers import OptimizerAdapter
from leto_strategy.update.slots import TensorSlot
from leto_strategy.update.state import RetainedState
from leto_strategy.update.versions import SharedVersion

PackedSteps = float | list[float]
"""Step counts as records hold them: one number where all parameters have the same."""


def pack_steps(steps: Sequence[float]) -> PackedSteps:
    """Return step counts in the short form; see `unpack_steps`."""
    return steps[0] if steps and steps.count(steps[0]) == len(steps) else list(steps)


def unpack_steps(packed: PackedSteps, num_slots: int) -> list[float]:
    """Return the step count of each of `num_slots` slots.

    Raises:
        ValueError: `packed` is of another number of slots.
    """
    if not isinstance(packed, list):
        return [packed] * num_slots
    if len(packed) != num_slots:
        raise ValueError(f"{len(packed)} step counts for {num_slots} trained parameters")
    return list(packed)


class StatePublisher:
    """Installs retained moments and step counts in one optimizer, and takes over what was loaded into it.

    Args:
        layout: The plan.
        state: Its tensors.
        adapter: The optimizer's.
    """

    def __init__(self, layout: StateLayout, state: RetainedState, adapter: OptimizerAdapter) -> None:
        self._layout = layout
        self._state = state
        self._adapter = adapter
        self._made: dict[int, dict[str, Tensor]] = {}  # entries by slot, not installed yet
        self._kept: dict[int, tuple[Tensor, ...]] = {}  # what was installed, by slot, in the order of the entry
        # The same as it lies in `optimizer.state`, to be compared in one go.
        self._parameters: list[Tensor] = []
        self._lengths: list[int] = []
        self._tensors: list[Tensor] = []
        self._version = SharedVersion()  # of all installed tensors
        self._number = self._version.number

    def prepare(self, optimizer: Optimizer) -> None:
        """Make ahead of time what `publish_state` will install; nothing of the optimizer changes."""
        self._made = {slot.index: self._make(optimizer, slot, 0.0) for slot in self._layout.slots}

    def initial_steps(self) -> list[float]:
        """Return the step counts before the first update."""
        return [0.0] * len(self._layout.slots)

    def publish_state(self, optimizer: Optimizer, steps: Sequence[float]) -> None:
        """Make `optimizer.state` what torch would have after these numbers of updates. Moments are not copied.

        A parameter without an update has no entry, as with torch. New entries come in torch's order; where several
        appear at once after a promotion, those that were updated more often come first.

        Args:
            optimizer: The one the layout was planned for.
            steps: Step count of each slot.

        Raises:
            StateChangedError: someone replaced an entry since the last call; `adopt_state` takes over on purpose.
        """
        self._require_same(optimizer)
        fresh = []
        for slot, step in zip(self._layout.slots, steps, strict=True):
            kept = self._kept.get(slot.index)
            if kept is None:
                if step:
                    fresh.append(slot)
            elif self._adapter.keeps_step:
                kept[0].fill_(step)
        place = _torch_order(optimizer)
        fresh.sort(key=lambda slot: (-steps[slot.index], place[id(slot.parameter)]))
        for slot in fresh:
            self._install(optimizer, slot, steps[slot.index])
        self._number = self._version.number

    def adopt_state(self, optimizer: Optimizer) -> list[float]:
        """Copy the state that a checkpoint loaded into `optimizer` to retained memory, and install that instead.

        To be called outside any update, before training goes on: retained moments are overwritten. A parameter that the
        checkpoint has no state for starts anew.

        Returns:
            The step count of each slot.

        Raises:
            ValueError: an entry is not what this optimizer keeps, or has another shape.
        """
        steps = self.initial_steps()
        for slot in self._layout.slots:
            self._check_loaded(slot, dict(optimizer.state.get(slot.parameter, {})))
        order = [id(parameter) for parameter in optimizer.state]
        with torch.no_grad():
            for slot in self._layout.slots:
                steps[slot.index] = self._copy_in(slot, dict(optimizer.state.get(slot.parameter, {})))
        for slot in self._layout.slots:
            optimizer.state.pop(slot.parameter, None)
        for noted in (self._made, self._kept, self._parameters, self._lengths, self._tensors):
            noted.clear()
        loaded = {id(slot.parameter): slot for slot in self._layout.slots if steps[slot.index]}
        for identity in order:
            if identity in loaded:
                self._install(optimizer, loaded[identity], steps[loaded[identity].index])
        self._number = self._version.number
        return steps

    def _install(self, optimizer: Optimizer, slot: TensorSlot, step: float) -> None:
        entry = self._made.pop(slot.index, None)
        if entry is None:
            entry = self._make(optimizer, slot, step)
        elif self._adapter.keeps_step:
            entry["step"].fill_(step)
        optimizer.state[slot.parameter] = entry
        self._kept[slot.index] = tuple(entry.values())
        self._parameters.append(slot.parameter)
        self._lengths.append(len(entry))
        self._tensors += entry.values()

    def _make(self, optimizer: Optimizer, slot: TensorSlot, step: float) -> dict[str, Tensor]:
        """An entry of `optimizer.state`."""
        entry: dict[str, Tensor] = {}
        if self._adapter.keeps_step:
            group = optimizer.param_groups[slot.group]
            entry["step"] = self._adapter.step_tensor(group, step, slot.parameter.device)
        entry |= self._state.moments(slot)
        return {name: self._version.alias(tensor) for name, tensor in entry.items()}

    def _copy_in(self, slot: TensorSlot, entry: dict[str, Tensor]) -> float:
        moments = self._state.moments(slot)
        present = [name for name in slot.moments if entry.get(name) is not None]
        for name, moment in moments.items():
            if name in present:
                moment.copy_(entry[name])
            else:
                moment.zero_()
        if self._adapter.keeps_step:
            return float(entry["step"]) if entry else 0.0
        return 1.0 if present else 0.0

    def _check_loaded(self, slot: TensorSlot, entry: dict[str, Tensor]) -> None:
        name = self._layout.optimizer_name
        known = (("step",) if self._adapter.keeps_step else ()) + slot.moments
        given = [key for key, value in entry.items() if value is not None]
        if given and sorted(given) != sorted(known):
            raise ValueError(
                f"the checkpoint's {name} state of {slot.name} has {', '.join(given)}; this optimizer keeps "
                f"{', '.join(known) or 'nothing'}: load it with the options it was saved with"
            )
        for key in slot.moments:
            value = entry.get(key)
            if value is not None and tuple(value.shape) != slot.shape:
                raise ValueError(
                    f"the checkpoint's {key} of {slot.name} has the shape {tuple(value.shape)}, the parameter "
                    f"{slot.shape}"
                )

    def require_unchanged(self, optimizer: Optimizer) -> None:
        """Raise if something has replaced or written an entry of `optimizer.state` since it was published.

        Raises:
            StateChangedError: Says which; the first parameter is named whose entry was replaced.
        """
        self._require_same(optimizer)
        if self._version.number != self._number:
            raise StateChangedError(_changed("optimizer.state", "written"))

    def _require_same(self, optimizer: Optimizer) -> None:
        if self._is_as_installed(optimizer.state):
            return
        for slot in self._layout.slots:
            current = optimizer.state.get(slot.parameter, {})
            kept = self._kept.get(slot.index, ())
            if len(current) != len(kept) or not all(map(is_, current.values(), kept)):
                raise StateChangedError(_changed(f"optimizer.state of {slot.name}", "replaced"))

    def _is_as_installed(self, state: Mapping[Tensor, Mapping[str, Any]]) -> bool:
        """Whether all entries are what was installed, in that order: a look without hashing a parameter."""
        entries = list(state.values())
        if list(map(len, entries)) != self._lengths or not all(map(is_, state, self._parameters)):
            return False
        return all(map(is_, chain.from_iterable(map(methodcaller("values"), entries)), self._tensors))


def _changed(what: str, how: str) -> str:
    return (
        f"{what} was {how} outside the optimizer step, which the transactional updater can't keep"
        " exact. Use LetoStrategy(updater='sync_snapshot'), or load a state through a checkpoint."
    )


def _torch_order(optimizer: Optimizer) -> dict[int, int]:
    """Return the order in which torch visits parameters, by identity."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {id(parameter): place for place, parameter in enumerate(parameters)}
