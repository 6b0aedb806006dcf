"""Runs `tiny.py` as a user would, disturbs it, and compares what it left with an undisturbed run, bit for bit.

User processes are forked from a process that has imported torch and Lightning (the product's own zygote), which saves
seconds a run; the supervisor, managers and trainers below them are started as always.
"""

import contextlib
import csv
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from leto_strategy import system
from leto_strategy.faults import FaultPlan
from leto_strategy.memory.wire import FrameConnection
from tests.e2e.tiny import Case, chosen_device
from tests.event_reader import event_directories, first_difference

TINY = str(Path(__file__).with_name("tiny.py"))
ROOT = str(Path(__file__).parents[2])
PROTECTION = {"protection": "on", "page_kib": 4, "protection_pages": 8, "parity_pages": 3, "chunk_bytes": 3 << 12}
"""Options with which a tiny model has several protection groups. What a run leaves does not depend on them."""
_START = timedelta(seconds=120)
_MODULES = ["lightning.pytorch", "lightning.pytorch.loggers", "leto_strategy.strategy.lightning"]


class ForkServer:
    """Forks user processes that run `tiny.py`; this process becomes their parent."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        code = f"from leto_strategy.processes.zygote import main; main({theirs.fileno()}, {os.getpid()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            env=_environment(),
            preexec_fn=hear_ctrl_c,
        )
        theirs.close()
        self._connection = FrameConnection(ours)
        script = {"path": TINY, "module": None, "argv": [TINY], "path0": str(Path(TINY).parent)}
        configure = {"op": "configure", "script": script, "argv": [sys.executable, TINY], "cwd": ROOT}
        self._connection.send({**configure, "modules": _MODULES}, timeout=_START)
        answer = self._connection.receive_one(timeout=_START).message
        assert answer["op"] == "ready", answer

    @property
    def pid(self) -> int:
        """Its pid."""
        return self._process.pid

    def start(self, case: Case) -> "UserProcess":
        """Start a user's process; its output goes to `<out>/output.txt`."""
        output = os.open(f"{case.out}/output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        env = _environment() | {"TINY_CASE": json.dumps(vars(case))}
        self._connection.send(
            {"op": "fork", "id": 1, "env": env, "fds": [0, 1, 2]}, [null, output, output], timeout=_START
        )
        answer = self._connection.receive_one(timeout=_START).message
        os.close(output)
        os.close(null)
        assert answer["op"] == "forked", answer
        return UserProcess(answer["pid"], case)

    def close(self) -> None:
        """End the server."""
        self._connection.close()
        self._process.wait(10)


def hear_ctrl_c() -> None:
    """In a child: a shell that runs the tests in the background lets them ignore SIGINT, and users don't."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _environment() -> dict[str, str]:
    """One thread, so that plain `ddp` and forked trainers, which read it at torch's import, compute alike.

    On a GPU cuBLAS needs a workspace of its own for each stream.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_CURRENT")}
    path = os.pathsep.join(filter(None, (ROOT, f"{ROOT}/src", env.get("PYTHONPATH"))))
    exact = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if chosen_device() == "cuda" else {}
    return env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | exact


class UserProcess:
    """A running `python tiny.py`."""

    def __init__(self, pid: int, case: Case) -> None:
        self.pid, self.case = pid, case
        self._status: int | None = None

    def poll(self) -> int | None:
        """Exit status as of `os.waitstatus_to_exitcode`, None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def wait(self, seconds: float) -> int:
        """Wait for its end.

        Raises:
            TimeoutError: With its last output.
        """
        deadline = time.monotonic() + seconds
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"{self.case.out} still ran after {seconds} s:\n{self.output()[-4000:]}")
            time.sleep(0.01)
        return status

    def kill(self) -> None:
        """SIGKILL and reap it."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            while self.poll() is None:
                time.sleep(0.01)

    def hurry(self) -> None:
        """Let the rest of its steps not be slow."""
        Path(self.case.out, "hurry").touch()

    def output(self) -> str:
        """What it and its trainers have printed."""
        return Path(self.case.out, "output.txt").read_text(errors="replace")

    def events(self) -> list[dict[str, Any]]:
        """The events so far."""
        path = Path(self.case.out, "leto", "events.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, condition: Callable[[list[dict[str, Any]]], Any], seconds: float = 60.0) -> Any:
        """Wait until `condition(events)` is true; returns its value."""
        deadline = time.monotonic() + seconds
        while not (value := condition(self.events())):
            if self.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"not seen: {self.events()[-5:]}\n{self.output()[-3000:]}")
            time.sleep(0.005)
        return value

    def steps(self, rank: int = 0) -> int:
        """Number of lines that a rank's notes have."""
        path = Path(self.case.out, f"steps.r{rank}.jsonl")
        return path.read_bytes().count(b"\n") if path.exists() else 0


def reap_adopted(server: "ForkServer", *, seconds: float = 10.0) -> None:
    """Wait for processes that this one has adopted: of a job whose supervisor is gone, or ranks of plain `ddp`."""
    deadline = time.monotonic() + seconds
    while children := [pid for pid in system.children_of(os.getpid()) if pid != server.pid]:
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        assert time.monotonic() < deadline, f"still there: {children}"
        time.sleep(0.01)


class Workshop:
    """Runs cases below one directory and keeps the undisturbed runs to compare with."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.server = ForkServer()
        self._references: dict[str, Path] = {}
        self._companions: dict[str, UserProcess] = {}
        self._number = 0

    def prepare(self, case: Case, plan: FaultPlan | None = None) -> Case:
        """A case with a directory of its own and its faults."""
        self._number += 1
        out = self.directory / f"{self._number:03d}"
        out.mkdir(parents=True)
        options = dict(case.options)
        if plan is not None:
            options["faults"] = [fault.to_json() for fault in plan.faults]
        return replace(case, out=str(out), options=options)

    def start(self, case: Case, plan: FaultPlan | None = None) -> UserProcess:
        """Start a run."""
        return self.server.start(self.prepare(case, plan))

    def run(self, case: Case, plan: FaultPlan | None = None, *, seconds: float = 150.0) -> UserProcess:
        """Run a case to its end, which must be a good one. The undisturbed run that it needs is run beside it."""
        (process,) = self.run_together((case, plan), seconds=seconds)
        return process

    def run_together(self, *runs: tuple[Case, FaultPlan | None], seconds: float = 150.0) -> list[UserProcess]:
        """Run cases as `run` does, at the same time: more than half of a run is its start, on one core."""
        processes = [self.start(case, plan) for case, plan in runs]
        needed = [case for case, plan in runs if plan is not None and case.strategy == "leto"]
        companions = {self._companions.get(self._start_reference(case)) for case in needed}
        try:
            for process in (*processes, *filter(None, companions)):
                process.wait(seconds)  # nothing may be left behind a test
        except TimeoutError:
            for process in processes:
                process.kill()
            raise
        for process in processes:
            status = process.poll()
            assert status == 0, f"status {status} of {process.case.out}:\n{process.output()[-6000:]}"
        return processes

    def reference(self, case: Case) -> Path:
        """Directory of the undisturbed run of a case."""
        key = self._start_reference(case)
        if key in self._companions:
            process = self._companions.pop(key)
            status = process.wait(150.0)
            assert status == 0, f"status {status} of {process.case.out}:\n{process.output()[-6000:]}"
            found = recoveries(process)
            assert found == [], f"the undisturbed run was disturbed: {found}\n{process.events()}\n{process.output()}"
            self._references[key] = Path(process.case.out)
        return self._references[key]

    def _start_reference(self, case: Case) -> str:
        """Start the undisturbed run of a case where there is none yet; returns its key."""
        quiet = replace(case, slow=0.0, options={k: v for k, v in case.options.items() if k != "faults"})
        key = quiet.key()
        if key not in self._references and key not in self._companions:
            self._companions[key] = self.start(quiet)
        return key

    def check(self, process: UserProcess) -> None:
        """Assert that a run left the same as the undisturbed one."""
        differences = compare(self.reference(process.case), Path(process.case.out), process.case)
        assert not differences, f"{process.case.out}:\n" + "\n".join(differences[:12]) + "\n" + process.output()[-2000:]

    def forget(self, process: UserProcess) -> None:
        """Remove the files of a run that was as it should be."""
        shutil.rmtree(process.case.out, ignore_errors=True)

    def close(self) -> None:
        """End the fork server."""
        self.server.close()


def recoveries(process: UserProcess) -> list[dict[str, Any]]:
    """The recoveries that the user's script was told of."""
    return json.loads(Path(process.case.out, "recoveries.json").read_text())


def compare(expected: Path, actual: Path, case: Case) -> list[str]:
    """Differences between two runs: steps of every rank, logged rows, checkpoint files, result."""
    found: list[str] = []
    for rank in range(case.devices):
        found += _compare_steps(expected, actual, rank)
    found += _compare_result(expected, actual)
    found += compare_rows(expected, actual)
    found += compare_events(expected, actual)
    found += compare_checkpoints(expected, actual)
    return found


def _notes(directory: Path, rank: int) -> dict[str, list[str]]:
    notes: dict[str, list[str]] = {}
    for line in (directory / f"steps.r{rank}.jsonl").read_text().splitlines():
        value = json.loads(line)
        if "epoch_end" in value:
            name = f"end of epoch {value['epoch_end']}"
        elif "part" in value:
            name = f"step {value['step']}, {value['part']}"
        else:
            name = f"step {value['step']}, batch {value['batch']} of epoch {value['epoch']}"
        notes.setdefault(name, []).append(line)
    return notes


def _compare_steps(expected: Path, actual: Path, rank: int) -> list[str]:
    want, have = _notes(expected, rank), _notes(actual, rank)
    found = [f"rank {rank}: {name} is missing" for name in want if name not in have]
    found += [f"rank {rank}: {name} is too much" for name in have if name not in want]
    for name in want:
        for line in have.get(name, []):  # a hook may run again, with the same result
            if line != want[name][0]:
                found.append(f"rank {rank}: {name}:\n  expected {want[name][0]}\n  actual   {line}")
    order = list(have)
    if not found and order != list(want):
        found.append(f"rank {rank}: steps came in another order: {order}")
    return found


def _compare_result(expected: Path, actual: Path) -> list[str]:
    want, have = (json.loads((d / "result.json").read_text()) for d in (expected, actual))
    return [f"result {key}: expected {want[key]}, actual {have.get(key)}" for key in want if want[key] != have.get(key)]


def compare_events(expected: Path, actual: Path) -> list[str]:
    """The first difference of the TensorBoard event files of two runs, apart from their wall-clock times."""
    difference = first_difference(event_directories(expected), event_directories(actual))
    return [] if difference is None else [difference]


def compare_rows(expected: Path, actual: Path) -> list[str]:
    """Differences between the files of CSVLogger, hyper-parameters included, of two runs."""
    want, have = (
        sorted(p.relative_to(d) for p in d.glob("logs/**/*.*") if "tfevents" not in p.name and p.suffix != ".ckpt")
        for d in (expected, actual)
    )
    if want != have:
        return [f"log files: expected {want}, actual {have}"]
    found = []
    for path in want:
        if (expected / path).read_bytes() != (actual / path).read_bytes():
            rows = [list(csv.reader((d / path).open())) for d in (expected, actual)]
            first = next((i for i, (a, b) in enumerate(zip(*rows, strict=False)) if a != b), "length")
            found.append(
                f"{path} differs at row {first}: {[r[first:][:2] if first != 'length' else len(r) for r in rows]}"
            )
    return found


def compare_checkpoints(expected: Path, actual: Path) -> list[str]:
    """Differences between the names and contents of the checkpoint files of two runs."""
    want, have = (
        sorted(
            p.relative_to(d)
            for pattern in ("checkpoints*/*", "logs/**/*.ckpt", "recorded/**/*.ckpt")
            for p in d.glob(pattern)
        )
        for d in (expected, actual)
    )
    if want != have:
        return [f"checkpoint files: expected {[str(p) for p in want]}, actual {[str(p) for p in have]}"]
    return [f"checkpoint {path} differs" for path in want if _content(expected, path) != _content(actual, path)]


def _content(root: Path, path: Path) -> str:
    """Digest of a checkpoint; paths that name the run's own directory are told apart from content."""
    import torch

    checkpoint = torch.load(root / path, weights_only=False, map_location="cpu")
    directory = str(root)

    def feed(value: Any, into: Any) -> None:
        if isinstance(value, torch.Tensor):
            into.update(repr((value.dtype, tuple(value.shape), value.stride())).encode())
            into.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            into.update(str(value.untyped_storage().nbytes()).encode())
        elif isinstance(value, dict):
            for key, item in value.items():
                feed(key, into)
                feed(item, into)
        elif isinstance(value, (list, tuple)):
            for item in value:
                feed(item, into)
        else:
            into.update(repr(value).replace(directory, "<out>").encode())

    digest = hashlib.sha1(str((root / path).is_symlink()).encode())
    feed(checkpoint, digest)
    return digest.hexdigest()
