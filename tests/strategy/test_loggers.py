"""The CSV writer: the bytes of Lightning's own, and a position to which it returns whatever came after."""

import csv
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from leto_strategy.strategy.capture.loggers import LoggerState, exact_csv_writer
from leto_strategy.strategy.capture.packing import pack, unpack

Writer: Any = exact_csv_writer(ExperimentWriter)

ROWS = [{"loss": 1.0}, {"loss": 0.5}, {"loss": 0.25, "val": 3.0}, {"loss": 0.1}, {"late": 1.0}]


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


def test_a_silent_logger_writes_nothing_and_the_next_trainer_goes_on(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="n", version=0)
    state = LoggerState([logger], CSVLogger, ExperimentWriter, is_rank_zero=True)
    state.silence()
    logger.log_metrics({"a": 1.0}, 0)
    logger.log_hyperparams({"b": 2})
    logger.save()
    assert not (tmp_path / "n" / "version_0").exists()
    state.restore({})
    logger.log_metrics({"a": 1.0}, 0)
    logger.save()
    positions = state.capture()
    logger.log_metrics({"a": 2.0}, 1)
    logger.save()
    state.restore(positions)
    assert (tmp_path / "n" / "version_0" / "metrics.csv").read_text().split() == ["a,step", "1.0,0"]
