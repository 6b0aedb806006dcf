"""Whole-state snapshots: torch's optimizers step in the trainer's own memory, and the state after it is copied out.

Exact for any optimizer, several of them, manual optimisation, parameters that thaw or are written by hooks. The price
is a copy of parameters, gradients and optimizer state at every step and two such copies in retained memory. Paper,
section 3, the strawman "sync snapshot".
"""

import json
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from leto_strategy.config import LetoConfig
from leto_strategy.errors import LayoutMismatchError, UnsupportedFeatureError
from leto_strategy.faults import CrashPoints
from leto_strategy.memory.pool import ResilientMemoryPool
from leto_strategy.progress import Marker, Phase, ProgressPage
from leto_strategy.recovery.records import RecordRing
from leto_strategy.strategy.buckets import private_buckets
from leto_strategy.strategy.capture.snapshot import hyper_parameters
from leto_strategy.strategy.reducer import GradientReducer
from leto_strategy.strategy.updaters.base import Updater
from leto_strategy.strategy.updaters.states import StateSnapshots
from leto_strategy.update.words import Words

_TORCH_ATTRIBUTES = frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=1.0))) | {"step", "_opt_called"}


class SnapshotUpdater(Updater):
    """See the module.

    Args:
        config: The user's options.
        module: The model.
        optimizers: Its optimizers.
        pool: The rank's retained memory.
        world: Number of ranks.
    """

    name = "sync_snapshot"
    steps_itself = False

    def __init__(
        self,
        config: LetoConfig,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        pool: ResilientMemoryPool,
        *,
        world: int,
    ) -> None:
        self._config, self._optimizers = config, list(optimizers)
        self._pool, self._world = pool, world
        self._named = dict(module.named_parameters())
        self._name_of = {id(parameter): name for name, parameter in self._named.items()}
        self._trained: list[str] = []

    def signature(self) -> str:
        """Names, dtypes and shapes."""
        tensors = {name: [str(p.dtype), list(p.shape)] for name, p in self._named.items()}
        return json.dumps({"updater": self.name, "optimizers": self._kinds(), "tensors": tensors})

    def require_signature(self, expected: str) -> None:
        """Compare names, dtypes, shapes and kinds of optimizers."""
        if expected == self.signature():
            return
        before, now = json.loads(expected), json.loads(self.signature())
        tensors_before, tensors_now = before.get("tensors", {}), now["tensors"]
        for name in sorted(tensors_before.keys() | tensors_now.keys()):
            if tensors_before.get(name) != tensors_now.get(name):
                raise LayoutMismatchError(
                    f"parameter {name} was {tensors_before.get(name, 'not there')} when training began and is "
                    f"{tensors_now.get(name, 'not there')} now: the script must build the same model each time it runs"
                )
        raise LayoutMismatchError(
            f"the optimizers were {before.get('optimizers')} when training began and are {now['optimizers']} now: the"
            " script must build the same ones each time it runs"
        )

    def _kinds(self) -> list[str]:
        return [type(optimizer).__name__ for optimizer in self._optimizers]

    def allocate(self) -> None:
        """Nothing: the size of a state is known when it is written."""

    def promoted(self, page: ProgressPage, words: Words, records: RecordRing, reach: CrashPoints) -> None:
        """Open the snapshots."""
        self._page, self._words, self._reach = page, words, reach
        self._snapshots = StateSnapshots(self._pool, records, reach, self._named)

    def attach(self, *, resuming: bool) -> None:
        """Keep the state from which step 0 starts."""
        self._reduce([name for name, parameter in self._named.items() if parameter.requires_grad])
        if not resuming:
            self._write(0)

    def check_start(self) -> None:
        """Whatever has changed is found and goes into the record."""

    def touched(self) -> bytes:
        """Part of the state."""
        return b""

    def start_part(self, step: int, touched: bytes) -> dict[str, Any]:
        """The state, where it is not the one that was kept: a hook has written parameters, thawed some, or the like."""
        thawed = [n for n, p in self._named.items() if p.requires_grad and n not in self._known]
        if thawed:
            self._reduce([name for name in self._named if name in self._known or name in thawed])
        state = self._state()
        changed = not self._snapshots.equals(step, state)
        groups = [kept["groups"] for kept in state["optimizers"]]
        return {
            "state": self._snapshots.pack(state) if changed else None,
            "trained": list(self._trained),
            "groups": groups,
        }

    def enter(self, step: int, start: dict[str, Any], *, finishing: bool) -> None:
        """Return to the state that was kept for the step, or to that in the record; when finishing, to the next one.

        A rank that has gone on into the next step may have written over the state of this one.
        """
        if start["trained"] != self._trained:
            self._reduce(start["trained"])
        if finishing:
            self.recall(step, {})
            # Hooks that run again ahead of `recall` find the groups that they found, and may add theirs again.
            for optimizer, groups in zip(self._optimizers, start["groups"], strict=True):
                self._regroup(optimizer, groups)
            return
        kept = self._snapshots.read(step)  # read in any case: `equals` compares with it
        self._restore(kept if start["state"] is None else self._snapshots.unpack(start["state"]))

    def begin_step(self) -> None:
        """No parameter has a gradient of it yet."""
        self.reducer.begin_step()

    def before_backward(self) -> None:
        """Gradients may be carried over: they are part of the state."""

    def mid_part(self, step: int, *, skipped: bool) -> dict[str, Any]:
        """Keep the state from which the next step starts."""
        self._write(step + 1)
        return {}

    def recall(self, step: int, mid: dict[str, Any]) -> None:
        """Return to it."""
        self._restore(self._snapshots.read(step + 1))

    def finish(self, step: int, mid: dict[str, Any], marker: Marker) -> None:
        """Everything is done: say so."""
        if marker.phase is not Phase.DONE:
            self._words.publish(Marker(step, Phase.DONE))
        self._reach("update_done", step, 0)

    def _write(self, step: int) -> None:
        try:
            self._snapshots.write(step, self._state())
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            kinds = ", ".join(self._kinds())
            raise UnsupportedFeatureError(
                f"The state of the optimizers ({kinds}) can't be carried over a failure: {error}. Keep only tensors and"
                " what can be pickled in optimizer.state and in the optimizer's attributes."
            ) from error

    def _reduce(self, trained: list[str]) -> None:
        """Reduce the gradients of these parameters from now on, in buckets that follow from their names alone."""
        if self._trained:
            self.reducer.close()
        self._trained, self._known = list(trained), frozenset(trained)
        parameters = [self._named[name] for name in trained]
        flags = [parameter.requires_grad for parameter in parameters]
        for parameter in parameters:
            parameter.requires_grad_(True)  # a hook can't be put on one that is frozen at this moment
        buckets = private_buckets(parameters, bucket_bytes=int(self._config.bucket_cap_mb * (1 << 20)))
        self.reducer = GradientReducer(
            parameters,
            buckets.views,
            buckets.members,
            buckets.flat,
            launch_order=range(len(buckets.flat)),
            world=self._world,
            find_unused=self._config.find_unused_parameters,
            on_first_gradient=lambda: self._reach("backward", self._page.step),
            names=trained,
            hands_out_views=False,
        )
        for parameter, flag in zip(parameters, flags, strict=True):
            parameter.requires_grad_(flag)

    def _state(self) -> dict[str, Any]:
        return {
            "parameters": {name: parameter.detach() for name, parameter in self._named.items()},
            "gradients": {name: p.grad for name, p in self._named.items() if p.grad is not None},
            "optimizers": [self._optimizer_state(optimizer) for optimizer in self._optimizers],
        }

    def _optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not getattr(optimizer, "param_groups", None):
            return {"groups": [], "state": {}}
        # Hyper-parameters are in the records of every step: a scheduler changes them between two states.
        groups = [[self._name(optimizer, p) for p in group["params"]] for group in optimizer.param_groups]
        state = {self._key(optimizer, key): value for key, value in optimizer.state.items()}
        own, inner = _own_attributes(optimizer)
        return {
            "groups": groups,
            "state": state,
            "own": own,
            "inner": {name: (self._optimizer_state(it), hyper_parameters(it)) for name, it in inner.items()},
        }

    def _key(self, optimizer: Optimizer, key: Any) -> Any:
        return self._name(optimizer, key) if isinstance(key, Tensor) else key

    def _name(self, optimizer: Optimizer, parameter: Tensor) -> str:
        name = self._name_of.get(id(parameter))
        if name is None:
            raise UnsupportedFeatureError(
                f"{type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that is not a parameter"
                " of the LightningModule; register it there, so that strategy='leto' can carry it over a failure."
            )
        return name

    def _restore(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, value in state["parameters"].items():
                self._named[name].data.copy_(value)
        for parameter in self._named.values():
            parameter.grad = None
        self.reducer.adopt({self._trained.index(n): g for n, g in state["gradients"].items() if n in self._known})
        for name, gradient in state["gradients"].items():
            if name not in self._known:
                self._named[name].grad = gradient
        for optimizer, kept in zip(self._optimizers, state["optimizers"], strict=True):
            self._restore_optimizer(optimizer, kept)

    def _restore_optimizer(self, optimizer: Optimizer, kept: dict[str, Any]) -> None:
        if not getattr(optimizer, "param_groups", None):
            return
        self._regroup(optimizer, kept["groups"])
        vars(optimizer).update(kept["own"])
        for name, (inner, groups) in kept["inner"].items():
            self._restore_optimizer(getattr(optimizer, name), inner)
            for group, values in zip(getattr(optimizer, name).param_groups, groups, strict=True):
                group.update(values)
        optimizer.state.clear()
        for key, value in kept["state"].items():
            optimizer.state[self._named.get(key, key)] = value

    def _regroup(self, optimizer: Optimizer, kept: list[list[str]]) -> None:
        """Let an optimizer have these parameter groups; their hyper-parameters are set from a record."""
        groups: list[dict[str, Any]] = getattr(optimizer, "param_groups", [])
        del groups[len(kept) :]
        groups += [{} for _ in range(len(kept) - len(groups))]
        for group, names in zip(groups, kept, strict=True):
            group["params"] = [self._named[name] for name in names]


def _own_attributes(optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Optimizer]]:
    """What an optimizer that is not torch's keeps beside its state: counters, slow weights; and inner optimizers."""
    if type(optimizer).__module__.startswith("torch.optim"):
        return {}, {}
    own = {k: v for k, v in vars(optimizer).items() if k not in _TORCH_ATTRIBUTES and not callable(v)}
    inner = {name: value for name, value in own.items() if isinstance(value, Optimizer)}
    return {name: value for name, value in own.items() if name not in inner}, inner
