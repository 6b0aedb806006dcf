"""LightningCLI's `SaveConfigCallback`: the file is written once, by the user's process, before trainers are started.

There it is checked and written as Lightning does, whichever trainers are killed later. What a subclass adds in
`save_config` runs in the active trainers, where loggers log; shadows and later calls leave it alone.
"""

import sys
from collections.abc import Iterator
from typing import Any

from leto_strategy.config import trainer_identity
from leto_strategy.strategy.flavour import Flavour


def _callbacks(trainer: Any, flavour: Flavour) -> Iterator[tuple[Any, Any]]:
    """Every such callback of a Trainer, and Lightning's class."""
    module = sys.modules.get(f"{flavour.name}.cli")
    if module is not None:
        for callback in trainer.callbacks:
            if isinstance(callback, module.SaveConfigCallback):
                yield callback, module.SaveConfigCallback


def save(trainer: Any, flavour: Flavour) -> None:
    """In the user's process, before the first call: write the file.

    Raises:
        RuntimeError: Lightning's own, where the file of an earlier run is there.
    """
    for callback, cls in _callbacks(trainer, flavour):
        if callback.already_saved or type(callback).setup is not cls.setup:
            continue
        callback.save_config = lambda *_: None
        try:
            callback.setup(trainer, trainer.lightning_module, trainer.state.fn)
        finally:
            del callback.save_config


def leave_files(trainer: Any, flavour: Flavour) -> None:
    """In a trainer, before its call: the file is there."""
    identity = trainer_identity()
    assert identity is not None
    for callback, cls in _callbacks(trainer, flavour):
        if type(callback).setup is cls.setup:
            callback.save_to_log_dir = False
            callback.already_saved = callback.already_saved or identity.role == "shadow"
        elif identity.generation > 0:
            callback.overwrite = True  # the first generation has found no file, or the job has ended


def note_saved(trainer: Any, flavour: Flavour) -> None:
    """After a call: later ones save nothing."""
    for callback, _ in _callbacks(trainer, flavour):
        callback.already_saved = True
