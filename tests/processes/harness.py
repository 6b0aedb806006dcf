"""The launcher's end of a supervisor, for tests: starts one, records its events, and looks at what it leaves."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from leto_strategy.memory import wire
from leto_strategy.memory.wire import FrameConnection
from leto_strategy.processes.messages import LaunchSpec
from leto_strategy.processes.operator import operator_address

STAND_IN = str(Path(__file__).with_name("stand_in.py"))
PATIENCE = 20.0
MODULUS = (1 << 61) - 1
QUICK = {"first_step": 0.5, "shadow_backoff": 0.05, "peer_grace": 0.5, "disconnect_grace": 0.3}
QUICK |= {"delivery": 2.0, "raise_grace": 0.3}


def expected_value(world: int, steps: int) -> int:
    """What rank 0 ends with when every update happened exactly once."""
    values = [rank + 1 for rank in range(world)]
    for step in range(steps):
        gradient = sum(values) + step
        values = [(value * 31 + gradient) % MODULUS for value in values]
    return values[0]


class Job:
    """One job with stand-in trainers; a context manager that leaves nothing behind."""

    def __init__(
        self,
        root: Path,
        *,
        world=2,
        steps=20,
        step_seconds=0.005,
        faults=(),
        hold=None,
        argv=None,
        timings=(),
        supervisor=("-I", "-m", "leto_strategy.processes.supervisor"),
        **spec,
    ):
        self.root, self.world, self.steps = root, world, steps
        self.trace_path = root / "trace.jsonl"
        self.command = [sys.executable, *supervisor]
        plan = {"steps": steps, "step_seconds": step_seconds, "faults": list(faults), "trace": str(self.trace_path)}
        plan["hold"] = hold
        values = {
            "job": secrets.token_hex(6),
            "argv": tuple(argv or (sys.executable, STAND_IN, json.dumps(plan))),
            "env": {k: v for k, v in os.environ.items() if not k.startswith("LETO_")},
            "cwd": str(root),
            "world": world,
            "call": 0,
            "function": "fit",
            "root_dir": str(root),
            "timings": {**QUICK, **dict(timings)},
            **spec,
        }
        self.spec = LaunchSpec(**values)
        self.events = []
        self.end = None
        self.replies = []

    def __enter__(self):
        ours, theirs = socket.socketpair()
        self.result_fd = os.memfd_create("result", os.MFD_CLOEXEC)
        with theirs:
            command = [*self.command, "--control-fd", str(theirs.fileno())]
            self.supervisor = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        self.connection = FrameConnection(ours)
        self.say("launch", **{k: v for k, v in self.spec.to_json().items() if k != "op"}, fds=[self.result_fd])
        return self

    def __exit__(self, *exception):
        self.connection.close()
        try:
            self.supervisor.wait(5)
        except subprocess.TimeoutExpired:
            self.supervisor.kill()
            self.supervisor.wait()
        os.close(self.result_fd)

    def say(self, op, *, fds=(), **fields):
        self.connection.send({"op": op, **fields}, fds, timeout=timedelta(seconds=5))

    def pump(self, seconds):
        """Take one more frame of the supervisor; False when none came in time."""
        try:
            message = self.connection.receive_one(timeout=timedelta(seconds=max(0.0, seconds))).message
        except TimeoutError:
            return False
        if message["op"] == "event":
            self.events.append(message["event"])
        elif message["op"] == "end":
            self.end = message
        else:
            self.replies.append(message)
        return True

    def until(self, condition, what, seconds=PATIENCE):
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            left = deadline - time.monotonic()
            assert left > 0, f"no {what} within {seconds} s; events: {self.names()}; end: {self.end}"
            self.pump(min(left, 0.02))
        return found

    def event(self, name, count=1, **fields):
        """Wait for the count-th event of this name with these fields."""

        def found():
            matches = [e for e in self.events if e["event"] == name and all(e[k] == v for k, v in fields.items())]
            return matches[count - 1] if len(matches) >= count else None

        return self.until(found, f"event {name} {fields} ({count})")

    def traced(self, what, count=1, **fields):
        """Wait for the count-th line of this kind in the trainers' trace."""

        def found():
            matches = [t for t in self.trace() if t["what"] == what and all(t[k] == v for k, v in fields.items())]
            return matches[count - 1] if len(matches) >= count else None

        return self.until(found, f"trace {what} {fields} ({count})")

    def wait(self, outcome="finished", seconds=PATIENCE):
        self.until(lambda: self.end, "end", seconds)
        assert self.end["outcome"] == outcome, (self.end, self.names())
        self.supervisor.wait(5)
        return self.end

    def finished(self, seconds=PATIENCE):
        """Wait for the end and check that training came out as if nothing had happened."""
        end = self.wait(seconds=seconds)
        assert self.result() == {"value": expected_value(self.world, self.steps)}
        return end

    def names(self):
        return [e["event"] for e in self.events]

    def count(self, name):
        return self.names().count(name)

    def trace(self):
        if not self.trace_path.exists():
            return []
        return [json.loads(line) for line in self.trace_path.read_text().splitlines()]

    def result(self):
        return json.loads(os.pread(self.result_fd, 1 << 16, 0) or b"null")

    def pids(self):
        """Pids of the active generation, by rank."""
        return [e for e in self.events if e["event"] == "promoted"][-1]["pids"]

    def go(self):
        """Let the trainers go on that are held."""
        Path(f"{self.trace_path}.go").touch()

    def kill(self, rank, signum=signal.SIGKILL):
        os.kill(self.pids()[rank], signum)
        return time.monotonic_ns()

    def ask(self, **message):
        """One request on the operator's socket."""
        sock = wire.connect(operator_address(self.spec.job), timeout=timedelta(seconds=5))
        with FrameConnection(sock) as connection:
            connection.send(message, timeout=timedelta(seconds=5))
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                self.pump(0)
                try:
                    return connection.receive_one(timeout=timedelta(seconds=0.01)).message
                except TimeoutError:
                    continue
        raise AssertionError("no answer")

    def processes(self):
        """Everything of this job that runs, but the supervisor."""
        mark = f"LETO_JOB={self.spec.job}".encode()
        sessions = {pid for e in self.events for pid in e.get("pids", ())}
        found = {}
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) == os.getpid():
                continue
            try:
                environ = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                stat = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
                command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            traced = {t["pid"] for t in self.trace()}
            if (mark in environ or int(stat[3]) in sessions or int(name) in traced) and stat[0] not in b"ZX":
                found[int(name)] = command
        return found

    def gone(self, seconds):
        """Wait until no process of the job runs; the seconds it took."""
        begin = time.monotonic()
        while left := self.processes():
            assert time.monotonic() - begin < seconds, f"still there after {seconds} s: {left}"
            time.sleep(0.01)
        return time.monotonic() - begin
