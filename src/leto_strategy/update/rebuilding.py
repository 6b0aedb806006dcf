"""Bring back the pages that one rank has lost, before anything reads them (rules R12, T5, T6; paper, 5.3).

Every step reads only pages that are not marked and writes only pages that are, or copies what is true already; marks
are cleared when the content they speak of is whole. So this may be killed anywhere, more pages may be lost, and the
next process begins again with what is left. Order of resuming: count everything; gradients; groups that are closed;
groups that are committed and not drained; the open group, its lost pages outside the open chunk, its parity and its
undo pages in one solution, then the open chunk from undo; then the marks.
"""

import time
from collections.abc import Callable, Collection

from leto_strategy.erasure.pages import PageTable
from leto_strategy.erasures import Assessment, InForce, Page, PageKind, Position, Repair, assess, positions
from leto_strategy.errors import PagesLostError
from leto_strategy.marks import ProtectionWords
from leto_strategy.progress import Marker, Phase
from leto_strategy.update.protected_memory import ProtectedMemory
from leto_strategy.update.protection import Recovered

Drain = Callable[[int, Marker], None]


def rebuild(
    memory: ProtectedMemory,
    words: ProtectionWords,
    marker: Marker | None,
    *,
    drain: Drain,
    found: Collection[Page] = (),
) -> Recovered:
    """Rebuild all that is lost.

    Args:
        memory: Where pages lie; lost ones are mapped again, with any content.
        words: Loss marks and drain marks.
        marker: The rank's word.
        drain: Brings device parity of a group to host memory and marks that with the DONE it is given.
        found: Pages found lost now, beside those that are marked.

    Raises:
        PagesLostError: Some group has lost more than its parity, or all copies of a word are gone. Only loss marks
            were written.
    """
    begin = time.monotonic()
    words.rewrite()
    words.mark_lost(sorted(found))
    lost = words.lost()
    localised = time.monotonic()
    drained = words.drained()
    where = positions(memory.shape, marker, drained)
    plan = assess(memory.shape, marker, drained, lost)
    if plan.state_beyond or plan.gradients_beyond:
        raise PagesLostError("lost beyond the parity: " + "; ".join((*plan.state_beyond, *plan.gradients_beyond)))
    work = _Rebuilding(memory, words, lost)
    zeroed = work.gradients(plan, marker)
    committed_not_drained = [index for index, position in enumerate(where) if _awaits_drain(memory, index, position)]
    for index, position in enumerate(where):
        if position.parity is InForce.HOST:
            work.closed(index, plan.repairs[index])
    for index in committed_not_drained:
        assert marker is not None, "a group can't await its drain where nothing was begun"
        work.solve(index, where[index], plan.repairs[index])
        work.clear_device(where[index].buffer, index)
        drain(index, Marker(marker.step, Phase.DONE, timeline=marker.timeline))
    for index, position in enumerate(where):
        if position.parity is not InForce.HOST and index not in committed_not_drained:
            work.opened(index, position, plan.repairs[index])
    work.forget_unneeded()
    return Recovered(work.num_pages, localised - begin, time.monotonic() - localised, zeroed)


def _awaits_drain(memory: ProtectedMemory, index: int, position: Position) -> bool:
    """Whether all chunks of a group are committed: no chunk of it is open, nor will be."""
    return position.parity is InForce.DEVICE and position.num_committed == len(memory.shape.groups[index].chunks)


