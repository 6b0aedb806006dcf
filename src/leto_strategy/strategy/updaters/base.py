"""What a fit needs of an updater: the seam between the step's records and words, and the state that a step changes."""

from abc import ABC, abstractmethod
from typing import Any

from leto_strategy.faults import CrashPoints
from leto_strategy.progress import Marker, ProgressPage
from leto_strategy.recovery.records import RecordRing
from leto_strategy.strategy.reducer import GradientReducer
from leto_strategy.update.words import Words


class Updater(ABC):
    """Owns the training state of one rank: parameters, gradients, optimizer state.

    A step goes `check_start`, `start_part`, `begin_step`, any number of forward and backward passes, then `mid_part`
    when everything that can't be repeated is done, and `finish` behind the global synchronisation. A promoted trainer
    calls `enter` first and, where only `finish` is left to do, `recall` in place of all passes.
    """

    name: str
    """Value of the option `updater`."""

    steps_itself: bool
    """Whether `finish` performs the optimizer step; else torch's optimizers have performed it before `mid_part`."""

    reducer: GradientReducer

    @property
    def protected(self) -> str | None:
        """What of the state survives lost memory pages, in one sentence; None where nothing does."""
        return None

    @abstractmethod
    def signature(self) -> str:
        """Text that is equal in every generation that builds the same model."""

    @abstractmethod
    def require_signature(self, expected: str) -> None:
        """Compare with the signature of the generation that allocated the state.

        Raises:
            LayoutMismatchError: Names the first difference.
        """

    @abstractmethod
    def allocate(self) -> None:
        """Allocate retained memory, or map it where an earlier generation did; nothing is written."""

    def rehearse(self) -> None:  # noqa: B027
        """Called in a shadow that waits: make ahead of time what a promotion needs; no content of memory is known."""

    @abstractmethod
    def promoted(self, page: ProgressPage, words: Words, records: RecordRing, reach: CrashPoints) -> None:
        """Retained memory may be written from now on."""

    @abstractmethod
    def attach(self, *, resuming: bool) -> None:
        """The start hooks have run: take over the state, which is new, or, when resuming, the retained one."""

    def check_loaded(self) -> None:  # noqa: B027
        """A checkpoint was loaded into the optimizers; raise if its options keep other state than was planned.

        Raises:
            LayoutMismatchError: They do.
            UnsupportedOptimizerError: They do, and the update can't be made crash-consistent with them.
        """

    @abstractmethod
    def check_start(self) -> None:
        """Raise if something that no record holds has changed since the last step.

        Raises:
            LetoError: What, and what to do.
        """

    def leave(self) -> None:  # noqa: B027
        """The last step is over; what hooks write from here on is not part of any step.

        Raises:
            LetoError: As in `check_start`.
        """

    @abstractmethod
    def touched(self) -> bytes:
        """Which parameters have a gradient now."""

    @abstractmethod
    def start_part(self, step: int, touched: bytes) -> dict[str, Any]:
        """What START must hold of the state; `touched` is of the moment before the batch was fetched."""

    @abstractmethod
    def enter(self, step: int, start: dict[str, Any], *, finishing: bool) -> None:
        """Return to the state at which the loop is entered, just before a batch is fetched again.

        Args:
            step: Transaction number.
            start: What `start_part` returned.
            finishing: No pass will run: `recall` follows.
        """

    @abstractmethod
    def begin_step(self) -> None:
        """A step begins."""

    @abstractmethod
    def before_backward(self) -> None:
        """A backward pass begins."""

    @abstractmethod
    def mid_part(self, step: int, *, skipped: bool) -> dict[str, Any]:
        """Make sure that everything `finish` needs survives this process; returns what MID must hold of it.

        Args:
            step: Transaction number.
            skipped: The attempt changes nothing: gradients overflowed, or the user did not step.
        """

    @abstractmethod
    def recall(self, step: int, mid: dict[str, Any]) -> None:
        """Return to the state that `mid_part` has described."""

    @abstractmethod
    def finish(self, step: int, mid: dict[str, Any], marker: Marker) -> None:
        """Do what is left of the step and publish DONE.

        Args:
            step: Transaction number.
            mid: What `mid_part` returned.
            marker: The rank's word: SYNCED, or how far an earlier generation has come.
        """
