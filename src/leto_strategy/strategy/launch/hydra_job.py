"""Jobs of Hydra applications: what the user's process tells of its job, and how a trainer comes to the same one.

A trainer runs the script with the user's own command line, `--multirun` included. Where the application would compose
its configuration and choose a directory, the trainer takes the configuration of the job that made the call instead: the
same values whatever the overrides, sweeps and clocks say, the same directory, and no second `.hydra`.
"""

import copy
import logging
import pickle
import sys
from collections.abc import Callable
from datetime import datetime
from types import FrameType, ModuleType
from typing import Any

from leto_strategy.config import trainer_identity
from leto_strategy.context import call_context
from leto_strategy.errors import ConfigurationError, UnsupportedFeatureError

_SEQUENTIAL = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"

_nows: dict[str, tuple[Any, str]] = {}
"""What `${now:PATTERN}` was in the user's process, by pattern, with the job in which it was asked for."""

_launched: tuple[Any, datetime] | None = None
"""The job of the newest call, and when its first one was made: patterns that are asked for later get this time."""


# The user's process.


def current_job() -> Any:
    """The configuration of the Hydra job that this call is made in; None outside of one. One object for one job.

    Hydra keeps only its own part of it; the whole is what `run_job` was given, somewhere above this call.
    """
    module = sys.modules.get("hydra.core.utils")
    return None if module is None else _locals_of(module.run_job).get("config")


