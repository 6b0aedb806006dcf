"""Checks of what the kernel, or a container's sandbox, lets a process do."""

import os
import socket
from pathlib import Path

from leto_strategy.cli.doctor.finding import Finding


def check_memfd() -> Finding:
    """Retained memory lives in memfds."""
    try:
        os.close(os.memfd_create("leto-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError as error:
        return Finding("memfd_create", "fail", str(error), "allow memfd_create in the container's seccomp profile")
    return Finding("memfd_create", "ok", "works")


def check_pidfd() -> Finding:
    """A failure ends when all pidfds of a generation are readable."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        remedy = "use Linux 5.3 or newer, and allow pidfd_open in the container's seccomp profile"
        return Finding("pidfd_open", "fail", str(error), remedy)
    return Finding("pidfd_open", "ok", "works")


def check_sockets() -> Finding:
    """Abstract sockets that this process can find again in /proc/net/unix, as `leto status` does."""
    name = f"leto/{os.getuid()}/doctor-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0" + name)
        server.listen(1)
        try:
            visible = f"@{name}" in Path("/proc/net/unix").read_text().split()
        except OSError:
            visible = False
    if not visible:
        return Finding(
            "abstract sockets",
            "warn",
            f"uid {os.getuid()} does not see its own socket in /proc/net/unix: `leto status` will find no job",
            "mount /proc in this network namespace (a sandbox such as gVisor hides it)",
        )
    return Finding("abstract sockets", "ok", f"visible to uid {os.getuid()}")


def check_processes() -> Finding:
    """A failure is over when all processes of a trainer are gone; they are found through /proc."""
    try:
        Path(f"/proc/{os.getpid()}/environ").read_bytes()
    except OSError as error:
        return Finding("/proc", "fail", str(error), "mount /proc in this PID namespace")
    return Finding("/proc", "ok", "own processes are visible")


def check_loopback() -> Finding:
    """Trainers of one machine meet on 127.0.0.1."""
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
    except OSError as error:
        return Finding("loopback", "fail", str(error), "bring up the interface lo (ip link set lo up)")
    return Finding("loopback", "ok", "127.0.0.1 can be bound")
