"""Runs the core matrix on one GPU and prints one JSON line a check, and a summary.

    python tests/gpu/matrix.py [--only REGEX] [--jobs 6] [--seconds 470] [--logs DIRECTORY] [--seed N] [--list]

Several workers share the GPU; each has a Workshop, and so a fork server, of its own. What measures the GPU runs last,
by itself. One failure never ends the others; what there was no time for is named, and counts as a failure. pytest runs
the same tests, one after the other: `pytest tests/e2e --device cuda`.
"""

import argparse
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from leto_strategy import system  # noqa: E402

ERROR_CHARACTERS_MAX = 1800
STOP_SECONDS_MAX = 25.0


class TimeIsUp(BaseException):
    """The matrix has no time left; nothing may catch this as an error of its own."""


def perform(name: str, checks: dict[str, Any], workshop: Any, logs: Path | None) -> dict[str, Any]:
    """Run one check; its line."""
    begin, error = time.monotonic(), ""
    figures: dict[str, Any] = {}
    try:
        with redirect_stdout(sys.stderr):
            figures = checks[name].run(workshop) or {}
    except (Exception, TimeIsUp):
        error = traceback.format_exc()
    try:
        keep = None if logs is None or not error else logs / re.sub(r"\W+", "-", name)
        figures |= workshop.end(keep)
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            (keep / "error.txt").write_text(error)
    except (Exception, TimeIsUp):
        error += traceback.format_exc()
    line = {"check": name, "ok": not error, "seconds": round(time.monotonic() - begin, 1), **figures}
    return line | ({"error": shortened(error)} if error else {})


def shortened(text: str) -> str:
    """The beginning of an error, where the claim is, and its end, where the output is."""
    if len(text) <= ERROR_CHARACTERS_MAX:
        return text
    begin = ERROR_CHARACTERS_MAX // 3
    return f"{text[:begin]} [...] {text[begin - ERROR_CHARACTERS_MAX :]}"


def work(connection: Connection, directory: Path, checks: dict[str, Any], logs: Path | None) -> None:
    """A worker: performs the checks whose names it is sent."""
    from tests.gpu.checks import RecordingWorkshop

    def stop(signum: int, frame: object) -> None:
        raise TimeIsUp

    system.become_subreaper()
    signal.signal(signal.SIGTERM, stop)
    system.set_parent_death_signal(signal.SIGTERM)
    try:
        workshop = RecordingWorkshop(directory)
        try:
            while (name := connection.recv()) is not None:
                connection.send(perform(name, checks, workshop, logs))
        finally:
            workshop.close()
    except TimeIsUp:
        sys.exit("time was up between two checks")


