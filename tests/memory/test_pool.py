"""Allocation by name, placement, read-only until promotion, nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest

from leto_strategy.errors import AllocationMismatchError, PoolError, ResourceError
from leto_strategy.memory.backend import Kind, Region, RegionSpec
from leto_strategy.memory.pool import ResilientMemoryPool
from memory.stand_in import Rank, eventually, open_fds

MIB = 1 << 20


def spec(name: str, size_bytes: int = 4096, kind: Kind = Kind.PROTECTED, **options: object) -> RegionSpec:
    return RegionSpec(name, size_bytes, kind, **options)  # type: ignore[arg-type]


def test_an_arena_lies_back_to_back_in_order_and_aligned(rank: Rank) -> None:
    pool = rank.pool()
    sizes = [4, 1000, 0, 512, 1]
    specs = [spec(f"r{i}", size, arena="a") for i, size in enumerate(sizes)]
    other = spec("other", 5)
    regions = pool.allocate([specs[0], other, *specs[1:]])
    arena = [regions[0], *regions[2:]]
    assert len({region.segment for region in arena}) == 1
    assert regions[1].segment != arena[0].segment
    assert [region.offset_bytes for region in arena] == [0, 512, 1536, 1536, 2048]
    assert all(pool.address(region) % 512 == 0 for region in regions)
    assert [len(pool.buffer(region)) for region in arena] == sizes


def test_new_memory_is_zeroed_and_allocation_is_idempotent_by_name_and_shard(rank: Rank) -> None:
    pool = rank.pool()
    (first,) = pool.allocate([spec("w")])
    assert first.created
    assert bytes(pool.buffer(first)) == bytes(4096)
    pool.buffer(first)[:3] = b"abc"
    again, shard = pool.allocate([spec("w"), spec("w", shard="1/2")])
    assert again == Region(first.spec, first.segment, first.offset_bytes, created=False)
    assert shard.created
    assert bytes(pool.buffer(again)[:4]) == b"abc\0"
    other = rank.pool()
    assert bytes(other.buffer(other.attach("w"))[:4]) == b"abc\0"
    assert other.attach("w", shard="1/2").spec.shard == "1/2"


@pytest.mark.parametrize(
    ("second", "what"),
    [
        ([spec("a", 4097, arena="x"), spec("b", arena="x")], "4096 bytes"),
        ([spec("a", kind=Kind.RETAINED, arena="x"), spec("b", arena="x")], "kind"),
        ([spec("b", arena="x"), spec("a", arena="x")], "another order"),
        ([spec("a", arena="x"), spec("b", arena="x"), spec("c", arena="x")], "in part"),
    ],
)
def test_another_size_kind_or_place_is_an_error_and_changes_nothing(
    rank: Rank, second: list[RegionSpec], what: str
) -> None:
    pool = rank.pool()
    pool.allocate([spec("a", arena="x"), spec("b", arena="x")])
    with pytest.raises(AllocationMismatchError, match=what):
        pool.allocate([spec("new"), *second])
    with pytest.raises(PoolError, match="no region new"):
        pool.attach("new")
    assert pool.version == 1


def test_a_name_twice_in_one_call_is_an_error(rank: Rank) -> None:
    with pytest.raises(ValueError, match="same name"):
        rank.pool().allocate([spec("a"), spec("a", 5)])


def test_two_thousand_regions_take_one_call_one_segment_and_little_time(rank: Rank) -> None:
    pool = rank.pool()
    specs = [spec(f"model.layers.{i}.self_attention.query.weight", 8192, arena="parameters") for i in range(2000)]
    begin = time.monotonic()
    regions = pool.allocate(specs)
    milliseconds = (time.monotonic() - begin) * 1000
    assert len(pool.regions) == 2000
    assert regions[-1].offset_bytes == 1999 * 8192
    assert len({region.segment for region in regions}) == 1
    assert milliseconds < 1000, f"{milliseconds:.0f} ms"
    assert rank.process is not None
    assert len(open_fds(rank.process.pid)) < 20


def test_more_segments_than_fit_one_message_go_in_parts(rank: Rank) -> None:
    specs = [spec(f"r{i}", 10) for i in range(600)]
    pool = rank.pool()
    regions = pool.allocate(specs)
    assert len({region.segment for region in regions}) == 600
    for i, region in enumerate(regions):
        pool.buffer(region)[:2] = i.to_bytes(2, "little")
    rank.kill_manager()
    reader = rank.pool(writable=False)
    for i, region in enumerate(reader.allocate(specs)):
        assert int.from_bytes(reader.buffer(region)[:2], "little") == i


def test_too_many_regions_for_one_message_is_an_error_that_says_so(rank: Rank) -> None:
    specs = [spec(f"{'long' * 40}.{i}", arena="a") for i in range(30_000)]
    with pytest.raises(ValueError, match="several calls"):
        rank.pool().allocate(specs)


def test_too_little_memory_is_an_error_that_says_how_much_and_leaves_nothing(rank: Rank) -> None:
    pool = rank.pool()
    assert rank.process is not None
    before = open_fds(rank.process.pid)
    with pytest.raises(ResourceError, match=r"1\.02e\+03 GiB.*huge.*available.*MemAvailable|limit") as caught:
        pool.allocate([spec("small"), spec("huge", 1 << 40)])
    assert "fewer ranks" in str(caught.value)
    assert open_fds(rank.process.pid) == before
    with pytest.raises(PoolError, match="no region small"):
        pool.attach("small")
    pool.allocate([spec("small")])


def test_memory_that_is_promised_counts_before_it_is_touched() -> None:
    rank = Rank(prelude="memfd.available_host_bytes = lambda: (100 << 20, 'a test')")
    try:
        pool = rank.start().pool()
        pool.allocate([spec("first", 60 * MIB)])
        with pytest.raises(ResourceError, match=r"0\.0586 GiB are promised"):
            pool.allocate([spec("second", 60 * MIB)])
        pool.free("first")
        pool.allocate([spec("second", 60 * MIB)])
    finally:
        rank.close()


def test_no_descriptors_left_is_an_error_and_rolls_back() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))"
    rank = Rank(prelude=f"manager.raise_file_limit = lambda n: 0\n{limit}")
    try:
        pool = rank.start().pool()
        assert rank.process is not None
        before = open_fds(rank.process.pid)
        for count in range(40, 5, -1):  # out of descriptors while it makes, sends, or measures
            try:
                pool.allocate([spec(f"{count}.{i}") for i in range(count)])
                break
            except ResourceError as error:
                assert "ulimit -n" in str(error)  # noqa: PT017  # this many fail, and then one succeeds
                assert open_fds(rank.process.pid) == before
                with rank.lock:
                    assert not rank.mirror.regions
        assert 10 < count < 30
        for i in range(count):
            pool.free(f"{count}.{i}")

        def allocate_for_ever() -> None:
            for i in range(100):
                pool.allocate([spec(f"s{i}")])

        with pytest.raises(ResourceError, match="ulimit -n"):
            allocate_for_ever()
        with rank.lock:
            assert len(rank.mirror.regions) == len(pool.regions)
        pool.free("s0")
        pool.allocate([spec("last")])
        assert rank.num_managers == 1
    finally:
        rank.close()


def shared_memory_bytes() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Shmem:"))


def mapped_shared_bytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssShmem:"))


def num_mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum(1 for _ in file)


def test_two_hundred_allocations_and_removals_leave_nothing(rank: Rank) -> None:
    pool = rank.pool()
    assert rank.process is not None
    pid = rank.process.pid

    def cycle(i: int) -> None:
        regions = pool.allocate([spec(f"{i}.{j}", MIB, arena="a") for j in range(3)])
        for region in regions:
            pool.buffer(region)[::4096] = bytes(256)
        with rank.lock:
            rank.mirror.buffer(f"{i}.0")[0] = 1
        for j in range(3):
            pool.free(f"{i}.{j}")

    cycle(-1)
    fds, own_fds, mappings, memory = open_fds(pid), open_fds(), num_mappings(), mapped_shared_bytes()
    for i in range(200):
        cycle(i)
    assert open_fds(pid) == fds
    assert open_fds() == own_fds
    assert num_mappings() <= mappings + 5
    assert mapped_shared_bytes() < memory + 10 * MIB  # 600 MiB were written, and no fd holds them either


def test_memory_is_freed_when_its_last_holder_is_gone(rank: Rank) -> None:
    pool = rank.pool()
    before = shared_memory_bytes()  # of the whole machine, on which other things run: hence the wide margins
    (region,) = pool.allocate([spec("big", 512 * MIB)])
    pool.buffer(region)[::4096] = bytes(512 * 256)
    assert eventually(lambda: shared_memory_bytes() > before + 256 * MIB)
    rank.kill_manager()
    assert eventually(lambda: shared_memory_bytes() > before + 256 * MIB)
    pool.free("big")
    assert eventually(lambda: shared_memory_bytes() < before + 256 * MIB)


def test_prefault_takes_the_pages_at_once(rank: Rank) -> None:
    pool, other = rank.pool(prefault=True), rank.pool()
    before = mapped_shared_bytes()
    pool.allocate([spec("big", 200 * MIB)])
    assert mapped_shared_bytes() >= before + 200 * MIB
    other.allocate([spec("lazy", 200 * MIB)])
    assert mapped_shared_bytes() < before + 210 * MIB
    pool.free("big")


READER = """
import ctypes, sys
from datetime import timedelta
from leto_strategy.memory.pool import ResilientMemoryPool

