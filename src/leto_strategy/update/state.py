"""Tensors over retained memory: parameters, gradients, moments and the undo buffer of one rank.

Every tensor here is an alias with a storage of its own over exactly its bytes: `torch.save` writes no more than these,
and a write through it never moves the version counter of the user's parameter. This module never writes a byte except
in `initialise`, so that a shadow may build it over read-only mappings. Paper, sections 4 and 5.2.
"""

import torch
from torch import Tensor

from leto_strategy.geometry import Span, align_up
from leto_strategy.memory.backend import Region
from leto_strategy.memory.dlpack import bytes_at
from leto_strategy.memory.pool import ResilientMemoryPool
from leto_strategy.memory.tensors import flat_tensor, tensor_from_pool
from leto_strategy.update.layout import UNDO_REGION, StateLayout
from leto_strategy.update.slots import Run, TensorSlot


class RetainedState:
    """The regions of a layout, allocated or found again, as tensors.

    Args:
        layout: The plan; must be the one that allocated the regions (`StateLayout.require_signature`).
        pool: Connected pool; read-only is enough for everything but `initialise` and updates.

    Raises:
        PoolError: the pool has regions of these names with other sizes or kinds, or no memory.
    """

    def __init__(self, layout: StateLayout, pool: ResilientMemoryPool) -> None:
        self.layout = layout
        self._pool = pool
        self._regions: dict[str, Region] = {region.spec.name: region for region in pool.allocate(layout.region_specs())}
        self._tensors: dict[str, Tensor] = {}
        for run in layout.runs:
            self._check_places(run)

    @property
    def created(self) -> bool:
        """Whether this call allocated all regions, so that they hold zeros; says nothing of later content."""
        return all(region.created for region in self._regions.values())

    def parameter(self, slot: TensorSlot) -> Tensor:
        """Return the retained parameter, trained or frozen, with the strides of the user's."""
        return self.tensor(slot, "parameter")

    def gradient(self, slot: TensorSlot) -> Tensor:
        """Return the retained gradient, with the strides of the parameter (as autograd would lay it out)."""
        assert slot.trained, f"{slot.name} is frozen and has no gradient"
        return self.tensor(slot, "gradient")

    def moments(self, slot: TensorSlot) -> dict[str, Tensor]:
        """Return the optimizer's tensors of a parameter by name, in torch's order, with the parameter's strides."""
        return {name: self.tensor(slot, name) for name in slot.moments}

    def tensor(self, slot: TensorSlot, what: str) -> Tensor:
        """Return "parameter", "gradient" or a moment of a slot; the same object each time."""
        name = slot.region_name(what)
        if name not in self._tensors:
            self._tensors[name] = self._with_strides(slot, name)
        return self._tensors[name]

    def bucket(self, index: int) -> Tensor:
        """Return a gradient bucket as one flat tensor; alignment gaps in it are zero and stay zero in a sum."""
        bucket = self.layout.buckets[index]
        return self._flat("gradient", bucket.slots[0], bucket.slots[-1])

    def run(self, run: Run, what: str) -> Tensor:
        """Return "parameter", "gradient" or a moment of a whole run as one flat tensor, alignment gaps included."""
        return self._flat(what, run.slots[0], run.slots[-1])

    def pages(self, run: Run, what: str, span: Span) -> Tensor:
        """Return the whole pages of a span, which starts at a page, as bytes."""
        assert self.layout.paging is not None, "pages are not protected"
        begin = span.start * run.dtype.itemsize
        size_bytes = align_up(span.num_elements * run.dtype.itemsize, self.layout.paging.page_bytes)
        assert begin % self.layout.paging.page_bytes == 0, f"a span of run {run.index} starts at byte {begin}"
        return bytes_at(self.run_address(run, what) + begin, size_bytes, self._pool.device)

    def run_address(self, run: Run, what: str) -> int:
        """Return where "parameter", "gradient" or a moment of a run starts."""
        return self._pool.address(self._regions[run.slots[0].region_name(what)])

    def arena(self, name: str) -> Region:
        """Return the region, without bytes, at the end of a page-wise arena such as "frozen/float32"."""
        return self._regions[f"end/{name}"]

    def undo(self) -> Tensor:
        """Return the undo buffer as bytes."""
        if UNDO_REGION not in self._regions:
            return torch.empty(0, dtype=torch.uint8)
        region = self._regions[UNDO_REGION]
        return tensor_from_pool(self._pool, region, dtype=torch.uint8, shape=(region.spec.size_bytes,))

    def initialise(self) -> None:
        """Copy the values of the user's parameters into retained memory: once, before training, outside any update.

        A GPU's driver does not promise that new memory is zero, which gaps between tensors must be.
        """
        with torch.no_grad():
            if self._pool.on_device:
                for run in self.layout.runs:
                    for what in (*run.tensors, "gradient"):
                        self.run(run, what).zero_()
            for slot in (*self.layout.slots, *self.layout.frozen):
                self.parameter(slot).copy_(slot.parameter.detach())

    def attach_parameters(self) -> None:
        """Make the user's parameters views of retained memory. Their objects, flags and version counters stay."""
        for slot in (*self.layout.slots, *self.layout.frozen):
            slot.parameter.data = self.parameter(slot)

    def _with_strides(self, slot: TensorSlot, name: str) -> Tensor:
        if slot.num_elements == 0:  # it has no region
            return torch.empty_strided(slot.shape, slot.strides, dtype=slot.dtype, device=slot.parameter.device)
        return tensor_from_pool(
            self._pool, self._regions[name], dtype=slot.dtype, shape=slot.shape, strides=slot.strides
        )

    def _flat(self, what: str, first: TensorSlot, last: TensorSlot) -> Tensor:
        regions = self._regions[first.region_name(what)], self._regions[last.region_name(what)]
        return flat_tensor(self._pool, *regions, first.dtype)

    def _check_places(self, run: Run) -> None:
        # Chunks address a run as one range in each arena, so the pool must have laid out what the plan computed.
        first = run.slots[0]
        assert first.offset_elements == 0, f"run {run.index} starts at {first.offset_elements}"
        for what in (*run.tensors, "gradient"):
            start = self._pool.address(self._regions[first.region_name(what)])
            for slot in run.slots:
                offset_bytes = slot.offset_elements * slot.dtype.itemsize
                assert offset_bytes == align_up(offset_bytes), f"{slot.name} is not aligned"
                address = self._pool.address(self._regions[slot.region_name(what)])
                assert address - start == offset_bytes, f"{what} of {slot.name} is not where the layout has it"
