"""The seam between an update and the erasure code that protects what it changes (rules T2 to T6; paper, 5.2).

D are the data of a protection group, U is the undo buffer, Q the parity of the group at its last committed chunk, H and
S its parity in host memory. The update calls in this order, for each group in turn; a call may only return when a kill
after it finds its effect::

    load(g)                          Q <- H, LOAD mark; from here on Q is authoritative
      for each chunk j of g:
        U <- C_j, mark UNDO(j)       (the update does it)
        update C_j in place          (the update does it)
        delta(g, j, U, C_j)          Q' <- Q xor RS_j(U xor C_j), never in place in Q
        commit(g, j)                 names Q' authoritative; the word COMMIT(j) follows, which makes it so
    drain(g)                         H, S <- Q, hostpar[g]; DONE waits for all drains
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from leto_strategy.update.layout import StateLayout


class Protection(ABC):
    """What keeps the parity of the training state consistent with its chunks."""

    @abstractmethod
    def groups(self, layout: StateLayout) -> Sequence[range]:
        """Return the chunks of each protection group: ranges that cover all chunks in order."""

    @abstractmethod
    def load(self, group: int) -> None:
        """Bring the parity of a group to where it can be updated, before its first chunk is saved."""

    @abstractmethod
    def reopen(self, group: int) -> None:
        """Find the authoritative parity of a group that had begun before a failure, instead of `load`.

        Also called for groups before the interrupted one, and `drain` again after it: only the parity's own marks know
        whether they were drained, and where they were, both do nothing.
        """

    @abstractmethod
    def delta(self, group: int, chunk: int, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
        """Compute the parity that follows from a chunk's change, beside the one in force.

        Args:
            group: Protection group.
            chunk: Index of the chunk, updated and not yet committed.
            before: Its old content, in the undo buffer, as flat tensors.
            after: Its new content, in the same order.
        """

    @abstractmethod
    def commit(self, group: int, chunk: int) -> None:
        """Make ready that the computed parity becomes the one in force with the word COMMIT, the next store."""

    @abstractmethod
    def drain(self, group: int) -> None:
        """Bring the parity of a group to where it is kept, after its last chunk is committed."""


class NoProtection(Protection):
    """Protects nothing: a lost page of training state can't be rebuilt, only a lost process be replaced.

    The update is crash-consistent all the same, since the undo buffer and the words survive a trainer.
    """

    def groups(self, layout: StateLayout) -> Sequence[range]:
        """Put all chunks into one group."""
        return [range(len(layout.chunks))]

    def load(self, group: int) -> None:
        """There is no parity."""

    def reopen(self, group: int) -> None:
        """There is no parity."""

    def delta(self, group: int, chunk: int, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
        """There is no parity."""

    def commit(self, group: int, chunk: int) -> None:
        """There is no parity."""

    def drain(self, group: int) -> None:
        """There is no parity."""
