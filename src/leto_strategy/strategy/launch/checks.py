"""What strategy="leto" refuses, said in the user's process before memory is allocated or a process is started."""

import inspect
import os
import resource
import sys
import tempfile
from typing import Any

from leto_strategy.errors import ConfigurationError, ResourceError, UnsupportedFeatureError
from leto_strategy.strategy.capture.loggers import files_kind
from leto_strategy.strategy.flavour import Flavour
from leto_strategy.strategy.launch.reproducibility import warn_irreproducible

_NUM_FILES_MINIMUM = 128

_CALLBACKS_LATER = {
    "StochasticWeightAveraging": "it exchanges schedulers in the middle of training; use WeightAveraging instead",
    "BatchSizeFinder": "it trains with other batch sizes first; run it once with strategy='auto'",
    "LearningRateFinder": "it trains with other learning rates first; run it once with strategy='auto'",
    "ModelPruning": "it replaces parameters in the middle of training; leave it out",
}
_PRECISIONS = ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision")


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
    check_devices(trainer)
    _check_environment(trainer, flavour)
    _check_features(trainer, flavour)
    _check_limits()
    check_directory(trainer.default_root_dir)
    warn_irreproducible(trainer, flavour)


def check_devices(trainer: Any) -> None:
    """Raise for devices that the ranks can't train on, together or at all.

    Raises:
        ConfigurationError: Devices that are neither CPUs nor CUDA GPUs, both at once, a GPU shared without gloo, or
            several nodes.
        UnsupportedFeatureError: Protection on a GPU.
    """
    strategy = trainer.strategy
    devices = list(strategy.parallel_devices or [])
    kinds = {device.type for device in devices}
    if len(kinds) > 1:
        raise ConfigurationError(
            f"strategy='leto' trains on CPUs or on GPUs, not on both at once: parallel_devices are"
            f" {', '.join(map(str, devices))}. Give all ranks the same kind."
        )
    if not kinds <= {"cpu", "cuda"} or not kinds:
        raise ConfigurationError(
            f"strategy='leto' runs on CPUs and on CUDA GPUs, not on {', '.join(sorted(kinds)) or 'no device'}:"
            " use Trainer(accelerator='gpu', devices=N), or accelerator='cpu'."
        )
    shared = len({str(device) for device in devices}) < len(devices)
    if kinds == {"cuda"} and shared and strategy._process_group_backend != "gloo":
        raise ConfigurationError(
            f"Several ranks on one GPU ({', '.join(map(str, devices))}) can't use NCCL, which wants one for each rank:"
            " use LetoStrategy(..., process_group_backend='gloo'), or a device for each rank."
        )
    if kinds == {"cuda"} and strategy.leto.protection == "on":
        raise UnsupportedFeatureError(
            "LetoStrategy(protection='on') rebuilds lost pages on the CPU only in this version; leave it out on a GPU."
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

    for callback in trainer.callbacks:
        for cls in type(callback).__mro__:
            if cls.__name__ in _CALLBACKS_LATER and cls.__module__.split(".")[0] in ("lightning", "pytorch_lightning"):
                later(f"{type(callback).__name__}", f"{_CALLBACKS_LATER[cls.__name__]}.")
    if type(trainer.precision_plugin).__name__ not in _PRECISIONS:
        later(
            f"{type(trainer.precision_plugin).__name__} (precision {trainer.precision!r})",
            "use precision='32-true', '64-true', 'bf16-true', '16-true', 'bf16-mixed' or '16-mixed'.",
        )
    if trainer.strategy._layer_sync is not None:
        if {device.type for device in trainer.strategy.parallel_devices or []} == {"cuda"}:
            later("SyncBatchNorm", "leave Trainer(sync_batchnorm=True) out.")
        raise ConfigurationError(
            "torch's SyncBatchNorm runs on GPUs only, so Trainer(sync_batchnorm=True) can't train on the CPU, under any"
            " strategy; leave it out."
        )
    if type(trainer.strategy.checkpoint_io).__name__ == "AsyncCheckpointIO":
        later("AsyncCheckpointIO", "use the default CheckpointIO: a checkpoint must be written when its step is over.")
    for logger in trainer.loggers:
        if files_kind(logger, flavour) == "csv_logs" and "://" in str(logger.save_dir):
            later(f"a CSVLogger that writes to {logger.save_dir}", "use a local directory: CSVLogger('logs').")


def check_fit(trainer: Any) -> None:
    """Raise for what a call of `fit` asks for and Leto can't keep exact yet.

    Raises:
        UnsupportedFeatureError: See its message.
    """
    if "dataloader_iter" in inspect.signature(trainer.lightning_module.training_step).parameters:
        raise UnsupportedFeatureError(
            "strategy='leto' does not support training_step(self, dataloader_iter): it can't know which batches a step"
            " fetched. Use training_step(self, batch, batch_idx)."
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
