"""How fast parity is made and lost pages are rebuilt: in host memory by one core, and on a GPU where there is one.

The limit first. Encoding reads each data word once and writes 1/64 as much parity, so at best it is as fast as memory
can be read. A core that copies reads and writes as many bytes as `copy_gbps_per_core` says; `percent_of_copy` is the
share of it that encoding's reads and writes take. With 16 parity pages a data word costs 2 products in the field, and
with vectors of 512 bits 16 words take 4 carry-less products and 18 other instructions: about 1.4 cycles a word.

Speeds are GB of data per second of the thread's processor time, the best of some repetitions that take turns, so that
other work on the machine disturbs them least. The Intel storage library's code is over GF(2^8), k = 128, m = 16, in
blocks of the size at which it is fastest: it can't have groups of more than 240 pages, so it encodes eight.
"""

import argparse
import ctypes
import ctypes.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.harness import machine, write_rows
from leto_strategy.erasure import compiler, reference
from leto_strategy.erasure.backend import Backend
from leto_strategy.erasure.backends import default_threads
from leto_strategy.erasure.bitsliced import BitslicedBackend
from leto_strategy.erasure.code import ErasureCode
from leto_strategy.erasure.native import NativeBackend
from leto_strategy.erasure.solve import solve

NUM_PARITY = 16
ISAL_DATA = 128
ISAL_BLOCKS = (1024, 4096, 16384, 65536)
CHECKED_WORDS = 1024
GPU_SECONDS_MAX = 300.0
GPU_SHARES = {
    "encode_gbps": "encode_percent_of_copy",
    "delta_traffic_gbps": "delta_percent_of_copy",
    "reconstruct_ms": "reconstruct_percent_of_copy",
}
"""Keys of `parity_gpu.py`, and where it says what share of the GPU's copy bandwidth they are."""

GB = 1e9


def best_seconds(work: Mapping[str, Callable[[], object]], *, repetitions: int) -> dict[str, float]:
    """Shortest processor time of each piece of work; they take turns, after one turn that does not count."""
    found: dict[str, float] = {}
    for repetition in range(repetitions + 1):
        for name, function in work.items():
            start = time.thread_time()
            function()
            if repetition:
                seconds = time.thread_time() - start
                found[name] = min(found.get(name, seconds), seconds)
    return found


def native_backends() -> list[Backend]:
    """Every variant that this machine can build and run, fastest first."""
    found: list[Backend] = []
    for variant in compiler.usable_variants():
        try:
            found.append(NativeBackend.build(variant))
        except compiler.BuildError as error:
            print(f"  {variant.name}: {error}", file=sys.stderr)
    return found


def isal_encoder(data_DW: Tensor) -> dict[str, Callable[[], object]]:
    """ISA-L's encoder over all data, for each size of block; none where the library is missing."""
    name = ctypes.util.find_library("isal")
    if name is None:
        print("  libisal is not installed (Debian: libisal-dev): no comparison with it", file=sys.stderr)
        return {}
    library = ctypes.CDLL(name)
    num_rows = ISAL_DATA + NUM_PARITY
    matrix, tables = (ctypes.c_ubyte * (num_rows * ISAL_DATA))(), (ctypes.c_ubyte * (32 * ISAL_DATA * NUM_PARITY))()
    library.gf_gen_cauchy1_matrix(matrix, num_rows, ISAL_DATA)
    library.ec_init_tables(ISAL_DATA, NUM_PARITY, ctypes.byref(matrix, ISAL_DATA * ISAL_DATA), tables)
    parity = torch.empty((NUM_PARITY, data_DW.shape[1]), dtype=torch.int32)
    page_bytes = 4 * data_DW.shape[1]

    def encode(block: int) -> None:
        for first in range(0, data_DW.shape[0] - ISAL_DATA + 1, ISAL_DATA):
            start = data_DW[first].data_ptr()
            for offset in range(0, page_bytes, block):
                sources = [start + index * page_bytes + offset for index in range(ISAL_DATA)]
                targets = [parity.data_ptr() + index * page_bytes + offset for index in range(NUM_PARITY)]
                library.ec_encode_data(
                    block,
                    ISAL_DATA,
                    NUM_PARITY,
                    tables,
                    (ctypes.c_void_p * ISAL_DATA)(*sources),
                    (ctypes.c_void_p * NUM_PARITY)(*targets),
                )

    return {f"isal {block}": partial(encode, block) for block in ISAL_BLOCKS if block <= page_bytes}


def is_exact(data_DW: Tensor, parity_HW: Tensor) -> bool:
    """Compare some words with the reference."""
    expected = reference.encode(data_DW[:, -CHECKED_WORDS:].contiguous(), num_parity=parity_HW.shape[0])
    return torch.equal(parity_HW[:, -CHECKED_WORDS:], expected)


