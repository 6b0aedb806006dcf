"""The seam between an update and the erasure code that protects what it changes (rules T2 to T6; paper, 5.2).

D are the data of a protection group, U is the undo buffer, Q the parity of the group at its last committed chunk, H and
S its parity in host memory, R the parity of gradients. A call may only return when a kill after it finds its effect. At
the beginning of training `encode`; in every step::

    seal_gradients(s)                R <- RS(gradients), before the word READY
    begin(s)
    for each group g:
        load(g)                      Q <- H
          for each chunk j of g:
            U <- C_j, mark UNDO(j)   (the update does it)
            update C_j in place      (the update does it)
            delta(g, j)              Q' <- Q xor RS_j(U xor C_j), never in place in Q
            COMMIT(j)                (the update does it) Q' is in force with it
            committed(g, j)          the group before g may be drained now: H, S <- Q, mark
    finish()                         every group is drained; DONE follows

A trainer that takes over calls `recover` first, before it looks at any of this memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from leto_strategy.progress import Marker
from leto_strategy.update.layout import StateLayout


@dataclass(frozen=True, slots=True)
class Recovered:
    """What `recover` found and did.

    Args:
        num_pages: Pages rebuilt, of all kinds.
        localise_seconds: Time to find out which pages are lost.
        rebuild_seconds: Time to bring them back.
        gradients_zeroed: Groups of gradients that the update had used, lost beyond their parity: only hooks could have
            read them still, and find zeros.
    """

    num_pages: int = 0
    localise_seconds: float = 0.0
    rebuild_seconds: float = 0.0
    gradients_zeroed: tuple[int, ...] = ()


class Protection(ABC):
    """What keeps the parity of the training state consistent with its chunks."""

    @abstractmethod
    def groups(self, layout: StateLayout) -> Sequence[range]:
        """Return the chunks of each protection group: ranges that cover all chunks in order; some may be empty."""

    @abstractmethod
    def encode(self) -> None:
        """Compute the parity of the initial state. Interrupted, it is done again with everything else of the start."""

    @abstractmethod
    def recover(self, marker: Marker | None) -> Recovered:
        """Rebuild what is lost and bring parity to where the word says that the update stands.

        Args:
            marker: The rank's word after the decision of the recovery.

        Raises:
            PagesLostError: More is lost than parity can rebuild. Nothing was written but loss marks.
        """

    @abstractmethod
    def seal_gradients(self, step: int) -> None:
        """Compute the parity of the gradients of a step, which are final."""

    @abstractmethod
    def begin(self, step: int, timeline: int) -> None:
        """An update begins, or goes on."""

    @abstractmethod
    def load(self, group: int) -> None:
        """Bring the parity of a group to where it can be updated, before its first chunk is saved."""

    @abstractmethod
    def delta(self, group: int, chunk: int) -> None:
        """Compute the parity that follows from a chunk's change, beside the one in force.

        Args:
            group: Protection group.
            chunk: Index of the chunk, updated and not yet committed; its old content is in the undo buffer.
        """

    @abstractmethod
    def committed(self, group: int, chunk: int) -> None:
        """The word COMMIT of a chunk is stored."""

    @abstractmethod
    def finish(self) -> None:
        """Bring all parity to where it is kept, after the last chunk."""


class NoProtection(Protection):
    """Protects nothing: a lost page of training state can't be rebuilt, only a lost process be replaced.

    The update is crash-consistent all the same, since the undo buffer and the words survive a trainer.
    """

    def groups(self, layout: StateLayout) -> Sequence[range]:
        """Put all chunks into one group."""
        return [range(len(layout.chunks))]

    def encode(self) -> None:
        """There is no parity."""

    def recover(self, marker: Marker | None) -> Recovered:
        """Nobody knows of lost pages."""
        return Recovered()

    def seal_gradients(self, step: int) -> None:
        """There is no parity."""

    def begin(self, step: int, timeline: int) -> None:
        """There is no parity."""

    def load(self, group: int) -> None:
        """There is no parity."""

    def delta(self, group: int, chunk: int) -> None:
        """There is no parity."""

    def committed(self, group: int, chunk: int) -> None:
        """There is no parity."""

    def finish(self) -> None:
        """There is no parity."""
