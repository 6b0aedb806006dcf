"""Kill any one process and no memory is lost: real managers, real trainers, real SIGKILLs."""

import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta

import pytest

from leto_strategy.errors import PoolError
from leto_strategy.memory.backend import Kind, RegionSpec
from memory.stand_in import Rank, eventually

STEPS = [
    "received",
    "created",
    "half of created",  # half of the change that goes to the mirror
    "mirrored",
    "acknowledged",
    "committed",
    "half of committed",  # half of the client's answer
    "answered",
]

SPECS = [RegionSpec(f"weight.{i}", 1000 + 100 * i, Kind.PROTECTED, arena="parameters") for i in range(5)]
SPECS += [RegionSpec("undo", 5000, Kind.RETAINED), RegionSpec("progress", 8192, Kind.RECORD)]

TRAINER = """
import sys
from datetime import timedelta
from leto_strategy.memory.backend import Kind, RegionSpec
from leto_strategy.memory.pool import ResilientMemoryPool

pool = ResilientMemoryPool.connect(sys.argv[1], timeout=timedelta(seconds=10), writable=True)
for i in range(1_000_000):
    (region,) = pool.allocate([RegionSpec(f"region.{i}", 4096, Kind.RETAINED)])
    pool.buffer(region)[:8] = i.to_bytes(8, "little")
    print(i, flush=True)
"""


@pytest.mark.parametrize("step", STEPS)
def test_an_allocation_survives_a_managers_death_at_any_step(rank: Rank, step: str) -> None:
    rank.kill_manager(dies_at=step)
    pool = rank.pool()
    regions = pool.allocate(SPECS)
    assert eventually(lambda: rank.num_managers == 3), "the manager did not die"
    assert [region.spec for region in regions] == SPECS
    assert all(region.created for region in regions), "the call that made them says so, whoever answered it"
    assert [region.offset_bytes for region in regions[:5]] == [0, 1024, 2560, 4096, 5632]
    with rank.lock:
        assert set(rank.mirror.regions) == {spec.key for spec in SPECS}
        assert rank.mirror.version == pool.version == 1, "made once"
    for i, region in enumerate(regions):
        pool.buffer(region)[:] = bytes([i + 1]) * region.spec.size_bytes
    for i, region in enumerate(rank.pool(writable=False).allocate(SPECS)):
        assert not region.created
        with rank.lock:
            assert bytes(rank.mirror.buffer(region.spec.name)) == bytes([i + 1]) * region.spec.size_bytes


@pytest.mark.parametrize("step", ["half of received", "mirrored", "acknowledged", "committed", "half of committed"])
def test_a_removal_survives_a_managers_death_at_any_step(rank: Rank, step: str) -> None:
    pool = rank.pool()
    regions = pool.allocate(SPECS)
    # Steps before the mirror belong to allocations: a removal's first is the message to the mirror.
    rank.kill_manager(dies_at=step)
    if step == "half of received":
        pool.allocate([RegionSpec("another", 10, Kind.RETAINED)])
    else:
        pool.free("undo")
        with pytest.raises(PoolError, match="not mapped"):
            pool.address(regions[5])
        with pytest.raises(PoolError, match="no region"):
            pool.attach("undo")
    if step != "half of committed" or not eventually(lambda: rank.num_managers == 3, seconds=0.5):
        pool.attach("weight.3")
    assert eventually(lambda: rank.num_managers == 3)
    with rank.lock:
        assert (("undo", "0/1") in rank.mirror.regions) == (step == "half of received")


def test_contents_and_addresses_stay_when_manager_after_manager_dies(rank: Rank) -> None:
    pool = rank.pool()
    before = pool.allocate(SPECS)
    pool.buffer(before[0])[:4] = b"leto"
    for i in range(5):
        rank.kill_manager()
        (new,) = pool.allocate([RegionSpec(f"later.{i}", 64, Kind.RETAINED)])
        assert new.created
        assert bytes(pool.buffer(before[0])[:4]) == b"leto"
        assert [pool.address(region) for region in pool.allocate(SPECS)] == [pool.address(r) for r in before]
    with rank.lock:
        assert rank.mirror.version == 6
        assert len(rank.mirror.regions) == len(SPECS) + 5


def test_what_a_killed_trainer_wrote_is_there_for_the_next(rank: Rank) -> None:
    command = [sys.executable, "-c", TRAINER, rank.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        for _ in range(50):
            last = int(trainer.stdout.readline())
        os.kill(trainer.pid, signal.SIGKILL)
    pool = rank.pool()
    for i in range(last + 1):
        assert int.from_bytes(pool.buffer(pool.attach(f"region.{i}"))[:8], "little") == i
    # Whatever it was in the middle of: it exists whole or not at all, and can be allocated.
    with rank.lock:
        told = {name for name, _ in rank.mirror.regions}
    for i in range(last + 1, last + 100):
        (region,) = pool.allocate([RegionSpec(f"region.{i}", 4096, Kind.RETAINED)])
        assert region.created == (f"region.{i}" not in told)


def test_allocations_go_on_while_managers_are_killed_at_random(rank: Rank) -> None:
    command = [sys.executable, "-c", TRAINER, rank.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        for _ in range(6):
            for _ in range(20):
                last = int(trainer.stdout.readline())
            rank.kill_manager()
        assert trainer.poll() is None
        os.kill(trainer.pid, signal.SIGKILL)
    with rank.lock:
        regions = rank.mirror.regions
        assert {f"region.{i}" for i in range(last + 1)} <= {name for name, _ in regions}
        for i in range(last + 1):
            assert int.from_bytes(rank.mirror.buffer(f"region.{i}")[:8], "little") == i


def test_a_client_never_knows_what_the_mirror_does_not(rank: Rank) -> None:
    pool, other = rank.pool(), rank.pool()
    rank.acknowledging.clear()
    answered = threading.Event()

    def allocate() -> None:
        pool.allocate(SPECS)
        answered.set()

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        assert not answered.wait(0.2)
        with pytest.raises(PoolError, match="no region"):
            other.attach("undo")
    finally:
        rank.acknowledging.set()
        thread.join(5)
    assert answered.is_set()
    assert other.attach("undo").spec == SPECS[5]


def test_a_pool_says_so_when_no_manager_comes_back(rank: Rank) -> None:
    pool = rank.pool(timeout=timedelta(seconds=0.3))
    (region,) = pool.allocate([RegionSpec("kept", 100, Kind.RETAINED)])
    rank.replace = False
    assert rank.process is not None
    rank.process.kill()
    rank.process.wait()
    with pytest.raises(PoolError, match=rank.address):
        pool.attach("undo")
    pool.buffer(region)[:] = b"x" * 100  # what is mapped needs no manager
