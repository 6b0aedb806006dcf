"""What strategy="leto" refuses, said in the user's process before memory is allocated or a process is started."""

import os
import resource
import sys
import tempfile
from typing import Any

from leto_strategy.errors import ConfigurationError, ResourceError, UnsupportedFeatureError
from leto_strategy.strategy.flavour import Flavour

_NUM_FILES_MINIMUM = 128

_CALLBACKS_LATER = {
    "GradientAccumulationScheduler": "gradient accumulation",
    "StochasticWeightAveraging": "weight averaging",
    "WeightAveraging": "weight averaging",
    "EMAWeightAveraging": "weight averaging",
    "BaseFinetuning": "unfreezing layers during training",
    "BackboneFinetuning": "unfreezing layers during training",
    "BatchSizeFinder": "the Tuner",
    "LearningRateFinder": "the Tuner",
    "ModelPruning": "pruning",
    "SaveConfigCallback": "LightningCLI",
}


def check_interactive() -> None:
    """Raise in a notebook or at a prompt: there is no script that a trainer could run again.

    Raises:
        ConfigurationError: There is no script.
    """
    main = sys.modules.get("__main__")
    prompt = (
        hasattr(sys, "ps1") or "ipykernel" in sys.modules or ("IPython" in sys.modules and hasattr(main, "get_ipython"))
    )
    if prompt or bool(sys.flags.interactive):
        raise ConfigurationError(
            "strategy='leto' runs the script again in processes of its own, and there is no script here. Put the code"
            " into a file and run it: `python train.py` (in a notebook: `!python train.py`)."
        )
    if len(sys.orig_argv) < 2 or sys.orig_argv[-1] == "-":
        raise ConfigurationError("strategy='leto' can't run a program from standard input again; put it into a file.")


def check_trainer(trainer: Any, flavour: Flavour) -> None:
    """Raise for the first option of the Trainer that Leto can't run with.

    Raises:
        ConfigurationError: A wrong device, accelerator, environment or directory.
        UnsupportedFeatureError: A feature that comes with a later version.
        ResourceError: The machine's limits are too low.
    """
    _check_devices(trainer)
    _check_environment(trainer, flavour)
    _check_features(trainer, flavour)
    _check_limits()
    check_directory(trainer.default_root_dir)


def _check_devices(trainer: Any) -> None:
    strategy = trainer.strategy
    kinds = {device.type for device in strategy.parallel_devices or []}
    if kinds != {"cpu"}:
        raise ConfigurationError(
            f"strategy='leto' runs on the CPU in this version, not on {', '.join(sorted(kinds)) or 'no device'}:"
            " use Trainer(accelerator='cpu', devices=N)."
        )
    if trainer.num_nodes != 1:
        raise ConfigurationError(
            f"strategy='leto' runs on one node in this version; use Trainer(num_nodes=1), not {trainer.num_nodes}."
        )


def _check_environment(trainer: Any, flavour: Flavour) -> None:
    environment = trainer.strategy.cluster_environment
    lightning_environment = flavour.fabric_module("plugins.environments").LightningEnvironment
    if type(environment) is not lightning_environment or environment.creates_processes_externally:
        raise ConfigurationError(
            f"strategy='leto' starts its own processes in this version and can't run below"
            f" {type(environment).__name__}{' with LOCAL_RANK set' if 'LOCAL_RANK' in os.environ else ''}:"
            " start the script once, with plain `python`."
        )


def _check_features(trainer: Any, flavour: Flavour) -> None:
    def later(what: str, remedy: str) -> None:
        raise UnsupportedFeatureError(f"strategy='leto' does not support {what} yet; {remedy}")

    hydra = sys.modules.get("hydra.core.hydra_config")
    if hydra is not None and hydra.HydraConfig.initialized():
        later("scripts started by Hydra", "run the training without @hydra.main.")
    for callback in trainer.callbacks:
        for cls in type(callback).__mro__:
            if cls.__name__ in _CALLBACKS_LATER and cls.__module__.split(".")[0] in ("lightning", "pytorch_lightning"):
                later(f"{_CALLBACKS_LATER[cls.__name__]} ({type(callback).__name__})", "leave that callback out.")
    precision = flavour.pytorch("plugins.precision").Precision
    if type(trainer.precision_plugin) is not precision:
        later(f"precision {trainer.precision!r}", "use Trainer(precision='32-true').")
    if trainer.accumulate_grad_batches != 1:
        later("gradient accumulation", "use Trainer(accumulate_grad_batches=1).")
    if trainer.reload_dataloaders_every_n_epochs:
        later("reload_dataloaders_every_n_epochs", "use 0.")
    if trainer.strategy._layer_sync is not None:
        later("sync_batchnorm", "use Trainer(sync_batchnorm=False).")
    if type(trainer.strategy.checkpoint_io).__name__ == "AsyncCheckpointIO":
        later("AsyncCheckpointIO", "use the default CheckpointIO: a checkpoint must be written when its step is over.")
    csv_logger = flavour.pytorch("loggers").CSVLogger
    for logger in trainer.loggers:
        if type(logger) is not csv_logger and type(logger).__name__ != "DummyLogger":
            later(f"the logger {type(logger).__name__}", "use Trainer(logger=CSVLogger('logs')) or logger=False.")


def check_fit(trainer: Any, arguments: dict[str, Any]) -> None:
    """Raise for what a call of `fit` asks for and Leto can't keep exact yet.

    Raises:
        UnsupportedFeatureError: See its message.
    """
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise UnsupportedFeatureError(
            "strategy='leto' does not support manual optimization yet; use automatic_optimization=True."
        )
    if arguments.get("ckpt_path") is not None:
        raise UnsupportedFeatureError(
            "strategy='leto' does not support fit(ckpt_path=...) yet; load the weights with load_from_checkpoint."
        )


def _check_limits() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _NUM_FILES_MINIMUM:
        raise ResourceError(
            f"The limit on open files is {hard}; strategy='leto' needs at least {_NUM_FILES_MINIMUM}."
            " Raise it: `ulimit -n 4096`."
        )


def check_directory(root_dir: Any) -> None:
    """Raise if events and logs can't be written below `default_root_dir`.

    Raises:
        ConfigurationError: They can't.
    """
    if "://" in str(root_dir):
        raise ConfigurationError(
            f"strategy='leto' writes its events to a local directory, not to {root_dir}; use a local"
            " Trainer(default_root_dir=...)."
        )
    directory = os.path.join(os.path.abspath(os.fspath(root_dir)), "leto")
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"strategy='leto' can't write to {directory}: {error.strerror}. Choose a writable directory:"
            " Trainer(default_root_dir=...)."
        ) from error
