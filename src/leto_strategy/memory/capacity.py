"""How much host memory this process may still take: MemAvailable, or what a cgroup leaves where that is less."""

from pathlib import Path

_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


def available_host_bytes(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, str]:
    """Bytes that can still be taken without swapping or the OOM killer, and the name of what limits them.

    Args:
        proc: where procfs is; tests pass another.
        cgroup: where the cgroup file systems are mounted.
    """
    candidates = [_unlimited_bytes(proc), *_of_cgroup_v2(proc, cgroup), *_of_cgroup_v1(proc, cgroup)]
    return min(candidates)


def _unlimited_bytes(proc: Path) -> tuple[int, str]:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024, "MemAvailable of /proc/meminfo"
    return _UNLIMITED_BYTES, "nothing known"


def _of_cgroup_v2(proc: Path, cgroup: Path) -> list[tuple[int, str]]:
    found = []
    for folder in _folders(_path_of(proc, controller=""), cgroup):
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None and used is not None:
            reclaimable = _statistic(folder, "inactive_file")
            found.append((max(0, limit - used + reclaimable), f"the limit in {folder / 'memory.max'}"))
    return found


def _of_cgroup_v1(proc: Path, cgroup: Path) -> list[tuple[int, str]]:
    found = []
    for folder in _folders(_path_of(proc, controller="memory"), cgroup / "memory"):
        limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            reclaimable = _statistic(folder, "total_inactive_file")
            found.append((max(0, limit - used + reclaimable), f"the limit in {folder / 'memory.limit_in_bytes'}"))
    return found


def _path_of(proc: Path, *, controller: str) -> str | None:
    """This process's cgroup in the hierarchy of `controller` ("" is version 2)."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return None


def _folders(path: str | None, root: Path) -> list[Path]:
    """The cgroup's folder and all above it, since each of them limits. In a container the path may lie outside of
    what is mounted; its own cgroup is the mount's root then.
    """
    if path is None:
        return []
    folder = root / path.lstrip("/")
    if ".." in folder.parts or not folder.is_dir():
        folder = root
    return [folder, *(parent for parent in folder.parents if parent == root or root in parent.parents)]


def _number(path: Path) -> int | None:
    """The limit or usage in a file; None where there is none ("max", a huge number, no such file)."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    if not text.isdecimal() or int(text) >= _UNLIMITED_BYTES:
        return None
    return int(text)


def _statistic(folder: Path, name: str) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name + " ")), 0)
