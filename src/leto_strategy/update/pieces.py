"""A chunk as tensors: what is copied to and from the undo buffer, and what each call of the optimizer is given.

A cuttable span is updated as one flat range where all its parameters are updated alike, else tensor by tensor; both
give the same bits. Tensors that may not be cut are passed whole, with their own strides. A chunk is written in at least
two calls where it can be, so that its torn middle is a place that tests can reach. Where pages are protected, whole
pages are copied: undo page k then holds the chunk's k-th page.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leto_strategy.geometry import Chunk, Segment, Span, align_up
from leto_strategy.update.layout import StateLayout
from leto_strategy.update.slots import Run
from leto_strategy.update.state import RetainedState


@dataclass(frozen=True, slots=True)
class Write:
    """The arguments of one call of the optimizer: pieces of one parameter group, in place.

    Args:
        run: The run that all pieces belong to.
        parameters: Pieces; gradients and the moments match them.
        slots: Index of a slot whose step count each piece has.
    """

    run: Run
    parameters: list[Tensor]
    gradients: list[Tensor]
    moments: dict[str, list[Tensor]]
    slots: list[int]


class ChunkPieces:
    """The pieces of one chunk; built once per process, since they stay where they are.

    Args:
        layout: The plan.
        state: Its tensors.
        chunk: The chunk.
        runs: Flat tensors of each run by name, shared by all chunks.
        undo: The undo buffer as bytes, shared by all chunks.
    """

    def __init__(
        self,
        layout: StateLayout,
        state: RetainedState,
        chunk: Chunk,
        runs: Sequence[dict[str, Tensor]],
        undo: Tensor,
    ) -> None:
        self._layout = layout
        self._state = state
        self._runs = runs
        self._chunk = chunk
        self.data: list[Tensor] = []
        self.saved: list[Tensor] = []
        offset_bytes = 0
        for span in chunk.spans:
            for name in layout.runs[span.run].tensors:
                if layout.paging is None:
                    data = self._range(span, name, span.start, span.stop)
                else:
                    data = state.pages(layout.runs[span.run], name, span)
                size_bytes = data.numel() * data.element_size()
                self.data.append(data)
                self.saved.append(undo[offset_bytes : offset_bytes + size_bytes].view(data.dtype))
                offset_bytes += align_up(size_bytes, layout.alignment_bytes)
        assert offset_bytes == chunk.undo_bytes, f"chunk {chunk.index}: {offset_bytes} bytes of undo, not planned"
        self._merged = [self._merge(span) for span in chunk.spans]

    def save(self) -> None:
        """Copy the chunk to the undo buffer."""
        for saved, data in zip(self.saved, self.data, strict=True):
            saved.copy_(data)

    def restore(self) -> None:
        """Copy the undo buffer back to the chunk."""
        for saved, data in zip(self.saved, self.data, strict=True):
            data.copy_(saved)

    def writes(self, steps: Sequence[float], touched: Sequence[bool]) -> Iterator[Write]:
        """Yield the calls that update the chunk, without the parameters that have no gradient this step.

        Args:
            steps: Step count of each slot before the update.
            touched: Whether each slot has a gradient this step.
        """
        for span, merged in zip(self._chunk.spans, self._merged, strict=True):
            slots = [segment.slot for segment in span.segments]
            alike = all(touched[slot] for slot in slots) and all(steps[slot] == steps[slots[0]] for slot in slots)
            if merged and alike:
                yield from merged
            else:
                yield from self._one_by_one(span, touched)

    def _merge(self, span: Span) -> list[Write]:
        run = self._layout.runs[span.run]
        if not run.cuttable:
            return []
        middle = span.start + span.num_elements // 2
        bounds = [(start, stop) for start, stop in ((span.start, middle), (middle, span.stop)) if start < stop]
        return [
            Write(
                run,
                [self._range(span, "parameter", *bound)],
                [self._range(span, "gradient", *bound)],
                {name: [self._range(span, name, *bound)] for name in run.moments},
                [span.segments[0].slot],
            )
            for bound in bounds
        ]

    def _one_by_one(self, span: Span, touched: Sequence[bool]) -> Iterator[Write]:
        run = self._layout.runs[span.run]
        segments = [segment for segment in span.segments if touched[segment.slot]]
        middle = len(segments) // 2
        for part in (segments[:middle], segments[middle:]):
            if not part:
                continue
            pieces = {
                name: [self._piece(span, segment, name) for segment in part] for name in (*run.tensors, "gradient")
            }
            yield Write(
                run,
                pieces["parameter"],
                pieces["gradient"],
                {name: pieces[name] for name in run.moments},
                [segment.slot for segment in part],
            )

    def _piece(self, span: Span, segment: Segment, name: str) -> Tensor:
        slot = self._layout.slots[segment.slot]
        if self._layout.runs[span.run].cuttable:
            return self._range(span, name, slot.offset_elements + segment.start, slot.offset_elements + segment.stop)
        assert (segment.start, segment.stop) == (0, slot.num_elements), f"{slot.name} was cut"
        return self._state.tensor(slot, name)

    def _range(self, span: Span, name: str, start: int, stop: int) -> Tensor:
        return self._runs[span.run][name][start:stop]


def pieces_of(layout: StateLayout, state: RetainedState) -> list[ChunkPieces]:
    """Return the pieces of every chunk of a layout."""
    with torch.no_grad():
        runs = [{name: state.run(run, name) for name in (*run.tensors, "gradient")} for run in layout.runs]
        undo = state.undo()
        return [ChunkPieces(layout, state, chunk, runs, undo) for chunk in layout.chunks]
