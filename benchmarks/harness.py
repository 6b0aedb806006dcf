"""What the benchmarks share: runs of `workload.py`, their notes, the machine, and tidy rows."""

import csv
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from leto_strategy.system import set_parent_death_signal

ROOT = Path(__file__).resolve().parents[1]
STOP_SECONDS_MAX = 12.0
LOOK_SECONDS = 0.002


class Lines:
    """The JSON lines of a file, as far as they are complete."""

    def __init__(self, path: Path) -> None:
        self.path, self._offset = path, 0

    def new(self) -> list[dict[str, Any]]:
        """The lines that came since the last call."""
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        return [json.loads(line) for line in data.splitlines()]


class Workload:
    """A running `workload.py`; as a context manager it leaves nothing behind.

    Args:
        out: Its directory, which must be new.
        arguments: Its arguments but for `--out`.
        num_ranks: Number of ranks.
    """

    def __init__(self, out: Path, arguments: Sequence[str], *, num_ranks: int) -> None:
        out.mkdir(parents=True)
        self.out, self.num_ranks, self._arguments = out, num_ranks, arguments
        self.events: list[dict[str, Any]] = []
        self._event_lines = Lines(out / "leto" / "events.jsonl")
        self._step_lines = Lines(out / "steps.r0.jsonl")
        self.num_steps = 0

    def __enter__(self) -> Self:
        command = [sys.executable, str(ROOT / "benchmarks" / "workload.py"), "--out", str(self.out)]
        command += ["--ranks", str(self.num_ranks), *self._arguments]
        with open(self.out / "output.txt", "wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONWARNINGS": "ignore"},
                process_group=0,
                preexec_fn=lambda: set_parent_death_signal(signal.SIGTERM),
            )
        return self

    def __exit__(self, *exception: object) -> None:
        process = self._process
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_SECONDS_MAX)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                pass
        try:
            os.killpg(process.pid, signal.SIGKILL)  # other ranks of plain ddp
        except ProcessLookupError:
            pass
        process.wait()

    @property
    def pid(self) -> int:
        """Pid of the user's process."""
        return self._process.pid

    def look(self) -> None:
        """Read what is new.

        Raises:
            RuntimeError: The run has ended with an error; with the end of its output.
        """
        status = self._process.poll()
        self.events += self._event_lines.new()
        for note in self._step_lines.new():
            self.num_steps = max(self.num_steps, note["step"] + 1)
        if status not in (None, 0):
            text = (self.out / "output.txt").read_text(errors="replace")[-3000:]
            raise RuntimeError(f"workload.py ended with status {status}\n{text}")

    def wait_for(self, condition: Any, *, seconds: float, what: str) -> Any:
        """Look until `condition()` is true and return its value.

        Raises:
            RuntimeError: It did not become true in time, or the run has ended before.
        """
        deadline = time.monotonic() + seconds
        while True:
            ended = self._process.poll() is not None
            self.look()
            if value := condition():
                return value
            if ended or time.monotonic() > deadline:
                text = (self.out / "output.txt").read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{'ended before' if ended else f'not within {seconds:g} s'}: {what}\n{text}")
            time.sleep(LOOK_SECONDS)

    def stop_at(self, step: int) -> None:
        """Let it end after `step` steps; no rank may have got there yet."""
        partial = self.out / "stop.partial"
        partial.write_text(str(step))
        partial.rename(self.out / "stop")

    def finish(self, *, seconds: float) -> None:
        """Wait for its good end."""
        self.wait_for(lambda: self._process.poll() == 0, seconds=seconds, what="the end of training")

    def last(self, event: str) -> dict[str, Any] | None:
        """The newest event of a name."""
        return next((entry for entry in reversed(self.events) if entry["event"] == event), None)


def machine() -> dict[str, Any]:
    """Where and with what this was measured."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": version("torch"),
        "lightning": version("lightning"),
        "commit": (commit or "unknown") + ("+changes" if dirty else ""),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def median(values: Iterable[float | None], digits: int = 3) -> float | None:
    """Rounded median of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return round(statistics.median(known), digits) if known else None


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Number, minimum, median and maximum."""
    if not values:
        return {"n": 0, "min": None, "median": None, "max": None}
    low, high = round(min(values), 3), round(max(values), 3)
    return {"n": len(values), "min": low, "median": median(values), "max": high}


def write_rows(name: str, rows: Sequence[Mapping[str, Any]], context: Mapping[str, Any], *, save: bool) -> Path:
    """Write tidy rows, each with its context, as CSV.

    Args:
        name: Name of the benchmark.
        rows: One measurement each, all with the same columns.
        context: Columns that all rows share.
        save: Append to `benchmarks/data/`, which is kept, instead of writing to `benchmarks/out/`, which git ignores.
    """
    path = ROOT / "benchmarks" / ("data" if save else "out") / f"{name}.csv"
    path.parent.mkdir(exist_ok=True)
    append = save and path.exists()
    with open(path, "a" if append else "w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *context])
        if not append:
            writer.writeheader()
        for row in rows:
            writer.writerow({**row, **context})
    return path
