"""`ckpt_path` of a call: chosen once, by the user's process, and the same file for every generation.

Training goes on writing checkpoints: a `last.ckpt` that a call began from is overwritten, a top-k file removed. The
file as it was when the call began is held open, and a shadow that is started an hour later loads that one.
"""

import os
import stat
from typing import Any

from leto_strategy.config import trainer_identity
from leto_strategy.context import CHECKPOINT_FILE, call_context
from leto_strategy.errors import ConfigurationError

# The user's process.


def select_checkpoint(trainer: Any, arguments: dict[str, Any]) -> Any:
    """The checkpoint that a call loads, None for none: "best", "last" and "hpc" as Lightning itself understands them.

    Args:
        trainer: The Trainer.
        arguments: The call's.

    Raises:
        ConfigurationError: It comes from a model registry.
        ValueError: Lightning's own, where there is no such checkpoint.
    """
    path = arguments.get("ckpt_path")
    if isinstance(path, str) and path.lower().split(":")[0] == "registry":
        raise ConfigurationError(
            f"strategy='leto' loads no checkpoint from a model registry (ckpt_path={path!r}): download it first and"
            " pass its path."
        )
    fn = trainer.state.fn
    return trainer._checkpoint_connector._select_ckpt_path(
        fn,
        path,
        model_provided=fn == "fit" or arguments.get("model") is not None,
        model_connected=trainer.lightning_module is not None,
    )


def pin(path: Any) -> int | None:
    """Open a checkpoint file; None where there is nothing to hold: no checkpoint, a URL, a directory, no such file."""
    if path is None or "://" in str(path):
        return None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # the trainers say what is wrong with it, as Lightning does
        return None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


# A trainer.


def take_selected(trainer: Any) -> None:
    """Let the call of this trainer load what the user's process has chosen."""
    context = call_context()
    if context is not None:
        path = context.ckpt_path
        trainer._checkpoint_connector._select_ckpt_path = lambda *_, **__: path


def pinned(path: Any) -> Any:
    """Where a checkpoint is to be read from."""
    identity, context = trainer_identity(), call_context()
    if identity is None or context is None or path != context.ckpt_path or CHECKPOINT_FILE not in identity.files:
        return path
    return f"/proc/self/fd/{identity.files[CHECKPOINT_FILE]}"
