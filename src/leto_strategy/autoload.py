"""Makes the name "leto" known to Lightning without an import in the user's script.

torch calls `autoload` at the end of `import torch` (entry-point group `torch.backends`). It installs a finder that lets
Lightning's strategy registry be loaded as usual and then adds one name to it. Nothing heavy is imported here.
"""

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from leto_strategy.config import become_trainer

_REGISTRIES = {
    "lightning.pytorch.strategies": "leto_strategy.strategy.lightning",
    "pytorch_lightning.strategies": "leto_strategy.strategy.pytorch_lightning",
}


def autoload() -> None:
    """Register the strategy where Lightning is imported, and arrange for it where it is not yet."""
    become_trainer()
    for name in _REGISTRIES:
        if name in sys.modules:
            _register(name)
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _register(name: str) -> None:
    registry = getattr(sys.modules[name], "StrategyRegistry", None)
    if registry is None or "leto" in registry:
        return

    def leto(**options: Any) -> Any:
        module = importlib.import_module(_REGISTRIES[name])
        return module.LetoStrategy(**options)

    registry.register("leto", leto, description="In-place recovery: a killed trainer costs nothing")


class _AfterImport:
    """Finder that runs `_register` right after a registry module was executed."""

    def __init__(self) -> None:
        self._searching = ""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a registry module with the other finders and hook its execution; pass on everything else."""
        if name not in _REGISTRIES or self._searching == name:
            return None
        self._searching = name
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = ""
        if spec is None or spec.loader is None:
            return None
        execute: Callable[[ModuleType], None] = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            try:
                _register(name)
            except Exception as error:  # never break somebody's `import lightning`
                print(f"leto: the strategy could not be registered: {error}", file=sys.stderr)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
