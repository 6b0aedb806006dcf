"""What the ending of a trainer means: one pure table, read by the supervisor.

It sees how a process ended, what a trainer reported before it ended, or that it hangs, and answers with a cause, its
origin and the reaction. It knows no process, no clock and no message.
"""

import signal
from dataclasses import dataclass
from enum import StrEnum


class Origin(StrEnum):
    """Where a failure comes from; the budget counts by it."""

    EXTERNAL = "external"
    """From outside the job: an operator, the kernel's OOM killer, a node agent. Says nothing about the step."""
    INTERNAL = "internal"
    """From the job itself: it may come back at the same step."""
    USER = "user"
    """An exception of the user's own, or their wish to end: theirs to see, never retried."""


class Reaction(StrEnum):
    """What the supervisor does about an ending."""

    RECOVER = "recover"
    """End the generation and promote the next one."""
    RAISE = "raise"
    """Let the trainer run Lightning's exception hooks and raise the exception in the user's process."""
    WAIT = "wait"
    """Wait for a peer's death within the grace: if one comes, this was its echo; else recover."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a trainer ended or stopped working; exactly one field is set.

    Args:
        exit_code: Code with which the process exited.
        signum: Signal that ended the process.
        report: Kind of the error that the trainer reported, one of `REPORT_KINDS`.
        hang: No progress for longer than the limit of its activity.
        disconnected: The process runs but has closed, or garbled, its connection to the supervisor.
    """

    exit_code: int | None = None
    signum: int | None = None
    report: str | None = None
    hang: bool = False
    disconnected: bool = False


@dataclass(frozen=True, slots=True)
class Meaning:
    """What an ending means.

    Args:
        cause: Short stable name for records, events and the budget, such as "SIGKILL", "exit 1", "hang".
        origin: Where it comes from.
        reaction: What to do about it.
        text: A phrase for people, fit to follow "rank 1".
    """

    cause: str
    origin: Origin
    reaction: Reaction
    text: str


_INSIDE: dict[int, str] = {
    signal.SIGSEGV: "crashed: invalid memory access",
    signal.SIGBUS: "crashed: bus error (often /dev/shm or a mapped file ran out of space)",
    signal.SIGABRT: "aborted itself (an assertion in native code, or NCCL's watchdog)",
    signal.SIGFPE: "crashed: arithmetic error in native code",
    signal.SIGILL: "crashed: illegal instruction",
    signal.SIGTRAP: "crashed: trap",
    signal.SIGSYS: "crashed: forbidden system call",
}

_REPORTS = {
    "exception": Meaning("exception", Origin.USER, Reaction.RAISE, "raised an exception"),
    "keyboard_interrupt": Meaning("keyboard_interrupt", Origin.USER, Reaction.RAISE, "was interrupted"),
    "system_exit": Meaning("system_exit", Origin.USER, Reaction.RAISE, "called sys.exit"),
    "sigterm": Meaning("SIGTERM", Origin.EXTERNAL, Reaction.RECOVER, "received SIGTERM from outside the job"),
    "worker_killed": Meaning("worker_killed", Origin.INTERNAL, Reaction.RECOVER, "lost a DataLoader worker"),
    "communicator": Meaning("communicator", Origin.INTERNAL, Reaction.WAIT, "had a communicator error"),
    "device": Meaning("device", Origin.INTERNAL, Reaction.RECOVER, "had a device error"),
    "out_of_memory": Meaning("out_of_memory", Origin.INTERNAL, Reaction.RECOVER, "ran out of memory"),
}

REPORT_KINDS = tuple(_REPORTS)
"""Kinds of error that a trainer reports."""


def classify(ending: Ending, *, stopping: bool = False) -> Meaning:
    """Return what an ending means.

    Args:
        ending: What was seen.
        stopping: The user's SIGINT or SIGTERM was forwarded: a report of it is then the user's wish, not a fault.
    """
    if ending.hang:
        return Meaning("hang", Origin.INTERNAL, Reaction.RECOVER, "made no progress within the limit of its activity")
    if ending.disconnected:
        return Meaning("disconnected", Origin.INTERNAL, Reaction.RECOVER, "lost its connection to the supervisor")
    if ending.report is not None:
        meaning = _REPORTS[ending.report]
        if stopping and ending.report == "sigterm":
            return Meaning("SIGTERM", Origin.USER, Reaction.RAISE, "was asked to end by SIGTERM")
        return meaning
    if ending.signum is not None:
        name = signal_name(ending.signum)
        if ending.signum in _INSIDE:
            return Meaning(
                name, Origin.INTERNAL, Reaction.RECOVER, f"{_INSIDE[signal.Signals(ending.signum)]} ({name})"
            )
        return Meaning(name, Origin.EXTERNAL, Reaction.RECOVER, f"was killed from outside by {name}")
    assert ending.exit_code is not None, "an ending has one field set"
    if ending.exit_code == 0:
        text = "ended without a result (exit code 0): the script did not reach the same call again"
        return Meaning("exit 0", Origin.INTERNAL, Reaction.RECOVER, text)
    cause = f"exit {ending.exit_code}"
    return Meaning(cause, Origin.INTERNAL, Reaction.RECOVER, f"exited with code {ending.exit_code} and no report")


def signal_name(signum: int) -> str:
    """Return "SIGKILL" for 9, and a name of its own for signals that have none."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
