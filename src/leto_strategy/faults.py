"""Faults as data: where a trainer can be made to fail, and the slots in retained memory that arm it.

A slot lives in a rank's progress page (bytes 1024..2047), so that an injector arms a fault from outside and a promoted
trainer does not meet it twice: a slot is emptied before its fault happens. Reaching a point costs one load while
nothing is armed.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

SLOTS_OFFSET = 1024
SLOTS_BYTES = 1024
_WORDS_PER_SLOT = 8
_NUM_SLOTS = 14
_ARMED, _FIRED_NS = 0, 1
_FIRST_SLOT = 16

FAULTS = ("kill", "hang", "stop", "segv", "exit", "raise", "trap", "page-loss", "host-page-loss")
"""kill: SIGKILL itself. hang: never go on. stop: SIGSTOP itself. segv: a crash from inside. exit: `os._exit(1)`.
raise: a RuntimeError, as a user's bug would. trap: on a GPU a kernel that traps, in the stream; else SIGTRAP.
page-loss, host-page-loss: memory pages of the state, or of its parity in host memory, are destroyed, then SIGKILL."""

LOSSES = ("page-loss", "host-page-loss")
"""The faults that need protected state."""

POINTS: dict[str, str] = {
    "gate": "a promoted trainer has passed its gate and restored nothing yet",
    "attached": "parameters, gradients and optimizer state are views of retained memory",
    "restored": "the record of the step to re-enter has been applied",
    "start_before": "before the START record of a step is written",
    "start_middle": "the START record's payload is written, its header is not",
    "start_after": "the START record of a step is complete",
    "forward": "just before the user's training_step",
    "backward": "the first gradient of a backward pass has been computed",
    "gradients": "nothing of the step must be repeated: gradients are reduced and clipped (sync_snapshot: used)",
    "snapshot_middle": "half of the training state is copied (updater sync_snapshot only)",
    "gradients_encoded": "the parity of the gradients is computed (option protection)",
    "mid_middle": "the MID record's payload is written, its header is not",
    "mid_after": "the MID record is complete, READY is not published",
    "ready": "READY is published, the global synchronisation is not passed",
    "synced": "the global synchronisation is passed and SYNCED published",
    "parity_loaded": "a group's parity was copied from host memory, before its first chunk (option protection)",
    "chunk_before_undo": "before a chunk is copied to the undo buffer",
    "chunk_undo_copied": "a chunk is in the undo buffer, not marked",
    "chunk_undo_marked": "the undo of a chunk is marked, the chunk is untouched",
    "chunk_updating": "between two writes of one chunk: the chunk is torn",
    "chunk_updated": "a chunk is updated, not committed",
    "parity_updated": "a chunk's new parity is computed beside the old, not committed (option protection)",
    "chunk_committed": "a chunk is committed",
    "parity_first": "a group's parity is back in host memory, the second tier is not (option protection)",
    "parity_drained": "both tiers are in host memory and marked (option protection)",
    "update_done": "DONE is published",
    "batch_end": "the strategy saw the end of a training step",
    "validation": "in a validation step",
    "checkpoint_before": "a checkpoint file is about to be written",
    "checkpoint_middle": "a checkpoint's temporary file exists and is empty",
    "checkpoint_removed": "an old checkpoint file was just removed",
    "checkpoint_after": "a checkpoint file was just written",
    "epoch_end": "an epoch's last batch is done, before the hooks of the epoch's end",
    "train_end": "training is over, the strategy is torn down",
    "finished": "this rank has ended, its result is written",
}


@dataclass(frozen=True)
class Loss:
    """Pages that each protection group loses, or one group.

    Args:
        data_pages: Of the state.
        host_pages: Of its parity in host memory.
        group: The group; None: every one.
    """

    data_pages: int
    host_pages: int
    group: int | None

    def to_word(self) -> int:
        """As one integer of 64 bits."""
        return self.data_pages | self.host_pages << 16 | (0 if self.group is None else self.group + 1) << 32

    @classmethod
    def from_word(cls, word: int) -> "Loss":
        """The inverse of `to_word`."""
        return cls(word & 0xFFFF, word >> 16 & 0xFF, (word >> 32) - 1 if word >> 32 else None)


@dataclass(frozen=True)
class Fault:
    """One planned fault.

    Args:
        rank: The rank that fails.
        point: Where; a key of `POINTS`.
        fault: What happens; one of `FAULTS`.
        step: Transaction number at which it happens, None for the first time the point is reached.
        chunk: Chunk of the update, None for any.
        generation: The generation must be at least this one, so that "kill it during recovery" can be said.
        skip: How often the point is passed first.
        pages: page-loss: data pages that each group loses; host-page-loss: host parity pages that each loses.
        host_pages: page-loss: host parity pages that each group loses as well.
        group: The group that loses pages; None: every one.
    """

    rank: int
    point: str
    fault: str = "kill"
    step: int | None = None
    chunk: int | None = None
    generation: int = 0
    skip: int = 0
    pages: int = 1
    host_pages: int = 0
    group: int | None = None

    @property
    def loss(self) -> "Loss":
        """What is lost."""
        on_host = self.fault == "host-page-loss"
        return Loss(0 if on_host else self.pages, self.pages if on_host else self.host_pages, self.group)

    def __post_init__(self) -> None:
        if not (0 <= self.pages < 1 << 16 and 0 <= self.host_pages < 1 << 8):
            raise ValueError(f"{self.pages} data and {self.host_pages} host pages to lose: below 65536 and 256")
        if self.group is not None and not 0 <= self.group < (1 << 32) - 1:
            raise ValueError(f"no protection group {self.group}")
        if self.point not in POINTS:
            raise ValueError(f"unknown point {self.point!r}; `leto inject --list-points` shows all points")
        if self.fault not in FAULTS:
            raise ValueError(f"unknown fault {self.fault!r}; use one of {', '.join(FAULTS)}")

    def to_json(self) -> dict[str, Any]:
        """The fault as plain JSON values."""
        return asdict(self)


class FaultPlan:
    """A readable list of faults: `FaultPlan().kill_at(rank=1, step=2, point="chunk_updating")`."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []

    def kill_at(
        self, *, rank: int, point: str, step: int | None = None, chunk: int | None = None, generation: int = 0
    ) -> "FaultPlan":
        """Add a SIGKILL of `rank` at `point` of `step`."""
        return self.at(Fault(rank=rank, point=point, step=step, chunk=chunk, generation=generation))

    def at(self, fault: Fault) -> "FaultPlan":
        """Add any fault."""
        self.faults.append(fault)
        return self


