"""`leto doctor`: can this machine run Leto, and what to do where it can't.

Each check looks at one thing and returns a `Finding`; nothing here changes the machine or loads torch.
"""

import json
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.table import Table

Level = Literal["ok", "warn", "fail"]

PIPE_WIDTH = 200
GIB = 2**30
MIB = 2**20

OLDEST = {"torch": (2, 11), "lightning": (2, 6), "pytorch-lightning": (2, 6)}
NUM_FILES_WANTED = 4096
SHARED_MEMORY_BYTES_WANTED = 512 * MIB
MEMORY_BYTES_WANTED = 2 * GIB


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Args:
        name: What was looked at.
        level: "ok"; "warn": Leto runs, with the limits that `found` tells; "fail": Leto can't run.
        found: What is there.
        remedy: What to do; empty where there is nothing to do.
    """

    name: str
    level: Level
    found: str
    remedy: str = ""


def run(*, as_json: bool) -> int:
    """Run all checks and print them; returns 1 if one failed."""
    findings = examine()
    failed = any(finding.level == "fail" for finding in findings)
    if as_json:
        print(json.dumps({"ok": not failed, "checks": [asdict(finding) for finding in findings]}))
    else:
        from rich.console import Console

        console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
        console.print(render(findings))
        console.print(summary(findings))
    return int(failed)


def examine() -> list[Finding]:
    """All findings, in the order in which a reader wants them. A check that breaks is a finding, not a traceback."""
    findings = []
    for check in CHECKS:
        try:
            findings.append(check())
        except Exception as error:
            name = check.__name__.removeprefix("check_").replace("_", " ")
            findings.append(Finding(name, "warn", f"could not be checked: {type(error).__name__}: {error}"))
    return findings


def render(findings: list[Finding]) -> "Table":
    """The findings as a table."""
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("check", no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in findings:
        found = Text(finding.found)
        if finding.remedy and finding.level != "ok":
            found.append(f"\n→ {finding.remedy}", style=styles[finding.level])
        table.add_row(Text(finding.level, style=styles[finding.level]), finding.name, found)
    return table


def summary(findings: list[Finding]) -> str:
    """One closing sentence."""
    failed = sum(finding.level == "fail" for finding in findings)
    warned = sum(finding.level == "warn" for finding in findings)
    if failed:
        return f"{failed} of {len(findings)} checks failed: Leto can't run here before they are put right."
    if warned:
        return f"Leto runs here; {warned} of {len(findings)} checks have something to say."
    return f"Leto runs here: all {len(findings)} checks are fine."


# Software


def check_system() -> Finding:
    """Linux on 64 bit, because of memfd, pidfd and /proc."""
    found = f"{platform.system()} {platform.release()} {platform.machine()}"
    if not sys.platform.startswith("linux") or sys.maxsize < 2**32:
        return Finding("system", "fail", found, "Leto needs 64-bit Linux")
    return Finding("system", "ok", found)


def check_python() -> Finding:
    """Which Python this is; one that is too old does not get here."""
    found = f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})"
    return Finding("python", "ok", found)


def check_torch() -> Finding:
    """A torch that is new enough."""
    return _distribution("torch", _installed("torch"))


def check_lightning() -> Finding:
    """Either of the two distributions of Lightning."""
    versions = {name: version for name in ("lightning", "pytorch-lightning") if (version := _installed(name))}
    if not versions:
        return Finding("lightning", "fail", "not installed", "pip install 'lightning>=2.6'")
    findings = [_distribution(name, version) for name, version in versions.items()]
    worst = max(findings, key=lambda finding: ("ok", "warn", "fail").index(finding.level))
    return Finding("lightning", worst.level, ", ".join(f.found for f in findings), worst.remedy)


def check_entry_point() -> Finding:
    """The entry point through which torch makes the name "leto" known."""
    points = [point for point in metadata.entry_points(group="torch.backends") if point.name == "leto"]
    if not points:
        return Finding(
            "entry point",
            "fail",
            'the installed packages have none: strategy="leto" is unknown unless leto_strategy is imported',
            "install the package (pip install leto-strategy, or pip install -e . in a checkout)",
        )
    return Finding("entry point", "ok", f"torch.backends: leto = {points[0].value}")


def check_autoload() -> Finding:
    """`TORCH_DEVICE_BACKEND_AUTOLOAD=0` switches that entry point off."""
    return autoload_finding(os.environ)


def autoload_finding(environment: Mapping[str, str]) -> Finding:
    """Pure part of `check_autoload`."""
    value = environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    if value == "1":
        return Finding("autoload", "ok", "torch loads the entry points of torch.backends")
    return Finding(
        "autoload",
        "warn",
        f'TORCH_DEVICE_BACKEND_AUTOLOAD={value}: torch ignores the entry point, the name "leto" is not registered',
        "unset the variable, or write `import leto_strategy` in the script",
    )


def check_compiler() -> Finding:
    """A C++ compiler, which only CUDA will need."""
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    return Finding("compiler", "ok", compiler or "none; training on CPU needs none")


# Kernel


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


# Resources


def check_files() -> Finding:
    """Leto raises the soft limit by itself, as far as the hard one lets it."""
    return files_finding(*resource.getrlimit(resource.RLIMIT_NOFILE))


def files_finding(soft: int, hard: int) -> Finding:
    """Pure part of `check_files`; `resource.RLIM_INFINITY` is -1."""
    found = f"RLIMIT_NOFILE {_limit(soft)} (soft), {_limit(hard)} (hard)"
    if hard != resource.RLIM_INFINITY and hard < NUM_FILES_WANTED:
        remedy = f"raise the hard limit to {NUM_FILES_WANTED} or more (ulimit -Hn, limits.conf, docker --ulimit nofile)"
        return Finding("open files", "warn", found, remedy)
    return Finding("open files", "ok", found)


def check_memory() -> Finding:
    """What this process may still use: of the machine and of its control group."""
    limit, used = _control_group_memory()
    return memory_finding(_meminfo("MemAvailable"), limit=limit, used=used)


def memory_finding(available: int, *, limit: int | None, used: int) -> Finding:
    """Pure part of `check_memory`; all in bytes, `limit` None where the control group has none."""
    found = f"{_gib(available)} available"
    free = available
    if limit is not None:
        free = min(available, limit - used)
        found += f"; control group: {_gib(limit - used)} left of {_gib(limit)}"
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
    found = f"{_gib(free)} free of {_gib(size)}"
    if free < SHARED_MEMORY_BYTES_WANTED:
        remedy = "DataLoader workers may die of SIGBUS: docker run --shm-size=2g, or free what lies in /dev/shm"
        return Finding("/dev/shm", "warn", found, remedy)
    return Finding("/dev/shm", "ok", found)


def check_huge_pages() -> Finding:
    """For information: huge pages make registered host memory faster to give back, on a GPU."""
    mode = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    chosen = mode.read_text().partition("[")[2].partition("]")[0] if mode.exists() else "unknown"
    return Finding(
        "huge pages", "ok", f"hugetlb {_meminfo('HugePages_Total')} pages, shmem THP {chosen}; not used on CPU"
    )


def check_gpu() -> Finding:
    """GPUs are seen, not used yet."""
    return gpu_finding(len(list(Path("/dev").glob("nvidia[0-9]*"))))


def gpu_finding(num_gpus: int) -> Finding:
    """Pure part of `check_gpu`."""
    if num_gpus == 0:
        return Finding("gpu", "ok", "no NVIDIA GPU; this release trains on CPU")
    return Finding(
        "gpu",
        "warn",
        f"{num_gpus} NVIDIA GPU{'s' if num_gpus > 1 else ''}: CUDA comes with a later release",
        'use Trainer(accelerator="cpu", strategy="leto") for now',
    )


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_system,
    check_python,
    check_torch,
    check_lightning,
    check_entry_point,
    check_autoload,
    check_memfd,
    check_pidfd,
    check_sockets,
    check_processes,
    check_loopback,
    check_files,
    check_memory,
    check_shared_memory,
    check_huge_pages,
    check_compiler,
    check_gpu,
)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _distribution(name: str, version: str | None) -> Finding:
    wanted = ".".join(map(str, OLDEST[name]))
    if version is None:
        return Finding(name, "fail", "not installed", f"pip install '{name}>={wanted}'")
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < OLDEST[name]:
        return Finding(name, "fail", f"{name} {version}", f"pip install '{name}>={wanted}'")
    return Finding(name, "ok", f"{name} {version}")


def _meminfo(field: str) -> int:
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


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
