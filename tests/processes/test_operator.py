"""The operator's socket: status and injection, and what others may send there."""

import os
import socket

import pytest

from leto_strategy.processes.operator import operator_address
from tests.processes.harness import Job


def connect(job):
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("\0" + operator_address(job.spec.job))
    sock.settimeout(5)
    return sock


def test_status_tells_of_every_process(tmp_path):
    with Job(tmp_path, steps=20, hold=5) as job:
        job.event("shadow_ready")
        job.traced("forward", step=5, rank=0)
        status = job.ask(op="status")
        roles = sorted((p["role"], p["rank"]) for p in status["processes"] if p["role"] != "supervisor")
        assert roles == [(role, rank) for role in ("active", "manager", "shadow") for rank in (0, 1)]
        active = next(p for p in status["processes"] if (p["role"], p["rank"]) == ("active", 0))
        assert (active["step"], active["activity"], active["state"], active["generation"]) == (5, "step", "training", 0)
        assert active["phase"] == "DONE(4)"
        shadow = next(p for p in status["processes"] if (p["role"], p["rank"]) == ("shadow", 0))
        assert (shadow["state"], shadow["level"], shadow["step"]) == ("ready", "L3", None)
        assert all(os.path.exists(f"/proc/{p['pid']}") for p in status["processes"])
        assert (status["state"], status["world"], status["recoveries"]) == ("training", 2, [])
        assert status["root_dir"] == str(tmp_path)
        job.go()
        job.finished()


def test_inject_at_once(tmp_path):
    with Job(tmp_path, steps=20, hold=5) as job:
        job.event("shadow_ready")
        assert job.ask(op="inject", rank=1, fault="kill") == {"ok": True}
        record = job.event("recovered")
        assert record["rank"] == 1
        assert 0 < record["phases_ms"]["detect"] < 1000
        assert job.event("fault_injected")["pid"] == job.event("trainer_failed")["pid"]
        assert len(job.ask(op="status")["recoveries"]) == 1
        job.go()
        job.finished()


def test_inject_at_a_step_and_point(tmp_path):
    with Job(tmp_path, steps=20, hold=5) as job:
        job.event("shadow_ready")
        assert job.ask(op="inject", rank=0, fault="kill", at_step=7, point="ready") == {"ok": True}
        job.go()
        assert job.event("trainer_failed")["rank"] == 0
        job.finished()
        (record,) = job.end["recoveries"]
        assert record["mode"] in ("finish", "redo")  # whether the other rank was READY when it was killed
        assert record["phases_ms"]["detect"] > 0


def test_planned_faults_are_armed_once(tmp_path):
    faults = ({"rank": 1, "point": "synced", "step": 3}, {"rank": 0, "point": "forward", "step": 6})
    job = Job(tmp_path, steps=10)
    object.__setattr__(job.spec, "faults", faults)
    with job:
        job.finished()
        assert [record["rank"] for record in job.end["recoveries"]] == [1, 0]


def test_inject_a_hang_and_a_stop(tmp_path):
    with Job(tmp_path, steps=20, hold=5, hang_timeout=0.5) as job:
        job.event("entered")
        assert job.ask(op="inject", rank=0, fault="hang", at_step=8, point="forward")["ok"]
        assert job.ask(op="inject", rank=1, fault="stop")["ok"]
        job.go()
        job.finished()
        assert [record["cause"] for record in job.end["recoveries"]] == ["hang", "hang"]


@pytest.mark.parametrize("role", ["shadow", "manager"])
def test_inject_into_others(tmp_path, role):
    with Job(tmp_path, steps=20, hold=5) as job:
        job.event("shadow_ready")
        assert job.ask(op="inject", rank=0, fault="kill", role=role)["ok"]
        job.event(f"{role}_failed")
        job.go()
        job.finished()
        assert job.end["recoveries"] == []


def test_wrong_requests_are_answered_with_what_to_do(tmp_path):
    with Job(tmp_path, steps=20, hold=5) as job:
        job.event("entered")
        for request, part in [
            ({"rank": 9, "fault": "kill"}, "ranks 0 to 1"),
            ({"rank": 0, "fault": "explode", "point": "forward"}, "explode"),
            ({"rank": 0, "fault": "kill", "point": "nowhere"}, "--list-points"),
            ({"rank": 0, "fault": "kill", "role": "boss"}, "active"),
            ({"rank": 0, "fault": "hang", "role": "manager"}, "use one of"),
            ({"rank": 0, "fault": "kill", "role": "manager", "at_step": 3}, "no points"),
        ]:
            answer = job.ask(op="inject", **request)
            assert answer["ok"] is False
            assert part in answer["error"]
        job.go()
        job.finished()
        assert job.end["recoveries"] == []


def test_garbage_closes_that_connection_only(tmp_path, rng):
    with Job(tmp_path, steps=20, hold=5) as job:
        job.event("entered")
        header = b"Lt\0\0\0\0\0\0"
        for data in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\0" * 100,
            header + (1 << 31).to_bytes(4, "little"),
            header + (2).to_bytes(4, "little") + b"[]",
            header + (16).to_bytes(4, "little") + b'{"op": "launch"}',
            *(rng.randbytes(rng.randrange(12, 300)) for _ in range(50)),
        ):
            with connect(job) as sock:
                try:
                    sock.sendall(data)
                    sock.shutdown(socket.SHUT_WR)
                    assert sock.recv(100) == b""
                except (BrokenPipeError, ConnectionResetError):
                    pass
            job.pump(0)
        assert job.ask(op="status")["state"] == "training"
        job.go()
        job.finished()
        assert job.end["recoveries"] == []


def test_silent_connections_do_not_keep_others_out_for_long(tmp_path):
    with Job(tmp_path, steps=20, hold=5) as job:
        job.event("entered")
        socks = [connect(job) for _ in range(20)]
        for sock in socks:
            sock.close()
        assert job.ask(op="status")["state"] == "training"
        job.go()
        job.finished()


def test_another_user_is_refused(tmp_path):
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    with Job(tmp_path, steps=20, hold=5) as job:
        job.event("entered")
        pid = os.fork()
        if pid == 0:
            try:
                os.setresuid(12345, 12345, 12345)
                with connect_as(job) as sock:
                    body = b'{"op":"status"}'
                    try:
                        sock.sendall(b"Lt\0\0\0\0\0\0" + len(body).to_bytes(4, "little") + body)
                        os._exit(0 if sock.recv(100) == b"" else 1)
                    except (BrokenPipeError, ConnectionResetError):
                        os._exit(0)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        job.go()
        job.finished()


def connect_as(job):
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(f"\0leto/0/{job.spec.job}")
    sock.settimeout(5)
    return sock
