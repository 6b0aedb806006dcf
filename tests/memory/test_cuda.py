"""Device memory, on a stand-in for NVIDIA's driver (`driver/libcuda.c`); `tests/gpu` has what needs the real one."""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leto_strategy.errors import ResourceError
from leto_strategy.memory import libcuda
from leto_strategy.memory.backend import Kind, Place, RegionSpec
from leto_strategy.memory.cuda import GRANULARITY_BYTES, CudaBackend, handle_sizes
from leto_strategy.memory.places import device_of, trainer_backends
from memory.stand_in import Rank, open_fds

MIB = 1 << 20

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the stand-in under the driver's name."""
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("driver") / "libcuda.c"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", source, "-o", folder / libcuda.LIBRARY],
        check=True,
    )
    return folder


@pytest.fixture
def driver(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libcuda, "LIBRARY", str(folder / "libcuda.so.1"))


@pytest.fixture
def gpu_rank(folder: Path, driver: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    """One rank on a device whose state manager is a process."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    rank = Rank(device=device_of("cuda:0", handle_bytes=4 * MIB)).start()
    yield rank
    rank.close()


@given(pages=st.integers(1, 1000), handles=st.integers(1, 1000))
def test_handles_cover_a_segment_and_none_is_larger_than_asked(pages: int, handles: int) -> None:
    size_bytes = pages * GRANULARITY_BYTES
    num_handles = -(-size_bytes // (handles * GRANULARITY_BYTES))
    sizes = handle_sizes(size_bytes, num_handles)
    assert sum(sizes) == size_bytes
    assert 0 < min(sizes) <= max(sizes) <= handles * GRANULARITY_BYTES
    assert all(size % GRANULARITY_BYTES == 0 for size in sizes)


def test_protected_memory_comes_in_handles_and_all_other_in_one(driver: None) -> None:
    backend = CudaBackend(0, handle_bytes=4 * MIB)
    protected = backend.create(10 * MIB, label="x", protected=True)
    other = backend.create(10 * MIB, label="x", protected=False)
    assert (len(protected), len(other)) == (3, 1)
    address = backend.map(protected, 10 * MIB, address_hint=0x2345_0000_0000, writable=True)
    assert address == 0x2345_0000_0000
    for fd in (*protected, *other):
        assert os.fstat(fd).st_size in (4 * MIB, 2 * MIB, 10 * MIB)
    ctypes.memset(address, 7, 10 * MIB)
    again = backend.map(protected, 10 * MIB, address_hint=address, writable=False)
    assert again != address
    assert ctypes.string_at(again, 10 * MIB) == b"\7" * (10 * MIB)
    for fd in (*protected, *other):
        os.close(fd)
    for mapped in (address, again):
        backend.unmap(mapped, 10 * MIB)


def test_a_mapping_that_fails_half_way_leaves_no_address_and_no_descriptor(driver: None) -> None:
    backend = CudaBackend(0, handle_bytes=4 * MIB)
    fds = backend.create(8 * MIB, label="x", protected=True)
    before = len(os.listdir("/proc/self/fd"))
    wrong = backend.create(2 * MIB, label="x", protected=False)
    with pytest.raises(ResourceError, match="cuMemMap"):
        backend.map([fds[0], wrong[0]], 8 * MIB, address_hint=0x2345_0000_0000, writable=True)
    os.close(wrong[0])
    assert len(os.listdir("/proc/self/fd")) == before
    assert backend.map(fds, 8 * MIB, address_hint=0x2345_0000_0000, writable=True) == 0x2345_0000_0000
    backend.unmap(0x2345_0000_0000, 8 * MIB)
    for fd in fds:
        os.close(fd)


def test_memory_that_is_not_there_is_an_error_that_says_what_to_do(driver: None) -> None:
    backend = CudaBackend(0, handle_bytes=1 << 42)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ResourceError, match=r"CUDA_ERROR_OUT_OF_MEMORY.*smaller model") as caught:
        backend.create(1 << 41, label="x", protected=True)
    assert caught.value.errno == 12
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ResourceError, match="cuDeviceGet"):
        CudaBackend(2, handle_bytes=2 * MIB)


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libcuda, "LIBRARY", "libcuda-that-is-not-there.so.1")
    with pytest.raises(ResourceError, match="leto doctor"):
        CudaBackend(0, handle_bytes=2 * MIB)


def test_state_lies_on_the_device_and_words_and_records_on_the_host(gpu_rank: Rank) -> None:
    pool = gpu_rank.pool()
    kinds = {"w": Kind.PROTECTED, "g": Kind.RETAINED, "r": Kind.RECORD}
    regions = {name: pool.allocate([RegionSpec(name, 9 * MIB, kind, arena=name)])[0] for name, kind in kinds.items()}
    catalogue = gpu_rank.mirror._holdings.catalogue
    segments = {name: catalogue.segments[region.segment] for name, region in regions.items()}
    assert {name: (s.place, s.num_handles) for name, s in segments.items()} == {
        "w": (Place.DEVICE, 3),
        "g": (Place.DEVICE, 1),
        "r": (Place.HOST, 1),
    }
    assert pool.on_device
    gpu_rank.mirror.buffer("r")[:4] = b"leto"
    assert bytes(pool.buffer(regions["r"])[:4]) == b"leto"


def test_another_trainer_and_a_new_manager_find_the_same_bytes(gpu_rank: Rank) -> None:
    spec = RegionSpec("w", 9 * MIB, Kind.PROTECTED)
    pool = gpu_rank.pool()
    (region,) = pool.allocate([spec])
    ctypes.memset(pool.address(region), 5, 9 * MIB)
    gpu_rank.kill_manager()
    other = gpu_rank.pool(writable=False)
    (found,) = other.allocate([spec])
    assert not found.created
    assert ctypes.string_at(other.address(found), 9 * MIB) == b"\5" * (9 * MIB)
    other.make_writable()
    ctypes.memset(other.address(found), 6, 4)
    assert ctypes.string_at(pool.address(region), 5) == b"\6\6\6\6\5"


def test_a_write_ahead_of_the_promotion_faults(gpu_rank: Rank, folder: Path) -> None:
    gpu_rank.pool().allocate([RegionSpec("w", 4096, Kind.PROTECTED)])
    code = f"""
import ctypes
from datetime import timedelta
from leto_strategy.memory.pool import ResilientMemoryPool
pool = ResilientMemoryPool.connect({gpu_rank.address!r}, timeout=timedelta(seconds=5), writable=False)
address = pool.address(pool.attach("w"))
assert ctypes.string_at(address, 1) == b"\\0"
ctypes.memset(address, 1, 1)
"""
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "LD_LIBRARY_PATH": str(folder)}, check=False)
    assert done.returncode == -11


def test_a_freed_region_gives_all_of_it_back(gpu_rank: Rank) -> None:
    pool = gpu_rank.pool()
    assert gpu_rank.process is not None
    before, mapped = open_fds(gpu_rank.process.pid), device_mappings()
    pool.allocate([RegionSpec("w", 9 * MIB, Kind.PROTECTED), RegionSpec("r", 9 * MIB, Kind.RECORD)])
    assert device_mappings() != mapped
    assert len(open_fds(gpu_rank.process.pid)) == len(before) + 4
    pool.free("w")
    pool.free("r")
    assert open_fds(gpu_rank.process.pid) == before
    assert device_mappings() == mapped


def device_mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "device memory" in line]


def test_a_trainer_gets_registered_host_memory(driver: None) -> None:
    backends = trainer_backends(device_of("cuda:1"))
    host = backends[Place.HOST]
    fds = host.create(4 * MIB, label="x", protected=False)
    address = host.map(fds, 4 * MIB, address_hint=0, writable=False)
    assert host.committed_bytes(fds, 4 * MIB) == 4 * MIB, "registered pages are taken"
    cuda = backends[Place.DEVICE]
    assert isinstance(cuda, CudaBackend)
    cuda.driver.write_in_stream(0, address + 8, 1 << 60)
    assert ctypes.c_uint64.from_address(address + 8).value == 1 << 60
    host.unmap(address, 4 * MIB)
    os.close(fds[0])
