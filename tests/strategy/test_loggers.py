"""Loggers: the bytes and events of Lightning's own, and a position to which they return whatever came after."""

import csv
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from leto_strategy.strategy.capture import waiting_loggers
from leto_strategy.strategy.capture.csv_logs import exact_csv_writer
from leto_strategy.strategy.capture.loggers import LoggerState, logger_starts, take_over
from leto_strategy.strategy.capture.packing import pack, unpack
from leto_strategy.strategy.flavour import flavour

LIGHTNING = flavour("lightning.pytorch")
Writer: Any = exact_csv_writer(ExperimentWriter)

ROWS = [{"loss": 1.0}, {"loss": 0.5}, {"loss": 0.25, "val": 3.0}, {"loss": 0.1}, {"late": 1.0}]


@pytest.fixture(autouse=True)
def holding() -> Iterator[None]:
    waiting_loggers._holding = True
    yield
    waiting_loggers._holding = True


def state_of(*loggers: Any, call: int = 0) -> LoggerState:
    return LoggerState(list(loggers), logger_starts(loggers, LIGHTNING, call), LIGHTNING, is_rank_zero=True)


def write(writer: Any, rows: list[dict[str, float]], first_step: int = 0) -> None:
    for step, row in enumerate(rows, start=first_step):
        writer.log_metrics(row, step)
        writer.save()


def test_it_writes_what_lightnings_own_writes(tmp_path: Path) -> None:
    write(ExperimentWriter(str(tmp_path / "theirs")), ROWS)
    write(Writer(str(tmp_path / "ours"), fresh=True), ROWS)
    theirs, ours = ((tmp_path / d / "metrics.csv").read_bytes() for d in ("theirs", "ours"))
    assert ours == theirs


@pytest.mark.parametrize(
    ("kept", "written"), [(kept, written) for written in range(len(ROWS) + 1) for kept in range(written + 1)]
)
def test_rows_written_after_the_position_come_once(tmp_path: Path, kept: int, written: int) -> None:
    """`kept` rows, a position, rows up to `written` by a trainer that dies; another returns and writes the rest."""
    write(Writer(str(tmp_path / "undisturbed"), fresh=True), ROWS)
    dying = Writer(str(tmp_path / "killed"), fresh=True)
    write(dying, ROWS[:kept])
    position = unpack(pack(dying.position()))
    write(dying, ROWS[kept:written], kept)
    promoted = Writer(str(tmp_path / "killed"), fresh=False)
    promoted.return_to(position)
    write(promoted, ROWS[kept:], kept)
    undisturbed, killed = ((tmp_path / d / "metrics.csv").read_bytes() for d in ("undisturbed", "killed"))
    assert killed == undisturbed


def test_a_row_cut_in_the_middle_is_dropped(tmp_path: Path) -> None:
    writer = Writer(str(tmp_path), fresh=True)
    write(writer, ROWS[:2])
    position = writer.position()
    with open(writer.metrics_file_path, "a") as file:
        file.write("0.2")
    Writer(str(tmp_path), fresh=False).return_to(position)
    with open(writer.metrics_file_path) as file:
        assert [row["loss"] for row in csv.DictReader(file)] == ["1.0", "0.5"]


def test_a_waiting_csv_logger_writes_nothing_and_the_next_trainer_goes_on(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="n", version=0)
    state = state_of(logger)
    logger.log_metrics({"a": 1.0})
    logger.log_hyperparams({"b": 2})
    logger.save()
    assert len(logger.experiment.metrics) == 0
    assert not (tmp_path / "n").exists()
    state.begin()
    assert type(logger) is CSVLogger
    assert logger.experiment.hparams == {"b": 2}
    logger.log_metrics({"a": 1.0}, 0)
    logger.save()
    recorded = unpack(pack(state.capture()))
    logger.log_metrics({"a": 2.0}, 1)
    logger.save()
    promoted = CSVLogger(tmp_path, name="n", version=0)
    state_of(promoted).restore(recorded)
    assert (tmp_path / "n" / "version_0" / "metrics.csv").read_text().split() == ["a,step", "1.0,0"]


def test_two_loggers_that_would_take_the_same_directory_take_two(tmp_path: Path) -> None:
    starts = logger_starts([CSVLogger(tmp_path), CSVLogger(tmp_path), CSVLogger(tmp_path, version=7)], LIGHTNING, 0)
    assert [start["version"] for start in starts] == [0, 1, 7]


def test_the_users_process_goes_on_with_the_file_of_the_trainers(tmp_path: Path) -> None:
    logger, trainers_own = CSVLogger(tmp_path), CSVLogger(tmp_path)
    state = LoggerState([trainers_own], logger_starts([logger], LIGHTNING, 0), LIGHTNING, is_rank_zero=True)
    state.begin()
    trainers_own.log_hyperparams({"width": 3})
    trainers_own.log_metrics({"a": 1.0}, 0)
    trainers_own.finalize("success")
    take_over([logger], unpack(pack(state.ended())), LIGHTNING)
    logger.log_metrics({"a": 2.0}, 1)
    logger.log_hyperparams({"depth": 4})
    (start,) = logger_starts([logger], LIGHTNING, 1)
    directory = tmp_path / "lightning_logs" / "version_0"
    assert (directory / "metrics.csv").read_text().split() == ["a,step", "1.0,0", "2.0,1"]
    assert (directory / "hparams.yaml").read_text().split() == ["width:", "3", "depth:", "4"]
    again = CSVLogger(tmp_path)
    LoggerState([again], [start], LIGHTNING, is_rank_zero=True).begin()
    again.log_metrics({"a": 3.0}, 2)
    again.save()
    assert (directory / "metrics.csv").read_text().split()[1:] == ["1.0,0", "2.0,1", "3.0,2"]


def test_hyper_parameters_that_can_not_be_packed_do_not_stop_a_record(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    state = state_of(logger)
    state.begin()
    logger.experiment.hparams.update(width=3, activation=lambda x: x, host=socket.socket)
    recorded = unpack(pack(state.capture()))
    state_of(logger).restore(recorded)
    assert logger.experiment.hparams == {"width": 3, "activation": "function", "host": socket.socket}
