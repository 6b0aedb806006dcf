"""A trainer without torch: speaks the supervisor's protocol, keeps state in retained memory, fails as its plan says.

Usage: ``python stand_in.py PLAN`` with PLAN a JSON object: steps, step_seconds, trace (a file), faults (a list of
{"rank", "do", "at", "step", "generation", "role"}), hold (a step in whose forward all wait until a file is there).
"Training" makes one number per rank out of the step numbers and of all ranks' numbers, so that a lost or repeated
update shows.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from datetime import timedelta

from leto_strategy.config import trainer_identity
from leto_strategy.faults import CrashPoints
from leto_strategy.memory.backend import Kind, RegionSpec
from leto_strategy.memory.pool import ResilientMemoryPool
from leto_strategy.memory.wire import FrameConnection
from leto_strategy.progress import PAGE_BYTES, Activity, Marker, Phase, ProgressPage
from leto_strategy.recovery.records import RecordKind, RecordRing

LONG = timedelta(minutes=2)
MODULUS = (1 << 61) - 1


class PeerLost(Exception):
    """The connection to another rank broke."""


class DeviceFailed(Exception):
    """The GPU refused to go on."""


class Hub:
    """All-gather of one number among the ranks, over rank 0."""

    def __init__(self, identity):
        self.rank, self.world = identity.rank, identity.world
        self.peers = []
        if self.rank == 0:
            listener = socket.socket(fileno=identity.store_fd)
            listener.settimeout(60)
            peers = {}
            while len(peers) < self.world - 1:
                peer, _ = listener.accept()
                peers[int(peer.recv(1))] = peer
            listener.close()
            self.peers = [peers[rank] for rank in range(1, self.world)]
        else:
            peer = socket.create_connection(("127.0.0.1", identity.store_port), timeout=60)
            peer.sendall(str(self.rank).encode())
            self.peers = [peer]
        for peer in self.peers:
            peer.settimeout(None)

    def gather(self, number):
        try:
            if self.rank:
                self.peers[0].sendall(number.to_bytes(8, "little"))
                return self._receive(self.peers[0], self.world)
            numbers = [number] + [self._receive(peer, 1)[0] for peer in self.peers]
            for peer in self.peers:
                peer.sendall(b"".join(n.to_bytes(8, "little") for n in numbers))
            return numbers
        except OSError as error:
            raise PeerLost(str(error)) from error

    @staticmethod
    def _receive(peer, count):
        data = b""
        while len(data) < 8 * count:
            more = peer.recv(8 * count - len(data))
            if not more:
                raise PeerLost("a peer has closed its connection")
            data += more
        return [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]


class Trainer:
    def __init__(self, plan):
        self.plan = plan
        self.identity = identity = trainer_identity()
        assert identity is not None
        self.control = FrameConnection(socket.socket(fileno=identity.control_fd))
        self.role = identity.role
        self.reach("begin")
        self.hub = Hub(identity)
        self.page = None
        self.points = CrashPoints(None)
        if identity.manager_address:
            self.pool = ResilientMemoryPool.connect(
                identity.manager_address, timeout=timedelta(seconds=20), writable=identity.role == "active"
            )
            page, state = self.pool.allocate(
                [RegionSpec("progress", PAGE_BYTES, Kind.RECORD), RegionSpec("state", 4096, Kind.PROTECTED)]
            )
            self.regions = page, state
            self.page = ProgressPage(self.pool.buffer(page))
        else:
            self.words = [identity.rank + 1, 0, 0]

    def attach(self):
        page, state = self.regions
        self.pool.make_writable()
        self.points = CrashPoints(self.pool.buffer(page), generation=self.identity.generation)
        self.page = ProgressPage(self.pool.buffer(page))
        self.records = RecordRing(self.pool)
        self.words = self.pool.buffer(state).cast("Q")  # value, undo, gradient

    def say(self, op, **fields):
        self.control.send({"op": op, **fields}, timeout=LONG)

    def hear(self):
        try:
            return self.control.receive_one(timeout=LONG).message
        except EOFError:
            os._exit(9)

    def trace(self, what, step=None):
        identity = self.identity
        line = {"what": what, "rank": identity.rank, "generation": identity.generation, "step": step}
        line.update(pid=os.getpid(), ns=time.monotonic_ns())
        with open(self.plan["trace"], "a") as file:
            file.write(json.dumps(line) + "\n")

    def reach(self, at, step=None):
        identity = self.identity
        for fault in self.plan.get("faults", ()):
            if fault["at"] != at or fault.get("rank", identity.rank) != identity.rank:
                continue
            if fault.get("step", step) != step or fault.get("generation", identity.generation) != identity.generation:
                continue
            if fault.get("role", self.role) != self.role:
                continue
            self.happen(fault["do"], step)

    def happen(self, do, step):
        if do == "kill":
            self.trace("fault", step)
            os.kill(os.getpid(), signal.SIGKILL)
        elif do == "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif do == "exit":
            os._exit(3)
        elif do == "exit0":
            os._exit(0)
        elif do == "hang":
            self.trace("hang", step)
            time.sleep(1000)
        elif do == "sleep":
            time.sleep(1)
        elif do == "raise":
            raise ValueError(f"a bug at step {step} on rank {self.identity.rank}")
        elif do == "garbage":
            self.say("nonsense")
            time.sleep(1000)
        elif do == "ignore_sigterm":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        elif do == "children":
            self.start_children()
        elif do == "communicator":
            raise PeerLost("injected")
        elif do == "device":
            raise DeviceFailed("CUDA error: an illegal memory access was encountered")
        elif do == "abort":
            os.abort()
        elif do.startswith("print "):
            print(do[6:], flush=True)
        else:
            raise AssertionError(do)

    def start_children(self):
        """A forked child that ignores SIGTERM, one in a session of its own, and an orphan in a session of its own."""
        for kind in ("forked", "setsid", "orphan"):
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                if kind != "forked":
                    os.setsid()
                if kind == "orphan" and os.fork():
                    os._exit(0)
                self.trace(kind)
                time.sleep(1000)
                os._exit(0)
            if kind == "orphan":
                os.waitpid(pid, 0)
        subprocess.Popen(["sleep", "1000"], start_new_session=True)

    def beat(self, step, activity=Activity.STEP):
        if self.page is not None:
            self.page.step = step
            self.page.activity = activity
            self.page.heartbeat += 1

    def mark(self, step, phase, chunk=0):
        if self.page is not None:
            self.page.publish(Marker(step, phase, chunk))
            self.points(phase.name.lower() if phase.name in ("READY", "SYNCED") else "update_done", step)

    def run(self):
        self.reach("before_ready")
        self.say("ready")
        while (order := self.hear())["op"] == "prepare":
            pass
        assert order["op"] == "promote", order
        self.role = "active"
        self.reach("gate")
        mode, step = order["mode"], order["step"]
        if self.page is not None:
            self.attach()
            self.page.generation = self.identity.generation
            self.beat(step, Activity.STARTING)
            if mode == "fresh":
                self.words[0] = self.identity.rank + 1
        self.trace("promoted " + mode, step)
        if mode == "finish":
            self.update(step, self.page.marker)
            step += 1
        entered = False
        while step < self.plan["steps"]:
            self.beat(step)
            if self.page is not None:
                self.records.write(RecordKind.START, step, b"start")
            if not entered:
                if self.page is not None:
                    self.page.entered_ns = time.monotonic_ns()
                self.say("entered", step=step)
                entered = True
            self.trace("forward", step)
            while step == self.plan.get("hold") and not os.path.exists(self.plan["trace"] + ".go"):
                time.sleep(0.005)
            self.points("forward", step)
            self.reach("forward", step)
            time.sleep(self.plan.get("step_seconds", 0.005))
            gradient = sum(self.hub.gather(self.words[0])) + step
            self.reach("reduced", step)
            self.words[2] = gradient
            if self.page is not None:
                self.records.write(RecordKind.MID, step, b"mid")
            self.mark(step, Phase.READY)
            self.reach("ready", step)
            self.update(step, None)
            step += 1
        self.reach("end", step)
        self.trace(f"value {self.words[0]}", step)
        if self.identity.rank == 0:
            os.pwrite(self.identity.result_fd, json.dumps({"value": self.words[0]}).encode(), 0)
        self.say("finished")
        self.reach("finished", step)
        assert self.hear()["op"] == "bye"
        self.trace("bye")
        os._exit(0)

    def update(self, step, marker):
        self.hub.gather(0)
        if marker is None or marker.phase is Phase.READY:
            self.mark(step, Phase.SYNCED)
        if marker is None or marker.phase < Phase.DONE:
            if marker is None or marker.phase < Phase.UNDO:
                self.words[1] = self.words[0]
                self.mark(step, Phase.UNDO)
                self.reach("undo", step)
            self.words[0] = (self.words[1] * 31 + self.words[2]) % MODULUS
            self.reach("updated", step)
            self.mark(step, Phase.DONE)
        self.reach("done", step)

    def main(self):
        try:
            self.run()
        except PeerLost as error:
            self.report("communicator", error)
        except DeviceFailed as error:
            self.report("device", error)
        except KeyboardInterrupt as error:
            self.report("keyboard_interrupt", error)
        except Exception as error:
            self.report("exception", error)

    def report(self, kind, error):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        step = None if self.page is None else self.page.step
        text = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
        self.say("error", kind=kind, step=step, **text)
        order = self.hear()
        assert order["op"] == "raise", order
        self.trace("raise")
        self.reach("raising")
        os.pwrite(self.identity.result_fd, json.dumps({"raised": str(error)}).encode(), 0)
        self.say("delivered")
        os._exit(1)


if __name__ == "__main__":
    Trainer(json.loads(sys.argv[1])).main()