class _Rebuilding:
    def __init__(self, memory: ProtectedMemory, words: ProtectionWords, lost: set[Page]) -> None:
        self._memory, self._words, self._lost = memory, words, lost
        self.num_pages = 0

    def gradients(self, plan: Assessment, marker: Marker | None) -> tuple[int, ...]:
        """Rebuild gradients; zero what nothing needs and nothing can rebuild. Returns groups that hooks might miss."""
        zeroed = []
        for index, repair in enumerate(plan.gradient_repairs):
            mine = self._marked(index, PageKind.GRADIENT, PageKind.GRADIENT_PARITY)
            if not mine:
                continue
            if repair is not None:
                self._memory.gradient_codes[index].reconstruct(
                    self._memory.gradients[index],
                    self._memory.gradient_parity[index],
                    lost_data=repair.data,
                    lost_parity=repair.parity,
                )
                self.num_pages += repair.num_erasures
            else:
                for page in mine:
                    self._memory.content(page).zero_()
                if marker is not None and marker.phase is not Phase.DONE:
                    zeroed.append(index)
            self._clear(mine)
        return tuple(zeroed)

    def closed(self, index: int, repair: Repair) -> None:
        """A group whose parity is in host memory: the second tier first, if that is enough."""
        memory = self._memory
        host = self._marked(index, PageKind.FIRST, PageKind.SECOND)
        if repair.first_from_second:
            memory.code.second.reconstruct(
                memory.first[index],
                memory.second[index],
                lost_data=repair.first_from_second,
                lost_parity=repair.second,
            )
            self.num_pages += len(repair.first_from_second) + len(repair.second)
            self._clear(host)
        if repair.num_erasures:
            memory.codes[index].reconstruct(
                memory.data[index], memory.first[index], lost_data=repair.data, lost_parity=repair.parity
            )
            self.num_pages += repair.num_erasures
            self._clear(self._marked(index, PageKind.DATA, PageKind.FIRST))
        if repair.second and not repair.first_from_second:
            memory.code.second.encode(memory.first[index], out=memory.second[index])
            self.num_pages += len(repair.second)
            self._clear(self._marked(index, PageKind.SECOND))

    def opened(self, index: int, position: Position, repair: Repair) -> None:
        """The group in which the update stands."""
        memory, group = self._memory, self._memory.shape.groups[index]
        if repair.first_from_second:
            lost_second = {page.place for page in self._marked(index, PageKind.SECOND)}
            lost_first = {page.place for page in self._marked(index, PageKind.FIRST)}
            memory.code.second.reconstruct(
                memory.first[index], memory.second[index], lost_data=lost_first, lost_parity=lost_second
            )
            self.num_pages += len(lost_first) + len(lost_second)
            self._clear(self._marked(index, PageKind.FIRST, PageKind.SECOND))
        for place in repair.device_from_first:
            source, target = Page(PageKind.FIRST, index, place), Page(PageKind.DEVICE, position.buffer, place)
            memory.content(target).copy_(memory.content(source))
            self.num_pages += 1
        self.solve(index, position, repair)
        undo: list[Page] = []
        if position.open_chunk is not None:
            opened = group.pages_of(position.open_chunk)
            undo = [Page(PageKind.UNDO, 0, k) for k in range(len(opened))]
            for k, place in enumerate(opened):
                page = Page(PageKind.DATA, index, place)
                if page in self._lost:  # what is torn, but there, is restored by the update itself
                    memory.content(page).copy_(memory.content(undo[k]))
                    self.num_pages += 1
        self._clear([page for page in undo if page in self._lost])
        self.clear_device(position.buffer, index)

    def solve(self, index: int, position: Position, repair: Repair) -> None:
        """Solve for what is lost of a group on the device, with undo pages in the place of an open chunk's."""
        if not repair.num_erasures:
            return
        memory, group = self._memory, self._memory.shape.groups[index]
        addresses = list(memory.data[index].addresses)
        if position.open_chunk is not None:
            opened = group.pages_of(position.open_chunk)
            addresses[opened.start : opened.stop] = memory.undo.addresses[: len(opened)]
        table = memory.data[index]
        memory.codes[index].reconstruct(
            PageTable(tuple(addresses), table.num_words, table.device),
            memory.device[position.buffer],
            lost_data=(*repair.data, *repair.undo),
            lost_parity=repair.parity,
        )
        self.num_pages += repair.num_erasures

    def clear_device(self, buffer: int, index: int) -> None:
        """The data of a group and the device parity in force are whole."""
        self._clear([*self._marked(buffer, PageKind.DEVICE), *self._marked(index, PageKind.DATA)])

    def forget_unneeded(self) -> None:
        """Undo and device parity that nothing refers to: they are written whole before anything does again."""
        self._clear(sorted(page for page in self._lost if page.kind in (PageKind.UNDO, PageKind.DEVICE)))

    def _marked(self, group: int, *kinds: PageKind) -> list[Page]:
        return sorted(page for page in self._lost if page.group == group and page.kind in kinds)

    def _clear(self, pages: Collection[Page]) -> None:
        self._words.clear(pages)
        self._lost -= set(pages)
