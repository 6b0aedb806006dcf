"""Jobs are found in the kernel's socket table, and a supervisor that misbehaves gives an error that says so."""

import os
import socket
from datetime import timedelta

import pytest

from leto_strategy.cli import jobs
from leto_strategy.memory import wire

TABLE = """Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 100 @leto/7/b0b0
0000000000000000: 00000002 00000000 00010000 0001 01 101 @leto/7/a1a1
0000000000000000: 00000003 00000000 00000000 0001 03 102 @leto/7/a1a1
0000000000000000: 00000003 00000000 00000000 0001 03 103 @leto/7/only-a-connection
0000000000000000: 00000002 00000000 00010000 0001 01 104 @leto/8/of-another-user
0000000000000000: 00000002 00000000 00010000 0001 01 105 @leto/7/a1a1/manager-0
0000000000000000: 00000002 00000000 00010000 0001 01 106 /run/leto/7/x y z
0000000000000000: 00000002 00000000 00000000 0002 01 107
"""


def test_jobs_of_a_user_are_its_listening_sockets() -> None:
    assert jobs.find_jobs(TABLE, uid=7) == ["a1a1", "b0b0"]
    assert jobs.find_jobs(TABLE, uid=8) == ["of-another-user"]
    assert jobs.find_jobs(TABLE, uid=9) == []


def test_a_real_socket_is_found_and_gone_when_closed() -> None:
    name = f"test-{os.getpid()}"
    with wire.listen(f"leto/{os.getuid()}/{name}", timeout=timedelta(seconds=1)):
        assert name in jobs.find_jobs()
    assert name not in jobs.find_jobs()


def test_the_job_is_the_only_one_or_named() -> None:
    assert jobs.choose_job(["abc"], None) == "abc"
    assert jobs.choose_job(["abc", "xyz"], "x") == "xyz"
    assert jobs.choose_job(["abc", "abcd"], "abc") == "abc"
    for running, wanted, message in (
        ([], None, "no job is running"),
        (["abc", "xyz"], None, "--job: abc, xyz"),
        (["abc", "abd"], "ab", "several jobs fit"),
        (["abc"], "q", "no job is called 'q'; running: abc"),
    ):
        with pytest.raises(jobs.JobNotFound, match=message):
            jobs.choose_job(running, wanted)


def test_a_job_that_has_just_ended_is_unreachable() -> None:
    with pytest.raises(jobs.JobUnreachable, match="has ended"):
        jobs.ask(f"gone-{os.getpid()}", {"op": "status"}, timeout=timedelta(seconds=1))


def test_a_job_that_does_not_answer_is_unreachable_after_the_timeout() -> None:
    name = f"silent-{os.getpid()}"
    with (
        wire.listen(f"leto/{os.getuid()}/{name}", timeout=timedelta(seconds=1)),
        pytest.raises(jobs.JobUnreachable, match=r"within 0\.1 s"),
    ):
        jobs.ask(name, {"op": "status"}, timeout=timedelta(seconds=0.1))


@pytest.mark.parametrize(
    ("answer", "message"),
    [(b"", "has ended"), (b"HTTP/1.1 400 Bad Request\r\n\r\n", "another protocol")],
)
def test_a_job_that_answers_nonsense_is_unreachable(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, message: str
) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(wire, "connect", lambda *_, **__: ours)
    with theirs:
        theirs.sendall(answer)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(jobs.JobUnreachable, match=message):
            jobs.ask("odd", {"op": "status"}, timeout=timedelta(seconds=1))
    assert ours.fileno() == -1, "the connection is closed whatever came"


def test_unexpected_descriptors_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(wire, "connect", lambda *_, **__: ours)
    with wire.FrameConnection(theirs) as supervisor:
        supervisor.queue({"ok": True}, [0])
        assert jobs.ask("generous", {"op": "status"}, timeout=timedelta(seconds=1)) == {"ok": True}
