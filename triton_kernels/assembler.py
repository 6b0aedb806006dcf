"""Which ptxas compiles the kernels: `clmad` needs one of CUDA 13.3 or later."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import triton

PTXAS_VERSION_MIN = (13, 3)
VERSION_SECONDS_MAX = 30.0


@dataclass(frozen=True)
class Assembler:
    """The ptxas to compile with. `path` None: Triton's own."""

    path: str | None
    has_clmad: bool
    why: str
    """In words for people: what was found, or what is missing."""


@cache
def find_assembler() -> Assembler:
    """Look for a ptxas that knows clmad: TRITON_PTXAS_PATH, the wheel nvidia-cuda-nvcc, what comes with Triton."""
    seen = []
    for path in _candidates():
        version = ptxas_version(path)
        seen.append(f"{path} ({'does not run' if version is None else '.'.join(map(str, version))})")
        if version is not None and version >= PTXAS_VERSION_MIN:
            return Assembler(path, True, f"ptxas {'.'.join(map(str, version))} at {path}")
    return Assembler(None, False, f"no ptxas of CUDA 13.3 or later: {', '.join(seen) or 'none found'}")


def _candidates() -> Iterator[str]:
    if named := os.environ.get("TRITON_PTXAS_PATH"):
        yield named
    for folder in map(Path, sys.path):
        yield from map(str, sorted(folder.glob("nvidia/cu*/bin/ptxas"), reverse=True))
        yield from map(str, folder.glob("nvidia/cuda_nvcc/bin/ptxas"))
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    yield from (str(tools / name) for name in ("ptxas-blackwell", "ptxas") if (tools / name).exists())


def ptxas_version(path: str) -> tuple[int, ...] | None:
    """Version of a ptxas, or None where it doesn't run or is something else."""
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=VERSION_SECONDS_MAX, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    found = re.search(r"ptxas.*release (\d+)\.(\d+)", done.stdout, re.DOTALL)
    return (int(found[1]), int(found[2])) if found else None
