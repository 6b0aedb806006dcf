"""Adapters: how one chunk of an update is computed by torch's own functions, with torch's own bits.

An adapter calls the functional form behind `torch.optim.Adam`, `AdamW` or `SGD` on pieces of tensors. It owns no memory
and no order; it knows what each optimizer keeps per parameter and which options can't be kept exact.
Paper, section 5.2.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from leto_strategy.errors import UnsupportedOptimizerError

TRAINED_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Dtypes of parameters that are trained. Frozen parameters may have any."""


class OptimizerAdapter(ABC):
    """What the update must know of an optimizer class.

    A parameter group is passed as a mapping of hyper-parameters: `optimizer.param_groups[i]`, or what a record holds of
    it. Its values may change from step to step; which moments exist may not.
    """

    _function: ClassVar[Callable[..., None]]
    _leading: ClassVar[tuple[str, ...]]  # arguments of the function that an adapter fills itself

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer_name = type(optimizer).__name__
        parameters = inspect.signature(self._function).parameters
        self._options = tuple(name for name in parameters if name not in self._leading)
        # torch chooses foreach by itself where all parameters of a group are of its own types. Pieces are plain
        # tensors, so for other types the choice that torch makes (not foreach) is made here.
        self._own_types = [
            all(type(parameter) in (Parameter, Tensor) for parameter in group["params"])
            for group in optimizer.param_groups
        ]
        for index, group in enumerate(optimizer.param_groups):
            self.check_group(index, group)
            missing = [name for name in self._options if name not in group and _required(parameters[name])]
            if missing:
                raise UnsupportedOptimizerError(
                    f"torch {torch.__version__} gives {self.optimizer_name} the options {', '.join(missing)}, which "
                    "this version of Leto does not know"
                )

    @abstractmethod
    def moment_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the tensors kept per parameter, in torch's order; they have the parameter's dtype."""

    @abstractmethod
    def counts(self, group: Mapping[str, Any]) -> bool:
        """Say whether an update of this group raises the step count of its parameters."""

    @property
    @abstractmethod
    def keeps_step(self) -> bool:
        """Whether torch's state of a parameter has the entry "step"."""

    @abstractmethod
    def update(
        self,
        group_index: int,
        group: Mapping[str, Any],
        parameters: list[Tensor],
        gradients: list[Tensor],
        moments: Mapping[str, list[Tensor]],
        steps: Sequence[float],
        *,
        mixed: bool = False,
    ) -> None:
        """Update pieces in place, in a way that can be repeated from the same content.

        Args:
            group_index: Index of the parameter group that all pieces belong to.
            group: Its hyper-parameters for this step.
            parameters: Pieces, as plain tensors; gradients and each of the moments match them in order and shape.
            gradients: Read only.
            moments: Pieces by the names of `moment_names`.
            steps: Step count of each piece before this update.
            mixed: Whether, among all parameters of this group and dtype that are updated in this step, some but not all
                are updated for the first time: torch then takes another path for all of them.
        """

    def step_tensor(self, group: Mapping[str, Any], step: float, device: torch.device) -> Tensor:
        """Return a step count as the scalar tensor that torch would keep."""
        on_device = bool(group.get("capturable") or group.get("fused"))
        dtype = self.step_dtype(group)
        return torch.tensor(step, dtype=dtype, device=device if on_device else torch.device("cpu"))

    def step_dtype(self, group: Mapping[str, Any]) -> torch.dtype:
        """Return the dtype of torch's step tensors: it follows the default dtype, except for fused kernels."""
        if not group.get("fused") and torch.get_default_dtype() == torch.float64:
            return torch.float64
        return torch.float32

    def next_step(self, group: Mapping[str, Any], step: float) -> float:
        """Return the step count after an update, with the saturation of the dtype in which torch counts."""
        if not self.counts(group):
            return step
        limit = float(2**53) if self.step_dtype(group) == torch.float64 else float(2**24)
        return min(step + 1.0, limit)

    def check_group(self, index: int, group: Mapping[str, Any]) -> None:
        """Refuse options whose results could not be kept exact.

        Raises:
            ValueError: names the option and what to write instead.
        """
        where = f"{self.optimizer_name}, parameter group {index}"
        if group.get("differentiable"):
            raise ValueError(f'{where}: differentiable=True is not supported by strategy="leto"; leave it out')
        if group.get("capturable") and any(parameter.device.type == "cpu" for parameter in group.get("params", ())):
            raise ValueError(f"{where}: capturable=True needs parameters on a GPU, these are on the CPU; leave it out")

    def _call(self, group_index: int, group: Mapping[str, Any], *pieces: list[Any], **special: Any) -> None:
        options = {name: group[name] for name in self._options if name in group} | special
        if options.get("fused") is None and options.get("foreach") is None and not self._own_types[group_index]:
            options["foreach"] = False
        type(self)._function(*pieces, **options)


