"""Frames: what is sent arrives; whatever else arrives is a ProtocolError, no fd leaks, nothing blocks."""

import array
import contextlib
import json
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leto_strategy.errors import ProtocolError
from leto_strategy.memory import wire
from memory.stand_in import open_fds

SECOND = timedelta(seconds=1)
SHORT = timedelta(seconds=0.05)
MANY = wire.Limits(message_bytes=16 << 20, message_fds=2000, pending_bytes=64 << 20)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@contextlib.contextmanager
def pair(limits: wire.Limits = wire.DEFAULT_LIMITS) -> Iterator[tuple[socket.socket, wire.FrameConnection]]:
    """A raw socket and the connection it talks to."""
    raw, sock = socket.socketpair()
    with raw, wire.FrameConnection(sock, limits=limits) as connection:
        yield raw, connection


def header(body_bytes: int, *, num_fds: int = 0, flags: int = 0, magic: bytes = b"Lt") -> bytes:
    return struct.pack("<2sBxHxxI", magic, flags, num_fds, body_bytes)


def frame(body: bytes, **fields: Any) -> bytes:
    return header(len(body), **fields) + body


def send_with_fds(raw: socket.socket, data: bytes, fds: list[int]) -> None:
    raw.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


@given(message=st.dictionaries(st.text(), JSON, max_size=5))
@settings(max_examples=100, deadline=None)
def test_any_object_arrives_as_it_was(message: dict[str, Any]) -> None:
    with pair() as (raw, connection), wire.FrameConnection(raw.dup()) as sender:
        sender.send(message, timeout=SECOND)
        assert connection.receive_one(timeout=SECOND) == wire.Frame(message, [])
        assert not connection.receiving


def test_fds_arrive_with_their_own_message_and_are_not_inherited() -> None:
    files = [os.memfd_create(f"f{i}") for i in range(3)]
    with pair() as (raw, connection), wire.FrameConnection(raw.dup()) as sender:
        sender.queue({"n": 0}, files[:2])
        sender.queue({"n": 1})
        sender.queue({"n": 2}, files[2:])
        frames = connection.receive()
        assert [f.message["n"] for f in frames] == [0, 1, 2]
        assert [len(f.fds) for f in frames] == [2, 0, 1]
        got = [fd for f in frames for fd in f.fds]
        assert [os.fstat(fd).st_ino for fd in got] == [os.fstat(fd).st_ino for fd in files]
        assert not any(os.get_inheritable(fd) for fd in got)
        for fd in [*got, *files]:
            os.close(fd)


@pytest.mark.parametrize(("num_bytes", "num_fds"), [(3 << 20, 0), (10, 600), ((1 << 20) + 1, 254), (2, 1300)])
def test_a_large_message_continues_in_further_frames(num_bytes: int, num_fds: int) -> None:
    file = os.memfd_create("f")
    message = {"x": "y" * num_bytes}
    assert all(len(data) <= wire.FRAME_BYTES_MAX + 12 for data, _ in wire.encode(message, [file] * num_fds))
    with pair(MANY) as (raw, connection), wire.FrameConnection(raw.dup(), limits=MANY) as sender:
        sender.queue(message, [file] * num_fds)
        frames: list[wire.Frame] = []
        while not frames:
            frames = connection.receive()
            sender.flush()
        assert frames[0].message == message
        assert len(frames[0].fds) == num_fds
        for fd in frames[0].fds:
            os.close(fd)
    os.close(file)


def test_the_default_is_one_frame() -> None:
    with pair() as (raw, connection), wire.FrameConnection(raw.dup(), limits=MANY) as sender:
        sender.queue({"x": "y" * (1 << 20)})

        def pass_on() -> None:
            while connection.receive() == []:
                sender.flush()

        with pytest.raises(ProtocolError, match="more than 1048576 bytes"):
            pass_on()


BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b"1",
    b"null",
    b'"op"',
    b"\xff\xfe",
    b'{"op":NaN}',
    b'{"op":-Infinity}',
    b"[" * 200_000,
    b'{"a":' * 100_000,
    b'{"n":' + b"9" * 100_000 + b"}",
    b"{}{}",
    b"{}\0",
]


@pytest.mark.parametrize("body", BAD_BODIES, ids=lambda body: repr(body[:12]))
def test_a_body_that_is_no_object_breaks_the_connection(body: bytes) -> None:
    with pair() as (raw, connection):
        raw.settimeout(2)

        def write() -> None:
            with contextlib.suppress(OSError):
                raw.sendall(frame(body))

        writer = threading.Thread(target=write)
        writer.start()
        with pytest.raises(ProtocolError):
            connection.receive_one(timeout=SECOND)
        with pytest.raises(ProtocolError, match="before"):
            connection.receive()
        connection.close()
        writer.join()


@pytest.mark.parametrize(
    "data",
    [
        header(1, magic=b"GE"),
        b"GET / HTTP/1.1\r\n\r\n",
        header(2, flags=2) + b"{}",
        header((1 << 20) + 1),
        header(0xFFFFFFFF),
        header(0, flags=1),
        header(2, num_fds=1) + b"{}",
        header(2, num_fds=254) + b"{}",
        header(2, num_fds=65535) + b"{}",
        (header(1 << 19, flags=1) + b" " * (1 << 19)) * 3,
    ],
    ids=lambda data: repr(data[:12]),
)
def test_a_bad_header_breaks_the_connection_at_once(data: bytes) -> None:
    with pair() as (raw, connection):
        raw.setblocking(False)

        def pass_on() -> None:
            begin = 0
            while True:
                with contextlib.suppress(BlockingIOError):
                    begin += raw.send(data[begin : begin + (1 << 16)]) if begin < len(data) else 0
                assert connection.receive() == []

        with pytest.raises(ProtocolError):
            pass_on()


