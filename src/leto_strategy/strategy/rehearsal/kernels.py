"""Notes the operations of a step, with the shapes of what they were given; runs them again on made-up values.

A process that has never run a kernel loads it at the first call: the first step of a fresh process takes hundreds of
milliseconds longer. Nothing of the user's code runs in a rehearsal, no memory but its own is touched, and random
numbers are put back. Paper, section 6 (shadow trainers at level L3).
"""

import logging
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from leto_strategy.strategy.capture.rng import capture_rng, restore_rng

_NAMESPACES = ("aten", "prims")  # not collectives: they need their peers
_PER_CALL_TENSORS_MAX = 4096

_log = logging.getLogger(__name__)


class _Like:
    """Stands for a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self.device = tensor.dtype, str(tensor.device)
        self.shape, self.strides = tuple(tensor.shape), tuple(tensor.stride())

    def __repr__(self) -> str:
        return f"{self.dtype} {self.device} {self.shape} {self.strides}"

    def make(self) -> Tensor:
        """A tensor like it. Ones: a probability, an argument of a logarithm; zeros among integers: a valid index."""
        tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        return tensor.fill_(1 if self.dtype.is_floating_point or self.dtype.is_complex else 0)


class _Cannot(Exception):
    """A call that can't be rehearsed."""


class KernelNotes(TorchDispatchMode):
    """While it is active, notes each kind of call once. What is called runs as ever."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: dict[str, tuple[str, Any, Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note, and call."""
        kwargs = kwargs or {}
        if func.namespace in _NAMESPACES:
            try:
                counted = [0, 0]
                call = (str(func), _describe(list(args), counted), _describe(kwargs, counted))
                if counted[1]:
                    self._calls.setdefault(repr(call), call)
            except _Cannot:
                pass
        return func(*args, **kwargs)

    def to_bytes(self) -> bytes:
        """For `rehearse`, in another process of the job."""
        return pickle.dumps(list(self._calls.values()))


def _describe(value: Any, counted: list[int]) -> Any:
    """`value` with tensors replaced; counts the tensors, and those on a GPU.

    Raises:
        _Cannot: It holds something else that is not plain.
    """
    if isinstance(value, Tensor):
        counted[0] += 1
        counted[1] += value.is_cuda
        if value.layout is not torch.strided or value.is_quantized or counted[0] > _PER_CALL_TENSORS_MAX:
            raise _Cannot
        return _Like(value)
    if isinstance(value, (list, tuple)):
        return [_describe(item, counted) for item in value]
    if isinstance(value, dict):
        return {key: _describe(item, counted) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return value
    raise _Cannot


def rehearse(notes: bytes, device: torch.device) -> Iterator[None]:
    """Run the noted calls once, one between two yields; closed early, it leaves no trace either.

    Args:
        notes: What `KernelNotes.to_bytes` returned.
        device: The GPU.
    """
    before = capture_rng()
    try:
        for name, args, kwargs in pickle.loads(notes):
            try:
                with torch.no_grad():
                    _function(name)(*_made(args), **_made(kwargs))
            except torch.AcceleratorError:
                raise
            except Exception as error:  # a call that can't be repeated, or no memory for it: it stays cold
                _log.debug("not rehearsed: %s: %s", name, error)
            yield
        torch.cuda.synchronize(device)
    finally:
        torch.cuda.empty_cache()
        restore_rng(before)


def _function(name: str) -> Any:
    namespace, operator, overload = name.split(".", 2)
    return getattr(getattr(getattr(torch.ops, namespace), operator), overload)


def _made(value: Any) -> Any:
    if isinstance(value, _Like):
        return value.make()
    if isinstance(value, list):
        return [_made(item) for item in value]
    if isinstance(value, dict):
        return {key: _made(item) for key, item in value.items()}
    return value
