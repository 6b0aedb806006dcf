"""Compiling kernels ahead of time in several processes, without touching a GPU; later launches find the results."""

import importlib
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from leto_strategy.triton_kernels.compiler import compiling


@dataclass(frozen=True)
class Compilation:
    """One variant of a kernel, described so that another process can compile it.

    Args:
        kernel: "module:function".
        args: In order: "*i64" and the like for a pointer, or a number that stands for all numbers of its kind.
        options: Compile-time constants and launch options by name.
    """

    kernel: str
    args: tuple[str | int | float, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, kernel: Any, args: Sequence[Any], options: Mapping[str, Any]) -> "Compilation":
        """What `launch` with the same arguments would compile."""
        return cls.of_names(kernel, [_POINTERS[arg.dtype] if isinstance(arg, Tensor) else arg for arg in args], options)

    @classmethod
    def of_names(cls, kernel: Any, args: Sequence[str | int | float], options: Mapping[str, Any]) -> "Compilation":
        """A variant by the types of its arguments."""
        return cls(f"{kernel.fn.__module__}:{kernel.fn.__name__}", tuple(args), dict(options))

    def compile(self) -> Any:
        """Compile for the active driver's target and put the result into the caches; nothing is run."""
        module, _, name = self.kernel.partition(":")
        kernel = getattr(importlib.import_module(module), name)
        args = [torch.empty(1, dtype=_DTYPES[arg], device="meta") if isinstance(arg, str) else arg for arg in self.args]
        with compiling():
            return kernel.warmup(*args, grid=(1,), **self.options)

    def load(self) -> None:
        """Compile, or read from the cache, and load into the current GPU's context, so that a launch only launches."""
        _ = self.compile().run  # the property loads the module


_POINTERS = {
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
}
_DTYPES = {name: dtype for dtype, name in _POINTERS.items()}


def compile_all(
    compilations: Sequence[Compilation], *, capability: tuple[int, int], num_processes: int, seconds_max: float
) -> list[dict[str, Any]]:
    """Compile ahead of time in several processes, without touching a GPU; later launches find the results cached.

    Args:
        compilations: What to compile.
        capability: Of the GPU, such as (9, 0).
        num_processes: Compilers at a time.
        seconds_max: All of it: what is not ready then is left out.

    Returns:
        For each compilation, in order: {"ok": bool, "seconds": float, "error": str}, and where Triton's cuobjdump is
        there "registers", "stack" and "shared" of the result.
    """
    deadline = time.monotonic() + seconds_max
    waiting = iter(enumerate(compilations))
    results: list[dict[str, Any]] = [{"ok": False, "seconds": 0.0, "error": "out of time"} for _ in compilations]
    lock = threading.Lock()

    def work() -> None:
        with _Worker(capability[0] * 10 + capability[1]) as worker:
            while time.monotonic() < deadline:
                with lock:
                    index, one = next(waiting, (None, None))
                if index is None or one is None:
                    return
                start = time.monotonic()
                results[index] = worker.compile(one, deadline=deadline)
                results[index]["seconds"] = round(time.monotonic() - start, 1)

    threads = [threading.Thread(target=work) for _ in range(min(num_processes, len(compilations)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class _Worker:
    """A process that compiles what it is told, one JSON line each way. A process of its own that imports no script."""

    def __init__(self, capability: int) -> None:
        self._command = [sys.executable, "-m", __name__, str(capability)]

    def __enter__(self) -> "_Worker":
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def compile(self, one: Compilation, *, deadline: float) -> dict[str, Any]:
        """The worker's answer, or why there is none."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        message = json.dumps({"kernel": one.kernel, "args": one.args, "options": dict(one.options)})
        try:
            self._process.stdin.write(message + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return {"ok": False, "error": "out of time"}
        line = self._process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self._errors.seek(0)
        return {"ok": False, "error": "the compiler ended: " + self._errors.read()[-500:]}


class _TargetOnly:
    """A driver of a GPU that need not be here: enough for Triton to compile for it."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _compile_for(message: Mapping[str, Any]) -> dict[str, Any]:
    try:
        compiled = Compilation(message["kernel"], tuple(message["args"]), message["options"]).compile()
        return {"ok": True, "error": "", **_resources(compiled.asm["cubin"])}
    except Exception as error:  # of compilers whose exceptions share no base
        return {"ok": False, "error": f"{type(error).__name__}: {str(error).strip()[-800:]}"}


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack and shared memory of a kernel; what spills shows as stack."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=False
        ).stdout
    patterns = {"registers": r"REG:(\d+)", "stack": r"STACK:(\d+)", "shared": r"SHARED:(\d+)"}
    return {key: int(found[1]) for key, pattern in patterns.items() if (found := re.search(pattern, usage))}


def _main() -> None:
    triton.runtime.driver.set_active(_TargetOnly(int(sys.argv[1])))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed does not get among the answers
    for line in sys.stdin:
        answers.write(json.dumps(_compile_for(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    _main()
