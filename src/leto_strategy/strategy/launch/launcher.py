"""What `Trainer.fit` and its sisters do instead of training: start the supervisor and wait, or be a trainer."""

import os
import secrets
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar
from weakref import WeakSet

import torch

from leto_strategy.beginnings import beginnings, hash_seed
from leto_strategy.config import (
    JOB_VARIABLE,
    TRAINER_VARIABLE,
    is_imported_by_worker,
    process_start,
    trainer_identity,
)
from leto_strategy.context import CHECKPOINT_FILE, CONTEXT_FILE, CallContext, replaces_auto
from leto_strategy.errors import ConfigurationError, UnrecoverableError
from leto_strategy.processes.messages import LaunchSpec, Script
from leto_strategy.strategy.capture.loggers import logger_starts, others_of, take_over
from leto_strategy.strategy.flavour import Flavour
from leto_strategy.strategy.launch import hydra_job, results, resume, saved_config
from leto_strategy.strategy.launch.checks import check_fit, check_trainer
from leto_strategy.strategy.launch.console import Console
from leto_strategy.strategy.launch.job import SupervisorProcess
from leto_strategy.strategy.launch.trainer import TrainerSide


class _Calls:
    """The script's launch calls so far, one state for the process.

    result_fds: In the user's process, the result of each call; of the calls in a Hydra application, those of the
        newest job, since a trainer of a job runs none of the jobs before it.
    num_outside: How many of them were made ahead of the application.
    job: The Hydra job of the newest call.
    replayed: In a trainer, how many calls were answered with their results.
    repeating: Names of loggers of which was said that calls may come twice.
    attached: Modules whose own callbacks the Trainer has.
    """

    result_fds: ClassVar[list[int]] = []
    num_outside: ClassVar[int] = 0
    job: ClassVar[Any] = None
    replayed: ClassVar[int] = 0
    repeating: ClassVar[set[str]] = set()
    attached: ClassVar[WeakSet[Any]] = WeakSet()

    @classmethod
    def begin(cls) -> int:
        """A new call in the user's process; returns the file for its result."""
        job = hydra_job.current_job()
        hydra_job.check_job(job, cls.job)
        if cls.job is None:
            cls.num_outside = len(cls.result_fds)
        if job is not cls.job:
            for fd in cls.result_fds[cls.num_outside :]:
                os.close(fd)
            del cls.result_fds[cls.num_outside :]
            cls.job = job
        fd = os.memfd_create("leto-result", os.MFD_CLOEXEC)
        cls.result_fds.append(fd)
        return fd