pool = ResilientMemoryPool.connect(sys.argv[1], timeout=timedelta(seconds=5), writable=False)
region = pool.attach("w")
assert bytes(pool.buffer(region)[:3]) == b"abc"
try:
    pool.buffer(region)[0] = 1
except TypeError:
    print("TypeError", flush=True)
if sys.argv[2] == "promoted":
    pool.make_writable()
ctypes.memset(pool.address(region), 120, 1)
print("written", flush=True)
"""


@pytest.mark.parametrize("promoted", [False, True])
def test_a_stray_write_before_promotion_is_a_segmentation_fault(rank: Rank, promoted: bool) -> None:
    pool = rank.pool()
    (region,) = pool.allocate([spec("w")])
    pool.buffer(region)[:3] = b"abc"
    command = [sys.executable, "-c", READER, rank.address, "promoted" if promoted else "shadow"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert result.stdout.splitlines() == ["TypeError", "written"][: 1 + promoted], result.stderr
    assert result.returncode == (0 if promoted else -signal.SIGSEGV)
    assert bytes(pool.buffer(region)[:3]) == (b"xbc" if promoted else b"abc")


PROMOTED = """
import sys, time
from datetime import timedelta
from leto_strategy.memory.backend import Kind, RegionSpec
from leto_strategy.memory.pool import ResilientMemoryPool

