"""Makes the name "leto" known to Lightning without an import in the user's script.

torch calls `autoload` at the end of `import torch` (entry-point group `torch.backends`). It installs a finder that lets
some modules of Lightning and Hydra be loaded as usual and then adds to them: the strategy's names, what `leto run`
changes, and what a trainer needs to come to its Hydra job. Nothing heavy is imported here.
"""

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from leto_strategy.beginnings import begin
from leto_strategy.config import become_trainer, trainer_identity
from leto_strategy.context import call_context, replaces_auto

_STRATEGIES = {
    "lightning.pytorch.strategies": "leto_strategy.strategy.lightning",
    "pytorch_lightning.strategies": "leto_strategy.strategy.pytorch_lightning",
}
_LOGGERS = ("lightning.fabric.loggers.logger", "lightning_fabric.loggers.logger")


def autoload() -> None:
    """Add to the modules that are imported, and arrange for it where they are not yet."""
    become_trainer()
    identity, context = trainer_identity(), call_context()
    begin(None if context is None else context.beginnings, rank=0 if identity is None else identity.rank)
    replaces_auto()  # takes the mark of `leto run` away before the script can pass it on
    for name in _ADDITIONS:
        if name in sys.modules:
            _ADDITIONS[name](sys.modules[name])
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _hold_loggers(module: ModuleType) -> None:
    """In a trainer process, let loggers wait for its promotion."""
    if trainer_identity() is not None:
        importlib.import_module("leto_strategy.strategy.capture.waiting_loggers").install(module)


def _register(module: ModuleType) -> None:
    """Add the strategy's names to Lightning's registry."""
    registry = getattr(module, "StrategyRegistry", None)
    if registry is None or "leto" in registry:
        return

    def leto(**options: Any) -> Any:
        return importlib.import_module(_STRATEGIES[module.__name__]).LetoStrategy(**options)

    registry.register("leto", leto, description="In-place recovery: a killed trainer costs nothing")
    for value in (False, True):
        registry.register(
            f"leto_find_unused_parameters_{str(value).lower()}",
            leto,
            description=f'"leto" with `find_unused_parameters` as {value}',
            find_unused_parameters=value,
        )


def _replace_auto(module: ModuleType) -> None:
    """Let `leto run` have its way where a Trainer chooses its strategy."""
    connector: Any = getattr(module, "_AcceleratorConnector", None)
    if connector is None or getattr(connector, "chooses_leto", False):
        return
    choose, check = connector._choose_strategy, connector._check_config_and_set_final_flags

    def choose_strategy(self: Any) -> Any:
        return "leto" if replaces_auto() else choose(self)

    def check_flags(self: Any, *args: Any, **kwargs: Any) -> None:
        check(self, *args, **kwargs)
        strategy = self._strategy_flag
        named = strategy if isinstance(strategy, str) else getattr(strategy, "strategy_name", type(strategy).__name__)
        if replaces_auto() and trainer_identity() is None and named != "auto" and not str(named).startswith("leto"):
            print(f"leto run: the script asks for strategy={named!r} itself and gets it", file=sys.stderr)

    connector._choose_strategy, connector._check_config_and_set_final_flags = choose_strategy, check_flags
    connector.chooses_leto = True


def _follow_hydra(module: ModuleType) -> None:
    """Let trainers run the Hydra job that they are started for, at the time of the user's process."""
    hydra_job = importlib.import_module("leto_strategy.strategy.launch.hydra_job")
    hydra_job.follow(module)


_ADDITIONS: dict[str, Callable[[ModuleType], None]] = {
    **dict.fromkeys(_STRATEGIES, _register),
    **dict.fromkeys(_LOGGERS, _hold_loggers),
    "lightning.pytorch.trainer.connectors.accelerator_connector": _replace_auto,
    "pytorch_lightning.trainer.connectors.accelerator_connector": _replace_auto,
    "hydra.core.utils": _follow_hydra,
    "hydra._internal.hydra": _follow_hydra,
}
"""What is added to which module, right after it was executed. Each may be called again for the same module."""


class _AfterImport:
    """Finder that makes the additions to a module right after it was executed."""

    def __init__(self) -> None:
        self._searching: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module of `_ADDITIONS` with the other finders and hook its execution; pass on everything else."""
        if name not in _ADDITIONS or name in self._searching:
            return None
        self._searching.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching.discard(name)
        if spec is None or spec.loader is None:
            return None
        execute: Callable[[ModuleType], None] = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            try:
                _ADDITIONS[name](module)
            except Exception as error:  # never break somebody's import
                print(f"leto: {name} could not be extended: {error}", file=sys.stderr)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
