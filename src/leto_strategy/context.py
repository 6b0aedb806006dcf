"""How the user's process came to a call, for what a trainer can't find out by running the script again.

A trainer inherits it as a file; the command `leto run` hands its own wish on as a file, too, so that the user's script
sees neither in its environment.
"""

import os
import pickle
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache

from leto_strategy.beginnings import Beginnings
from leto_strategy.config import trainer_identity

CONTEXT_FILE = "context"
CHECKPOINT_FILE = "checkpoint"
_MARK = "leto-run"


@dataclass(frozen=True)
class CallContext:
    """What the user's process knows about a call.

    Args:
        replaces_auto: `leto run` started the script: a Trainer without a strategy gets "leto".
        ckpt_path: The checkpoint that the call loads, as path or URL; None for none.
        launched: Local time at which the call began.
        nows: What Hydra's `${now:PATTERN}` was in the user's process, by pattern.
        beginnings: How the global random generators of the user's process began.
        hydra: The configuration of the Hydra job that made the call, pickled; it may name classes of the script.
    """

    replaces_auto: bool = False
    ckpt_path: str | os.PathLike[str] | None = None
    launched: datetime = field(default_factory=datetime.now)
    nows: dict[str, str] = field(default_factory=dict)
    beginnings: Beginnings | None = None
    hydra: bytes | None = None

    def to_fd(self) -> int:
        """A file that holds it, for trainers to inherit."""
        fd = os.memfd_create(f"leto-{CONTEXT_FILE}", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(fd), "wb") as file:
            pickle.dump(self, file)
        return fd


@cache
def _of_trainer(fd: int) -> CallContext:
    with open(f"/proc/self/fd/{fd}", "rb") as file:
        context = pickle.load(file)
    assert isinstance(context, CallContext)
    return context


def call_context() -> CallContext | None:
    """The context of the call that this trainer runs; None in a process that is no trainer."""
    identity = trainer_identity()
    if identity is None or CONTEXT_FILE not in identity.files:
        return None
    return _of_trainer(identity.files[CONTEXT_FILE])


def mark_program() -> None:
    """Let the program that this process is about to execute know that `leto run` did so."""
    os.memfd_create(_MARK, 0)


@cache
def _is_marked() -> bool:
    """Whether `leto run` executed this program; the mark is removed, so that it reaches no other program."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith(f"/memfd:{_MARK} "):
                os.close(int(name))
                return True
        except OSError:  # the listing's own descriptor
            continue
    return False


def replaces_auto() -> bool:
    """Whether a Trainer of this process gets "leto" where it names no strategy."""
    context = call_context()
    return _is_marked() if context is None else context.replaces_auto
