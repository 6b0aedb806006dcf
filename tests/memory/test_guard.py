"""When the supervisor is gone, everything of the job is gone within a second, and nothing else is."""

import os
import signal
import subprocess
import sys
import time

import pytest

from memory.stand_in import eventually

SUPERVISOR = """
import os, socket, subprocess, sys, time
from datetime import timedelta
from leto_strategy.memory.mirror import CatalogueMirror

job, keeper_fd = sys.argv[1], int(sys.argv[2])
ours, theirs = socket.socketpair()
manager = subprocess.Popen(
    [sys.executable, "-I", "-m", "leto_strategy.memory.manager", "--control-fd", str(theirs.fileno())],
    pass_fds=[theirs.fileno()], start_new_session=True, env={**os.environ, "LETO_JOB": job})
theirs.close()
mirror = CatalogueMirror()
mirror.configure(ours, job=job, rank=0, address=f"leto-test/{job}", timeout=timedelta(seconds=5))

TREE = '''
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
grandchild = subprocess.Popen(["sleep", "60"], start_new_session=True, env={})
print(child.pid, grandchild.pid, flush=True)
if sys.argv[1] == "leave":
    sys.exit()
time.sleep(60)
'''
pids = [manager.pid]

def start(*arguments, **options):
    trainer = subprocess.Popen([sys.executable, "-c", TREE, *arguments], stdout=subprocess.PIPE, text=True, **options)
    below = trainer.stdout.readline().split()
    if arguments == ("leave",):
        trainer.wait()  # its session and its orphans live on
        pids.append(int(below[0]))
        return trainer.pid
    pids.extend(map(int, [trainer.pid, *below]))
    return trainer.pid

stays = start("stay", start_new_session=True)
left = start("leave", start_new_session=True)
start("stay", start_new_session=True, env={"LETO_JOB": job})  # not watched, known by its environment
mirror.watch([stays, left])
while mirror.manager_pid is None:
    mirror.process()
    time.sleep(0.005)
if keeper_fd:  # a process of another job that holds this end of the control socket, so that there is never an EOF
    keeper = subprocess.Popen(["sleep", "60"], pass_fds=[mirror.fileno()], start_new_session=True)
    print(keeper.pid, *pids, flush=True)
else:
    print(0, *pids, flush=True)
time.sleep(60)
"""


def running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("socket_stays_open", [False, True])
def test_the_supervisors_death_ends_the_whole_job_within_a_second(socket_stays_open: bool) -> None:
    job = f"guard{os.getpid()}{int(socket_stays_open)}"
    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True, env={"LETO_JOB": job + "x"})
    command = [sys.executable, "-c", SUPERVISOR, job, str(int(socket_stays_open))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        keeper, *pids = map(int, supervisor.stdout.readline().split())
        assert len(pids) == 8
        assert all(running(pid) for pid in pids)
        begin = time.monotonic()
        os.kill(supervisor.pid, signal.SIGKILL)
        try:
            assert eventually(lambda: not any(running(pid) for pid in pids)), [pid for pid in pids if running(pid)]
            assert time.monotonic() - begin < 1.0
            assert bystander.poll() is None
        finally:
            bystander.kill()
            bystander.wait()
            for pid in [keeper, *pids] if keeper else pids:
                if running(pid):
                    os.kill(pid, signal.SIGKILL)
