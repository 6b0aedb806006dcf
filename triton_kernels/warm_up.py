"""Kernels compiled before they are needed: a shadow does not pay for it after a failure.

`warm_up` fills Triton's cache on disk, in several processes and without touching a GPU. `preload` makes this process
ready to launch: it reads the cache (or compiles what is not there) and loads the result into the GPU's context.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from leto_strategy.triton_kernels import _chunk_update_kernels, _parity_kernels
from leto_strategy.triton_kernels.adam import AdamStep
from leto_strategy.triton_kernels.ahead import Compilation, compile_all
from leto_strategy.triton_kernels.assembler import find_assembler
from leto_strategy.triton_kernels.compiler import CAPABILITY_MIN, has_clmad
from leto_strategy.triton_kernels.factors import BLOCK_PAGES
from leto_strategy.triton_kernels.launch_shapes import FusedShape, Way, fused_options, pages_options, restore_options
from leto_strategy.triton_kernels.pages import PARTIAL, SCATTERED, WHOLE
from leto_strategy.triton_kernels.parity import XOR_OPTIONS, fft_shape, matrix_options

NUMBER = 16
"""Stands for the numbers that kernels are not specialised for, and for a page's words, which are multiples of 16."""


@dataclass(frozen=True)
class Needs:
    """What a job will launch.

    Args:
        num_parity: Parity pages of a group.
        step: An update's form; its numbers don't matter.
        rotates: Moments rotate.
        bf16_grad: Gradients are bf16.
        bf16_copy: The update writes a bf16 working copy.
        scattered: Pages of a block may lie anywhere.
    """

    num_parity: int
    step: AdamStep
    rotates: bool = True
    bf16_grad: bool = False
    bf16_copy: bool = False
    scattered: bool = False


def warm_up(
    needs: Needs, *, capability: tuple[int, int], num_processes: int | None = None, seconds_max: float = 120.0
) -> list[dict[str, Any]]:
    """Compile all that a job needs into the cache on disk, in processes of their own; no GPU is touched.

    Args:
        needs: What the job will launch.
        capability: Of the GPU, such as (9, 0).
        num_processes: Compilers at a time; as many as there are cores without it.
        seconds_max: Compilers are ended then.

    Returns:
        For each kernel `ok`, `error`, `seconds` and, where known, `registers`, `stack` and `shared`. What is not ready
        is compiled at its first launch.
    """
    clmad = capability >= CAPABILITY_MIN and find_assembler().has_clmad
    processes = num_processes or len(os.sched_getaffinity(0))
    return compile_all(
        compilations(needs, clmad=clmad), capability=capability, num_processes=processes, seconds_max=seconds_max
    )


def preload(needs: Needs, device: torch.device) -> None:
    """Make this process ready to launch all that a job needs on a GPU, whose context it opens."""
    with torch.cuda.device(device):
        for one in compilations(needs, clmad=has_clmad(device)):
            one.load()


def compilations(needs: Needs, *, clmad: bool) -> list[Compilation]:
    """Every variant of a kernel that a job may launch, the slowest to compile first."""
    fft = needs.num_parity == BLOCK_PAGES
    found = update_compilations(needs, FusedShape(), clmad=clmad)
    layouts = (WHOLE, PARTIAL, SCATTERED) if needs.scattered else (WHOLE, PARTIAL)
    if fft:
        for layout in layouts:
            found += [_encode(delta, layout, clmad) for delta in (False, True)]
            found.append(_reconstruct(layout, clmad))
    else:
        found += [_matrix(needs.num_parity, delta=delta, clmad=clmad) for delta in (False, True)]
        tiles = {matrix_options(lost, clmad)["TILE"]: lost for lost in range(needs.num_parity, 0, -1)}
        found += [_matrix(lost, delta=False, clmad=clmad) for lost in tiles.values() if lost != needs.num_parity]
    found.append(Compilation.of_names(_parity_kernels._xor_pages, ("*i64", "*i64", NUMBER), XOR_OPTIONS))
    return found


def update_compilations(needs: Needs, shape: FusedShape, *, clmad: bool) -> list[Compilation]:
    """The kernels of a chunk's update and of what brings it back."""
    kernels, types = _chunk_update_kernels, {"bf16_grad": needs.bf16_grad, "bf16_copy": needs.bf16_copy}
    tail = ("*fp32", "*fp32", "*i64", "*i64", NUMBER)
    options = pages_options(rotates=needs.rotates, **types, step=needs.step)
    found = [Compilation.of_names(kernels._update_pages, ("*i64", *tail), options)]
    ways = [Way.PAGES]
    if needs.num_parity == BLOCK_PAGES and clmad:
        options = fused_options(shape, rotates=needs.rotates, **types, step=needs.step, clmad=clmad)
        args = (*("*i64",) * 4, *tail, NUMBER, NUMBER)
        found.insert(0, Compilation.of_names(kernels._fused_update, args, options))
        ways.append(Way.FUSED)
    for way in ways:
        options = restore_options(way, shape, rotates=needs.rotates)
        found.append(Compilation.of_names(kernels._restore_tiles, (*("*i64",) * 3, NUMBER, NUMBER), options))
    return found


def _encode(delta: bool, layout: int, clmad: bool) -> Compilation:
    options = {"DELTA": delta, "LAYOUT": layout, "CLMAD": clmad, **fft_shape(clmad)}
    return Compilation.of_names(_parity_kernels._encode_fft, _pointers(9, 2), options)


def _reconstruct(layout: int, clmad: bool) -> Compilation:
    options = {"LAYOUT": layout, "CLMAD": clmad, **fft_shape(clmad)}
    return Compilation.of_names(_parity_kernels._reconstruct_fft, _pointers(7, 3), options)


def _matrix(num_outputs: int, *, delta: bool, clmad: bool) -> Compilation:
    options = {"DELTA": delta, "ADD": delta, **matrix_options(num_outputs, clmad)}
    return Compilation.of_names(_parity_kernels._apply_matrix, _pointers(5, 2), options)


def _pointers(num_pointers: int, num_numbers: int) -> Sequence[str | int]:
    return (*("*i64",) * num_pointers, *(NUMBER,) * num_numbers)