def _locals_of(function: Any) -> dict[str, Any]:
    """Variables of the innermost running call of a function; empty where none is running."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return {} if frame is None else frame.f_locals


def check_job(config: Any, previous: Any) -> None:
    """Raise where a trainer couldn't come to a job by running the script again.

    Args:
        config: The job of this call, None for a call outside of jobs.
        previous: The job of the call before, if there was one.

    Raises:
        ConfigurationError: Another launcher than Hydra's own runs the jobs of a sweep.
        UnsupportedFeatureError: The script has several applications, or calls the Trainer after its application.
    """
    if config is not None and _mode(config) == "MULTIRUN":
        launcher = str(config.hydra.launcher.get("_target_"))
        if launcher != _SEQUENTIAL:
            raise ConfigurationError(
                f"strategy='leto' runs the script again in processes of its own, and {launcher.rsplit('.', 1)[-1]} runs"
                " the jobs of a sweep where there is no script: use hydra/launcher=basic."
            )
    if previous is None or config is previous:
        return
    if config is None:
        raise UnsupportedFeatureError(
            "strategy='leto' can't run a call of the Trainer that follows a Hydra application in the same script; move"
            " it into the function that @hydra.main decorates."
        )
    if "RUN" in (_mode(config), _mode(previous)) or config.hydra.sweep.dir != previous.hydra.sweep.dir:
        raise UnsupportedFeatureError(
            "strategy='leto' can't run two Hydra applications in one script; start them one by one."
        )


def launch_time() -> datetime:
    """What trainers of this call take for now; from here on this process does in the same job, too."""
    global _launched
    job = current_job()
    if _launched is None or _launched[0] is not job or job is None:
        _launched = (job, datetime.now())
    return _launched[1]


def nows() -> dict[str, str]:
    """What `${now:PATTERN}` was in this job so far. What was asked for ahead of it is in its configuration."""
    job = current_job()
    return {pattern: value for pattern, (owner, value) in _nows.items() if owner is job}


def _mode(config: Any) -> str:
    mode = config.hydra.mode
    return "RUN" if mode is None else str(getattr(mode, "name", mode))


def pack_job(config: Any) -> bytes:
    """The configuration of a job as trainers get it, with what its resolvers have given so far.

    Raises:
        ConfigurationError: It holds something that can't be pickled.
    """
    omegaconf = sys.modules["omegaconf"].OmegaConf
    task = _locals_of(sys.modules["hydra.core.utils"].run_job)["task_cfg"]
    config = copy.deepcopy(config)
    omegaconf.copy_cache(from_config=task, to_config=config)
    try:
        return pickle.dumps(config)
    except Exception as error:
        raise ConfigurationError(
            f"strategy='leto' hands the Hydra job's configuration to its trainers, and it can't be pickled: {error}"
        ) from error


# Both.


def follow(module: ModuleType) -> None:
    """Adapt a module of Hydra that was just imported, or is imported already."""
    if getattr(module, "leto_follows", False):
        return
    module.leto_follows = True  # type: ignore[attr-defined]
    context = call_context()
    if module.__name__ == "hydra.core.utils":
        module.datetime = _Clock  # type: ignore[attr-defined]
        if context is not None and context.hydra is not None:
            module._save_config = _save_nothing  # type: ignore[attr-defined]
            module.configure_log = _gated(module.configure_log)  # type: ignore[attr-defined]
    elif context is not None and context.hydra is not None:
        hydra: Any = module.Hydra
        hydra.get_mode = lambda self, **_: None
        hydra.run = hydra.multirun = _enter


class _Clock:
    """Stands for `datetime` where Hydra resolves `${now:PATTERN}`."""

    @staticmethod
    def now() -> "_Clock":
        return _Clock()

    def strftime(self, pattern: str) -> str:
        context = call_context()
        if context is not None:
            return context.nows.get(pattern) or context.launched.strftime(pattern)
        moment, job = datetime.now(), current_job()
        if job is not None and _launched is not None and job is _launched[0]:
            moment = _launched[1]
        value = moment.strftime(pattern)
        _nows[pattern] = job, value
        return value


# A trainer.


def _enter(self: Any, config_name: str | None, task_function: Callable[..., Any], **_: Any) -> Any:
    """Instead of `Hydra.run` and `Hydra.multirun`: run the job that this trainer was started for.

    As in the processes of a parallel launcher, callbacks hear of the job, and in a single run of the run.
    """
    from hydra.core.utils import run_job
    from hydra.types import HydraContext

    # Here and not earlier: the configuration may name classes that the script has just defined.
    context = call_context()
    assert context is not None
    assert context.hydra is not None
    config = pickle.loads(context.hydra)
    callbacks = sys.modules["hydra._internal.hydra"].Callbacks(config)
    if _mode(config) == "RUN":
        callbacks.on_run_start(config=config, config_name=config_name)
    job = run_job(
        task_function=task_function,
        config=config,
        job_dir_key="hydra.runtime.output_dir",
        job_subdir_key=None,
        hydra_context=HydraContext(config_loader=self.config_loader, callbacks=callbacks),
    )
    return job.return_value


def _save_nothing(cfg: Any, filename: str, output_dir: Any) -> None:
    """The user's process has saved the configuration."""


_handlers: list[logging.Handler] = []
_open = False


def _gated(configure: Callable[..., None]) -> Callable[..., None]:
    """Hydra's `configure_log` for a trainer: its log files are appended to, by rank 0, from the call on."""

    def configure_log(log_config: Any, verbose_config: Any = False) -> None:
        from omegaconf import OmegaConf

        if log_config is not None:
            log_config = OmegaConf.create(OmegaConf.to_container(log_config, resolve=True))
            for handler in (log_config.get("handlers") or {}).values():
                if "mode" in handler:
                    handler["mode"] = "a"
        configure(log_config, verbose_config)
        loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
        for logger in loggers:
            for handler in getattr(logger, "handlers", ()):
                if isinstance(handler, logging.FileHandler) and handler not in _handlers:
                    handler.addFilter(_let_through)
                    _handlers.append(handler)

    return configure_log


def _let_through(record: logging.LogRecord) -> bool:
    """What the script logs on its way to the call has been logged by the user's process."""
    identity = trainer_identity()
    return _open and identity is not None and identity.rank == 0


def open_logs() -> None:
    """This trainer speaks from here on: Hydra's log files get what rank 0 logs."""
    global _open
    _open = True