def build_launcher(flavour: Flavour) -> Any:
    """The launcher class of a distribution."""
    base = flavour.pytorch("strategies.launchers.launcher")._Launcher
    sigterm_class = flavour.pytorch("utilities.exceptions").SIGTERMException
    datamodule_class = flavour.pytorch("core.datamodule").LightningDataModule

    class LetoLauncher(base):  # type: ignore[misc, valid-type]
        """Runs calls of the Trainer in trainer processes."""

        def __init__(self, strategy: Any) -> None:
            self._strategy = strategy
            self._set_aside: tuple[Any, ...] | None = None

        @property
        def is_interactive_compatible(self) -> bool:
            """A notebook has no script to run again; `check_interactive` says so better."""
            return True

        def kill(self, signum: int) -> None:
            """Signals reach the trainers through the supervisor."""

        def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
            """Run `function` in trainers, or, in a trainer, here."""
            assert trainer is not None
            if is_imported_by_worker():
                raise ConfigurationError(
                    "A spawned DataLoader worker runs the script's top level, and that trains. Put the training behind"
                    " `if __name__ == '__main__':`, or leave out multiprocessing_context='spawn'."
                )
            identity = trainer_identity()
            if identity is None:
                return self._run_job(function, args, trainer)
            call, _Calls.replayed = _Calls.replayed, _Calls.replayed + 1
            if call < identity.call:
                return self._take(identity.prior_result_fds[call], args, trainer)
            resume.take_selected(trainer)
            saved_config.leave_files(trainer, flavour)
            self._strategy.side = TrainerSide(identity, flavour)
            self._strategy.side.run(function, args, kwargs, trainer)
            raise AssertionError("a trainer ends with its call")

        def _run_job(self, function: Callable[..., Any], args: Any, trainer: Any) -> Any:
            result_fd = _Calls.begin()
            try:
                check_trainer(trainer, flavour)
                if trainer.state.fn == "fit":
                    check_fit(trainer)
                end = self._wait_for_job(trainer, arguments_of(function, args))
                fitted = trainer.state.fn == "fit"
                self._strategy.recoveries = ([] if fitted else self._strategy.recoveries) + end["recoveries"]
                if end["outcome"] == "failed":
                    raise self._failure(end)
            except BaseException as error:  # trainers of later calls meet it again when they run the script
                portable = results.portable_exception(error)
                results.write_result(result_fd, {"outcome": "raise", "exception": portable})
                raise
            return self._take(result_fd, args, trainer)

        def _wait_for_job(self, trainer: Any, arguments: dict[str, Any]) -> dict[str, Any]:
            """Run the newest call in trainers; returns the supervisor's last message."""
            *earlier, result_fd = _Calls.result_fds
            with ExitStack() as stack:
                console = stack.enter_context(Console())
                files = self._pinned(trainer, arguments)
                for fd in files.values():
                    stack.callback(os.close, fd)
                saved_config.save(trainer, flavour)
                spec = self._spec(len(earlier), trainer, tuple(files))
                self._say_which_loggers_repeat(trainer, console)
                job = stack.enter_context(SupervisorProcess(spec, [result_fd, *earlier, *files.values()]))
                return job.wait(lambda event: self._on_event(event, trainer, console))

        def _say_which_loggers_repeat(self, trainer: Any, console: Console) -> None:
            names = [name for name in others_of(trainer.loggers, flavour) if name not in _Calls.repeating]
            if names:
                _Calls.repeating.update(names)
                text = f"{', '.join(dict.fromkeys(names))} gets each call at least once:"
                text += " after a failure, those of the interrupted step may come twice."
                console.show({"event": "warning", "text": text})

        def _pinned(self, trainer: Any, arguments: dict[str, Any]) -> dict[str, int]:
            """Files for the trainers, by name: the checkpoint as it is now, and how this process came to the call."""
            checkpoint = resume.select_checkpoint(trainer, arguments)
            job = _Calls.job
            context = CallContext(
                replaces_auto=replaces_auto(),
                ckpt_path=checkpoint,
                launched=hydra_job.launch_time(),
                nows=hydra_job.nows(),
                beginnings=beginnings(),
                hydra=None if job is None else hydra_job.pack_job(job),
            )
            pinned = resume.pin(checkpoint)
            files = {} if pinned is None else {CHECKPOINT_FILE: pinned}
            return files | {CONTEXT_FILE: context.to_fd()}

        def _failure(self, end: dict[str, Any]) -> BaseException:
            """What to raise for a job that ended without a result."""
            if end.get("signum") == signal.SIGINT:
                return KeyboardInterrupt(end["reason"])
            if end.get("signum") == signal.SIGTERM:
                return sigterm_class(end["reason"])  # type: ignore[no-any-return]
            return UnrecoverableError(end["reason"])

        def _take(self, result_fd: int, args: Any, trainer: Any) -> Any:
            result = results.read_result(result_fd)
            saved_config.note_saved(trainer, flavour)
            self._attach_data(trainer, args)
            if "state" in result:
                take_over(trainer.loggers, result["loggers"], flavour)
                returned = results.apply(trainer, result, flavour)
            if result["outcome"] == "raise":
                self._set_hooks_aside(trainer)
                results.raise_remote(result["exception"])
            return returned

        def _attach_data(self, trainer: Any, args: Any) -> None:
            """Connect the datamodule and the module's callbacks, as the call does in a trainer."""
            module = trainer.lightning_module
            trainer.strategy.connect(module)
            datamodule = next((value for value in args if isinstance(value, datamodule_class)), None)
            trainer._data_connector.attach_datamodule(module, datamodule)
            if module not in _Calls.attached:
                trainer._callback_connector._attach_model_callbacks()
                _Calls.attached.add(module)

        def _set_hooks_aside(self, trainer: Any) -> None:
            """Lightning is about to run `on_exception` here, and the trainer has run it already."""
            self._set_aside = (trainer, trainer.callbacks, trainer._loggers, trainer.datamodule)
            trainer.callbacks, trainer._loggers, trainer.datamodule = [], [], None

        def bring_hooks_back(self) -> None:
            """Undo `_set_hooks_aside`."""
            if self._set_aside is not None:
                trainer, trainer.callbacks, trainer._loggers, trainer.datamodule = self._set_aside
                self._set_aside = None

        def _on_event(self, event: dict[str, Any], trainer: Any, console: Console) -> None:
            console.show(event)
            for callback in trainer.callbacks:
                hook = getattr(callback, "on_leto_event", None)
                if callable(hook):
                    hook(trainer, event)

        def _spec(self, call: int, trainer: Any, files: tuple[str, ...]) -> LaunchSpec:
            config, start = self._strategy.leto, process_start()
            script = _script()
            # What the script takes away from its environment it may read before, when it is run again.
            env = {"PYTHONHASHSEED": hash_seed(), **start.environ, **os.environ}
            forks = script is not None and not start.flags
            function = str(trainer.state.fn.value)
            loggers = logger_starts(trainer.loggers, flavour, call)
            writers = ("torch.utils.tensorboard",) if any(x.get("files") == "tensorboard" for x in loggers) else ()
            return LaunchSpec(
                job=secrets.token_hex(8),
                argv=(sys.executable, *sys.orig_argv[1:]),
                env={k: v for k, v in env.items() if k not in (JOB_VARIABLE, TRAINER_VARIABLE)},
                cwd=start.cwd,
                world=self._strategy.num_processes,
                devices=tuple(device_name(device) for device in self._strategy.parallel_devices),
                handle_bytes=config.handle_mib << 20,
                call=call,
                function=function,
                root_dir=os.path.abspath(os.fspath(trainer.default_root_dir)),
                script=script,
                shadows=config.shadows if function == "fit" else 0,
                zygote=forks and config.zygote != "off",
                zygote_modules=(flavour.name, f"leto_strategy.strategy.{flavour.name.split('.')[0]}", *writers),
                max_restarts=config.max_restarts,
                hang_timeout=config.hang_timeout,
                reap_timeout=config.reap_timeout,
                stop_grace=config.stop_grace,
                loggers=loggers,
                files=files,
                rerun_first=_Calls.job is not None and script is not None,
                faults=config.faults,
                needs_memory=function == "fit",
            )

    return LetoLauncher


def arguments_of(function: Callable[..., Any], args: Any) -> dict[str, Any]:
    """The arguments of a bound method of the Trainer, by name."""
    return dict(zip(function.__code__.co_varnames[1:], args, strict=False))


def device_name(device: torch.device) -> str:
    """A device as the supervisor and the state managers call it."""
    return "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}"


def _script() -> Script | None:
    """How to run this script again inside a process of ours; None where only its own command will do."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None:
        return None
    start, spec = process_start(), getattr(main, "__spec__", None)
    if spec is not None and spec.name == "__main__":  # a directory or an archive
        return None
    if spec is not None:
        module = spec.name.removesuffix(".__main__")
        return Script(path=None, module=module, argv=start.argv, path0=start.cwd)
    path = os.path.join(start.cwd, path)
    return Script(path=path, module=None, argv=start.argv, path0=os.path.dirname(os.path.realpath(path)))
