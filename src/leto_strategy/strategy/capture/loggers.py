"""CSVLogger without a lost or doubled row: its file is cut back to a recorded position when a trainer is promoted.

Lightning's writer deletes an existing file when it is created and rewrites it in place when a new column appears; a
kill between the two would lose every row. `ExactCsvWriter` keeps the file's bytes, rewrites through a temporary file,
and can say and restore its position. A shadow's loggers are inert until its promotion.
"""

import csv
import io
import os
from typing import Any


class _Discarding:
    """Stands for a logger's experiment while nothing may be written: takes every call, does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "_Discarding":
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        return None


def exact_csv_writer(base: type) -> type:
    """Subclass of Lightning's `ExperimentWriter` (`base`) with a position."""

    class ExactCsvWriter(base):  # type: ignore[misc]
        """Writes the same bytes as its base class."""

        def __init__(self, log_dir: str, *, fresh: bool) -> None:
            self._fresh = fresh
            super().__init__(log_dir=log_dir)
            self._size_bytes = _size_bytes(self.metrics_file_path)

        def _check_log_dir_exists(self) -> None:
            if self._fresh:
                super()._check_log_dir_exists()

        def save(self) -> None:
            """Write pending rows."""
            super().save()
            self._size_bytes = _size_bytes(self.metrics_file_path)

        def position(self) -> tuple[int, list[str], list[dict[str, Any]], dict[str, Any]]:
            """Bytes in the file, its columns, rows not written yet, hyper-parameters."""
            return self._size_bytes, list(self.metrics_keys), list(self.metrics), dict(self.hparams)

        def return_to(self, position: tuple[int, list[str], list[dict[str, Any]], dict[str, Any]]) -> None:
            """Cut the file back to what it was at `position`."""
            size, keys, rows, hparams = position
            self.metrics_keys, self.metrics, self.hparams = list(keys), list(rows), dict(hparams)
            path = self.metrics_file_path
            self._size_bytes = size
            if size == 0:
                if os.path.exists(path):
                    os.remove(path)
                return
            with open(path, newline="") as file:
                header = next(csv.reader(file), [])
            if header == list(keys):
                os.truncate(path, size)
                return
            # A new column came after the position: the file was rewritten. Drop the column, then cut.
            with open(path, newline="") as file:
                old_rows = [{key: row[key] for key in keys} for row in csv.DictReader(file)]
            _replace(path, _csv_text(keys, old_rows))
            os.truncate(path, size)

        def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
            with open(self.metrics_file_path, newline="") as file:
                rows = list(csv.DictReader(file))
            _replace(self.metrics_file_path, _csv_text(fieldnames, rows))

    return ExactCsvWriter


def _size_bytes(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _csv_text(fieldnames: list[str], rows: list[dict[str, Any]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=fieldnames)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _replace(path: str, text: str) -> None:
    temporary = f"{path}.leto-tmp"
    with open(temporary, "w", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class LoggerState:
    """The loggers of one trainer process.

    Args:
        loggers: The Trainer's loggers.
        csv_class: Lightning's CSVLogger.
        writer_class: Lightning's `ExperimentWriter`.
        is_rank_zero: Whether this rank writes.
    """

    def __init__(self, loggers: list[Any], csv_class: Any, writer_class: type, *, is_rank_zero: bool) -> None:
        self._loggers = [logger for logger in loggers if isinstance(logger, csv_class)] if is_rank_zero else []
        self._writer = exact_csv_writer(writer_class)
        self._writers: list[Any] = []

    def silence(self) -> None:
        """Let every logger drop what it is given."""
        for logger in self._loggers:
            logger._experiment = _Discarding()

    def capture(self) -> dict[str, Any]:
        """Position of each logger, by its directory."""
        return {writer.log_dir: writer.position() for writer in self._writers}

    def restore(self, positions: dict[str, Any]) -> None:
        """Return to positions; loggers write from there. One without a position begins a new file."""
        for logger in self._loggers:
            os.makedirs(logger.root_dir, exist_ok=True)
        if not self._writers:
            self._writers = [
                self._writer(logger.log_dir, fresh=logger.log_dir not in positions) for logger in self._loggers
            ]
        for logger, writer in zip(self._loggers, self._writers, strict=True):
            if writer.log_dir in positions:
                writer.return_to(positions[writer.log_dir])
            logger._experiment = writer
