"""Speed of a protected update on one GPU, against torch's fused AdamW in the same run.

    python benchmarks/update_kernels.py --json [--sweep] [--seconds-max S]

176 million fp32 parameters with their moments in one group of 1008 pages, updated chunk after chunk, with undo copies,
tile numbers and parity. Keys: `fused_ratio` and `two_kernel_ratio`, time per parameter over that of
torch.optim.AdamW(fused=True), for the default way (moments rotate) and chunks of `chunk_pages`; `*_ps` per parameter;
`*_percent_of_copy`, the share of the copy bandwidth of the same run. `by_chunk` has other sizes of chunks, `in_place`
the same without rotation, `sweep` other launch shapes.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.gpu_timing import PAGE_WORDS, copy_gbps, machine, milliseconds, print_result
from benchmarks.kernel_checks import SHAPES, name_of
from benchmarks.kernel_data import table
from leto_strategy.triton_kernels.adam import AdamStep
from leto_strategy.triton_kernels.chunk_pages import ChunkPages
from leto_strategy.triton_kernels.chunk_update import ChunkCode, update_chunk
from leto_strategy.triton_kernels.launch_shapes import FusedShape, Way
from leto_strategy.triton_kernels.pages import PageTable
from leto_strategy.triton_kernels.tile_flags import TileFlags

NUM_TRIPLES = 21
NUM_PARAMS = NUM_TRIPLES * 16 * PAGE_WORDS
STEP = AdamStep(1e-3, (0.9, 0.999), 1e-8, 0.01, 3)


def torch_ps() -> float:
    """Time a parameter of torch's fused AdamW, in ps."""
    params = [torch.randn(NUM_PARAMS // NUM_TRIPLES, device="cuda").requires_grad_() for _ in range(NUM_TRIPLES)]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
    optimizer.step()
    return milliseconds(optimizer.step) / NUM_PARAMS * 1e9


class Group:
    """Parameters and moments of one group, cut into chunks of block triples."""

    def __init__(self, num_triples: int, *, rotate: bool) -> None:
        pages, length = NUM_TRIPLES * 16, num_triples * 16
        state = torch.randn((3 * pages, PAGE_WORDS), device="cuda").mul_(0.1)
        state[2 * pages :].abs_()
        grad = torch.randn((pages, PAGE_WORDS), device="cuda")
        words = state.view(torch.int32)
        parity = torch.zeros((2, 16, PAGE_WORDS), dtype=torch.int32, device="cuda")
        self.parities = [table(parity[i]) for i in range(2)]
        moved = torch.empty((2 * pages if rotate else 0, PAGE_WORDS), dtype=torch.int32, device="cuda")
        saved = torch.empty(((1 if rotate else 3) * length, PAGE_WORDS), dtype=torch.int32, device="cuda")
        size = length * PAGE_WORDS // 32
        self.flags = TileFlags(*(torch.zeros(size, dtype=torch.int64, device="cuda") for _ in range(2)))
        self.coefficients, self.clip, self.number = torch.zeros(8, device="cuda"), torch.ones(1, device="cuda"), 0
        STEP.write(self.coefficients)
        undo: list[PageTable | None] = [table(saved[i : i + length]) for i in range(0, len(saved), length)]
        undo += [None] * (3 - len(undo))
        assert undo[0] is not None
        self.directions: list[list[tuple[ChunkPages, ChunkCode]]] = []
        for there in (True, False) if rotate else (True,):
            chunks = []
            for start in range(0, pages - length + 1, length):
                here = slice(start, start + length)
                param, avg, sq = (words[i * pages :][here] for i in range(3))
                out: list[PageTable | None] = [None, None]
                if rotate:
                    new_avg, new_sq = moved[:pages][here], moved[pages:][here]
                    if not there:
                        avg, sq, new_avg, new_sq = new_avg, new_sq, avg, sq
                    out = [table(new_avg), table(new_sq)]
                chunk = ChunkPages(
                    table(param), table(avg), table(sq), table(grad[here]), undo[0], undo[1], undo[2], out[0], out[1]
                )  # fmt: skip
                first = [range(i * pages + start, i * pages + start + length, 16) for i in range(3)]
                chunks.append((chunk, ChunkCode((first[0], first[1], first[2]))))
            self.directions.append(chunks)
        self.num_params = len(self.directions[0]) * length * PAGE_WORDS
        self.num_launches = len(self.directions[0])

    def update(self, way: Way, shape: FusedShape) -> None:
        """Update the whole group, chunk after chunk."""
        chunks = self.directions[self.number % len(self.directions)]
        self.number += 1
        for chunk, code in chunks:
            update_chunk(
                chunk, code, self.parities[0], self.parities[1], self.coefficients, self.clip, self.flags, self.number,
                STEP, way=way, shape=shape,
            )  # fmt: skip
            self.parities.reverse()


def bytes_per_param(way: Way, *, rotate: bool, num_triples: int) -> float:
    """Least traffic: state and gradient read, state written, undo copies, parity read and written.

    In two passes old and new state are read once more.
    """
    update = 16 + 12 + (4 if rotate else 12) + 32 * 4 / (num_triples * 16)
    return update + (24 if way is Way.PAGES else 0)


def measure(way: Way, num_triples: int, where: dict[str, float], *, rotate: bool, shape: FusedShape) -> dict[str, Any]:
    """Time a parameter, its ratio to torch's, and the share of the copy bandwidth."""
    group = Group(num_triples, rotate=rotate)
    group.update(way, shape)
    ps = milliseconds(lambda: group.update(way, shape), repeats=6) / group.num_params * 1e9
    start = time.perf_counter()
    group.update(way, shape)
    host_us = (time.perf_counter() - start) / group.num_launches * 1e6
    moved = bytes_per_param(way, rotate=rotate, num_triples=num_triples) / ps * 1e3
    return {
        "ps": round(ps, 2), "ratio": round(ps / where["torch_ps"], 3),
        "percent_of_copy": round(moved / where["copy_gbps"] * 100, 1), "host_us": round(host_us),
    }  # fmt: skip


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON line last")
    parser.add_argument("--sweep", action="store_true", help="other launch shapes too")
    parser.add_argument("--seconds-max", type=float, default=1e9, help="start no further shape after this time")
    arguments = parser.parse_args()
    start = time.monotonic()
    where = {"copy_gbps": copy_gbps(), "torch_ps": torch_ps()}
    result: dict[str, Any] = {key: round(value, 2) for key, value in where.items()}
    result |= {"chunk_pages": NUM_TRIPLES * 48, "shape": name_of(FusedShape())}
    for key, way in (("fused", Way.FUSED), ("two_kernel", Way.PAGES)):
        found = measure(way, NUM_TRIPLES, where, rotate=True, shape=FusedShape())
        result |= {f"{key}_{name}": value for name, value in found.items()}
        print(json.dumps(result), flush=True)
    result["by_chunk"] = {
        f"{key}_{triples * 48}": measure(way, triples, where, rotate=True, shape=FusedShape())
        for key, way, triples in (("fused", Way.FUSED, 3), ("fused", Way.FUSED, 7), ("two_kernel", Way.PAGES, 3))
    }
    result["in_place"] = {
        key: measure(way, NUM_TRIPLES, where, rotate=False, shape=FusedShape())
        for key, way in (("fused", Way.FUSED), ("two_kernel", Way.PAGES))
    }
    print(json.dumps(result), flush=True)
    rows = []
    for shape in SHAPES[1:] if arguments.sweep else ():
        for triples in (NUM_TRIPLES, 3):
            if time.monotonic() - start > arguments.seconds_max:
                break
            row: dict[str, Any] = {**asdict(shape), "chunk_pages": triples * 48}
            try:
                row |= measure(Way.FUSED, triples, where, rotate=True, shape=shape)
            except Exception as error:  # of one shape, such as too many registers
                row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
            print(json.dumps(row), flush=True)
            rows.append(row)
            torch.cuda.empty_cache()
    if rows:
        result["sweep"] = rows
    result |= machine()
    print_result(result, as_json=arguments.json)


if __name__ == "__main__":
    main()
