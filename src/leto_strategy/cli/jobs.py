"""Finds the running jobs of this user and talks to their supervisors.

A supervisor listens on the abstract socket `leto/<uid>/<job>`; the kernel lists such sockets in /proc/net/unix, so
there is no registry that a killed job could leave stale.
"""

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

from leto_strategy.errors import LetoError, ProtocolError
from leto_strategy.memory import wire

SOCKETS = Path("/proc/net/unix")
_ACCEPTS_CONNECTIONS = 0x10000  # __SO_ACCEPTCON: the listening socket, not one of its connections
_NAME = re.compile(r"@leto/(\d+)/([A-Za-z0-9_.-]+)")


class JobNotFound(LetoError):
    """No running job fits what was asked for; the message says which run."""


class JobUnreachable(LetoError):
    """A supervisor did not answer, or answered with an error."""


def find_jobs(table: str | None = None, *, uid: int | None = None) -> list[str]:
    """Names of the running jobs of a user, sorted.

    Args:
        table: Content of /proc/net/unix; None: read it now.
        uid: The user; None: the one of this process.
    """
    text = SOCKETS.read_text() if table is None else table
    owner = os.getuid() if uid is None else uid
    jobs = set()
    for line in text.splitlines()[1:]:
        fields = line.split(maxsplit=7)  # Num RefCount Protocol Flags Type St Inode Path
        if len(fields) < 8 or not int(fields[3], 16) & _ACCEPTS_CONNECTIONS:
            continue
        name = _NAME.fullmatch(fields[7])
        if name and int(name[1]) == owner:
            jobs.add(name[2])
    return sorted(jobs)


def choose_job(jobs: list[str], wanted: str | None) -> str:
    """The one job that is meant.

    Args:
        jobs: The running jobs.
        wanted: Name or a beginning of it; None: there must be just one.

    Raises:
        JobNotFound: none fits, or several do.
    """
    if not jobs:
        raise JobNotFound('no job is running; start one with Trainer(strategy="leto")')
    fitting = [job for job in jobs if job.startswith(wanted or "")]
    if wanted in fitting:
        return str(wanted)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise JobNotFound(f"several jobs fit, say which with --job: {', '.join(fitting)}")
    raise JobNotFound(f"no job is called {wanted!r}; running: {', '.join(jobs)}")


def ask(job: str, message: dict[str, Any], *, timeout: timedelta) -> dict[str, Any]:
    """Send one request to a job's supervisor and return its answer.

    Args:
        job: Full name of the job.
        message: The request.
        timeout: Limit of the connection, of sending and of the answer, each.

    Raises:
        JobUnreachable: it has just ended, does not answer in time, or speaks another version of the protocol.
    """
    try:
        sock = wire.connect(f"leto/{os.getuid()}/{job}", timeout=timedelta(0))
        with wire.FrameConnection(sock) as connection:
            connection.send(message, timeout=timeout)
            frame = connection.receive_one(timeout=timeout)
    except TimeoutError:
        seconds = timeout.total_seconds()
        raise JobUnreachable(f"job {job} did not answer within {seconds:g} s; is its supervisor stopped?") from None
    except (EOFError, OSError) as error:
        raise JobUnreachable(f"job {job} has ended or refuses connections ({error})") from error
    except ProtocolError as error:
        raise JobUnreachable(f"job {job} answers in another protocol ({error}); is it of another version?") from error
    for fd in frame.fds:  # none are expected
        os.close(fd)
    return frame.message
