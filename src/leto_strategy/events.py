"""The events of a job and the file they go to: one JSON object a line in ``<root_dir>/leto/events.jsonl``.

Each line has ``event``, ``job``, ``time`` (ISO 8601, UTC) and ``monotonic_ns`` (CLOCK_MONOTONIC, comparable between the
processes of a machine), and the fields that `EVENTS` lists. Writing never stops training: a full disk or a read-only
directory is said once.
"""

import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

EVENTS: dict[str, tuple[str, ...]] = {
    "job_started": ("pid", "world", "function", "call", "shadows", "argv", "root_dir"),
    "generation_started": ("generation", "role", "pids", "start"),
    "shadow_ready": ("generation", "pids", "seconds"),
    "promoted": ("generation", "pids", "mode", "step", "reason"),
    "entered": ("generation", "step"),
    "trainer_failed": ("rank", "pid", "generation", "step", "cause", "origin", "text", "report"),
    "devices": ("names", "driver", "pids_comparable", "text"),
    "fenced": ("generation", "num_processes", "milliseconds"),
    "recovered": ("number", "cause", "rank", "step", "level", "mode", "generation", "phases_ms", "total_ms")
    + ("steps_repeated", "completed", "pages", "health"),
    "shadow_failed": ("rank", "pid", "generation", "cause", "text", "log", "num_failures"),
    "shadows_off": ("text",),
    "manager_failed": ("rank", "pid", "cause"),
    "manager_replaced": ("rank", "pid"),
    "zygote_failed": ("pid", "text"),
    "hang": ("rank", "pid", "generation", "activity", "seconds", "limit_seconds"),
    "fault_injected": ("rank", "pid", "fault", "role", "at_step", "point"),
    "signal": ("signum", "name", "action"),
    "suspended": (),
    "resumed": (),
    "user_exception": ("rank", "pid", "kind", "type", "message", "step"),
    "warning": ("text",),
    "job_finished": ("outcome", "reason", "recoveries", "seconds"),
}
"""Every event with its own fields. ``shadow_failed.log`` names the kept log file, or is None where it was empty."""


class EventLog:
    """Makes events, appends them to the file and hands each to a listener.

    Args:
        root_dir: The job's default_root_dir; None writes no file.
        job: Name of the job.
        listener: Called with every event, also when the file can't be written.
    """

    def __init__(self, root_dir: str | None, *, job: str, listener: Callable[[dict[str, Any]], None]) -> None:
        self._job = job
        self._listener = listener
        self._path = None if root_dir is None else Path(root_dir) / "leto" / "events.jsonl"
        self._fd: int | None = None
        self._failed = False

    def emit(self, event: str, **fields: Any) -> dict[str, Any]:
        """Write one event with exactly the fields that `EVENTS` lists for it, and return it."""
        assert set(fields) == set(EVENTS[event]), (event, set(fields))
        line = self._line(event, fields)
        self._append(line)
        self._listener(line)
        return line

    def close(self) -> None:
        """Close the file; later events reach the listener only."""
        self._failed = True
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _append(self, line: dict[str, Any]) -> None:
        if self._failed or self._path is None:
            return
        data = json.dumps(line, default=str).encode() + b"\n"
        try:
            if self._fd is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            # One write a line: a reader never sees lines of two jobs mixed.
            written = os.write(self._fd, data)
            if written != len(data):
                raise OSError(f"only {written} of {len(data)} bytes were written")
        except OSError as error:
            self.close()
            text = f"no more events are written to {self._path}: {error}. Training goes on"
            self._listener(self._line("warning", {"text": text}))

    def _line(self, event: str, fields: dict[str, Any]) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        return {"event": event, "job": self._job, "time": now, "monotonic_ns": time.monotonic_ns(), **fields}
