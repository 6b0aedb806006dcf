"""Parity that follows the update, chunk by chunk: the Resumable Model Updater's half of the erasure code.

Invariant: at every moment one parity of each group belongs, bit for bit, to its data with the undo buffer in place of
an open chunk, and the word and the drain marks say which (`erasures.positions`). So nothing here writes over parity in
force. Device parity alternates between the two buffers of a pair; COMMIT makes the other one the one in force. The pair
is used again by the group after the next, which is loaded only when this one is drained (T3, T4). Paper, 5.2.
"""

from collections.abc import Sequence

from torch import Tensor

from leto_strategy.erasures import NUM_DEVICE_BUFFERS, Page, PageKind, device_buffer
from leto_strategy.faults import Reach, reach_nothing
from leto_strategy.progress import Marker, Phase
from leto_strategy.update.layout import StateLayout
from leto_strategy.update.protected_memory import ProtectedMemory
from leto_strategy.update.protection import Protection, Recovered
from leto_strategy.update.rebuilding import rebuild


class CodedProtection(Protection):
    """See the module.

    Args:
        memory: Where everything lies, writable.
        reach: Crash points: gradients_encoded, parity_loaded, parity_updated, parity_first, parity_drained.
    """

    def __init__(self, memory: ProtectedMemory, *, reach: Reach = reach_nothing) -> None:
        self._memory, self._reach = memory, reach
        self._words = memory.words()
        self._done = Marker(0, Phase.DONE)
        self._pending: list[int] = []  # groups with all chunks committed that are not drained
        self._first = [memory.parity_bytes(PageKind.FIRST, group) for group in range(len(memory.shape.groups))]
        self._device: list[Tensor] = [
            memory.parity_bytes(PageKind.DEVICE, buffer) for buffer in range(NUM_DEVICE_BUFFERS)
        ]
        self._undo = [
            [memory.undo.select(range(count)) for count in group.chunk_pages] for group in memory.shape.groups
        ]
        self._chunks = [
            [memory.data[index].select(group.pages_of(chunk)) for chunk in group.chunks]
            for index, group in enumerate(memory.shape.groups)
        ]

    def groups(self, layout: StateLayout) -> Sequence[range]:
        """As laid out; groups of frozen parameters have no chunks."""
        return [group.chunks for group in self._memory.shape.groups]

    def encode(self) -> None:
        """First and second tier of every group, then the words."""
        memory = self._memory
        for index, code in enumerate(memory.codes):
            code.encode(memory.data[index], out=memory.first[index])
            memory.code.second.encode(memory.first[index], out=memory.second[index])
        self._words.initialise()
        memory.publish_shape()

    def recover(self, marker: Marker | None) -> Recovered:
        """See `rebuilding`."""
        result = rebuild(self._memory, self._words, marker, drain=self._drain_as_of)
        self._pending.clear()
        return result

    def seal_gradients(self, step: int) -> None:
        """Encode every group of gradients."""
        memory = self._memory
        for index, code in enumerate(memory.gradient_codes):
            code.encode(memory.gradients[index], out=memory.gradient_parity[index])
        self._reach("gradients_encoded", step)

    def begin(self, step: int, timeline: int) -> None:
        """Drains are marked with this step."""
        self._done = Marker(step, Phase.DONE, timeline=timeline)

    def load(self, group: int) -> None:
        """Host parity to the first buffer of the group's pair, which no group that is not drained uses."""
        assert all(other % 2 != group % 2 for other in self._pending), f"group {group} would overwrite parity in force"
        self._device[device_buffer(group, 0)].copy_(self._first[group])
        self._reach("parity_loaded", self._done.step, self._memory.shape.groups[group].first_chunk)

    def delta(self, group: int, chunk: int) -> None:
        """From the undo buffer and the chunk to the other buffer of the pair."""
        memory, shape = self._memory, self._memory.shape.groups[group]
        place = chunk - shape.first_chunk
        memory.codes[group].update(
            memory.device[device_buffer(group, place)],
            indices=shape.pages_of(chunk),
            new=self._chunks[group][place],
            old=self._undo[group][place],
            out=memory.device[device_buffer(group, place + 1)],
        )
        self._reach("parity_updated", self._done.step, chunk)

    def committed(self, group: int, chunk: int) -> None:
        """Behind the first chunk of a group drain the one before, so that a copy engine could do it meanwhile."""
        self._drain_pending()
        if chunk == self._memory.shape.groups[group].chunks[-1]:
            self._pending.append(group)

    def finish(self) -> None:
        """Drain the last group."""
        self._drain_pending()
        groups = self._memory.shape.groups
        late = [
            g for g, drained in enumerate(self._words.drained()) if groups[g].chunks and drained != self._done.position
        ]
        assert not late, f"groups {late} are not drained at the end of step {self._done.step}"

    def _drain_pending(self) -> None:
        while self._pending:
            self._drain_as_of(self._pending[0], self._done)
            del self._pending[0]

    def _drain_as_of(self, group: int, done: Marker) -> None:
        """Host parity of both tiers from the device's, then the mark: until then the device's stays in force (T3)."""
        memory, shape = self._memory, self._memory.shape
        self._first[group].copy_(self._device[device_buffer(group, len(shape.groups[group].chunks))])
        self._reach("parity_first", done.step, shape.groups[group].chunks[-1])
        memory.code.second.encode(memory.first[group], out=memory.second[group])
        self._words.clear(self._marked_on_host(group))
        self._words.mark_drained(group, done)
        self._reach("parity_drained", done.step, shape.groups[group].chunks[-1])

    def _marked_on_host(self, group: int) -> list[Page]:
        """Pages just written that are still marked as lost: an open group keeps such marks until here."""
        host = (PageKind.FIRST, PageKind.SECOND)
        return sorted(page for page in self._words.lost() if page.kind in host and page.group == group)
