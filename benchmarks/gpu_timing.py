"""What the GPU benchmarks share: timing by events, the copy bandwidth of the same run, what the machine is."""

import json
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton

from leto_strategy.triton_kernels.assembler import find_assembler
from leto_strategy.triton_kernels.compiler import has_clmad

PAGE_BYTES = 2 << 20
PAGE_WORDS = PAGE_BYTES // 4


def milliseconds(work: Callable[[], object], *, repeats: int = 7) -> float:
    """Median device time of a piece of work, after one run to warm up."""
    work()
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in events))


def copy_gbps(*, num_bytes: int = 2 << 30) -> float:
    """Bytes read and written by a device copy, in GB/s."""
    source = torch.randint(0, 255, (num_bytes // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return 2 * num_bytes / milliseconds(lambda: target.copy_(source)) / 1e6


def machine() -> dict[str, Any]:
    """Where and with what this was measured."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "clmad": has_clmad(torch.device("cuda", 0)),
        "assembler": find_assembler().why,
    }


def print_result(result: Mapping[str, Any], *, as_json: bool) -> None:
    """Print what was measured: one line of JSON, or one line a key."""
    if as_json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key}: {value}")
