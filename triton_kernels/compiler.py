"""How the kernels are compiled and started: with which products, which assembler, into which cache.

`clmad` needs a ptxas of CUDA 13.3 or later and a GPU of sm_80 or later. Where either is missing the kernels multiply
by integer products: same bytes, slower, said once. The assembler and the cache are set only while one of our kernels
compiles: kernels of others are compiled as they would be without us.
"""

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

from leto_strategy.triton_kernels.assembler import find_assembler
from leto_strategy.triton_kernels.factors import field_product

LOG = logging.getLogger(__name__)

CAPABILITY_MIN = (8, 0)
INTERPRETED = triton.knobs.runtime.interpret
"""Kernels run in Triton's interpreter, on the CPU: fixed when they are decorated, so when this package is imported."""


@cache
def say_once(message: str) -> None:
    """Log a warning, and never again the same in this process."""
    LOG.warning("%s", message)


_forced: list[bool] = []


@contextmanager
def products(*, clmad: bool) -> Iterator[None]:
    """Multiply by clmad or by integer products, whatever would be picked: for checks and measurements."""
    _forced.append(clmad)
    try:
        yield
    finally:
        _forced.pop()


def has_clmad(device: torch.device) -> bool:
    """Whether kernels on this device multiply by clmad. Says once when not."""
    return _forced[-1] if _forced else _finds_clmad(device)


@cache
def _finds_clmad(device: torch.device) -> bool:
    if INTERPRETED:
        return False
    assembler = find_assembler()
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY_MIN:
        why = f"{device} is sm_{capability[0]}{capability[1]}, clmad needs sm_80"
    elif not assembler.has_clmad:
        why = f"{assembler.why}. Try: pip install 'nvidia-cuda-nvcc>=13.3'"
    elif (failure := _probe(device)) is not None:
        why = f"{assembler.why} made a kernel that fails: {failure}"
    else:
        return True
    say_once(f"event=slow_products The erasure code multiplies without clmad, several times slower: {why}")
    return False


def _probe(device: torch.device) -> str | None:
    """Multiply one pair of symbols; what is wrong with the result, or None."""
    from leto_strategy.triton_kernels._probe_kernels import _multiply

    out = torch.zeros(1, dtype=torch.int32, device=device)
    try:
        launch(_multiply, (1,), (out, 0x12345678, 0x1CA7F00D, 1), {"CLMAD": True, "num_warps": 1})
        found = int(out.item()) & 0xFFFFFFFF
    except Exception as error:  # whatever compiler and driver say, the integer path does not need it
        return f"{type(error).__name__}: {str(error).strip()[:300]}"
    expected = field_product(0x12345678, 0x1CA7F00D) ^ 1
    return None if found == expected else f"0x12345678 * 0x1ca7f00d + 1 is {found:#x}, not {expected:#x}"


@cache
def _cache_folder() -> str | None:
    """None where Triton's own cache can be written, else a folder for this process and its children."""
    folder = Path(triton.knobs.cache.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        instead = tempfile.mkdtemp(prefix="leto-kernels-")
        say_once(f"event=no_kernel_cache {folder} can't be written ({error}): every process compiles its kernels anew")
        return instead


@contextmanager
def compiling() -> Iterator[None]:
    """Triton's settings while one of our kernels may have to be compiled."""
    if INTERPRETED:
        yield
        return
    path, folder = find_assembler().path, _cache_folder()
    with triton.knobs.nvidia.scope(), triton.knobs.cache.scope():
        if path is not None:
            triton.knobs.nvidia.ptxas = path
            triton.knobs.nvidia.ptxas_blackwell = path
        if folder is not None:
            triton.knobs.cache.dir = folder
        yield


def launch(kernel: Any, grid: tuple[int, ...], args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Run a kernel on the current stream, compiled first where it has not been."""
    with compiling():
        kernel[grid](*args, **options)
