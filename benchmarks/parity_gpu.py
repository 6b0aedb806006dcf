"""Speed of the erasure code on one GPU: a 2 GiB group, 16 parity pages; every result checked on sampled columns.

    python benchmarks/parity_gpu.py --json

Keys: `encode_gbps` of data, `delta_traffic_gbps` of memory traffic for 256-page chunks (old and new pages read, parity
read and written), `reconstruct_ms` on the device and `reconstruct_total_ms` with the host's solution for 16 lost pages;
each with `percent_of_copy`, the share of the copy bandwidth of the same run. `integer` holds the same without clmad.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.gpu_timing import PAGE_BYTES, PAGE_WORDS, copy_gbps, machine, milliseconds, print_result
from benchmarks.kernel_data import table
from leto_strategy.erasure.generator import generator
from leto_strategy.erasure.solve import solve
from leto_strategy.triton_kernels import parity as ops
from leto_strategy.triton_kernels.compiler import products
from leto_strategy.triton_kernels.references import apply_matrix_torch

NUM_DATA = 1024
CHUNK_PAGES = 256
SAMPLED_COLUMNS = 24


def columns_agree(data: Tensor, parity: Tensor, rows: Tensor) -> bool:
    """Compare sampled words of the parity with the reference."""
    at = torch.randint(0, PAGE_WORDS, (SAMPLED_COLUMNS,), device=data.device)
    at[0], at[1] = 0, PAGE_WORDS - 1
    expected = apply_matrix_torch(data.index_select(1, at).cpu(), rows)
    return torch.equal(parity.index_select(1, at).cpu(), expected)


class Group:
    """A 2 GiB group with its parity."""

    def __init__(self) -> None:
        self.data = torch.randint(-(2**31), 2**31, (NUM_DATA, PAGE_WORDS), dtype=torch.int32, device="cuda")
        self.parity = torch.empty((16, PAGE_WORDS), dtype=torch.int32, device="cuda")
        self.out = torch.empty_like(self.parity)
        self.rows = generator(NUM_DATA, 16)
        self.pages, self.parity_pages, self.out_pages = table(self.data), table(self.parity), table(self.out)


def measure(group: Group, copy: float, *, clmad: bool) -> dict[str, Any]:
    """All keys, with one way to multiply."""
    with products(clmad=clmad):
        result = _encode(group, copy) | _delta(group, copy)
        if clmad:
            result |= _reconstruct(group, copy)
            result |= _direct(group, copy)
        return result


def _encode(group: Group, copy: float) -> dict[str, Any]:
    group.parity.fill_(0x5AA5)
    ms = milliseconds(lambda: ops.encode(group.pages, group.parity_pages))
    gbps = group.data.numel() * 4 / ms / 1e6
    exact = columns_agree(group.data, group.parity, group.rows)
    return {"encode_gbps": round(gbps), "encode_percent_of_copy": round(gbps / copy * 100, 1), "encode_exact": exact}


def _direct(group: Group, copy: float) -> dict[str, Any]:
    rows = group.rows.cuda()
    ms = milliseconds(lambda: ops.encode(group.pages, group.out_pages, matrix_PH=rows), repeats=3)
    return {
        "direct_encode_gbps": round(group.data.numel() * 4 / ms / 1e6),
        "direct_encode_exact": torch.equal(group.out, group.parity),
    }


def _delta(group: Group, copy: float, num_pages: int = CHUNK_PAGES) -> dict[str, Any]:
    ops.encode(group.pages, group.parity_pages)
    before = group.data[512 : 512 + num_pages].clone()
    after = group.data[512 : 512 + num_pages]
    after.random_(-(2**31), 2**31)
    old, new = table(before), table(after)
    group.out.fill_(0x5AA5)
    ms = milliseconds(lambda: ops.update(old, new, group.parity_pages, group.out_pages, first_page=512))
    gbps = (2 * num_pages + 32) * PAGE_BYTES / ms / 1e6
    exact = columns_agree(group.data, group.out, group.rows)
    group.parity.copy_(group.out)
    return {
        "delta_traffic_gbps": round(gbps), "delta_percent_of_copy": round(gbps / copy * 100, 1), "delta_exact": exact,
    }  # fmt: skip


def _reconstruct(group: Group, copy: float) -> dict[str, Any]:
    """14 lost data pages and 2 lost parity pages."""
    ops.encode(group.pages, group.parity_pages)
    lost = sorted(torch.randperm(NUM_DATA, generator=torch.Generator().manual_seed(3))[:14].tolist())
    lost_parity = [3, 9]
    kept = torch.cat([group.data[lost], group.parity[lost_parity]])
    group.data[lost], group.parity[lost_parity] = 0x5AA5, 0x5AA5
    out = torch.full((16, PAGE_WORDS), 0x5AA5, dtype=torch.int32, device="cuda")
    out_pages = table(out)

    def everything() -> tuple[Any, ...]:
        """From the list of lost pages to the rebuilt bytes."""
        solution = solve(lost, lost_parity, num_data=NUM_DATA, num_parity=16)
        full = torch.zeros((16, 16), dtype=torch.int64)
        full[:, list(solution.syndrome_rows)] = torch.tensor(solution.matrix, dtype=torch.int64)
        arguments = (group.pages.without(lost), group.parity_pages.without(lost_parity), full.cuda(), out_pages)
        ops.reconstruct(*arguments)
        return arguments

    arguments = everything()
    exact = torch.equal(out, kept)
    totals = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        everything()
        torch.cuda.synchronize()
        totals.append((time.perf_counter() - start) * 1e3)
    ms = milliseconds(lambda: ops.reconstruct(*arguments))
    group.data[lost], group.parity[lost_parity] = kept[:14], kept[14:]
    gbps = (NUM_DATA + 32) * PAGE_BYTES / ms / 1e6
    return {
        "reconstruct_ms": round(ms, 3), "reconstruct_total_ms": round(statistics.median(totals), 2),
        "reconstruct_exact": exact, "reconstruct_percent_of_copy": round(gbps / copy * 100, 1),
    }  # fmt: skip


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON line last")
    arguments = parser.parse_args()
    where = machine()
    copy = copy_gbps()
    group = Group()
    result: dict[str, Any] = {"copy_gbps": round(copy)}
    if where["clmad"]:
        result |= measure(group, copy, clmad=True)
    result["integer"] = measure(group, copy, clmad=False)
    result |= where
    print_result(result, as_json=arguments.json)


if __name__ == "__main__":
    main()
