"""The process: small, quick, alone with its supervisor, and not impressed by any client."""

import array
import contextlib
import json
import os
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from leto_strategy.errors import ProtocolError
from leto_strategy.memory import manager, wire
from leto_strategy.memory.backend import Kind, RegionSpec
from leto_strategy.memory.mirror import CatalogueMirror
from memory.stand_in import SECONDS, Rank, eventually, open_fds

HELLO = {"op": "hello", "pool": "p"}


@contextlib.contextmanager
def raw(rank: Rank) -> Iterator[socket.socket]:
    with wire.connect(rank.address, timeout=SECONDS) as sock:
        sock.setblocking(True)
        sock.settimeout(5)
        yield sock


@contextlib.contextmanager
def client(rank: Rank) -> Iterator[wire.FrameConnection]:
    with wire.FrameConnection(wire.connect(rank.address, timeout=SECONDS)) as connection:
        connection.send(HELLO, timeout=SECONDS)
        assert connection.receive_one(timeout=5 * SECONDS).message["op"] == "welcome"
        yield connection


def is_dropped(connection: wire.FrameConnection, *, seconds: float = 5) -> bool:
    try:
        while True:
            connection.receive_one(timeout=timedelta(seconds=seconds))
    except EOFError:
        return True
    except TimeoutError:
        return False


