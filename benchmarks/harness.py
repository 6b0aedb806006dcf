"""What the benchmarks share: runs of `workload.py`, their notes, the machine, and tidy rows."""

import argparse
import csv
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from benchmarks.gpu import MeasuredGpu
from leto_strategy.config import JOB_VARIABLE, LetoConfig
from leto_strategy.system import all_processes, process_environ_has, set_parent_death_signal

ROOT = Path(__file__).resolve().parents[1]
STOP_SECONDS_MAX = 12.0
LOOK_SECONDS = 0.002
LARGE_PARAMETERS, LARGE_BATCH_SIZE = 1e9, 16
"""A step of some 250 ms on one H200."""
RETAINED_BYTES = 16
"""Of one parameter: fp32 parameter, two moments, gradient."""


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


@dataclass(frozen=True)
class Setting:
    """What is trained, and where.

    Args:
        device: "cpu", or "cuda" for one GPU, which all ranks share.
        num_ranks: Number of ranks.
        num_parameters: Size of a GPT; None: a small perceptron.
        batch_size: Samples a rank and step; None: as the workload has it.
    """

    device: str
    num_ranks: int
    num_parameters: int | None = None
    batch_size: int | None = None

    def arguments(self) -> list[str]:
        """The arguments of `workload.py`."""
        found = ["--ranks", str(self.num_ranks), "--device", self.device]
        if self.num_parameters is not None:
            found += ["--parameters", str(self.num_parameters)]
        if self.batch_size is not None:
            found += ["--batch-size", str(self.batch_size)]
        return found

    def options(self) -> dict[str, Any]:
        """Options of LetoStrategy: a large run that stands still has not stopped by itself."""
        return {} if self.num_parameters is None else {"hang_timeout": 3600.0}


def add_setting(parser: argparse.ArgumentParser) -> None:
    """Options of a benchmark that make a `Setting`."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: one GPU for all ranks")
    parser.add_argument("--ranks", type=int, default=None, help="default: 2, on a GPU 1")
    parser.add_argument("--parameters", type=float, default=None, help="of a GPT; default on a GPU: 1e9")
    parser.add_argument("--batch-size", type=int, default=None, help="samples a rank and step")


def setting_of(options: argparse.Namespace) -> Setting:
    """What `add_setting` has parsed."""
    on_gpu = options.device == "cuda"
    num_parameters = options.parameters or (LARGE_PARAMETERS if on_gpu else None)
    return Setting(
        device=options.device,
        num_ranks=options.ranks or (1 if on_gpu else 2),
        num_parameters=None if num_parameters is None else int(num_parameters),
        batch_size=options.batch_size or (LARGE_BATCH_SIZE if on_gpu else None),
    )


def described(setting: Setting) -> dict[str, Any]:
    """Where and with what was measured; of a large model its size, and of which pieces its memory is made."""
    if setting.num_parameters is None:
        return machine()
    handle_mib = LetoConfig().handle_mib if setting.device == "cuda" else None
    retained = {"retained_gib": round(RETAINED_BYTES * setting.num_parameters / 2**30, 2), "handle_mib": handle_mib}
    size = {"parameters": setting.num_parameters, "batch_size": setting.batch_size}
    return {**size, **retained, **machine(setting.device)}


class Workload:
    """A running `workload.py`; as a context manager it leaves nothing behind.

    Args:
        out: Its directory, which must be new.
        arguments: Further arguments.
        setting: What is trained, and where.
    """

    def __init__(self, out: Path, arguments: Sequence[str], *, setting: Setting) -> None:
        out.mkdir(parents=True)
        self.out, self.num_ranks = out, setting.num_ranks
        self._arguments = [*setting.arguments(), *arguments]
        self.large = setting.num_parameters is not None
        self.events: list[dict[str, Any]] = []
        self._event_lines = Lines(out / "leto" / "events.jsonl")
        self._step_lines = Lines(out / "steps.r0.jsonl")
        self.num_steps = 0

    def __enter__(self) -> Self:
        command = [sys.executable, str(ROOT / "benchmarks" / "workload.py"), "--out", str(self.out)]
        command += self._arguments
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
                text = f"{self.events[-8:]}\n{text}"
                raise RuntimeError(f"{'ended before' if ended else f'not within {seconds:g} s'}: {what}\n{text}")
            time.sleep(LOOK_SECONDS)

    def stop_at(self, step: int) -> None:
        """Let it end after `step` steps; no rank may have got there yet."""
        self._tell("stop", step)

    def hold(self, *, at: int = 0) -> None:
        """Let all ranks stand still as soon as `at` steps are done."""
        self._tell("hold", at)

    def wait_until_held(self, *, at: int, seconds: float) -> None:
        """Wait until rank 0 stands still, with at least `at` steps done on the device, too."""
        path = self.out / "held.r0.jsonl"
        self.wait_for(lambda: any(n["steps"] >= at for n in Lines(path).new()), seconds=seconds, what=f"step {at}")

    def _tell(self, name: str, steps: int) -> None:
        partial = self.out / f"{name}.partial"
        partial.write_text(str(steps))
        partial.rename(self.out / name)

    def go_on(self) -> None:
        """Let them train again."""
        (self.out / "hold").unlink(missing_ok=True)

    def finish(self, *, seconds: float) -> None:
        """Wait for its good end; of a large model, that its last step is over."""
        if not self.large:
            self.wait_for(lambda: self._process.poll() == 0, seconds=seconds, what="the end of training")
            return
        self.wait_for((self.out / "result.json").exists, seconds=seconds, what="the last step")
        self._process.kill()
        self._process.wait()
        deadline = time.monotonic() + STOP_SECONDS_MAX
        while self._job_is_there() and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)

    def _job_is_there(self) -> bool:
        """Whether supervisor, managers or trainers are left, which end when the user's process has ended."""
        entry = f"{JOB_VARIABLE}={self.events[0]['job']}".encode() if self.events else b""
        return bool(entry) and any(process_environ_has(process.pid, entry) for process in all_processes())

    def last(self, event: str) -> dict[str, Any] | None:
        """The newest event of a name."""
        return next((entry for entry in reversed(self.events) if entry["event"] == event), None)


def scratch_directory(prefix: str, device: str) -> "tempfile.TemporaryDirectory[str]":
    """Where runs are; on a GPU in memory, since no driver registers pages of a file on a disk."""
    directory = "/dev/shm" if device == "cuda" else None
    return tempfile.TemporaryDirectory(prefix=prefix, dir=directory, ignore_cleanup_errors=True)


def machine(device: str = "cpu") -> dict[str, Any]:
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
        **(MeasuredGpu().describe() if device == "cuda" else {}),
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
