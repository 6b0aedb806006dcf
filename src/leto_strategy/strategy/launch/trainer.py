"""A trainer process: joins its generation, waits for its promotion, runs the call, leaves its result.

The script of the user is re-run up to the launch call this trainer was started for; earlier calls are answered with the
results they had. After the call the process ends: the rest of the script belongs to the user's process.
"""

import logging
import multiprocessing.process
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from leto_strategy.config import TrainerIdentity, scratch_directory
from leto_strategy.faults import CrashPoints
from leto_strategy.strategy.capture.kept import KeptState
from leto_strategy.strategy.capture.loggers import LoggerState, logger_kind
from leto_strategy.strategy.flavour import Flavour
from leto_strategy.strategy.launch.hydra_job import open_logs
from leto_strategy.strategy.launch.link import SupervisorLink, kind_of
from leto_strategy.strategy.launch.results import collect, portable_exception, write_result


class TrainerSide:
    """This process's part as a trainer.

    Args:
        identity: Who it is.
        flavour: Lightning's distribution.
    """

    def __init__(self, identity: TrainerIdentity, flavour: Flavour) -> None:
        self.identity, self._flavour = identity, flavour
        self._link = SupervisorLink(identity)
        self.loggers: LoggerState | None = None
        self._promoted = False
        self._unplaced: list[Any] = []
        self._before: KeptState | None = None

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any, trainer: Any) -> None:
        """Run the call and end the process; never returns."""
        self._prepare(trainer)
        try:
            returned = function(*args, **kwargs)
            session = trainer.strategy._session
            result = collect(trainer, returned, self._before, self.loggers)
            if self.identity.rank == 0:
                write_result(self.identity.result_fd, {"outcome": "finished", **result})
            if session is not None:
                session.reach("finished", session.step - 1)
            else:
                CrashPoints()("finished")
        except BaseException as error:  # every ending is reported: the supervisor decides what it means
            self._deliver(trainer, error)
            _leave(1)
        self._link.finished()
        _leave(0)

    def _prepare(self, trainer: Any) -> None:
        hush(self._flavour.name, level=logging.INFO)
        # Sockets of DataLoader workers: processes that are killed can't remove theirs, so all lie in one place.
        directory = scratch_directory(self.identity.job)
        os.makedirs(directory, mode=0o700, exist_ok=True)
        multiprocessing.process.current_process()._config["tempdir"] = directory  # type: ignore[attr-defined]
        # What a killed trainer's spawned workers left is unlinked for it; nothing the user has to know.
        sys.warnoptions.append("ignore:resource_tracker")
        if self.identity.role == "active":
            self._speak()
        identity = self.identity
        self._flavour.fabric_module("utilities.distributed")._set_num_threads_if_needed(num_processes=identity.world)
        self.loggers = LoggerState(trainer.loggers, identity.loggers, self._flavour, is_rank_zero=identity.rank == 0)
        if trainer.loggers and logger_kind(trainer.loggers[0], self._flavour) == "other":
            checkpoint_class = self._flavour.pytorch("callbacks").ModelCheckpoint
            checkpoints = [callback for callback in trainer.callbacks if isinstance(callback, checkpoint_class)]
            self._unplaced = [checkpoint for checkpoint in checkpoints if checkpoint.dirpath is None]
        if identity.role == "shadow":
            trainer._data_connector.prepare_data = lambda: None
        self._replace_sigterm_handler(trainer)

    def _replace_sigterm_handler(self, trainer: Any) -> None:
        """Keep collectives out of the SIGTERM handler.

        Lightning's own runs one, and ranks that are at different places would mismatch. Every trainer gets the signal
        anyway, and rank 0's flag reaches the others at the next step.
        """
        connector, world = trainer._signal_connector, self.identity.world

        def notify(signum: int, _: Any) -> None:
            if world == 1 or self.identity.rank == 0:
                connector.received_sigterm = True

        connector._sigterm_notifier_fn = notify

    def begin_to_log(self, trainer: Any) -> None:
        """Nothing of this call is recorded yet: log from its beginning.

        A checkpoint directory that has the name of a logger's run in it could not be known before that run was begun.
        """
        assert self.loggers is not None
        self.loggers.begin()
        for checkpoint in self._unplaced:
            checkpoint.dirpath = None
            checkpoint.setup(trainer, trainer.lightning_module, stage=trainer.state.fn)

    def note_user_state(self, trainer: Any) -> None:
        """Everything is attached and no hook of the call has run: what changes from here on is the call's doing."""
        self._before = KeptState(trainer, self._flavour, quiet=True)

    def join(self, backend: str, timeout: timedelta) -> None:
        """Join the process group of this generation."""
        if dist.is_initialized():
            return
        identity = self.identity
        options: dict[str, Any] = {"is_master": identity.rank == 0, "wait_for_workers": False, "timeout": timeout}
        if identity.rank == 0:
            options["master_listen_fd"] = socket.socket(fileno=identity.store_fd).detach()
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", identity.store_port, identity.world, **options
        )
        dist.init_process_group(backend, store=store, rank=identity.rank, world_size=identity.world, timeout=timeout)

    def wait_for_promotion(
        self, prepare: Callable[[], None] = lambda: None, work: Iterator[float] | None = None
    ) -> dict[str, Any]:
        """Wait at the gate; afterwards this trainer is the active one and speaks to the user.

        Args:
            prepare: Called when the active generation is being killed: to do what may be done ahead of the fence.
            work: What a shadow does while it waits, see `SupervisorLink.ready`.
        """
        order = self._link.ready(prepare, work if self.identity.role == "shadow" else None)
        self._promoted = True
        if self.identity.role == "shadow":
            self._speak()
        return order

    def _speak(self) -> None:
        """Let output go to the user from here on."""
        sys.stdout.flush()
        sys.stderr.flush()
        open_logs()
        os.dup2(self.identity.stdout_fd, 1)
        os.dup2(self.identity.stderr_fd, 2)
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure") and stream.isatty():
                stream.reconfigure(line_buffering=True)

    def entered(self, step: int) -> None:
        """The first forward pass that was not done yet has begun."""
        self._link.entered(step)

    def _deliver(self, trainer: Any, error: BaseException) -> None:
        """Report an exception; if it is the user's, do what Lightning does and hand it over."""
        session = trainer.strategy._session
        self._link.failed(error, kind_of(error), session.step if session is not None else None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        call = self._flavour.pytorch("trainer.call")
        portable = portable_exception(error)
        _stand_alone(trainer.strategy)
        try:
            call._interrupt(trainer, error)
            trainer._teardown()
        except Exception:  # the user's own exception matters more than one in its handling
            logging.getLogger(__name__).exception("leto: an on_exception hook failed")
        result = collect(trainer, None, self._before, self.loggers)
        write_result(self.identity.result_fd, {"outcome": "raise", "exception": portable, **result})
        self._link.delivered()


def hush(logger: str, *, level: int = logging.WARNING) -> None:
    """Keep Lightning's notices about devices and tips to the user's process: each trainer repeats the script."""
    logging.getLogger(logger).setLevel(level)


def print_no_summary(trainer: Any, flavour: Flavour) -> None:
    """In a trainer that goes on with a fit: the summary of the model was printed when the fit began."""
    callbacks = flavour.pytorch("callbacks")
    for callback in trainer.callbacks:
        if type(callback) in (callbacks.ModelSummary, callbacks.RichModelSummary):
            callback.on_fit_start = lambda *_: None


def _stand_alone(strategy: Any) -> None:
    """Only this rank runs its exception hooks: a checkpoint that one of them writes must not wait for the others."""
    strategy.barrier = lambda *args, **kwargs: None
    strategy.broadcast = lambda value, *args, **kwargs: value
    strategy.reduce_boolean_decision = lambda decision, *args, **kwargs: decision


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)
