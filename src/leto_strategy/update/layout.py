"""The plan of a rank's training state: which tensors are kept where, and how an update and a reduction divide them.

A plan is a pure function of model, optimizer and options, so that every generation of trainers arrives at the same one;
`signature` is how they make sure. It allocates nothing. Paper, section 5.2.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from leto_strategy.errors import LayoutMismatchError
from leto_strategy.geometry import (
    ALIGNMENT_BYTES,
    Chunk,
    Extent,
    align_up,
    cut_buckets,
    cut_chunks,
    default_chunk_bytes,
    offsets,
)
from leto_strategy.memory.backend import Kind, RegionSpec
from leto_strategy.progress import CHUNK_MAX
from leto_strategy.update.admission import check_parameters, groups_of_parameters
from leto_strategy.update.cutting import is_cuttable
from leto_strategy.update.optimizers import OptimizerAdapter
from leto_strategy.update.slots import Bucket, Run, TensorSlot

LAYOUT_VERSION = 1
UNDO_REGION = "undo"
BUCKET_BYTES_FIRST = 1 << 20
BUCKET_BYTES = 25 << 20


@dataclass(frozen=True, eq=False)
class StateLayout:
    """See `plan`.

    Args:
        slots: Trained parameters in the order of updates: by dtype, parameter group, reverse registration.
        frozen: The others, in order of registration.
        runs: What chunks are cut from.
        chunks: Units of commit.
        buckets: Units of the gradient reduction, the same in every step of every generation.
        launch_order: Indices of buckets in the order in which a backward pass usually completes them.
        version: Of the rules by which a plan is made.
    """

    slots: tuple[TensorSlot, ...]
    frozen: tuple[TensorSlot, ...]
    runs: tuple[Run, ...]
    chunks: tuple[Chunk, ...]
    buckets: tuple[Bucket, ...]
    launch_order: tuple[int, ...]
    optimizer_name: str
    version: int = LAYOUT_VERSION

    @classmethod
    def plan(
        cls,
        named_parameters: Sequence[tuple[str, Parameter]],
        optimizer: Optimizer,
        adapter: OptimizerAdapter,
        *,
        chunk_bytes: int | None = None,
        bucket_bytes_first: int = BUCKET_BYTES_FIRST,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> "StateLayout":
        """Plan the state of a model and its optimizer.

        Args:
            named_parameters: The model's parameters in order of registration; a parameter with two names counts once.
            optimizer: Its groups decide what is trained. A parameter with `requires_grad=False` is not.
            adapter: `adapter_for(optimizer)`.
            chunk_bytes: Parameters and moments in one chunk; None derives it from the total (4 to 32 chunks).
            bucket_bytes_first: Limit of the first gradient bucket of each dtype. The defaults are DDP's.
            bucket_bytes: Limit of the other buckets.

        Raises:
            ValueError: a parameter that can't be kept exact, named with what to do.
        """
        names: dict[int, str] = {}
        parameters: list[Parameter] = []
        for name, parameter in named_parameters:
            if id(parameter) not in names:
                names[id(parameter)] = name
                parameters.append(parameter)
        group_of = groups_of_parameters(optimizer, names)
        trained = [p for p in parameters if p.requires_grad and id(p) in group_of]
        trained_ids = {id(p) for p in trained}
        check_parameters([(names[id(p)], p) for p in parameters], trained_ids)

        registration = {id(p): index for index, p in enumerate(parameters)}
        trained.sort(key=lambda p: (str(p.dtype), group_of[id(p)], -registration[id(p)]))
        slots, runs = _slots_and_runs(trained, names, group_of, registration, optimizer, adapter)
        frozen = tuple(
            _slot(index, names[id(p)], p, -1, registration[id(p)])
            for index, p in enumerate(p for p in parameters if id(p) not in trained_ids)
        )
        extents = [
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
        total_bytes = sum(e.num_elements * e.element_bytes * e.num_copies for e in extents)
        chunk_bytes = default_chunk_bytes(total_bytes) if chunk_bytes is None else chunk_bytes
        chunks = cut_chunks(extents, chunk_bytes=chunk_bytes)
        if len(chunks) > CHUNK_MAX + 1:
            raise ValueError(
                f"chunk_bytes={chunk_bytes} makes {len(chunks)} chunks, at most {CHUNK_MAX + 1} fit a word"
            )
        buckets = _buckets(slots, bucket_bytes_first, bucket_bytes)
        launch_order = sorted(range(len(buckets)), key=lambda i: -min(slot.registration for slot in buckets[i].slots))
        return cls(slots, frozen, runs, chunks, buckets, tuple(launch_order), adapter.optimizer_name)

    @property
    def undo_bytes(self) -> int:
        """Size of the undo buffer: that of the largest chunk."""
        return max((chunk.undo_bytes for chunk in self.chunks), default=0)

    @property
    def protected_bytes(self) -> int:
        """Bytes of parameters and moments, frozen parameters included."""
        return sum(s.size_bytes * (1 + len(s.moments)) for s in (*self.slots, *self.frozen))

    def region_specs(self) -> list[RegionSpec]:
        """Return everything that must be allocated, in one call: neighbours of an arena lie back to back."""
        specs = [_spec(slot, "parameter", Kind.PROTECTED, "frozen") for slot in self.frozen if slot.num_elements]
        inside = [slot for run in self.runs for slot in run.slots]
        specs += [_spec(slot, "parameter", Kind.PROTECTED) for slot in inside]
        for moment in dict.fromkeys(name for run in self.runs for name in run.moments):
            specs += [_spec(slot, moment, Kind.PROTECTED) for slot in inside if moment in slot.moments]
        specs += [_spec(slot, "gradient", Kind.RETAINED) for slot in inside]
        if self.undo_bytes:
            specs.append(RegionSpec(UNDO_REGION, self.undo_bytes, Kind.RETAINED, alignment_bytes=ALIGNMENT_BYTES))
        return specs

    def signature(self) -> str:
        """Return the plan as one line of JSON that is equal where, and only where, two plans agree."""
        return json.dumps(
            {
                "version": self.version,
                "optimizer": self.optimizer_name,
                "tensors": {slot.name: _description(slot) for slot in (*self.slots, *self.frozen)},
                "chunks": [[[span.run, span.start, span.stop] for span in chunk.spans] for chunk in self.chunks],
                "cuttable": [run.cuttable for run in self.runs],
                "buckets": [[slot.index for slot in bucket.slots] for bucket in self.buckets],
            },
            separators=(",", ":"),
        )

    def require_signature(self, expected: str) -> None:
        """Compare with the signature of the generation that allocated the state.

        Raises:
            LayoutMismatchError: names the first difference.
        """
        if expected == self.signature():
            return
        before, now = json.loads(expected), json.loads(self.signature())
        for part in ("version", "optimizer"):
            if before.get(part) != now[part]:
                raise LayoutMismatchError(
                    f"the {part} was {before.get(part)} when training began and is {now[part]} now"
                )
        tensors_before, tensors_now = before["tensors"], now["tensors"]
        for name in sorted(tensors_before.keys() ^ tensors_now.keys()) or tensors_now:
            if tensors_before.get(name) != tensors_now.get(name):
                raise LayoutMismatchError(
                    f"parameter {name} was {tensors_before.get(name, 'not there')} when training began and is "
                    f"{tensors_now.get(name, 'not there')} now: the script must build the same model each time it runs"
                )
        part = next((p for p in now if before.get(p) != now[p]), "order of parameters")
        raise LayoutMismatchError(f"the {part} of the training state differ from those made when training began")


def _slots_and_runs(
    trained: Sequence[Parameter],
    names: dict[int, str],
    group_of: dict[int, int],
    registration: dict[int, int],
    optimizer: Optimizer,
    adapter: OptimizerAdapter,
) -> tuple[tuple[TensorSlot, ...], tuple[Run, ...]]:
    slots: list[TensorSlot] = []
    runs: list[Run] = []
    members: dict[tuple[torch.dtype, int], list[Parameter]] = {}
    for parameter in trained:
        members.setdefault((parameter.dtype, group_of[id(parameter)]), []).append(parameter)
    for (dtype, group_index), inside in members.items():
        group = optimizer.param_groups[group_index]
        moments = adapter.moment_names(group)
        starts = offsets(p.numel() * dtype.itemsize for p in inside)
        made = [
            _slot(
                len(slots) + place,
                names[id(p)],
                p,
                group_index,
                registration[id(p)],
                run=len(runs) if p.numel() else -1,
                offset_elements=starts[place] // dtype.itemsize,
                moments=moments,
            )
            for place, p in enumerate(inside)
        ]
        slots += made
        filled = tuple(slot for slot in made if slot.num_elements)
        if filled:
            cuttable = is_cuttable(adapter, group_index, group, dtype, inside[0].device)
            runs.append(Run(len(runs), dtype, group_index, filled, moments, cuttable))
    return tuple(slots), tuple(runs)


def _slot(
    index: int,
    name: str,
    parameter: Parameter,
    group: int,
    registration: int,
    *,
    run: int = -1,
    offset_elements: int = 0,
    moments: tuple[str, ...] = (),
) -> TensorSlot:
    shape, strides = tuple(parameter.shape), tuple(parameter.stride())
    return TensorSlot(
        index, name, parameter, group, parameter.dtype, shape, strides, registration, run, offset_elements, moments
    )


def _buckets(slots: Sequence[TensorSlot], first_bytes: int, bytes_each: int) -> tuple[Bucket, ...]:
    buckets: list[Bucket] = []
    for dtype in dict.fromkeys(slot.dtype for slot in slots):
        inside = [slot for slot in slots if slot.dtype == dtype and slot.num_elements]
        sizes = [align_up(slot.size_bytes) for slot in inside]
        for part in cut_buckets(sizes, first_bytes=first_bytes, bytes_each=bytes_each):
            buckets.append(Bucket(len(buckets), dtype, tuple(inside[i] for i in part)))
    return tuple(buckets)


def _spec(slot: TensorSlot, what: str, kind: Kind, arena: str = "") -> RegionSpec:
    dtype = str(slot.dtype).removeprefix("torch.")
    return RegionSpec(
        slot.region_name(what), slot.size_bytes, kind, arena=f"{arena or what}/{dtype}", alignment_bytes=ALIGNMENT_BYTES
    )


def _description(slot: TensorSlot) -> list[object]:
    return [str(slot.dtype), list(slot.shape), list(slot.strides), slot.group, list(slot.moments)]
