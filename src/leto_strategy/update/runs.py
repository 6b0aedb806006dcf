"""From parameters to slots and runs: what lies back to back, and where in it each tensor starts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from leto_strategy.geometry import Extent, offsets
from leto_strategy.update.cutting import is_cuttable
from leto_strategy.update.optimizers import OptimizerAdapter
from leto_strategy.update.paging import Placement, RunSizes
from leto_strategy.update.slots import Run, TensorSlot


@dataclass(frozen=True, slots=True)
class Family:
    """Trained parameters of one dtype and parameter group; a run where one of them has elements."""

    dtype: torch.dtype
    group: int
    parameters: tuple[Parameter, ...]
    moments: tuple[str, ...]
    cuttable: bool

    @property
    def filled(self) -> tuple[Parameter, ...]:
        """Those with elements."""
        return tuple(p for p in self.parameters if p.numel())

    @property
    def sizes(self) -> RunSizes:
        """As `paging.place` wants them."""
        sizes = tuple(p.numel() for p in self.filled)
        return RunSizes(self.dtype.itemsize, 1 + len(self.moments), self.cuttable, sizes)

    @property
    def state_bytes(self) -> int:
        """Parameters and moments."""
        return sum(self.sizes.num_elements) * self.dtype.itemsize * (1 + len(self.moments))


def families_of(
    trained: Sequence[Parameter], group_of: dict[int, int], optimizer: Optimizer, adapter: OptimizerAdapter
) -> list[Family]:
    """Put trained parameters together, in their order."""
    members: dict[tuple[torch.dtype, int], list[Parameter]] = {}
    for parameter in trained:
        members.setdefault((parameter.dtype, group_of[id(parameter)]), []).append(parameter)
    families: list[Family] = []
    for (dtype, index), inside in members.items():
        group = optimizer.param_groups[index]
        filled = any(p.numel() for p in inside)
        cuttable = filled and is_cuttable(adapter, index, group, dtype, inside[0].device)
        families.append(Family(dtype, index, tuple(inside), adapter.moment_names(group), cuttable))
    return families


def slots_and_runs(
    families: Sequence[Family], names: dict[int, str], registration: dict[int, int], placement: Placement | None
) -> tuple[tuple[TensorSlot, ...], tuple[Run, ...]]:
    """Return the slots of all families, and a run for each that has elements; `placement` says where they lie."""
    slots: list[TensorSlot] = []
    runs: list[Run] = []
    for family in families:
        starts = iter(offsets(p.numel() * family.dtype.itemsize for p in family.filled))
        if placement is not None and family.filled:
            starts = iter(placement.offsets[len(runs)])
        made: list[TensorSlot] = []
        num_filled = 0
        for p in family.parameters:
            at_page = placement is not None and (num_filled == 0 or (len(runs), num_filled) in placement.at_page)
            made.append(
                new_slot(
                    len(slots) + len(made),
                    names[id(p)],
                    p,
                    family.group,
                    registration[id(p)],
                    run=len(runs) if p.numel() else -1,
                    offset_elements=next(starts) // family.dtype.itemsize if p.numel() else 0,
                    moments=family.moments,
                    opens_page=at_page and p.numel() > 0,
                )
            )
            num_filled += p.numel() > 0
        slots += made
        filled = tuple(slot for slot in made if slot.num_elements)
        if filled:
            runs.append(Run(len(runs), family.dtype, family.group, filled, family.moments, family.cuttable))
    return tuple(slots), tuple(runs)


def extents_of(runs: Sequence[Run]) -> list[Extent]:
    """Return trained tensors as the cutter sees them."""
    return [
        Extent(
            slot.index,
            run.index,
            slot.offset_elements,
            slot.num_elements,
            run.dtype.itemsize,
            len(run.tensors),
            run.cuttable,
        )
        for run in runs
        for slot in run.slots
    ]


def new_slot(
    index: int,
    name: str,
    parameter: Parameter,
    group: int,
    registration: int,
    *,
    run: int = -1,
    offset_elements: int = 0,
    moments: tuple[str, ...] = (),
    opens_page: bool = False,
) -> TensorSlot:
    """Return the slot of a parameter; its arguments are the slot's."""
    shape, strides = tuple(parameter.shape), tuple(parameter.stride())
    return TensorSlot(
        index,
        name,
        parameter,
        group,
        parameter.dtype,
        shape,
        strides,
        registration,
        run,
        offset_elements,
        moments,
        opens_page,
    )
