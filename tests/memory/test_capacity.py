"""What may still be taken: the machine's number, or a cgroup's where it is lower."""

from pathlib import Path

import pytest

from leto_strategy.memory.capacity import available_host_bytes

MIB = 1 << 20


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroup.mkdir()
    (proc / "meminfo").write_text("MemTotal: 9999999 kB\nMemAvailable:   1024000 kB\n")
    return proc, cgroup


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_without_a_limit_it_is_what_the_machine_has(roots: tuple[Path, Path]) -> None:
    proc, cgroup = roots
    (proc / "self" / "cgroup").write_text("0::/a\n")
    write(cgroup / "a", memory__max="max", memory__current=5)
    assert available_host_bytes(proc=proc, cgroup=cgroup) == (1000 * MIB, "MemAvailable of /proc/meminfo")


def test_the_lowest_limit_on_the_way_to_the_root_counts(roots: tuple[Path, Path]) -> None:
    proc, cgroup = roots
    (proc / "self" / "cgroup").write_text("0::/a/b\n")
    write(cgroup / "a", memory__max=300 * MIB, memory__current=250 * MIB, memory__stat=f"inactive_file {20 * MIB}")
    write(cgroup / "a/b", memory__max=200 * MIB, memory__current=100 * MIB)
    size_bytes, limit = available_host_bytes(proc=proc, cgroup=cgroup)
    assert size_bytes == 70 * MIB
    assert limit.endswith("a/memory.max")


def test_version_1_counts_too(roots: tuple[Path, Path]) -> None:
    proc, cgroup = roots
    (proc / "self" / "cgroup").write_text("9:name=systemd:/\n4:cpu,memory:/x/y\n0::/\n")
    folder = cgroup / "memory" / "x" / "y"
    write(folder, memory__limit_in_bytes=90 * MIB, memory__usage_in_bytes=95 * MIB)
    write(cgroup / "memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=5)
    assert available_host_bytes(proc=proc, cgroup=cgroup) == (0, f"the limit in {folder / 'memory.limit_in_bytes'}")


@pytest.mark.parametrize("path", ["/elsewhere", "/../x", "/"])
def test_in_a_container_the_mount_is_its_own_cgroup(roots: tuple[Path, Path], path: str) -> None:
    proc, cgroup = roots
    (proc / "self" / "cgroup").write_text(f"0::{path}\n")
    write(cgroup, memory__max=60 * MIB, memory__current=10 * MIB)
    assert available_host_bytes(proc=proc, cgroup=cgroup)[0] == 50 * MIB


def test_here_it_is_a_number_with_a_name() -> None:
    size_bytes, limit = available_host_bytes()
    assert size_bytes > 0
    assert limit
