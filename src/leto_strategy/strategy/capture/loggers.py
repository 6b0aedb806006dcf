"""The loggers of one trainer: wait until its promotion, then go on where a record says.

Lightning's own CSVLogger and TensorBoardLogger end up with the rows and events of an undisturbed run. Any other logger
gets each call at least once: those of a step that is entered again come twice.
"""

import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from leto_strategy.strategy.capture import waiting_loggers
from leto_strategy.strategy.capture.csv_logs import exact_csv_writer
from leto_strategy.strategy.capture.event_files import EventFiles, write_through
from leto_strategy.strategy.capture.hyperparameters import PackedHyperparameters, unpack_hyperparameters
from leto_strategy.strategy.flavour import Flavour

_RUN = ("_run_id", "_run_short_id", "_experiment_id", "_experiment_key", "_id")
"""Attributes by which Lightning's other loggers find their run again."""


def logger_kind(logger: Any, flavour: Flavour) -> str:
    """One of "csv_logs", "tensorboard", "other", and "none" for a logger that logs nowhere."""
    if type(logger).__name__ == "DummyLogger":
        return "none"
    exact = waiting_loggers.exact_kind(waiting_loggers.live_class(logger)) is not None
    return (exact and files_kind(logger, flavour)) or "other"


def files_kind(logger: Any, flavour: Flavour) -> str | None:
    """Whose files it writes, be it by a subclass with behaviour of its own: "csv_logs", "tensorboard" or None."""
    kind = waiting_loggers.inherited_kind(waiting_loggers.live_class(logger))
    if kind == "tensorboard":
        local = "://" not in str(logger.save_dir)
        return kind if local and flavour.fabric_module("loggers.tensorboard")._TENSORBOARD_AVAILABLE else None
    return kind


def others_of(loggers: Sequence[Any], flavour: Flavour) -> list[str]:
    """Names of the loggers whose calls come at least once, not exactly once."""
    return [waiting_loggers.live_class(x).__name__ for x in loggers if logger_kind(x, flavour) == "other"]


def logger_starts(loggers: Sequence[Any], flavour: Flavour, call: int) -> tuple[dict[str, Any], ...]:
    """In the user's process: what each trainer of a call must know of each logger, as JSON values.

    Nothing is created: `version` of some loggers begins a run.
    """
    second = int(time.time()) + 1  # TensorBoard reads files by name: after those that this process has begun until now
    prefix = f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{os.getpid()}.{call}"
    taken: set[tuple[str, Any]] = set()
    return tuple([_start(logger, flavour, prefix, taken) for logger in loggers])


def _start(logger: Any, flavour: Flavour, prefix: str, taken: set[tuple[str, Any]]) -> dict[str, Any]:
    kind = logger_kind(logger, flavour)
    start: dict[str, Any] = {"kind": kind}
    if _has_versions(logger):
        start["version"], start["root"] = _pinned_version(logger, taken), os.path.abspath(logger.root_dir)
    if kind == "other":
        start["run"] = _run_of(logger)
    files = None if kind == "none" else files_kind(logger, flavour)
    if files is None:
        return start
    start["files"], written = files, logger._experiment
    if files == "csv_logs":
        if written is not None:  # the script has logged before the call: the trainers go on with that file
            logger.save()
            size = os.path.getsize(written.metrics_file_path) if os.path.exists(written.metrics_file_path) else 0
            start["file"] = [size, list(written.metrics_keys)]
        return start
    if written is not None:
        written.close()  # its next event begins a file after that of the trainers
    start["events"] = prefix
    start["yaml"] = os.path.exists(_hparams_file(logger))
    return start


def _has_versions(logger: Any) -> bool:
    """Whether its version is the number of a directory, which can be looked up without making anything."""
    return hasattr(logger, "_get_next_version") and hasattr(logger, "_version")


def _pinned_version(logger: Any, taken: set[tuple[str, Any]]) -> Any:
    """The version; two loggers that would take the same free directory take one after the other, as when they log."""
    root = os.path.abspath(logger.root_dir)
    automatic = logger._version is None
    version = logger.version
    while automatic and (root, version) in taken:
        version = logger._version = version + 1
    taken.add((root, version))
    return version