def memory_of(pid: int) -> dict[str, int]:
    with open(f"/proc/{pid}/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return {name: int(fields[name].split()[0]) for name in ("VmRSS", "VmHWM", "Threads")}


def test_it_starts_in_well_under_100_ms_of_processor_time_and_stays_below_40_mib() -> None:
    rank, seconds = Rank(), []
    try:
        rank.start()
        for _ in range(4):
            assert rank.process is not None
            # Its own processor time, so that a busy machine does not count.
            with open(f"/proc/{rank.process.pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            seconds.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
            rank.kill_manager()
        pool = rank.pool()
        pool.allocate([RegionSpec(f"w.{i}", 4096, Kind.PROTECTED, arena="a") for i in range(5000)])
        pool.allocate([RegionSpec(f"own.{i}", 4096, Kind.PROTECTED) for i in range(500)])
        assert rank.process is not None
        memory = memory_of(rank.process.pid)
        print(f"start: {min(seconds) * 1000:.0f} ms of processor time; {memory}")
        assert min(seconds) <= 0.1
        assert memory["VmHWM"] < 40 * 1024
        assert memory["Threads"] == 1
    finally:
        rank.close()


def test_it_loads_neither_torch_nor_numpy_nor_lightning() -> None:
    folder = Path(manager.__file__).parent
    modules = [path.stem for path in folder.glob("*.py") if path.stem not in ("__init__", "dlpack", "tensors")]
    assert len(modules) > 10
    script = "import sys\n" + "".join(f"import leto_strategy.memory.{name}\n" for name in modules)
    script += "print([m for m in ('torch', 'numpy', 'lightning', 'pytorch_lightning', 'asyncio') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, timeout=30)
    assert result.stdout.strip() == "[]", result.stderr


BAD_MESSAGES: list[dict[str, Any]] = [
    {},
    {"op": None},
    {"op": "nonsense"},
    {"op": ["allocate"]},
    {"op": "allocate"},
    {"op": "allocate", "number": 1, "specs": {}},
    {"op": "allocate", "number": "1", "specs": []},
    {"op": "allocate", "number": 1, "specs": [1]},
    {"op": "allocate", "number": 1, "specs": [[]]},
    {"op": "allocate", "number": 1, "specs": [["a", 1, "protected", "0/1", "", 3]]},
    {"op": "allocate", "number": 1, "specs": [["a", -1, "protected", "0/1", "", 512]]},
    {"op": "allocate", "number": 1, "specs": [["a", 1e300, "protected", "0/1", "", 512]]},
    {"op": "allocate", "number": 1, "specs": [["a", 10**200, "protected", "0/1", "", 512]]},
    {"op": "allocate", "number": 1, "specs": [["a", 1, ["protected"], "0/1", "", 512]]},
    {"op": "allocate", "number": 1, "specs": [["a\ud800", 1, "protected", "0/1", "", 512]]},
    {"op": "allocate", "number": 1, "specs": [["a", 1, "protected", "0/1", "", 512]] * 2},
    {"op": "allocate", "number": 1, "specs": [], "known": "all"},
    {"op": "allocate", "number": 1, "specs": [], "known": [-1]},
    {"op": "attach", "names": [None]},
    {"op": "attach", "names": [["a"]]},
    {"op": "attach", "names": [["a", {}]]},
    {"op": "attach", "names": [["a" * 300, "0/1"]]},
    {"op": "free", "names": [["a", "0/1", 1]]},
    {"op": "free", "names": [], "known": {}},
    {"op": "change", "version": 1},
    {"op": "watch", "pids": [1]},
    {"op": "bye"},
    HELLO,
]


def test_a_malformed_request_closes_that_connection_and_harms_nobody(rank: Rank) -> None:
    pool = rank.pool()
    assert rank.process is not None
    pid, before = rank.process.pid, open_fds(rank.process.pid)
    for message in BAD_MESSAGES:
        with client(rank) as connection:
            connection.send(message, timeout=SECONDS)
            assert is_dropped(connection), message
        pool.allocate([])
    for first in (*BAD_MESSAGES[:-1], {"op": "hello"}, {"op": "hello", "pool": 5}, {"op": "hello", "pool": "x" * 65}):
        with wire.FrameConnection(wire.connect(rank.address, timeout=SECONDS)) as connection:
            connection.send(first, timeout=SECONDS)
            assert is_dropped(connection), first
    assert eventually(lambda: open_fds(pid) == before)
    assert rank.num_managers == 1


def test_thousands_of_hostile_connections_leave_it_serving(rank: Rank, rng: random.Random) -> None:
    pool = rank.pool()
    (region,) = pool.allocate([RegionSpec("w", 8, Kind.RETAINED)])
    pool.allocate([])  # it closes what it sent after we have it: by the next answer it has
    assert rank.process is not None
    pid, before = rank.process.pid, open_fds(rank.process.pid)
    rss = memory_of(pid)["VmRSS"]
    file = os.memfd_create("hostile")
    for i in range(2000):
        body = json.dumps({"op": rng.choice(["hello", "allocate", "free"]), "pool": "x", "specs": [[1]]}).encode()
        good = struct.pack("<2sBxHxxI", b"Lt", 0, rng.choice([0, 0, 1, 2, 254]), len(body)) + body
        data = rng.choice([good, rng.randbytes(rng.randint(1, 60)), good[: rng.randrange(1, len(good))], good * 3])
        fds = [file] * rng.choice([0, 0, 1, 2, 253])
        with raw(rank) as sock, contextlib.suppress(OSError):
            sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
        if i % 100 == 0:
            pool.allocate([RegionSpec(f"r{i}", 8, Kind.RETAINED, arena="a")])
    os.close(file)
    # One more for each segment, and nothing else.
    assert eventually(lambda: len(open_fds(pid)) == len(before) + 20), open_fds(pid) - before
    assert memory_of(pid)["VmRSS"] < rss + 8 * 1024
    assert rank.num_managers == 1
    pool.buffer(region)[:] = b"survived"


def test_silent_and_slow_and_deaf_clients_hold_nobody_up_and_are_dropped() -> None:
    prelude = "clients._HELLO_TIME_MAX = clients._MESSAGE_TIME_MAX = timedelta(seconds=0.5)"
    rank = Rank(prelude=prelude)
    with contextlib.ExitStack() as stack:
        stack.callback(rank.close)
        pool = rank.start().pool()
        pool.allocate([RegionSpec(f"{'n' * 150}.{i}", 8, Kind.RETAINED, arena="a") for i in range(4000)])
        silent, slow, deaf = (stack.enter_context(raw(rank)) for _ in range(3))
        slow.sendall(b"Lt\0\0\0\0\0\0\xff\0\0\0{")
        for message in (HELLO, {"op": "attach", "names": [[f"{'n' * 150}.{i}", "0/1"] for i in range(4000)]}):
            (data, _), *_ = wire.encode(message)
            deaf.sendall(data)  # asks for an answer larger than the socket takes and does not read it
        begin = time.monotonic()
        for i in range(20):
            pool.allocate([RegionSpec(f"r{i}", 8, Kind.RETAINED)])
        assert time.monotonic() - begin < 2
        assert rank.process is not None
        pid = rank.process.pid

        def num_sockets() -> int:
            return sum("socket:" in item for item in open_fds(pid))

        assert eventually(lambda: num_sockets() == 3), "control, listener and the pool remain"
        for sock in (silent, slow):
            assert sock.recv(1) == b""
        time.sleep(0.7)
        pool.allocate([RegionSpec("later", 8, Kind.RETAINED)])  # idle is not stalled


def test_a_client_that_asks_twice_at_once_is_dropped(rank: Rank) -> None:
    rank.acknowledging.clear()
    with client(rank) as connection:
        for number in (1, 2):
            spec = [f"x{number}", 8, "retained", "0/1", "", 512]
            connection.send({"op": "allocate", "number": number, "specs": [spec]}, timeout=SECONDS)
        assert is_dropped(connection)
    rank.acknowledging.set()
    rank.pool().allocate([RegionSpec("w", 8, Kind.RETAINED)])


def test_connections_are_bounded(rank: Rank) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(raw(rank))
        assert rank.process is not None
        pid = rank.process.pid
        assert eventually(lambda: sum("socket:" in item for item in open_fds(pid)) == 66)
    rank.pool().allocate([RegionSpec("w", 8, Kind.RETAINED)])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(rank: Rank) -> None:
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(5)
                sock.connect(b"\0" + rank.address.encode())
                with contextlib.suppress(OSError):
                    sock.sendall(wire.encode(HELLO)[0][0])
                try:
                    code = 0 if sock.recv(100) == b"" else 2
                except ConnectionResetError:
                    code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    rank.pool().allocate([])


def test_a_bye_ends_it_with_code_0_and_memory_lives_on_in_the_mirror() -> None:
    rank = Rank()
    try:
        pool = rank.start().pool()
        (region,) = pool.allocate([RegionSpec("w", 8, Kind.RETAINED)])
        pool.buffer(region)[:] = b"12345678"
        rank.replace = False
        with rank.lock:
            rank.mirror.bye()
        assert rank.process is not None
        assert rank.process.wait(5) == 0
        with rank.lock:
            assert bytes(rank.mirror.buffer("w")) == b"12345678"
    finally:
        rank.close()


@pytest.mark.parametrize(
    "first",
    [
        {"op": "configure"},
        {"op": "configure", "job": "", "rank": 0, "address": "x"},
        {"op": "configure", "job": "j", "rank": "0", "address": "x"},
        {"op": "configure", "job": "j", "rank": 0, "address": "x", "catalogue": [1]},
        {"op": "configure", "job": "j", "rank": 0, "address": "x", "catalogue": {"version": 1}},
        {"op": "hello", "job": "j", "rank": 0, "address": "x"},
    ],
)
def test_a_malformed_configuration_ends_it(first: dict[str, Any]) -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-I", "-m", "leto_strategy.memory.manager", "--control-fd", str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True) as process:
        theirs.close()
        with wire.FrameConnection(ours) as connection:
            connection.send(first, timeout=SECONDS)
            assert process.wait(5) == 1
        assert process.stderr is not None
        assert "ProtocolError" in process.stderr.read()


def test_a_mirror_refuses_nonsense_and_keeps_what_it_has() -> None:
    ours, theirs = socket.socketpair()
    mirror = CatalogueMirror()
    assert mirror.fileno() == -1
    assert not mirror.process()
    file = os.memfd_create("small")
    os.ftruncate(file, 4096)
    region = ["a", 10, "record", "0/1", "", 512, 1, 0, "p:1"]
    good = {"op": "change", "version": 1, "next": [2, 5], "removed": [], "regions": [region]}
    before = open_fds()
    for message, fds in (
        ({"op": "odd"}, []),
        ({"op": "change"}, [file]),
        (good | {"segments": [[1, 4096, 1, 0, 1, 0, 0]]}, []),
        (good | {"segments": [[1, 4096, 1, 0, 1, 0, 0]]}, [file, file]),
        (good | {"segments": [[1, 8192, 1, 0, 1]]}, [file]),
    ):
        ours, theirs = socket.socketpair()
        mirror.configure(ours, job="j", rank=0, address="a", timeout=SECONDS)
        with wire.FrameConnection(theirs) as peer:
            peer.receive_one(timeout=SECONDS)
            peer.send(message, fds, timeout=SECONDS)
            with pytest.raises(ProtocolError):
                mirror.process()
            assert not mirror.regions
    ours, theirs = socket.socketpair()
    mirror.configure(ours, job="j", rank=0, address="a", timeout=SECONDS)
    with wire.FrameConnection(theirs) as peer:
        peer.receive_one(timeout=SECONDS)
        peer.send(good | {"segments": [[1, 4096, 1, 0, 1, 0, 0]]}, [file], timeout=SECONDS)
        assert mirror.process()
        assert peer.receive_one(timeout=SECONDS).message == {"op": "mirrored", "version": 1}
    mirror.buffer("a")[:3] = b"abc"
    assert os.pread(file, 3, 0) == b"abc"
    assert not mirror.process()
    mirror.close()
    mirror.close()
    assert len(open_fds()) == len(before) - 2
    os.close(file)
