"""TensorBoard event files without a lost or doubled event: they are cut back when a trainer is promoted.

TensorBoard's own writer hands events to a thread that may hold them for two minutes, and every new one begins another
file. Here an event is in the file when `add_event` returns, where a SIGKILL can't take it, and a promoted trainer
appends to the files that the dead one has left, behind the position that its record says.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

Positions = dict[str, tuple[int, bool]]
"""Path of each file: bytes in it, whether it is written to."""


class EventFiles:
    """The event files that one call writes, below the directories of its loggers.

    Args:
        prefix: How the names of these files begin: the same in every trainer of the call, and in no other call.
        directories: The log directories.
    """

    def __init__(self, prefix: str, directories: list[str]) -> None:
        self._prefix = prefix
        self._directories = [os.path.abspath(directory) for directory in directories]
        self._files: dict[str, EventFile] = {}
        self._left: Positions = {}  # by an earlier trainer, not opened here
        self.live = False

    def owns(self, directory: str) -> bool:
        """Whether a writer for `directory` belongs to these files."""
        path = os.path.abspath(directory)
        return any(path == own or path.startswith(own + os.sep) for own in self._directories)

    def open(self, directory: str, suffix: str) -> tuple["EventFile", bool]:
        """A file to append to, and whether it is new: else it goes on with one that an earlier trainer had open."""
        directory = os.path.abspath(directory)
        os.makedirs(directory, exist_ok=True)
        for path, (size_bytes, is_open) in self._left.items():
            if is_open and os.path.dirname(path) == directory:
                del self._left[path]
                self._files[path] = EventFile(path, size_bytes)
                return self._files[path], False
        count = sum(os.path.dirname(path) == directory for path in (*self._left, *self._files))
        path = os.path.join(directory, f"{self._prefix}.{count}{suffix}")
        self._files[path] = EventFile(path, 0)
        return self._files[path], True

    def positions(self) -> Positions:
        """Where all files are."""
        return self._left | {path: (file.size_bytes, not file.closed) for path, file in self._files.items()}

    def return_to(self, positions: Positions) -> None:
        """Cut the files back to `positions`, remove what this call began after them, and write from here on."""
        for file in self._files.values():
            file.close()
        for path in self._found():
            if path in positions:
                os.truncate(path, positions[path][0])
            else:
                os.remove(path)
                self._remove_empty(os.path.dirname(path))
        self._files, self._left = {}, dict(positions)
        self.live = True

    def _found(self) -> list[str]:
        return [
            os.path.join(directory, name)
            for own in self._directories
            for directory, _, names in os.walk(own)
            for name in names
            if name.startswith(self._prefix + ".")
        ]

    def _remove_empty(self, directory: str) -> None:
        with suppress(OSError):  # not empty
            while directory not in self._directories:
                os.rmdir(directory)
                directory = os.path.dirname(directory)


class EventFile:
    """One file that is appended to, every write in full before it returns.

    Args:
        path: The file.
        size_bytes: What is in it.
    """

    def __init__(self, path: str, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._lock = threading.Lock()

    def write(self, data: bytes) -> None:
        """Append."""
        with self._lock:
            view = memoryview(data)
            while view:
                written = self._file.write(view)
                view = view[written:]
                self.size_bytes += written

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._file.closed


class EventWriter:
    """What `torch.utils.tensorboard` uses in place of TensorBoard's `EventFileWriter`.

    Args:
        files: The files of the call.
        directory: Where the events go.
        suffix: End of the file's name.
        make_record_writer: TensorBoard's `RecordWriter`.
        make_header: Makes the first event of a file.
    """

    def __init__(
        self,
        files: EventFiles,
        directory: str,
        suffix: str,
        *,
        make_record_writer: Callable[[Any], Any],
        make_header: Callable[[], Any],
    ) -> None:
        self._files, self._directory, self._suffix = files, directory, suffix
        self._make_record_writer, self._make_header = make_record_writer, make_header
        self._records: Any = None
        self._closed = False
        if files.live:
            self._open()

    def _open(self) -> None:
        file, is_new = self._files.open(self._directory, self._suffix)
        self._records = self._make_record_writer(file)
        if is_new:
            self._records.write(self._make_header().SerializeToString())

    def get_logdir(self) -> str:
        """Where the events go."""
        return self._directory

    def add_event(self, event: Any) -> None:
        """Write an event; before the promotion it is dropped."""
        if self._closed:
            raise OSError("Writer is closed")
        if self._records is None:
            if not self._files.live:
                return
            self._open()
        self._records.write(event.SerializeToString())

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Close the file."""
        self._closed = True
        if self._records is not None:
            self._records.close()

    def reopen(self) -> None:
        """Begin another file after `close`."""
        if self._closed:
            self._closed, self._records = False, None
            if self._files.live:
                self._open()


def write_through(files: EventFiles) -> Any:
    """Let every `SummaryWriter` below the directories of `files` write there; returns torch's writer module.

    `add_scalars` opens a file for each tag and `add_hparams` another writer: all look the class up in that module.
    """
    from tensorboard.compat.proto import event_pb2
    from tensorboard.summary.writer.record_writer import RecordWriter
    from torch.utils.tensorboard import writer

    module: Any = writer
    theirs = module.EventFileWriter

    def make_header() -> Any:
        source = event_pb2.SourceMetadata(writer="tensorboard.summary.writer.event_file_writer")
        return event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2", source_metadata=source)

    def make(logdir: str, max_queue_size: int = 10, flush_secs: int = 120, filename_suffix: str = "") -> Any:
        if not files.owns(logdir):
            return theirs(logdir, max_queue_size, flush_secs, filename_suffix)
        return EventWriter(files, logdir, filename_suffix, make_record_writer=RecordWriter, make_header=make_header)

    module.EventFileWriter = make
    return module
