"""CSVLogger without a lost or doubled row: its file is cut back to a recorded position when a trainer is promoted.

Lightning's writer deletes an existing file when it is created and rewrites it in place when a new column appears; a
kill between the two would lose every row. `ExactCsvWriter` keeps the file's bytes, rewrites through a temporary file,
and can say and restore its position.
"""

import csv
import io
import os
from typing import Any

from leto_strategy.strategy.capture.hyperparameters import PackedHyperparameters, unpack_hyperparameters

Position = tuple[int, list[str], list[dict[str, Any]], bytes]
"""Bytes in the file, its columns, rows not written yet, hyper-parameters."""


def exact_csv_writer(base: type) -> type:
    """Subclass of Lightning's `ExperimentWriter` (`base`) with a position."""

    class ExactCsvWriter(base):  # type: ignore[misc]
        """Writes the same bytes as its base class."""

        def __init__(self, log_dir: str, *, fresh: bool) -> None:
            self._fresh = fresh
            super().__init__(log_dir=log_dir)
            self._size_bytes = _size_bytes(self.metrics_file_path)
            self._packed = PackedHyperparameters()

        def _check_log_dir_exists(self) -> None:
            if self._fresh:
                super()._check_log_dir_exists()

        def save(self) -> None:
            """Write pending rows."""
            super().save()
            self._size_bytes = _size_bytes(self.metrics_file_path)

        def position(self) -> Position:
            """Where it is."""
            return self._size_bytes, list(self.metrics_keys), list(self.metrics), self._packed.of(self.hparams)

        def go_on_from(self, position: Position) -> None:
            """Take a position for its own; the file is there already."""
            self._size_bytes, keys, rows, hparams = position
            self.metrics_keys, self.metrics = list(keys), list(rows)
            self.hparams = unpack_hyperparameters(hparams)

        def return_to(self, position: Position) -> None:
            """Cut the file back to what it was at `position`."""
            self.go_on_from(position)
            size, keys, path = self._size_bytes, self.metrics_keys, self.metrics_file_path
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
