"""The plan of a rank's training state: which tensors are kept where, and how an update and a reduction divide them.

A plan is a pure function of model, optimizer and options, so that every generation of trainers arrives at the same one;
`signature` is how they make sure. It allocates nothing. Paper, section 5.2.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from leto_strategy.erasures import Shape
from leto_strategy.errors import LayoutMismatchError
from leto_strategy.geometry import (
    ALIGNMENT_BYTES,
    Chunk,
    Extent,
    Segment,
    align_up,
    chunk_of,
    cut_buckets,
    cut_chunks,
    default_chunk_bytes,
)
from leto_strategy.memory.backend import Kind, RegionSpec
from leto_strategy.progress import CHUNK_MAX
from leto_strategy.update.admission import check_parameters, groups_of_parameters
from leto_strategy.update.optimizers import OptimizerAdapter
from leto_strategy.update.paging import Paging, Placement, chunk_bytes_in_groups, pages_of, place, shape_of
from leto_strategy.update.runs import extents_of, families_of, new_slot, slots_and_runs
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
        paging: How pages are protected; None: they are not, and nothing is laid out by pages.
        shape: Protection groups, where pages are protected.
    """

    slots: tuple[TensorSlot, ...]
    frozen: tuple[TensorSlot, ...]
    runs: tuple[Run, ...]
    chunks: tuple[Chunk, ...]
    buckets: tuple[Bucket, ...]
    launch_order: tuple[int, ...]
    optimizer_name: str
    version: int = LAYOUT_VERSION
    paging: Paging | None = None
    shape: Shape | None = None

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
        paging: Paging | None = None,
    ) -> "StateLayout":
        """Plan the state of a model and its optimizer.

        Args:
            named_parameters: The model's parameters in order of registration; a parameter with two names counts once.
            optimizer: Its groups decide what is trained. A parameter with `requires_grad=False` is not.
            adapter: `adapter_for(optimizer)`.
            chunk_bytes: Parameters and moments in one chunk; None derives it from the total (4 to 32 chunks).
            bucket_bytes_first: Limit of the first gradient bucket of each dtype. The defaults are DDP's.
            bucket_bytes: Limit of the other buckets.
            paging: Lay out by pages, in protection groups.

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
        families = families_of(trained, group_of, optimizer, adapter)
        total_bytes = sum(family.state_bytes for family in families)
        chunk_bytes = default_chunk_bytes(total_bytes) if chunk_bytes is None else chunk_bytes
        placement = None
        if paging is not None:
            chunk_bytes = chunk_bytes_in_groups(chunk_bytes, paging)
            placement = place(
                [f.sizes for f in families if f.filled], chunk_bytes=chunk_bytes, page_bytes=paging.page_bytes
            )
        slots, runs = slots_and_runs(families, names, registration, placement)
        frozen = tuple(
            new_slot(index, names[id(p)], p, -1, registration[id(p)])
            for index, p in enumerate(p for p in parameters if id(p) not in trained_ids)
        )
        extents = extents_of(runs)
        if placement is None or paging is None:
            chunks, shape = cut_chunks(extents, chunk_bytes=chunk_bytes), None
        else:
            chunks = _placed_chunks(placement, runs, extents, paging)
            shape = _shape(chunks, runs, frozen, paging)
        if len(chunks) > CHUNK_MAX + 1:
            raise ValueError(
                f"chunk_bytes={chunk_bytes} makes {len(chunks)} chunks, at most {CHUNK_MAX + 1} fit a word"
            )
        buckets = _buckets(slots, bucket_bytes_first, bucket_bytes)
        launch_order = sorted(range(len(buckets)), key=lambda i: -min(slot.registration for slot in buckets[i].slots))
        return cls(
            slots,
            frozen,
            runs,
            chunks,
            buckets,
            tuple(launch_order),
            adapter.optimizer_name,
            paging=paging,
            shape=shape,
        )

    @property
    def alignment_bytes(self) -> int:
        """Of the start of runs and of each copy in the undo buffer: a page, where pages are protected."""
        return ALIGNMENT_BYTES if self.paging is None else self.paging.page_bytes

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
        inside = [slot for run in self.runs for slot in run.slots]
        alignment = {slot.index: self.alignment_bytes if slot.opens_page else ALIGNMENT_BYTES for slot in inside}
        specs = [
            _spec(slot, "parameter", Kind.PROTECTED, ALIGNMENT_BYTES, "frozen")
            for slot in self.frozen
            if slot.num_elements
        ]
        specs += [_spec(slot, "parameter", Kind.PROTECTED, alignment[slot.index]) for slot in inside]
        for moment in dict.fromkeys(name for run in self.runs for name in run.moments):
            specs += [
                _spec(slot, moment, Kind.PROTECTED, alignment[slot.index]) for slot in inside if moment in slot.moments
            ]
        specs += [_spec(slot, "gradient", Kind.RETAINED, alignment[slot.index]) for slot in inside]
        if self.paging is not None:
            # Nothing but the end of each arena, so that its last page is whole.
            ends = {spec.arena: spec.kind for spec in specs}
            specs += [
                RegionSpec(f"end/{arena}", 0, kind, arena=arena, alignment_bytes=self.paging.page_bytes)
                for arena, kind in ends.items()
            ]
        if self.undo_bytes:
            specs.append(RegionSpec(UNDO_REGION, self.undo_bytes, Kind.RETAINED, alignment_bytes=self.alignment_bytes))
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
                "protection": None if self.paging is None else asdict(self.paging),
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


def _placed_chunks(
    placement: Placement, runs: Sequence[Run], extents: Sequence[Extent], paging: Paging
) -> tuple[Chunk, ...]:
    by_slot = {extent.slot: extent for extent in extents}
    return tuple(
        chunk_of(
            index,
            [Segment(runs[piece.run].slots[piece.tensor].index, piece.start, piece.stop) for piece in pieces],
            by_slot,
            alignment_bytes=paging.page_bytes,
        )
        for index, pieces in enumerate(placement.chunks)
    )


def _shape(chunks: Sequence[Chunk], runs: Sequence[Run], frozen: Sequence[TensorSlot], paging: Paging) -> Shape:
    arenas: dict[torch.dtype, int] = {}
    for slot in frozen:
        if slot.num_elements:
            arenas[slot.dtype] = align_up(arenas.get(slot.dtype, 0)) + slot.size_bytes
    return shape_of(
        chunks,
        [len(run.tensors) for run in runs],
        [run.dtype.itemsize for run in runs],
        sum(pages_of(size, paging) for size in arenas.values()),
        paging,
    )


def _buckets(slots: Sequence[TensorSlot], first_bytes: int, bytes_each: int) -> tuple[Bucket, ...]:
    buckets: list[Bucket] = []
    for dtype in dict.fromkeys(slot.dtype for slot in slots):
        inside = [slot for slot in slots if slot.dtype == dtype and slot.num_elements]
        sizes = [align_up(slot.size_bytes) for slot in inside]
        for part in cut_buckets(sizes, first_bytes=first_bytes, bytes_each=bytes_each):
            buckets.append(Bucket(len(buckets), dtype, tuple(inside[i] for i in part)))
    return tuple(buckets)


def _spec(slot: TensorSlot, what: str, kind: Kind, alignment_bytes: int, arena: str = "") -> RegionSpec:
    dtype = str(slot.dtype).removeprefix("torch.")
    return RegionSpec(
        slot.region_name(what), slot.size_bytes, kind, arena=f"{arena or what}/{dtype}", alignment_bytes=alignment_bytes
    )


def _description(slot: TensorSlot) -> list[object]:
    return [str(slot.dtype), list(slot.shape), list(slot.strides), slot.group, list(slot.moments)]