class FaultSlots:
    """The slots of one rank. The injector arms, the trainer takes; both hold a view of the same progress page."""

    def __init__(self, page: memoryview) -> None:
        self._words = page[SLOTS_OFFSET : SLOTS_OFFSET + SLOTS_BYTES].cast("Q")
        self.loss = Loss(0, 0, None)
        """What goes with the fault that was taken last."""

    def arm(self, fault: Fault) -> None:
        """Store a fault in a free slot.

        Raises:
            ValueError: All slots are in use.
        """
        for index in range(_NUM_SLOTS):
            at = _FIRST_SLOT + index * _WORDS_PER_SLOT
            if self._words[at] == 0:
                point, code = list(POINTS).index(fault.point), FAULTS.index(fault.fault)
                step = 0 if fault.step is None else fault.step + 1
                chunk = 0 if fault.chunk is None else fault.chunk + 1
                words = (code, point, step, chunk, fault.generation, fault.skip, fault.loss.to_word())
                for k, word in enumerate(words, start=1):
                    self._words[at + k] = word
                self._words[at] = 1
                self._words[_ARMED] += 1
                return
        raise ValueError(f"no more than {_NUM_SLOTS} faults can be armed on one rank at a time")

    @property
    def armed(self) -> int:
        """How many faults are armed."""
        return self._words[_ARMED]

    @property
    def fired_ns(self) -> int:
        """CLOCK_MONOTONIC nanoseconds just before the last fault happened, 0 if none did."""
        return self._words[_FIRED_NS]

    def take(self, point: int, step: int, chunk: int, generation: int) -> str | None:
        """The fault that is due at this point, emptied from its slot; None if there is none."""
        for index in range(_NUM_SLOTS):
            at = _FIRST_SLOT + index * _WORDS_PER_SLOT
            state, code, want, at_step, at_chunk, first_generation, skip = self._words[at : at + 7].tolist()
            if state == 0 or want != point or generation < first_generation:
                continue
            if (at_step and at_step != step + 1) or (at_chunk and at_chunk != chunk + 1):
                continue
            if skip:
                self._words[at + 6] = skip - 1
                continue
            self._words[at] = 0
            self._words[_ARMED] -= 1
            self._words[_FIRED_NS] = time.monotonic_ns()
            self.loss = Loss.from_word(self._words[at + 7])
            return FAULTS[code]
        return None


class Reach(Protocol):
    """What is called at every place where a failure leaves memory in another state."""

    def __call__(self, point: str, step: int = 0, chunk: int = 0, /) -> None:
        """Go through `point`."""


def reach_nothing(point: str, step: int = 0, chunk: int = 0, /) -> None:
    """No failure is planned."""


class CrashPoints:
    """What product code calls at each point: `reach("ready", step)`. Almost free while nothing is armed."""

    def __init__(
        self, page: memoryview | None = None, *, generation: int = 0, trap: Callable[[], None] | None = None
    ) -> None:
        self._trap = trap
        self.lose: Callable[[Loss], object] | None = None
        """Destroys and marks pages, where the state is protected."""
        self._slots = FaultSlots(page) if page is not None else None
        self._armed = page[SLOTS_OFFSET : SLOTS_OFFSET + 8].cast("Q") if page is not None else (0,)
        self._index = {name: i for i, name in enumerate(POINTS)}
        self._generation = generation

    def __call__(self, point: str, step: int = 0, chunk: int = 0) -> None:
        """Go through `point`; does not return if a deadly fault is armed here."""
        if not self._armed[_ARMED]:
            return
        assert self._slots is not None
        fault = self._slots.take(self._index[point], step, chunk, self._generation)
        if fault == "trap" and self._trap is not None:
            self._trap()
        elif fault in LOSSES:
            if self.lose is not None:
                self.lose(self._slots.loss)
            happen("kill")
        elif fault is not None:
            happen(fault)


def happen(fault: str) -> None:
    """Let the fault happen to this process, now."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "trap":
        os.kill(os.getpid(), signal.SIGTRAP)
    elif fault == "segv":
        ctypes.string_at(0)
    elif fault == "exit":
        os._exit(1)
    elif fault == "raise":
        raise RuntimeError("injected exception")
    while fault in ("kill", "hang"):
        time.sleep(1.0)
