"""What a step has done to checkpoint files, so that its hooks find the same files when the step is entered again.

ModelCheckpoint avoids existing names with `-v1`. When hooks run a second time, a file that their first run wrote must
not count as existing, and one that it removed must; else the set of files would differ from an undisturbed run's. A
half-written temporary file is removed.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from leto_strategy.recovery.records import RecordKind, RecordRing
from leto_strategy.strategy.capture.packing import pack, unpack


class CheckpointJournal:
    """The files of the current step, kept in retained memory ahead of each write and removal.

    Args:
        records: Records of rank 0; None on other ranks, which touch no files.
    """

    def __init__(self, records: RecordRing | None) -> None:
        self._records = records
        self._step = -1
        self._written: list[str] = []
        self._removed: list[str] = []
        self._temporary: list[str] = []
        self._overwritable: frozenset[str] = frozenset()
        self._phantoms: set[str] = set()
        self._reentered = False

    def enter_step(self, step: int) -> None:
        """A step has its complete START record: what was written before it is settled."""
        if self._step != step:
            self._step, self._reentered = step, False
            self._written, self._removed, self._temporary = [], [], []
            self._overwritable, self._phantoms = frozenset(), set()

    def reenter_step(self, step: int) -> None:
        """A promoted trainer enters `step` again."""
        self._step, self._reentered = step, True
        if self._records is not None and self._records.holds(RecordKind.FILES, step):
            self._written, self._removed, self._temporary = unpack(self._records.read(RecordKind.FILES, step).payload)
            for name in self._temporary:
                with suppress(FileNotFoundError):
                    os.remove(name)
        self._overwritable, self._phantoms = frozenset(self._written), set(self._removed)

    @contextmanager
    def writing(self, path: str, begun: Callable[[], None]) -> Iterator[None]:
        """Note a file before it is written, and the temporary file it is first written to.

        Args:
            path: The file. One that existed already is not the step's own.
            begun: Called when the temporary file is there and empty.
        """
        path = os.path.abspath(path)
        if self._records is None or self._step < 0:
            yield
            return
        if path not in self._written and not os.path.exists(path):
            self._note(self._written, path)
        make: Any = tempfile.mkstemp

        def mkstemp(*args: Any, **kwargs: Any) -> tuple[int, str]:
            fd, name = make(*args, **kwargs)
            self._note(self._temporary, name)
            begun()
            return fd, name

        tempfile.mkstemp = mkstemp  # type: ignore[assignment]  # fsspec looks it up at each call
        try:
            yield
        finally:
            tempfile.mkstemp = make

    def removing(self, path: str) -> None:
        """Note a file before it is removed."""
        path = os.path.abspath(path)
        self._phantoms.discard(path)
        if self._records is not None and self._step >= 0 and path not in self._removed:
            self._note(self._removed, path)

    def _note(self, names: list[str], name: str) -> None:
        assert self._records is not None
        names.append(name)
        self._records.write(RecordKind.FILES, self._step, pack((self._written, self._removed, self._temporary)))

    def _exists_undisturbed(self, path: str, found: bool) -> bool:
        """Whether a file would exist had this step not been interrupted."""
        path = os.path.abspath(path)
        return path in self._phantoms or (found and path not in self._overwritable)

    def watch(self, callback: Any) -> None:
        """Let a ModelCheckpoint see the files of an undisturbed run, and note the links that it makes."""
        exists, link = callback.file_exists, callback._link_checkpoint

        def file_exists(filepath: Any, trainer: Any) -> bool:
            found = bool(exists(filepath, trainer))
            if not self._reentered:
                return found
            answer = trainer.is_global_zero and self._exists_undisturbed(str(filepath), found)
            return bool(trainer.strategy.reduce_boolean_decision(answer, all=False))

        def link_checkpoint(trainer: Any, filepath: str, linkpath: str) -> None:
            with self.writing(linkpath, lambda: None):
                link(trainer, filepath, linkpath)

        callback.file_exists, callback._link_checkpoint = file_exists, link_checkpoint