class Worker:
    """A process that performs checks.

    Args:
        directory: For its runs; must be new.
        checks: All checks.
        logs: Where the files of failed checks go.
    """

    def __init__(self, directory: Path, checks: dict[str, Any], logs: Path | None) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self.check: str | None = None
        self.process = context.Process(target=work, args=(theirs, directory, checks, logs))
        self.process.start()
        theirs.close()

    def begin(self, check: str) -> None:
        """Let it perform one."""
        self.check = check
        self.connection.send(check)

    def result(self) -> dict[str, Any]:
        """The line of the check that it performed."""
        name, self.check = self.check, None
        try:
            line: dict[str, Any] = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            return {"check": name, "ok": False, "error": f"the worker ended with status {self.process.exitcode}"}
        return line

    def stop(self) -> None:
        """End it."""
        try:
            self.connection.send(None)
        except OSError:
            pass
        self.process.join(STOP_SECONDS_MAX)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class Matrix:
    """Gives checks to workers until none is left or time is up.

    Args:
        checks: By name.
        jobs: How many run at once.
        seconds: For all of it.
        directory: For the runs.
        logs: Where the files of failed checks go.
    """

    def __init__(
        self, checks: dict[str, Any], *, jobs: int, seconds: float, directory: Path, logs: Path | None
    ) -> None:
        self.lines: list[dict[str, Any]] = []
        self._checks, self._directory, self._logs = checks, directory, logs
        self._deadline = time.monotonic() + seconds
        self._together = [name for name, check in checks.items() if not check.alone]
        self._alone = [name for name, check in checks.items() if check.alone]
        self._number = 0
        self._workers = [self._new_worker() for _ in range(max(1, min(jobs, len(self._together))))]

    def run(self) -> list[str]:
        """Run all of it; returns the names of what there was no time for."""
        while (busy := self._assign()) and time.monotonic() < self._deadline:
            self._take(busy, self._deadline - time.monotonic())
        for worker in (busy := [worker for worker in self._workers if worker.check]):
            os.kill(worker.process.pid or 0, signal.SIGTERM)
        end = time.monotonic() + STOP_SECONDS_MAX
        while (busy := [worker for worker in busy if worker.check]) and time.monotonic() < end:
            self._take(busy, end - time.monotonic())
        left = [worker.check for worker in busy if worker.check]
        for worker in self._workers:
            worker.stop()
        return [*left, *self._together, *self._alone]

    def _assign(self) -> list[Worker]:
        """Give idle workers something to do; those that have."""
        for worker in self._workers:
            if worker.check is None and self._together:
                worker.begin(self._together.pop(0))
        if not any(worker.check for worker in self._workers) and self._alone:
            self._workers[0].begin(self._alone.pop(0))
        return [worker for worker in self._workers if worker.check]

    def _take(self, busy: Sequence[Worker], seconds: float) -> None:
        """Wait for results and print them."""
        ready = wait([worker.connection for worker in busy], timeout=max(0.0, seconds))
        for worker in busy:
            if worker.connection in ready:
                line = worker.result()
                self.lines.append(line)
                print(json.dumps(line), flush=True)
                if not worker.process.is_alive() and time.monotonic() < self._deadline:
                    self._workers[self._workers.index(worker)] = self._new_worker()

    def _new_worker(self) -> Worker:
        self._number += 1
        return Worker(self._directory / f"worker-{self._number}", self._checks, self._logs)


def main() -> int:
    """Run and print; returns 1 where anything failed."""
    parser = argparse.ArgumentParser(description="The core matrix on one GPU, one JSON line a check.")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), help="regular expression of checks")
    parser.add_argument("--wide", action="store_true", help="the whole table of what works, too")
    parser.add_argument("--jobs", type=int, default=6, help="checks at the same time")
    parser.add_argument("--seconds", type=float, default=470.0, help="time for all of it")
    parser.add_argument("--logs", type=Path, default=None, help="directory for the files of failed checks")
    parser.add_argument("--seed", type=int, default=None, help="of random kills; printed")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--list", action="store_true", help="print the names, and run nothing")
    options = parser.parse_args()
    os.environ["LETO_TEST_DEVICE"] = options.device
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    from tests.gpu.checks import all_checks

    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    named = options.wide or bool(options.only.pattern)
    checks = {
        name: check
        for name, check in all_checks(seed).items()
        if options.only.search(name) and (named or not check.wide)
    }
    if options.list:
        print("\n".join(checks))
        return 0
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="matrix-", ignore_cleanup_errors=True) as name:
        seconds, directory = options.seconds, Path(name)
        matrix = Matrix(checks, jobs=options.jobs, seconds=seconds, directory=directory, logs=options.logs)
        not_run = matrix.run()
    system.kill_processes(pid for pid in system.descendants(os.getpid()) if pid != os.getpid())
    failed = [line["check"] for line in matrix.lines if not line["ok"]]
    summary = {
        "summary": "matrix",
        "ok": not failed and not not_run and bool(matrix.lines),
        "passed": len(matrix.lines) - len(failed),
        "failed": failed,
        "not_run": not_run,
        "recoveries": sum(line.get("recoveries", 0) for line in matrix.lines),
        "seconds": round(time.monotonic() - begin, 1),
        "seed": seed,
        **(described() if options.device == "cuda" else {}),
    }
    print(json.dumps(summary), flush=True)
    return int(not summary["ok"])


def described() -> dict[str, str | None]:
    """The GPU."""
    from benchmarks.gpu import MeasuredGpu

    return MeasuredGpu().describe()


if __name__ == "__main__":
    sys.exit(main())
