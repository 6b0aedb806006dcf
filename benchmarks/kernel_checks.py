"""Every exactness check of the kernels on a GPU: one JSON line a check, exit status 1 if one fails.

    python benchmarks/kernel_checks.py [--only NAME] [--seconds-max S] [--compile-only] [--seed N]

Scratch is poisoned before a kernel writes it. Nothing is compared with a tolerance.
"""

import argparse
import json
import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton

from benchmarks.kernel_data import Place
from benchmarks.parity_checks import (
    LOSSES,
    UPDATES,
    check_encode,
    check_encode_matrix,
    check_reconstruct,
    check_update,
    check_xor,
)
from benchmarks.torn_checks import check_flags_matter, check_torn
from benchmarks.update_checks import STEPS, check_update_chunk
from leto_strategy.triton_kernels import ahead, compiler
from leto_strategy.triton_kernels.ahead import Compilation
from leto_strategy.triton_kernels.launch_shapes import FusedShape, Order, Way
from leto_strategy.triton_kernels.pages import SCATTERED
from leto_strategy.triton_kernels.warm_up import Needs, compilations, preload, update_compilations

Check = Callable[[], str]

SHAPES = (
    FusedShape(),
    FusedShape(order=Order.FENCE_FIRST),
    FusedShape(order=Order.FENCE_LAST),
    FusedShape(64, 2, 168, Order.FENCE_FIRST),
    FusedShape(32, 1, 168, Order.FENCE_FIRST),
    FusedShape(32, 1, 200, Order.FENCE_FIRST),
    FusedShape(32, 1, 200, Order.FENCE_LAST),
)
"""Of the fused kernel: the default first, then what is measured beside it."""

HEIGHTS = (*range(1, 21), 33, 64)
BF16 = torch.bfloat16


def name_of(shape: FusedShape) -> str:
    """A short name of a launch shape."""
    return f"b{shape.block}.w{shape.num_warps}.r{shape.maxnreg or 0}.{shape.order}"


def checks(place: Place) -> Iterator[tuple[str, Check]]:
    """All checks by name."""
    large = Place(place.device, 16384)
    ways = [True, False] if compiler.has_clmad(place.device) else [False]
    if ways[0]:
        yield "preloaded", partial(check_preloaded, place)  # first: what is checked before is loaded
    for clmad in ways:
        for name, check in _parity(place, large):
            yield f"{name}.{'clmad' if clmad else 'integer'}", partial(_multiplying, clmad, check)
    yield "xor", partial(check_xor, place, num_pages=17)
    for i, step in enumerate(STEPS):
        pages = partial(check_update_chunk, place, step=step, way=Way.PAGES)
        yield f"update_pages.{i}.in_place", partial(pages, num=19, rotate=False)
        yield f"update_pages.{i}.rotate.bf16", partial(pages, num=19, dtype=BF16, copy=True, clip=0.37)
    yield "update_pages.matrix", partial(
        check_update_chunk, place, num=5, step=STEPS[0], way=Way.PAGES, height=5, scattered=True
    )  # fmt: skip
    torn = partial(check_torn, place, way=Way.PAGES, num=19)
    for lost in ("", "flags", "other_flags"):
        yield f"torn.pages.in_place.{lost}", partial(torn, rotate=False, lost=lost, copy=False)
        yield f"torn.pages.rotate.{lost}", partial(torn, rotate=True, lost=lost, copy=False)
    yield "flags_matter", partial(check_flags_matter, place, num=3, way=Way.PAGES, rotate=True)
    if ways[0]:
        yield from _fused(place, large)


def check_preloaded(place: Place) -> str:
    """After `preload` nothing is compiled, nor read from the cache on disk, whatever of it is launched."""
    preload(Needs(16, STEPS[1]), place.device)
    compiled: list[str] = []

    def note(*, repr: str, **_: object) -> None:
        compiled.append(repr)

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = note
        for way in Way:
            check_update_chunk(place, num=16, step=STEPS[1], way=way)
        check_torn(place, num=16, way=Way.FUSED, rotate=True, copy=False)
        check_encode(place, num_pages=19, missing=[[3]])
        check_reconstruct(place, num_data=32, lost=[3], lost_parity=[], by_matrix=False)
    assert not compiled, compiled
    return "update both ways, restore, encode, reconstruct"


def _parity(place: Place, large: Place) -> Iterator[tuple[str, Check]]:
    missing = ([0], [15, 16, 79], list(range(32, 64)))
    yield "encode", partial(check_encode, place, num_pages=80, missing=missing)
    yield "encode.ragged", partial(check_encode, place, num_pages=37, first_page=16)
    yield "encode.scattered", partial(check_encode, place, num_pages=80, scattered=True)
    yield "encode.large_pages", partial(check_encode, large, num_pages=32)
    yield "encode.every_h", partial(check_encode_matrix, place, num_pages=19, heights=HEIGHTS)
    for height, first, count in UPDATES:
        update = partial(check_update, place, num_pages=64, height=height, first=first, count=count)
        yield f"update.{height}.{first}.{count}", update
    for i, (lost, lost_parity) in enumerate(LOSSES):
        yield f"reconstruct.{i}", partial(check_reconstruct, place, num_data=48, lost=lost, lost_parity=lost_parity)


