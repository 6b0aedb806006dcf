"""A logger that waits creates nothing and drops what it is given; released, it is what its class says."""

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger

from leto_strategy.strategy.capture import waiting_loggers
from leto_strategy.strategy.capture.loggers import LoggerState, logger_kind, logger_starts, others_of, take_over
from leto_strategy.strategy.flavour import flavour

LIGHTNING = flavour("lightning.pytorch")


@pytest.fixture(autouse=True)
def holding() -> Iterator[None]:
    waiting_loggers._holding = True
    yield
    waiting_loggers._holding = True


class Base:
    """Stands for Lightning's Logger."""


def user_logger(base: type = Base) -> Any:
    """A class like those of tracking services: its constructor may begin a run, and its version needs one."""

    class Tracker(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.calls: list[Any] = []
            self._run_id: str | None = None
            self.prepare("x")
            self.log_metrics({"too early": 1.0})
            self._create_experiment()

        def prepare(self, what: str) -> None:
            self.prepared = what

        def _create_experiment(self) -> None:
            self.calls.append("created")

        @property
        def experiment(self) -> Any:
            if self._run_id is None:
                self._create_experiment()
                self._run_id = "run-1"
            return self.calls

        @property
        def version(self) -> Any:
            return self.experiment is not None and self._run_id

        @property
        def name(self) -> str:
            return "tracker"

        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            self.experiment.append(metrics)

        def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
            self.experiment.append(params)

        def watch(self, model: Any) -> str:
            self.experiment.append("watched")
            return "watching"

    return Tracker


def test_a_logger_is_born_waiting_and_its_constructor_can_use_its_own_methods() -> None:
    waiting_loggers.install(SimpleNamespace(Logger=Base))  # type: ignore[arg-type]
    cls = user_logger()
    logger = cls()
    assert isinstance(logger, cls)
    assert type(logger) is not cls
    assert (logger.prepared, logger.calls, logger.name, logger.version) == ("x", [], "tracker", None)
    kept_method, kept_experiment, kept_append = logger.watch, logger.experiment, logger.experiment.append
    assert logger.watch(None) is None
    logger.log_hyperparams({"a": 1})
    logger.experiment.config.update({"b": 2})["c"] = 3
    with logger.experiment.scope("s"), pytest.raises(pickle.PicklingError):
        pickle.dumps(logger.experiment)
    assert list(logger.experiment) == []
    assert logger.calls == []
    waiting_loggers.release(logger)
    assert type(logger) is cls
    assert kept_method(None) == "watching"
    kept_experiment.append("later")
    kept_append("bound")
    assert logger.calls == ["created", "watched", "later", "bound"]
    assert (logger.version, len(kept_experiment)) == ("run-1", 4)


def test_from_the_promotion_on_new_loggers_log() -> None:
    waiting_loggers.install(SimpleNamespace(Logger=Base))  # type: ignore[arg-type]
    waiting_loggers.stop_holding()
    cls = user_logger()
    assert type(cls()) is cls


def test_the_users_process_begins_no_run_and_finds_that_of_the_trainers() -> None:
    cls = user_logger(Logger)
    users, first, second = cls(), cls(), cls()
    for logger in (users, first, second):
        logger.calls.clear()
        logger._run_id = None
    starts = logger_starts([users], LIGHTNING, 0)
    assert users.calls == []
    assert starts == ({"kind": "other", "run": {}},)
    active = LoggerState([first], starts, LIGHTNING, is_rank_zero=True)
    promoted = LoggerState([second], starts, LIGHTNING, is_rank_zero=True)
    active.begin()
    first.log_metrics({"a": 1.0}, 0)
    recorded = active.capture()
    assert second.calls == []
    promoted.restore(recorded)
    second.log_metrics({"a": 1.0}, 0)
    assert (second.version, second.calls) == ("run-1", [{"a": 1.0}]), "it goes on with the same run"
    take_over([users], promoted.ended(), LIGHTNING)
    assert (users.version, users.calls) == ("run-1", [])


def test_what_is_logged_to_at_least_once_is_named(tmp_path: Any) -> None:
    class Own(CSVLogger):
        pass

    loggers = [CSVLogger(tmp_path), Own(tmp_path), user_logger(Logger)()]
    assert others_of(loggers, LIGHTNING) == ["Own", "Tracker"]
    for logger in loggers:
        waiting_loggers.hold(logger)
    assert [logger_kind(logger, LIGHTNING) for logger in loggers] == ["csv_logs", "other", "other"]
    (_, start, _) = logger_starts(loggers, LIGHTNING, 0)
    assert start["version"] == 1, "the directory that it takes is known to every trainer"