def measure_cpu(*, num_pages: int, page_bytes: int, repetitions: int) -> dict[str, Any]:
    """Everything about host memory."""
    code = ErasureCode(num_pages, NUM_PARITY, page_bytes)
    data_DW = torch.randint(-(2**31), 2**31, (num_pages, code.num_words), dtype=torch.int32)
    out_HW = torch.empty((NUM_PARITY, code.num_words), dtype=torch.int32)
    num_bytes = data_DW.numel() * 4
    natives, without = native_backends(), BitslicedBackend()

    exact = {}
    for backend in (*natives, without):
        out_HW.fill_(-1)
        code.encode(data_DW, out=out_HW, backend=backend)
        exact[backend.name] = is_exact(data_DW, out_HW)

    def encode(backend: Backend) -> Callable[[], object]:
        return lambda: code.encode(data_DW, out=out_HW, threads=1, backend=backend)

    half = num_pages // 2
    work: dict[str, Callable[[], object]] = {"copy": lambda: data_DW[:half].copy_(data_DW[-half:])}
    work |= {backend.name: encode(backend) for backend in natives} | isal_encoder(data_DW)
    seconds = best_seconds(work, repetitions=repetitions)
    slow = best_seconds({without.name: encode(without)}, repetitions=1)[without.name]
    copy_gbps = 8 * half * code.num_words / seconds["copy"] / GB
    chosen = natives[0] if natives else without
    encode_seconds = seconds[chosen.name] if natives else slow
    isal = {
        name: num_pages // ISAL_DATA * ISAL_DATA * page_bytes / s / GB for name, s in seconds.items() if "isal" in name
    }
    isal_gbps = max(isal.values(), default=None)
    traffic = (num_pages + NUM_PARITY) * page_bytes
    encode_gbps = num_bytes / encode_seconds / GB
    return {
        "encode_gbps_per_core": round(encode_gbps, 3),
        "backend": chosen.name,
        "percent_of_copy": {"encode_gbps_per_core": round(100 * traffic / encode_seconds / GB / copy_gbps, 1)},
        "copy_gbps_per_core": round(copy_gbps, 2),
        "isal_gbps_per_core": None if isal_gbps is None else round(isal_gbps, 3),
        "ratio_to_isal": None if isal_gbps is None else round(encode_gbps / isal_gbps, 2),
        "isal_gbps_by_block_bytes": {name.removeprefix("isal "): round(value, 3) for name, value in isal.items()},
        "nocompiler_gbps_per_core": round(num_bytes / slow / GB, 3),
        "encode_gbps_by_variant": {b.name: round(num_bytes / seconds[b.name] / GB, 3) for b in natives},
        "exact": all(exact.values()),
        **measure_repair(code, data_DW, chosen),
        "group": {"pages": num_pages, "page_bytes": page_bytes, "num_parity": NUM_PARITY},
    }


def measure_repair(code: ErasureCode, data_DW: Tensor, backend: Backend) -> dict[str, Any]:
    """Wall time of rebuilding 14 data and 2 parity pages with all cores, and of the solution it needs."""
    parity_HW = code.encode(data_DW, backend=backend)
    lost_data, lost_parity = list(range(3, code.num_data, code.num_data // 14))[:14], [2, 11]
    kept_DW, kept_HW = data_DW[lost_data], parity_HW[lost_parity]
    data_DW[lost_data], parity_HW[lost_parity] = -1, -1
    start = time.perf_counter()
    code.reconstruct(data_DW, parity_HW, lost_data=lost_data, lost_parity=lost_parity, backend=backend)
    rebuilt = time.perf_counter()
    solutions = []
    for _ in range(5):
        before = time.perf_counter()
        solve(lost_data, lost_parity, num_data=code.num_data, num_parity=code.num_parity)
        solutions.append(time.perf_counter() - before)
    return {
        "cpu_reconstruct_ms": round((rebuilt - start) * 1e3, 1),
        "solve_ms": round(min(solutions) * 1e3, 2),
        "reconstruct_exact": torch.equal(data_DW[lost_data], kept_DW) and torch.equal(parity_HW[lost_parity], kept_HW),
        "threads": default_threads(),
    }


def measure_gpu() -> dict[str, Any]:
    """What `parity_gpu.py` prints, where there is a GPU."""
    if not torch.cuda.is_available():
        print("  no CUDA GPU: the keys of the GPU are left out", file=sys.stderr)
        return {}
    command = [sys.executable, str(Path(__file__).with_name("parity_gpu.py")), "--json"]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=GPU_SECONDS_MAX, check=True).stdout
    measured: dict[str, Any] = json.loads(output.splitlines()[-1])
    percent = {key: measured[share] for key, share in GPU_SHARES.items() if share in measured}
    return measured | {"percent_of_copy": percent}


def merge(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One object of all keys; `percent_of_copy` has those of all parts."""
    result: dict[str, Any] = {"benchmark": "parity"}
    percent: dict[str, Any] = {}
    for part in parts:
        percent |= part.get("percent_of_copy", {})
        result |= part
    return result | {"percent_of_copy": percent}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Speed of the erasure code.")
    parser.add_argument("--json", action="store_true", help="print one JSON line last (else an indented object)")
    parser.add_argument("--pages", type=int, default=1024, help="data pages of the group in host memory")
    parser.add_argument("--page-kib", type=int, default=512, help="size of its pages")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a small group, to see that all works")
    parser.add_argument("--save", action="store_true", help="append the row to benchmarks/data/, which is kept")
    options = parser.parse_args()
    pages, page_kib, repetitions = options.pages, options.page_kib, options.repetitions
    if options.quick:
        pages, page_kib, repetitions = 256, 16, 1
    torch.set_num_threads(1)
    cpu = measure_cpu(num_pages=pages, page_bytes=page_kib << 10, repetitions=repetitions)
    context = machine()
    summary = merge([cpu, measure_gpu(), context])
    rows = [{key: value for key, value in summary.items() if isinstance(value, float | int | str | None)}]
    summary["rows"] = os.path.relpath(write_rows("parity", rows, {}, save=options.save))
    print(json.dumps(summary, indent=None if options.json else 2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