class AdamAdapter(OptimizerAdapter):
    """`torch.optim.Adam` and `torch.optim.AdamW`, which differ in one option of their groups."""

    _function = staticmethod(adam)
    _leading = ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps", "beta1", "beta2")

    @property
    def keeps_step(self) -> bool:
        """Torch's own counter, one per parameter."""
        return True

    def counts(self, group: Mapping[str, Any]) -> bool:
        """Every update counts."""
        return True

    def moment_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """First and second moment, with amsgrad also the largest second moment so far."""
        names = ("exp_avg", "exp_avg_sq")
        return (*names, "max_exp_avg_sq") if group["amsgrad"] else names

    def update(
        self,
        group_index: int,
        group: Mapping[str, Any],
        parameters: list[Tensor],
        gradients: list[Tensor],
        moments: Mapping[str, list[Tensor]],
        steps: Sequence[float],
        *,
        mixed: bool = False,
    ) -> None:
        """Call torch's `adam`."""
        # torch raises the step tensors that it is given, so they are made anew: a repeated piece starts from the same.
        step_tensors = [
            self.step_tensor(group, step, piece.device) for step, piece in zip(steps, parameters, strict=True)
        ]
        beta1, beta2 = group["betas"]
        self._call(
            group_index,
            group,
            parameters,
            gradients,
            moments["exp_avg"],
            moments["exp_avg_sq"],
            moments["max_exp_avg_sq"] if group["amsgrad"] else [],
            step_tensors,
            beta1=beta1,
            beta2=beta2,
        )


class SGDAdapter(OptimizerAdapter):
    """`torch.optim.SGD`. torch keeps no step count; here it is the number of updates that used the momentum buffer."""

    _function = staticmethod(sgd)
    _leading = ("params", "d_p_list", "momentum_buffer_list")

    def check_group(self, index: int, group: Mapping[str, Any]) -> None:
        """Refuse one kernel more: fused SGD on the CPU in half precision leaves most elements as they were.

        Its momentum is not reproducible either (https://github.com/pytorch/pytorch/issues/191763, torch <= 2.13).
        """
        super().check_group(index, group)
        half = (torch.bfloat16, torch.float16)
        if group["fused"] and any(p.dtype in half and p.device.type == "cpu" for p in group["params"]):
            raise ValueError(
                f"{self.optimizer_name}, parameter group {index}: torch's fused=True is wrong for bf16 and fp16 on the "
                "CPU (pytorch issue 191763); leave fused out"
            )

    @property
    def keeps_step(self) -> bool:
        """Torch keeps no counter."""
        return False

    def counts(self, group: Mapping[str, Any]) -> bool:
        """Only updates with momentum count."""
        return bool(group["momentum"] != 0)

    def moment_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The momentum buffer, where there is momentum."""
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def update(
        self,
        group_index: int,
        group: Mapping[str, Any],
        parameters: list[Tensor],
        gradients: list[Tensor],
        moments: Mapping[str, list[Tensor]],
        steps: Sequence[float],
        *,
        mixed: bool = False,
    ) -> None:
        """Call torch's `sgd`; a first momentum buffer, which torch makes itself, is copied to its retained place."""
        if group["momentum"] == 0:
            self._call(group_index, group, parameters, gradients, [])
            return
        retained = moments["momentum_buffer"]
        if group.get("fused"):  # it takes a list only whole, either first or not
            parts = [[index for index, step in enumerate(steps) if (step == 0) == first] for first in (True, False)]
        else:
            parts = [list(range(len(steps)))]
        for part in filter(None, parts):
            chosen, chosen_gradients = [parameters[i] for i in part], [gradients[i] for i in part]
            # torch's first buffer is a copy of the gradient, whatever lay there before.
            buffers: list[Tensor | None] = [retained[i] if steps[i] else None for i in part]
            if mixed and len(parts) == 1:
                # A part of a mixed list may not look mixed. An empty tensor without a buffer makes torch take the same
                # path as for the whole list: in bf16 and fp16 the two paths of foreach=True round differently.
                empty = parameters[0].new_empty(0)
                chosen.append(empty)
                chosen_gradients.append(empty.clone())
                buffers.append(None)
            self._call(group_index, group, chosen, chosen_gradients, buffers)
            for i, buffer in zip(part, buffers, strict=False):
                if buffer is not retained[i]:
                    assert buffer is not None, "torch left a first momentum buffer unset"
                    retained[i].copy_(buffer)


_ADAPTERS: dict[type[Optimizer], type[OptimizerAdapter]] = {Adam: AdamAdapter, AdamW: AdamAdapter, SGD: SGDAdapter}


def adapter_for(optimizer: Optimizer) -> OptimizerAdapter:
    """Return the adapter of an optimizer. Nothing is allocated.

    A subclass is refused too: what it changes in `step` would silently be left out.

    Raises:
        UnsupportedOptimizerError: the class is not exactly Adam, AdamW or SGD of torch.optim.
        ValueError: an option can't be kept exact.
    """
    adapter = _ADAPTERS.get(type(optimizer))
    if adapter is None:
        kind = type(optimizer)
        supported = ", ".join(f"torch.optim.{known.__name__}" for known in _ADAPTERS)
        base = next((known.__name__ for known in _ADAPTERS if issubclass(kind, known)), None)
        hint = f" It is a subclass of {base}, whose step() may differ." if base else ""
        raise UnsupportedOptimizerError(
            f'strategy="leto" can\'t make the update of {kind.__module__}.{kind.__qualname__} crash-consistent.{hint} '
            f"Use one of {supported}."
        )
    return adapter(optimizer)


def _required(parameter: inspect.Parameter) -> bool:
    return parameter.default is inspect.Parameter.empty