def _fused(place: Place, large: Place) -> Iterator[tuple[str, Check]]:
    fused = partial(check_update_chunk, way=Way.FUSED)
    for shape in SHAPES:
        name = name_of(shape)
        yield f"fused.{name}", partial(fused, place, num=48, step=STEPS[1], clip=0.5, shape=shape)
        yield f"torn.fused.{name}", partial(
            check_torn, place, way=Way.FUSED, num=48, rotate=True, copy=False, shape=shape
        )  # fmt: skip
    yield "fused.large_pages", partial(fused, large, num=32, step=STEPS[0])
    yield "fused.in_place", partial(fused, place, num=32, step=STEPS[2], rotate=False)
    yield "fused.foreach.bf16", partial(fused, place, num=32, step=STEPS[5], dtype=BF16, copy=True, clip=0.37)
    torn = partial(check_torn, place, way=Way.FUSED, num=32, copy=False)
    for lost in ("flags", "other_flags"):
        yield f"torn.fused.rotate.{lost}", partial(torn, rotate=True, lost=lost)
        yield f"torn.fused.in_place.{lost}", partial(torn, rotate=False, lost=lost)


def _multiplying(clmad: bool, check: Check) -> str:
    with compiler.products(clmad=clmad):
        return check()


def ahead_of_checks() -> list[Compilation]:
    """What the checks launch."""
    found: dict[str, Compilation] = {}

    def add(more: list[Compilation]) -> None:
        found.update((json.dumps([one.kernel, one.args, sorted(one.options.items())]), one) for one in more)

    for shape in SHAPES:
        add(update_compilations(Needs(16, STEPS[0]), shape, clmad=True))
    add(update_compilations(Needs(16, STEPS[0], rotates=False), FusedShape(), clmad=True))
    add(update_compilations(Needs(16, STEPS[4], bf16_grad=True, bf16_copy=True), FusedShape(), clmad=True))
    for step in (STEPS[0], STEPS[3], STEPS[4], STEPS[7]):
        add(update_compilations(Needs(1, step, rotates=False), FusedShape(), clmad=True))
        add(update_compilations(Needs(1, step, bf16_grad=True, bf16_copy=True), FusedShape(), clmad=True))
    for clmad in (False, True):
        for height in (16, 20, 5, 33):
            pages = compilations(Needs(height, STEPS[0], scattered=True), clmad=clmad)
            add([one for one in pages if "_parity_kernels" in one.kernel and not _rare(one)])
        for lost in range(1, 17):
            matrices = [one for one in compilations(Needs(lost, STEPS[0]), clmad=clmad) if "_apply" in one.kernel]
            add([one for one in matrices if not one.options["DELTA"]])
    return list(found.values())


def _rare(one: Compilation) -> bool:
    """No check changes or rebuilds a group whose pages lie anywhere by the FFT."""
    return one.options.get("LAYOUT") == SCATTERED and one.options.get("DELTA", True)


def compile_ahead(compilations: list[Compilation], *, seconds_max: float) -> bool:
    """Compile in parallel and print one JSON line for each."""
    start = time.monotonic()
    results = ahead.compile_all(
        compilations, capability=(9, 0), num_processes=len(os.sched_getaffinity(0)), seconds_max=seconds_max
    )
    for one, outcome in zip(compilations, results, strict=True):
        print(json.dumps({"kernel": one.kernel.rpartition(":")[2], **one.options, **outcome}), flush=True)
    good = sum(bool(outcome["ok"]) for outcome in results)
    print(f"compiled {good} of {len(results)} in {time.monotonic() - start:.0f} s", flush=True)
    return good == len(results)


def run(only: str, *, seconds_max: float = 1e9, seed: int = 1) -> list[dict[str, Any]]:
    """Run the checks whose name contains `only`; what does not begin in time is reported as not run."""
    results, start = [], time.monotonic()
    for name, check in checks(Place(torch.device("cuda", 0))):
        if only not in name:
            continue
        began = time.monotonic()
        result: dict[str, Any] = {"check": name, "seed": seed}
        if began - start > seconds_max:
            result |= {"ok": None, "detail": "not run: out of time"}
        else:
            torch.manual_seed(seed)
            try:
                result |= {"ok": True, "detail": check()}
                torch.cuda.synchronize()
            except Exception as error:
                result |= {"ok": False, "detail": f"{type(error).__name__}: {str(error).strip()[:500]}"}
                if not isinstance(error, AssertionError):
                    traceback.print_exc()
        result["seconds"] = round(time.monotonic() - began, 2)
        print(json.dumps(result), flush=True)
        results.append(result)
    return results


def main() -> int:
    """Run all checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run checks whose name contains this")
    parser.add_argument("--seconds-max", type=float, default=1e9, help="start no check after this time")
    parser.add_argument("--compile-only", action="store_true", help="compile what the checks launch, and check nothing")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help="of everything random")
    arguments = parser.parse_args()
    if arguments.compile_only:
        return 0 if compile_ahead(ahead_of_checks(), seconds_max=arguments.seconds_max) else 1
    results = run(arguments.only, seconds_max=arguments.seconds_max, seed=arguments.seed)
    return 0 if results and all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