def _run_of(logger: Any) -> dict[str, Any]:
    run = {name: vars(logger)[name] for name in _RUN if isinstance(vars(logger).get(name), (str, int))}
    experiment = vars(logger).get("_experiment")
    if isinstance(vars(logger).get("_wandb_init"), dict) and isinstance(getattr(experiment, "id", None), str):
        run["_id"] = experiment.id
    return run


def _find_run_again(logger: Any, run: dict[str, Any]) -> None:
    vars(logger).update(run)
    if "_id" in run and isinstance(vars(logger).get("_wandb_init"), dict):
        logger._wandb_init["id"] = run["_id"]


def _hparams_file(logger: Any) -> str:
    return os.path.join(str(logger.log_dir), str(logger.NAME_HPARAMS_FILE))


def take_over(loggers: Sequence[Any], ended: Sequence[dict[str, Any]], flavour: Flavour) -> None:
    """After a call: let the loggers of this process know where those of the trainers have ended.

    Args:
        loggers: The Trainer's loggers.
        ended: What `LoggerState.ended` said.
        flavour: The distribution.
    """
    for logger, end in zip(loggers, ended, strict=False):
        kind = logger_kind(logger, flavour)
        if "version" in end and _has_versions(logger):
            logger._version = end["version"]
        if kind == "other":
            _find_run_again(logger, end["run"])
        if end["hparams"]:
            logger.hparams = unpack_hyperparameters(end["hparams"])
        if end["position"] is not None:
            if waiting_loggers.is_waiting(logger):
                waiting_loggers.pending_hparams(logger).update(unpack_hyperparameters(end["position"][3]))
            else:
                writer = exact_csv_writer(flavour.pytorch("loggers.csv_logs").ExperimentWriter)
                logger._experiment = writer(logger.log_dir, fresh=False)
                logger._experiment.go_on_from(end["position"])


class LoggerState:
    """The loggers of one trainer process; they wait until `begin` or `restore`.

    Args:
        loggers: The Trainer's loggers.
        starts: What the user's process has said of them, see `logger_starts`.
        flavour: The distribution.
        is_rank_zero: Whether this rank writes files.
    """

    def __init__(
        self, loggers: list[Any], starts: Sequence[dict[str, Any]], flavour: Flavour, *, is_rank_zero: bool
    ) -> None:
        self._loggers, self._starts = list(loggers), list(starts)
        for logger, start in zip(loggers, starts, strict=False):
            if "version" in start:
                logger._version = start["version"]
            if start["kind"] == "other":
                _find_run_again(logger, start["run"])
        for logger in loggers:
            if type(logger).__name__ != "DummyLogger":
                waiting_loggers.hold(logger)
        exact = zip(loggers, starts, strict=False) if is_rank_zero else ()
        by_kind: dict[str, list[tuple[Any, dict[str, Any]]]] = {"csv_logs": [], "tensorboard": []}
        for logger, start in exact:
            if "files" in start:
                by_kind[start["files"]].append((logger, start))
        self._others = [x for x, start in zip(loggers, starts, strict=False) if start["kind"] == "other"]
        self._csv = [_CsvLogs(logger, start, flavour) for logger, start in by_kind["csv_logs"]]
        self._tensorboard = _TensorBoards(by_kind["tensorboard"]) if by_kind["tensorboard"] else None

    def capture(self) -> dict[str, Any]:
        """Where each logger is."""
        return {
            "csv": [log.writer.position() for log in self._csv],
            "tensorboard": None if self._tensorboard is None else self._tensorboard.capture(),
            "others": [_run_of(logger) for logger in self._others],
        }

    def begin(self) -> None:
        """Log from here on, from where the call began: what another trainer has written in this call is removed."""
        hparams = self._release()
        for log in self._csv:
            log.begin(hparams[id(log.logger)])
        if self._tensorboard is not None:
            self._tensorboard.begin()

    def restore(self, state: dict[str, Any]) -> None:
        """Log from here on, from where `capture` was called."""
        self._release()
        for log, position in zip(self._csv, state["csv"], strict=True):
            log.restore(position)
        if self._tensorboard is not None:
            self._tensorboard.restore(state["tensorboard"])
        for logger, run in zip(self._others, state["others"], strict=True):
            _find_run_again(logger, run)

    def _release(self) -> dict[int, dict[str, Any]]:
        waiting_loggers.stop_holding()
        return {id(logger): waiting_loggers.release(logger) for logger in self._loggers}

    def ended(self) -> list[dict[str, Any]]:
        """For the user's process, see `take_over`."""
        csv = {id(log.logger): log for log in self._csv}
        ends = []
        for logger, start in zip(self._loggers, self._starts, strict=False):
            end: dict[str, Any] = {name: start[name] for name in ("version",) if name in start}
            end["run"] = _run_of(logger)
            log = csv.get(id(logger))
            end["position"] = None if log is None or log.writer is None else log.writer.position()
            end["hparams"] = PackedHyperparameters().of(logger.hparams) if start.get("files") == "tensorboard" else b""
            ends.append(end)
        return ends