def minor_faults():
    with open("/proc/self/stat") as file:
        return int(file.read().rpartition(")")[2].split()[7])

MIB = 1 << 20
specs = [RegionSpec(f"w{i}", 64 * MIB, Kind.PROTECTED, arena="a") for i in range(8)]
specs += [RegionSpec(f"m{i}", 128 * MIB, Kind.PROTECTED) for i in range(4)]
shadow = ResilientMemoryPool.connect(sys.argv[1], timeout=timedelta(seconds=5), writable=False)
regions = shadow.allocate(specs)
for region in regions:
    bytes(shadow.buffer(region)[::4096])  # the shadow has read every page
begin = time.thread_time()
shadow.make_writable()
print((time.thread_time() - begin) * 1000)
faults = minor_faults()
for region in regions:
    bytes(shadow.buffer(region)[::4096])
print(minor_faults() - faults)
shadow.buffer(regions[0])[0] = 7
(later,) = shadow.allocate([RegionSpec("later", 10, Kind.RETAINED)])
shadow.buffer(later)[0] = 1
print(shadow.address(regions[0]))
"""


def run(script: str, *arguments: str) -> list[str]:
    result = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
    assert not result.returncode, result.stderr
    return result.stdout.split()


def test_promotion_of_one_gib_takes_milliseconds_and_keeps_page_tables(rank: Rank) -> None:
    milliseconds, faults, address = run(PROMOTED, rank.address)
    print(f"make_writable: {float(milliseconds):.2f} ms for 1 GiB in 4 KiB pages")
    # Some 10 to 70 ns for each entry of the page tables, by machine; to map anew would take 10 times that.
    assert float(milliseconds) < 100
    assert int(faults) < 2000, "the page tables were lost"
    with rank.lock:
        assert rank.mirror.buffer("w0")[0] == 7
    # A segment has the same address in every process that has room for it there.
    script = "from leto_strategy.memory.pool import *; import sys\n" + (
        "p = ResilientMemoryPool.connect(sys.argv[1], timeout=timedelta(seconds=5), writable=False)\n"
        "print(p.address(p.attach('w0')))"
    )
    assert run(script, rank.address) == [address]


def test_a_forked_child_is_refused(rank: Rank) -> None:
    pool = rank.pool()
    (region,) = pool.allocate([spec("w")])
    pid = os.fork()
    if not pid:
        try:
            pool.allocate([spec("v")])
        except PoolError:
            os._exit(0 if bytes(pool.buffer(region)[:1]) == b"\0" else 2)  # it may read, as data loaders do
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    pool.allocate([spec("v")])


def test_the_catalogue_has_a_version_that_every_answer_carries(rank: Rank) -> None:
    pool, other = rank.pool(), rank.pool()
    assert pool.version == 0
    pool.allocate([spec("a"), spec("b")])
    pool.allocate([spec("a")])
    assert pool.version == 1
    pool.free("a")
    pool.free("a")
    assert pool.version == 2
    other.attach("b")
    assert other.version == 2


def test_a_closed_pool_says_so_and_its_memory_stays(rank: Rank) -> None:
    pool = rank.pool()
    (region,) = pool.allocate([spec("w")])
    pool.close()
    pool.close()
    pool.buffer(region)[0] = 1
    with pytest.raises(PoolError, match="closed"):
        pool.attach("w")


def test_a_wrong_token_or_address_is_refused(rank: Rank) -> None:
    timeout = timedelta(seconds=0.2)
    with pytest.raises(PoolError, match="no state manager"):
        ResilientMemoryPool.connect(rank.address + "x", timeout=timeout, writable=True)
    with pytest.raises(PoolError, match="no state manager"):
        rank.pool(token="another", timeout=timeout)
    rank.pool(token="secret")


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": "a b"},
        {"name": "x" * 201},
        {"size_bytes": -1},
        {"size_bytes": 1 << 60},
        {"size_bytes": True},
        {"kind": "protected!"},
        {"shard": "1/1"},
        {"shard": "1"},
        {"arena": "\n"},
        {"alignment_bytes": 3},
        {"alignment_bytes": 0},
    ],
)
def test_a_malformed_spec_is_a_value_error(wrong: dict[str, object]) -> None:
    fields: dict[str, object] = {"name": "a", "size_bytes": 1, "kind": Kind.RECORD}
    with pytest.raises(ValueError, match="region"):
        RegionSpec(**(fields | wrong))  # type: ignore[arg-type]
