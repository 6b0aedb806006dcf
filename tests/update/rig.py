"""A model, its optimizer and their retained state on a shared memfd, with no state manager: what the tests of the
update drive. `Rig` is what the strategy does around an update, and nothing else.
"""

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from leto_strategy.geometry import align_up
from leto_strategy.memory.backend import Region, RegionSpec
from leto_strategy.progress import PAGE_BYTES, Marker, ProgressPage
from leto_strategy.update import ResumableModelUpdater, RetainedState, StateLayout, StatePublisher, adapter_for
from leto_strategy.update.pieces import pieces_of
from leto_strategy.update.protection import Protection
from leto_strategy.update.words import HostWords

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]

Build = Callable[[], tuple[nn.Module, Optimizer]]


def map_memfd(size_bytes: int) -> int:
    """Return the address of a new shared mapping, which a forked child shares and which outlives any one process."""
    fd = os.memfd_create("rig")
    try:
        os.ftruncate(fd, size_bytes)
        address = _libc.mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        assert address not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    finally:
        os.close(fd)
    return int(address)


class LocalPool:
    """The calls of `ResilientMemoryPool` that retained state makes, over one memfd for each arena."""

    device = "cpu"
    on_device = False

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._regions: dict[str, Region] = {}
        self.num_allocations = 0

    def allocate(self, specs: Sequence[RegionSpec]) -> list[Region]:
        self.num_allocations += 1
        arenas: dict[str, list[RegionSpec]] = {}
        for spec in specs:
            arenas.setdefault(spec.arena or f"region:{spec.name}", []).append(spec)
        for members in arenas.values():
            if members[0].name in self._regions:
                continue
            offset = 0
            for spec in members:
                offset = align_up(offset, spec.alignment_bytes)
                self._regions[spec.name] = Region(spec, len(self._bases), offset, created=True)
                offset += spec.size_bytes
            self._bases.append(map_memfd(align_up(max(offset, 1), mmap.PAGESIZE)))
        return [self._regions[spec.name] for spec in specs]

    def address(self, region: Region) -> int:
        return self._bases[region.segment] + region.offset_bytes


def new_page() -> ProgressPage:
    address = map_memfd(PAGE_BYTES)
    return ProgressPage(memoryview((ctypes.c_char * PAGE_BYTES).from_address(address)).cast("B"))


class Rig:
    """One rank: builds, allocates, attaches, updates."""

    def __init__(
        self,
        build: Build,
        *,
        chunk_bytes: int | None = None,
        reach: Callable[[str, int, int], None] = lambda point, step, chunk: None,
        protection: Protection | None = None,
        pool: Any = None,
        **plan: Any,
    ) -> None:
        self.module, self.optimizer = build()
        self.adapter = adapter_for(self.optimizer)
        named = list(self.module.named_parameters(remove_duplicate=False))
        self.layout = StateLayout.plan(named, self.optimizer, self.adapter, chunk_bytes=chunk_bytes, **plan)
        self.pool = pool or LocalPool()
        self.state = RetainedState(self.layout, self.pool)
        self.state.initialise()
        self.state.attach_parameters()
        self.page = new_page()
        self.updater = ResumableModelUpdater(
            self.layout,
            pieces_of(self.layout, self.state),
            HostWords(self.page),
            self.adapter,
            reach=reach,
            protection=protection,
        )
        self.publisher = StatePublisher(self.layout, self.state, self.adapter)
        self.steps = self.publisher.initial_steps()
        self.touched = [True] * len(self.layout.slots)

    def set_gradients(self, gradients: dict[str, Tensor | None]) -> None:
        for slot in self.layout.slots:
            gradient = gradients[slot.name]
            self.touched[slot.index] = gradient is not None
            self.state.gradient(slot).copy_(torch.zeros(()) if gradient is None else gradient)

    def update(self, step: int, *, resume: Marker | None = None) -> None:
        """Update and publish; `self.steps` is what a record would hold, so it changes only here, at the end."""
        self.steps = self.updater.run(
            step,
            groups=self.optimizer.param_groups,
            steps_before=self.steps,
            touched=self.touched,
            resume=resume,
        )
        self.publisher.publish_state(self.optimizer, self.steps)

    def content(self) -> dict[str, bytes]:
        """Return the bytes of every parameter and moment."""
        found = {}
        for slot in (*self.layout.slots, *self.layout.frozen):
            found[slot.name] = bytes_of(self.state.parameter(slot))
            for name, moment in self.state.moments(slot).items():
                found[f"{slot.name}.{name}"] = bytes_of(moment)
        return found


def bytes_of(tensor: Tensor) -> bytes:
    """Return a tensor's elements in logical order as bytes."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def random_gradients(module: nn.Module, seed: int, scale: float = 0.1) -> dict[str, Tensor | None]:
    """Return a gradient for every parameter, with the parameter's strides, and a few exact zeros."""
    generator = torch.Generator().manual_seed(seed)
    gradients: dict[str, Tensor | None] = {}
    for name, parameter in module.named_parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale
        values[values.abs() < scale / 100] = 0
        gradients[name] = torch.empty_like(parameter).copy_(values)
    return gradients


def give_torch(module: nn.Module, gradients: dict[str, Tensor | None]) -> None:
    """Set `.grad` as autograd would have left it."""
    for name, parameter in module.named_parameters():
        gradient = gradients[name] if parameter.requires_grad else None
        parameter.grad = None if gradient is None else gradient.clone(memory_format=torch.preserve_format)


def assert_same_state(rig: Rig, module: nn.Module, optimizer: Optimizer) -> None:
    """Compare parameters and the optimizer's state with torch's own, bit for bit, and in keys, order and dtypes."""
    for (name, ours), (_, theirs) in zip(rig.module.named_parameters(), module.named_parameters(), strict=True):
        assert ours.stride() == theirs.stride(), name
        assert bytes_of(ours) == bytes_of(theirs), f"parameter {name} differs"
    ours_state, their_state = rig.optimizer.state_dict(), optimizer.state_dict()
    assert list(ours_state["state"]) == list(their_state["state"])
    for index, theirs_entry in their_state["state"].items():
        ours_entry = ours_state["state"][index]
        assert list(ours_entry) == list(theirs_entry)
        for key, theirs in theirs_entry.items():
            ours = ours_entry[key]
            assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride()), key
            assert bytes_of(ours) == bytes_of(theirs), f"{key} of parameter {index} differs"
