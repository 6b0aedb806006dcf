"""Checks of limits and memory."""

import os
import resource
from pathlib import Path

from leto_strategy.cli.doctor.finding import GIB, Finding, gib

MIB = 2**20
NUM_FILES_WANTED = 4096
SHARED_MEMORY_BYTES_WANTED = 512 * MIB
MEMORY_BYTES_WANTED = 2 * GIB


def check_files() -> Finding:
    """Leto raises the soft limit by itself, as far as the hard one lets it."""
    return files_finding(*resource.getrlimit(resource.RLIMIT_NOFILE))


def files_finding(soft: int, hard: int) -> Finding:
    """Pure part of `check_files`; `resource.RLIM_INFINITY` is -1."""
    found = f"RLIMIT_NOFILE {limit_text(soft)} (soft), {limit_text(hard)} (hard)"
    if hard != resource.RLIM_INFINITY and hard < NUM_FILES_WANTED:
        remedy = f"raise the hard limit to {NUM_FILES_WANTED} or more (ulimit -Hn, limits.conf, docker --ulimit nofile)"
        return Finding("open files", "warn", found, remedy)
    return Finding("open files", "ok", found)


def check_memory() -> Finding:
    """What this process may still use: of the machine and of its control group."""
    limit, used = _control_group_memory()
    return memory_finding(meminfo("MemAvailable"), limit=limit, used=used)


def memory_finding(available: int, *, limit: int | None, used: int) -> Finding:
    """Pure part of `check_memory`; all in bytes, `limit` None where the control group has none."""
    found = f"{gib(available)} available"
    free = available
    if limit is not None:
        free = min(available, limit - used)
        found += f"; control group: {gib(limit - used)} left of {gib(limit)}"
    if free < MEMORY_BYTES_WANTED:
        remedy = "every rank has an active trainer and a shadow: free memory, raise the limit, or use shadows=0"
        return Finding("memory", "warn", found, remedy)
    return Finding("memory", "ok", found)


def check_shared_memory() -> Finding:
    """DataLoader workers pass batches through /dev/shm; retained memory does not count there."""
    try:
        place = os.statvfs("/dev/shm")
    except OSError as error:
        return Finding("/dev/shm", "warn", str(error), "mount a tmpfs on /dev/shm: DataLoader workers need it")
    return shared_memory_finding(size=place.f_frsize * place.f_blocks, free=place.f_frsize * place.f_bavail)


def shared_memory_finding(*, size: int, free: int) -> Finding:
    """Pure part of `check_shared_memory`; both in bytes."""
    found = f"{gib(free)} free of {gib(size)}"
    if free < SHARED_MEMORY_BYTES_WANTED:
        remedy = "DataLoader workers may die of SIGBUS: docker run --shm-size=2g, or free what lies in /dev/shm"
        return Finding("/dev/shm", "warn", found, remedy)
    return Finding("/dev/shm", "ok", found)


def meminfo(field: str) -> int:
    """A field of /proc/meminfo, in bytes where it has the unit kB, else as a number."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            number, *unit = value.split()
            return int(number) * (1024 if unit == ["kB"] else 1)
    raise KeyError(field)


def _control_group_memory() -> tuple[int | None, int]:
    """Tightest memory limit of the control groups around this process and what is used of it, in bytes."""
    tightest: tuple[int | None, int] = (None, 0)
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit_file, used_file = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            limit_file, used_file = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        for place in (group, *group.parents):
            if not place.is_relative_to(root):
                break
            try:
                limit, used = (place / limit_file).read_text().strip(), int((place / used_file).read_text())
            except (OSError, ValueError):
                continue
            # Version 1 writes "no limit" as a number near 2**63.
            if limit.isdigit() and int(limit) < 2**60:
                left = int(limit) - used
                if tightest[0] is None or left < tightest[0] - tightest[1]:
                    tightest = (int(limit), used)
    return tightest


def limit_text(value: int) -> str:
    """A limit for people."""
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