@pytest.mark.parametrize("place", ["before", "inside", "extra", "too many", "between"])
def test_fds_that_no_frame_announces_break_the_connection_and_are_closed(place: str) -> None:
    file = os.memfd_create("f")
    before = open_fds()
    with pair() as (raw, connection):
        data = frame(b'{"a":1}', num_fds=0 if place in ("before", "inside") else 1)
        if place == "before":
            send_with_fds(raw, data, [file])
        elif place == "inside":
            raw.sendall(data[:14])
            send_with_fds(raw, data[14:16], [file])
        elif place == "extra":
            send_with_fds(raw, data, [file, file])
        elif place == "too many":
            for byte in data[:2]:
                send_with_fds(raw, bytes([byte]), [file] * 253)
        else:
            send_with_fds(raw, data, [file])
            send_with_fds(raw, b"L", [file])
            send_with_fds(raw, b"t", [file] * 253)
        with pytest.raises(ProtocolError):
            connection.receive()
    assert open_fds() == before
    os.close(file)


def test_random_bytes_and_mutated_frames_never_do_worse_than_break_the_connection(rng: random.Random) -> None:
    files = [os.memfd_create(f"f{i}") for i in range(3)]
    before = len(open_fds())
    broken = 0
    for _ in range(3000):
        data = bytearray()
        for _ in range(rng.randint(1, 3)):
            body = json.dumps({"op": "allocate", "specs": [[rng.random(), None, "x" * rng.randint(0, 50)]]}).encode()
            num_fds = rng.choice([0, 0, 0, 1, 2, 300])
            data += rng.choice([frame(body, num_fds=num_fds, flags=rng.choice([0, 0, 0, 1, 7])), rng.randbytes(20)])
        for _ in range(rng.randint(0, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with pair() as (raw, connection):
            raw.setblocking(False)
            begin = 0
            with contextlib.suppress(BlockingIOError):
                while begin < len(data):
                    end = begin + rng.randint(1, len(data))
                    send_with_fds(raw, bytes(data[begin:end]), rng.choices(files, k=rng.choice([0, 0, 1, 3])))
                    begin = end
            raw.shutdown(socket.SHUT_WR)
            try:
                while not connection.at_end:
                    for received in connection.receive():
                        for fd in received.fds:
                            os.close(fd)
            except ProtocolError:
                broken += 1
    assert broken > 1000
    assert len(open_fds()) == before
    for fd in files:
        os.close(fd)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8))
@settings(max_examples=300, deadline=None)
def test_arbitrary_pieces_are_frames_or_an_error(pieces: list[bytes]) -> None:
    with pair() as (raw, connection), contextlib.suppress(ProtocolError):
        for piece in pieces:
            raw.sendall(piece)
            connection.receive()


def test_a_message_cut_off_by_its_senders_death_is_dropped_and_those_before_it_are_not() -> None:
    file = os.memfd_create("f")
    before = open_fds()
    with pair() as (raw, connection):
        raw.sendall(frame(b'{"a":1}'))
        send_with_fds(raw, frame(b'{"b":1}', num_fds=1)[:-2], [file])
        raw.close()
        assert [f.message for f in connection.receive()] == [{"a": 1}]
        assert connection.at_end
        assert not connection.receiving
        with pytest.raises(EOFError):
            connection.receive_one(timeout=SECOND)
    assert open_fds() == before
    os.close(file)


def test_a_peer_that_does_not_read_never_blocks_and_is_given_up() -> None:
    with pair() as (_, connection):
        begin = time.monotonic()

        def insist() -> None:
            for _ in range(100):
                connection.queue({"x": "y" * (1 << 19)})

        with pytest.raises(ProtocolError, match="does not read"):
            insist()
        assert connection.wants_write
        assert time.monotonic() - begin < 5
        with pytest.raises(TimeoutError):
            wire.FrameConnection(connection.socket.dup()).send({"x": "y" * (1 << 19)}, timeout=SHORT)


def test_a_peer_that_never_stops_sending_does_not_hold_the_receiver() -> None:
    stop = threading.Event()
    with pair() as (raw, connection):
        data = frame(b'{"a":1}') * 5000
        raw.settimeout(0.2)

        def flood() -> None:
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    raw.sendall(data)

        thread = threading.Thread(target=flood)
        thread.start()
        for _ in range(5):
            begin = time.monotonic()
            connection.receive()
            assert time.monotonic() - begin < 2
        stop.set()
        thread.join()


def test_waits_end() -> None:
    with pair() as (raw, connection):
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            connection.receive_one(timeout=SHORT)
        raw.sendall(b"Lt")
        with pytest.raises(TimeoutError):
            connection.receive_one(timeout=SHORT)
        assert connection.receiving
        assert time.monotonic() - begin < 2
    address = f"leto-test/{os.getpid()}/nobody"
    with pytest.raises(ConnectionRefusedError):
        wire.connect(address, timeout=SHORT)
    with wire.listen(address, timeout=SHORT), pytest.raises(OSError, match="in use"):
        wire.listen(address, timeout=SHORT)


def test_an_address_is_taken_over_when_its_holder_ends() -> None:
    address = f"leto-test/{os.getpid()}/taken"
    first = wire.listen(address, timeout=SHORT)
    timer = threading.Timer(0.1, first.close)
    timer.start()
    with wire.listen(address, timeout=5 * SECOND), wire.connect(address, timeout=SECOND) as client:
        wire.require_same_user(client)
    timer.join()