class _CsvLogs:
    """One CSVLogger."""

    def __init__(self, logger: Any, start: dict[str, Any], flavour: Flavour) -> None:
        self.logger, self._start = logger, start
        self._make = exact_csv_writer(flavour.pytorch("loggers.csv_logs").ExperimentWriter)
        self.writer: Any = None

    def _write(self, *, fresh: bool) -> None:
        os.makedirs(self.logger.root_dir, exist_ok=True)
        self.writer = self.logger._experiment = self._make(self.logger.log_dir, fresh=fresh)

    def begin(self, hparams: dict[str, Any]) -> None:
        file = self._start.get("file")
        self._write(fresh=file is None)
        if file is not None:
            size_bytes, columns = file
            self.writer.return_to((size_bytes, columns, [], PackedHyperparameters().of({})))
        self.writer.hparams = hparams

    def restore(self, position: Any) -> None:
        self._write(fresh=False)
        self.writer.return_to(position)


class _TensorBoards:
    """All TensorBoardLoggers: their directories may lie in each other, so their files are looked after together."""

    def __init__(self, loggers: list[tuple[Any, dict[str, Any]]]) -> None:
        self._loggers = [logger for logger, _ in loggers]
        self._had_yaml = [start["yaml"] for _, start in loggers]
        self._files = EventFiles(loggers[0][1]["events"], [logger.log_dir for logger in self._loggers])
        self._module = write_through(self._files)
        self._packed = [PackedHyperparameters() for _ in loggers]

    def begin(self) -> None:
        self._files.return_to({})
        for logger, had_yaml in zip(self._loggers, self._had_yaml, strict=True):
            _remove_unless(had_yaml, _hparams_file(logger))
            os.makedirs(logger.root_dir, exist_ok=True)
            logger._experiment = self._module.SummaryWriter(log_dir=logger.log_dir, **logger._kwargs)

    def capture(self) -> dict[str, Any]:
        return {
            "files": self._files.positions(),
            "loggers": [
                {
                    "writers": None if logger._experiment.all_writers is None else list(logger._experiment.all_writers),
                    "projector": _projector(logger._experiment),
                    "hparams": packed.of(logger.hparams),
                    "yaml": os.path.exists(_hparams_file(logger)),
                }
                for logger, packed in zip(self._loggers, self._packed, strict=True)
            ],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._files.return_to(state["files"])
        for logger, values in zip(self._loggers, state["loggers"], strict=True):
            _remove_unless(values["yaml"], _hparams_file(logger))
            logger.hparams = unpack_hyperparameters(values["hparams"])
            logger._experiment = self._reopened(logger, values["writers"])
            if values["projector"] is not None:
                from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig

                logger._experiment._projector_config = ProjectorConfig.FromString(values["projector"])

    def _reopened(self, logger: Any, directories: list[str] | None) -> Any:
        """A SummaryWriter with the writers that another one had; None: it was closed."""
        live, self._files.live = self._files.live, directories is not None
        writer = self._module.SummaryWriter(log_dir=logger.log_dir, **{**logger._kwargs, "purge_step": None})
        self._files.live = live
        if directories is None:
            writer.file_writer = writer.all_writers = None
        for directory in (directories or [])[1:]:
            writer.all_writers[directory] = self._module.FileWriter(
                directory, writer.max_queue, writer.flush_secs, writer.filename_suffix
            )
        return writer


def _remove_unless(kept: bool, path: str) -> None:
    """A file that a record does not know may be half written."""
    if not kept and os.path.exists(path):
        os.remove(path)


def _projector(writer: Any) -> bytes | None:
    config = vars(writer).get("_projector_config")
    return None if config is None else config.SerializeToString()
