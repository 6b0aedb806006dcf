"""Leto: a training strategy for PyTorch Lightning that recovers from failures in place, bit for bit.

Use it by name, `Trainer(strategy="leto")`, or as `LetoStrategy(...)`. Importing this package loads neither torch nor
Lightning: it is imported at the end of every `import torch`.
"""

import sys
from typing import Any

from leto_strategy.autoload import autoload

__version__ = "0.1.0"
__all__ = ["LetoStrategy", "__version__"]

autoload()

_FLAVOURS = {
    "lightning.pytorch": "leto_strategy.strategy.lightning",
    "pytorch_lightning": "leto_strategy.strategy.pytorch_lightning",
}


def __getattr__(name: str) -> Any:
    if name != "LetoStrategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    imported = [flavour for flavour in _FLAVOURS if flavour in sys.modules]
    if len(imported) > 1:
        # LightningCLI's parser looks in parent packages for a shorter name of a class, and takes a missing one for no.
        parser = str(sys._getframe(1).f_globals.get("__name__")).startswith("jsonargparse")
        raise (AttributeError if parser else ImportError)(
            "Both `lightning` and `pytorch_lightning` are imported; say which one LetoStrategy is for:"
            " `from leto_strategy.strategy.lightning import LetoStrategy` or"
            " `from leto_strategy.strategy.pytorch_lightning import LetoStrategy`."
        )
    module = import_module(_FLAVOURS[imported[0] if imported else _installed()])
    return module.LetoStrategy


def _installed() -> str:
    from importlib.util import find_spec

    return "lightning.pytorch" if find_spec("lightning") else "pytorch_lightning"
