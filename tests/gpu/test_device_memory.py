"""Device memory of the real driver: it outlives whoever made, mapped or wrote it, and costs its owner nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import MIB, MeasuredGpu

from leto_strategy.memory.backend import Kind, RegionSpec
from leto_strategy.memory.cuda import CudaBackend
from leto_strategy.memory.dlpack import bytes_at
from leto_strategy.memory.tensors import tensor_from_pool
from memory.stand_in import Rank
from tests.gpu.rig import HANDLE_BYTES, MARKS, environment, occupy, run_python

pytestmark = MARKS

SIZE_BYTES = 3 * HANDLE_BYTES + 2 * MIB
WEIGHTS = RegionSpec("weights", SIZE_BYTES, Kind.PROTECTED)
HINT = 0x2468_0000_0000
MANAGER_HBM_BYTES_MAX = 4 * MIB
MANAGER_RSS_KIB_MAX = 40 * 1024

CONNECT = f"""
import ctypes, os, sys, time
from datetime import timedelta
import torch
torch.ones(1, device="cuda")
from leto_strategy.memory.backend import Kind, RegionSpec
from leto_strategy.memory.pool import ResilientMemoryPool
from leto_strategy.memory.tensors import tensor_from_pool
def connect(writable):
    pool = ResilientMemoryPool.connect(sys.argv[1], timeout=timedelta(seconds=10), writable=writable)
    (region,) = pool.allocate([RegionSpec("weights", {SIZE_BYTES}, Kind.PROTECTED)])
    tensor = tensor_from_pool(pool, region, dtype=torch.int32, shape=({SIZE_BYTES} // 4,))
    return pool, region, tensor
"""


def weights_of(rank: Rank, *, writable: bool = True) -> torch.Tensor:
    pool = rank.pool(writable=writable)
    (region,) = pool.allocate([WEIGHTS])
    return tensor_from_pool(pool, region, dtype=torch.int32, shape=(SIZE_BYTES // 4,))


def test_handles_are_mapped_at_the_hint_and_a_second_mapping_sees_the_same_bytes(context: None) -> None:
    backend = CudaBackend(0, handle_bytes=HANDLE_BYTES)
    fds = backend.create(SIZE_BYTES, label="x", protected=True)
    assert len(fds) == 4
    first = backend.map(fds, SIZE_BYTES, address_hint=HINT, writable=True)
    assert first == HINT
    second = backend.map(fds, SIZE_BYTES, address_hint=HINT, writable=False)
    assert second not in (0, HINT)
    for fd in fds:
        os.close(fd)
    written, seen = (bytes_at(address, SIZE_BYTES, "cuda:0").view(torch.int32) for address in (first, second))
    written.copy_(torch.arange(len(written), dtype=torch.int32, device="cuda"))
    assert torch.equal(seen.cpu(), torch.arange(len(written), dtype=torch.int32))
    torch.cuda.synchronize()
    for address in (first, second):
        backend.unmap(address, SIZE_BYTES)
    fds = backend.create(2 * MIB, label="x", protected=True)
    assert backend.map(fds, 2 * MIB, address_hint=HINT, writable=True) == HINT, "the addresses are free again"
    os.close(fds[0])
    backend.unmap(HINT, 2 * MIB)


def test_another_process_maps_it_at_the_same_address(rank: Rank) -> None:
    pool = rank.pool()
    (region,) = pool.allocate([WEIGHTS])
    weights_of(rank).fill_(77)
    torch.cuda.synchronize()
    code = CONNECT + "pool, region, tensor = connect(False)\nprint(pool.address(region), int(tensor.sum()))"
    done = run_python("-c", code, rank.address)
    assert done.stdout.split() == [str(pool.address(region)), str(77 * SIZE_BYTES // 4)], done.stderr


def test_a_write_before_the_promotion_faults_and_changes_nothing(rank: Rank) -> None:
    weights = weights_of(rank)
    weights.fill_(5)
    torch.cuda.synchronize()
    code = (
        CONNECT
        + """
pool, region, tensor = connect(False)
assert int(tensor[0]) == 5
try:
    tensor.fill_(6)
    torch.cuda.synchronize()
except RuntimeError as error:
    print("refused:", str(error).splitlines()[0])
    sys.stdout.flush()
    os._exit(0)
"""
    )
    done = run_python("-c", code, rank.address)
    assert "refused:" in done.stdout, (done.returncode, done.stdout, done.stderr[-2000:])
    assert torch.equal(weights, torch.full_like(weights, 5))


def test_a_promotion_lets_the_same_mapping_be_written(rank: Rank) -> None:
    weights = weights_of(rank)
    weights.fill_(5)
    torch.cuda.synchronize()
    code = (
        CONNECT
        + """
pool, region, tensor = connect(False)
before = pool.address(region), int(tensor[0])
begin = time.monotonic()
pool.make_writable()
seconds = time.monotonic() - begin
tensor.add_(1)
torch.cuda.synchronize()
assert (pool.address(region), 5) == before
print(seconds)
"""
    )
    done = run_python("-c", code, rank.address)
    assert done.returncode == 0, done.stderr[-2000:]
    print(f"promotion of {SIZE_BYTES // MIB} MiB: {1000 * float(done.stdout):.2f} ms")
    assert torch.equal(weights, torch.full_like(weights, 6))


def test_data_survive_the_sigkill_of_a_process_whose_kernels_run(rank: Rank) -> None:
    code = (
        CONNECT
        + """
pool, region, tensor = connect(True)
tensor.copy_(torch.arange(len(tensor), dtype=torch.int32, device="cuda"))
torch.cuda.synchronize()
print("written", flush=True)
for _ in range(100):
    torch.cuda._sleep(200_000_000)
time.sleep(60)
"""
    )
    command = [sys.executable, "-c", code, rank.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "written\n"
        time.sleep(0.1)
        begin = time.monotonic()
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(30)
        print(f"reaped after {1000 * (time.monotonic() - begin):.0f} ms")
    weights = weights_of(rank, writable=False)
    assert torch.equal(weights.cpu(), torch.arange(len(weights), dtype=torch.int32))


def test_a_killed_manager_is_replaced_and_nothing_is_lost(rank: Rank) -> None:
    weights = weights_of(rank)
    weights.copy_(torch.arange(len(weights), dtype=torch.int32, device="cuda"))
    occupy(200)  # and what runs meanwhile runs on
    weights.add_(1)
    rank.kill_manager()
    again = weights_of(rank, writable=False)
    torch.cuda.synchronize()
    expected = torch.arange(1, len(weights) + 1, dtype=torch.int32)
    assert torch.equal(again.cpu(), expected)
    rank.kill_manager()
    assert torch.equal(weights_of(rank).cpu(), expected)


@pytest.mark.timeout(180)
def test_a_manager_has_no_context_and_costs_next_to_nothing(context: None) -> None:
    """The GPU is shared: of some attempts the one counts in which nobody else took memory."""
    gpu, costs, rss_kib = MeasuredGpu(), [], []
    for _ in range(5):
        before = gpu.settled_used_bytes()
        rank = Rank(device={"ordinal": 0, "handle_bytes": HANDLE_BYTES}).start()
        try:
            pool = rank.pool()
            regions = pool.allocate([WEIGHTS])
            assert rank.process is not None
            assert rank.process.pid not in gpu.context_pids()
            # This process's mapping takes page tables, too: what it has mapped stays when the manager's client leaves.
            costs.append(gpu.settled_used_bytes() - before - SIZE_BYTES)
            rss_kib.append(_rss_kib(rank.process.pid))
            pool.free(regions[0].spec.name)
        finally:
            rank.close()
    print(f"manager: {[round(cost / MIB, 1) for cost in costs]} MiB of HBM, {[kib // 1024 for kib in rss_kib]} MiB RSS")
    assert -MANAGER_HBM_BYTES_MAX <= min(costs, key=abs) <= MANAGER_HBM_BYTES_MAX, costs
    assert max(rss_kib) <= MANAGER_RSS_KIB_MAX, rss_kib


def _rss_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])
