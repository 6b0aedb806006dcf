"""Operating-system primitives, with real processes."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

from leto_strategy import system
from leto_strategy.errors import ResourceError

SECONDS = timedelta(seconds=1)

# Prints the pid of a child in its session, and of one that left it.
TREE = """
import subprocess, sys, time
inside = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
outside = subprocess.Popen(["sleep", "60"], start_new_session=True)
print(inside.pid, outside.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def tree() -> Iterator[tuple[int, int, int]]:
    command = [sys.executable, "-c", TREE]
    environment = {**os.environ, "LETO_JOB": "abc"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment) as top:
        assert top.stdout is not None
        inside, outside = map(int, top.stdout.readline().split())
        try:
            yield top.pid, inside, outside
        finally:
            system.kill_processes([top.pid, inside, outside])


def test_sessions_children_and_descendants(tree: tuple[int, int, int]) -> None:
    top, inside, outside = tree
    assert sorted(system.session_members(top)) == sorted([top, inside])
    assert sorted(system.children_of(top)) == sorted([inside, outside])
    below = system.descendants(os.getpid())
    assert set(tree) <= set(below)
    assert below.index(top) < below.index(inside)
    assert system.descendants(outside) == []
    assert system.process_environ_has(inside, b"LETO_JOB=abc")
    assert not system.process_environ_has(inside, b"LETO_JOB=ab")
    assert not system.process_environ_has(2**22 + 5, b"LETO_JOB=abc")


def test_a_zombie_is_a_member_that_has_ended() -> None:
    child = subprocess.Popen(["true"], start_new_session=True)
    pidfd = system.open_pidfd(child.pid)
    assert pidfd is not None
    assert system.wait_pidfds([pidfd], timeout=5 * SECONDS) == []
    stat = system.process_stat(child.pid)
    assert stat is not None
    assert stat.ended
    assert system.session_members(child.pid) == [child.pid]
    assert system.session_members(child.pid, include_ended=False) == []
    assert system.pidfd_ended(pidfd)
    child.wait()
    assert system.session_members(child.pid) == []
    assert system.process_stat(child.pid) is None
    assert system.proc_start_time(child.pid) is None
    assert system.open_pidfd(child.pid) is None
    assert not system.signal_pidfd(pidfd, signal.SIGTERM)
    os.close(pidfd)


def test_a_name_with_parentheses_is_read_right() -> None:
    rename = "import ctypes, time; ctypes.CDLL(None).prctl(15, b') Z 1 ('); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", rename], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        stat = system.process_stat(child.pid)
        assert stat is not None
        assert (stat.parent, stat.session) == (os.getpid(), os.getsid(0))
        assert stat.state in "RSD"
        assert stat.start_time > 0
        child.kill()


def test_kill_ignores_those_that_are_gone_and_waiting_ends(tree: tuple[int, int, int]) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    pidfds = [system.open_pidfd(pid) for pid in tree]
    assert None not in pidfds
    begin = time.monotonic()
    assert system.wait_pidfds(pidfds, timeout=0.05 * SECONDS) == sorted(pidfds)  # type: ignore[arg-type, type-var]
    assert time.monotonic() - begin < 1
    assert system.kill_processes([gone.pid, *tree]) == list(tree)
    assert system.wait_pidfds(pidfds, timeout=5 * SECONDS) == []  # type: ignore[arg-type]
    for pidfd in pidfds:
        os.close(pidfd)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        system.kill_processes([0])


PARENT = """
import os, signal, sys, time
from leto_strategy import system
middle = os.getpid()
if os.fork() == 0:
    system.set_parent_death_signal(signal.SIGKILL, expected_parent=middle)
    print(os.getpid(), flush=True)
    time.sleep(60)
time.sleep(60)
"""


def test_a_child_dies_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pidfd = system.open_pidfd(int(parent.stdout.readline()))
        assert pidfd is not None
        parent.kill()
        assert system.wait_pidfds([pidfd], timeout=5 * SECONDS) == []
        os.close(pidfd)


def test_a_parent_that_is_gone_already_is_noticed() -> None:
    with pytest.raises(ProcessLookupError, match="ended before"):
        system.set_parent_death_signal(0, expected_parent=os.getpid())
    system.set_parent_death_signal(0, expected_parent=os.getppid())
    assert system.parent_is(os.getppid())
    with pytest.raises(OSError, match="prctl"):
        system.set_parent_death_signal(1000)


SUBREAPER = """
import os, subprocess, sys
from leto_strategy import system
system.become_subreaper()
orphan = "import os; print(os.getpid(), flush=True) if os.fork() == 0 else os._exit(0)"
read = subprocess.run([sys.executable, "-c", orphan], stdout=subprocess.PIPE, text=True)
pid = int(read.stdout)
assert os.waitpid(pid, 0)[0] == pid
"""


def test_a_subreaper_can_wait_for_orphans() -> None:
    assert subprocess.run([sys.executable, "-c", SUBREAPER], timeout=30).returncode == 0


def test_a_tracer_shows() -> None:
    script = "import ctypes, time; ctypes.CDLL(None).ptrace(0, 0, 0, 0); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert system.tracer_pid(child.pid) == os.getpid()
        assert system.tracer_pid(os.getpid()) == 0
        child.kill()
    assert system.tracer_pid(2**22 + 5) == 0


def test_peer_credentials_are_the_kernels() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert system.peer_credentials(ours) == (os.getpid(), os.geteuid(), os.getegid())


LIMITED = """
import os, resource
from leto_strategy import errors, system
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
assert system.raise_file_limit(50) == 60
assert system.raise_file_limit(100) == 100
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (100, 120)
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)
try:
    system.raise_file_limit(500)
except errors.ResourceError as error:
    assert "ulimit -Hn 500" in str(error) and "`ulimit -n`" in str(error) and "120" in str(error), error
else:
    raise SystemExit(1)
"""


def test_the_file_limit_is_raised_or_the_error_says_how() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, 120))

    assert subprocess.run([sys.executable, "-c", LIMITED], preexec_fn=limit, timeout=30).returncode == 0
    assert issubclass(ResourceError, OSError)


def test_a_process_that_exits_is_seen_until_it_is_reaped() -> None:
    process = subprocess.Popen(["sleep", "60"])
    assert not system.is_exiting(process.pid)
    process.kill()
    deadline = time.monotonic() + 5
    while not system.is_exiting(process.pid):
        assert time.monotonic() < deadline
    process.wait()
    assert not system.is_exiting(process.pid)
