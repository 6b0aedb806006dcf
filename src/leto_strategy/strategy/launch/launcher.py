"""What `Trainer.fit` and its sisters do instead of training: start the supervisor and wait, or be a trainer."""

import os
import secrets
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar
from weakref import WeakSet

from leto_strategy.config import JOB_VARIABLE, TRAINER_VARIABLE, process_start, trainer_identity
from leto_strategy.errors import UnrecoverableError
from leto_strategy.processes.messages import LaunchSpec, Script
from leto_strategy.strategy.flavour import Flavour
from leto_strategy.strategy.launch import results
from leto_strategy.strategy.launch.checks import check_fit, check_trainer
from leto_strategy.strategy.launch.console import Console
from leto_strategy.strategy.launch.job import SupervisorProcess
from leto_strategy.strategy.launch.trainer import TrainerSide


class _Calls:
    """The script's launch calls so far, one state for the process.

    result_fds: In the user's process, the result of each call.
    replayed: In a trainer, how many calls were answered with their results.
    logger_positions: Where these calls left the loggers' files.
    attached: Modules whose own callbacks the Trainer has.
    """

    result_fds: ClassVar[list[int]] = []
    replayed: ClassVar[int] = 0
    logger_positions: ClassVar[dict[str, Any]] = {}
    attached: ClassVar[WeakSet[Any]] = WeakSet()


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
            identity = trainer_identity()
            if identity is None:
                return self._run_job(function, args, trainer)
            call, _Calls.replayed = _Calls.replayed, _Calls.replayed + 1
            if call < identity.call:
                return self._take(identity.prior_result_fds[call], args, trainer)
            self._strategy.side = TrainerSide(identity, flavour, _Calls.logger_positions)
            self._strategy.side.run(function, args, kwargs, trainer)
            raise AssertionError("a trainer ends with its call")

        def _run_job(self, function: Callable[..., Any], args: Any, trainer: Any) -> Any:
            result_fd = os.memfd_create("leto-result", os.MFD_CLOEXEC)
            _Calls.result_fds.append(result_fd)
            try:
                check_trainer(trainer, flavour)
                if trainer.state.fn == "fit":
                    check_fit(trainer, dict(zip(function.__code__.co_varnames[1:], args, strict=False)))
                end = self._wait_for_job(trainer)
                fitted = trainer.state.fn == "fit"
                self._strategy.recoveries = ([] if fitted else self._strategy.recoveries) + end["recoveries"]
                if end["outcome"] == "failed":
                    raise self._failure(end)
            except BaseException as error:  # trainers of later calls meet it again when they run the script
                portable = results.portable_exception(error)
                results.write_result(result_fd, {"outcome": "raise", "exception": portable})
                raise
            return self._take(result_fd, args, trainer)

        def _wait_for_job(self, trainer: Any) -> dict[str, Any]:
            """Run the newest call in trainers; returns the supervisor's last message."""
            *earlier, result_fd = _Calls.result_fds
            with ExitStack() as stack:
                console = stack.enter_context(Console())
                spec = self._spec(len(earlier), trainer)
                job = stack.enter_context(SupervisorProcess(spec, [result_fd, *earlier]))
                return job.wait(lambda event: self._on_event(event, trainer, console))

        def _failure(self, end: dict[str, Any]) -> BaseException:
            """What to raise for a job that ended without a result."""
            if end.get("signum") == signal.SIGINT:
                return KeyboardInterrupt(end["reason"])
            if end.get("signum") == signal.SIGTERM:
                return sigterm_class(end["reason"])  # type: ignore[no-any-return]
            return UnrecoverableError(end["reason"])

        def _take(self, result_fd: int, args: Any, trainer: Any) -> Any:
            result = results.read_result(result_fd)
            self._attach_data(trainer, args)
            if "state" in result:
                _Calls.logger_positions.update(result["loggers"])
                returned = results.apply(trainer, result, flavour.pytorch("loops.loop")._Loop)
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

        def _spec(self, call: int, trainer: Any) -> LaunchSpec:
            config, start = self._strategy.leto, process_start()
            script = _script()
            function = str(trainer.state.fn.value)
            return LaunchSpec(
                job=secrets.token_hex(8),
                argv=(sys.executable, *sys.orig_argv[1:]),
                env={k: v for k, v in os.environ.items() if k not in (JOB_VARIABLE, TRAINER_VARIABLE)},
                cwd=start.cwd,
                world=self._strategy.num_processes,
                call=call,
                function=function,
                root_dir=os.path.abspath(os.fspath(trainer.default_root_dir)),
                script=script,
                shadows=config.shadows if function == "fit" else 0,
                zygote=config.zygote == "on" or (config.zygote == "auto" and script is not None),
                zygote_modules=(flavour.name, f"leto_strategy.strategy.{flavour.name.split('.')[0]}"),
                max_restarts=config.max_restarts,
                hang_timeout=config.hang_timeout,
                reap_timeout=config.reap_timeout,
                stop_grace=config.stop_grace,
                logger_versions=tuple(getattr(logger, "version", None) for logger in trainer.loggers),
                faults=config.faults,
                needs_memory=function == "fit",
            )

    return LetoLauncher


def _script() -> Script | None:
    """How to run this script again inside a forked process; None where only a new interpreter will do."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or any(argument.startswith("-") and argument != "-m" for argument in _interpreter_flags()):
        return None
    start, spec = process_start(), getattr(main, "__spec__", None)
    if spec is not None:
        module = spec.name.removesuffix(".__main__")
        return Script(path=None, module=module, argv=start.argv, path0=start.cwd)
    path = os.path.join(start.cwd, path)
    return Script(path=path, module=None, argv=start.argv, path0=os.path.dirname(os.path.realpath(path)))


def _interpreter_flags() -> list[str]:
    """What stands between the interpreter and the script on the command line."""
    count = len(sys.orig_argv) - len(process_start().argv)
    return sys.orig_argv[1:count]
