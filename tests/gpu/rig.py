"""A rank's progress page in registered memory, as a trainer has it; and Python run in a process of its own."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from leto_strategy.memory.backend import Place
from leto_strategy.memory.cuda import CudaBackend
from leto_strategy.memory.libcuda import CudaDriver
from leto_strategy.memory.places import device_of, trainer_backends
from leto_strategy.progress import COPY_OFFSETS_BYTES, ProgressPage
from leto_strategy.update.words import StreamWords

MARKS = [
    pytest.mark.gpu,
    pytest.mark.leaks("fds"),  # the driver opens descriptors of its own whenever it needs one, and keeps them
]
"""Of every test module here."""

ROOT = Path(__file__).resolve().parents[2]
DEVICE = torch.device("cuda:0")
SEGMENT_BYTES, HANDLE_BYTES = 2 << 20, 32 << 20
_CYCLES_PER_MS = 1_500_000


class Page:
    """A progress page whose words a stream stores."""

    def __init__(self) -> None:
        backends = trainer_backends(device_of("cuda:0"))
        cuda = backends[Place.DEVICE]
        assert isinstance(cuda, CudaBackend)
        self.driver: CudaDriver = cuda.driver
        self._host = backends[Place.HOST]
        fds = self._host.create(SEGMENT_BYTES, label="page", protected=False)
        self.address = self._host.map(fds, SEGMENT_BYTES, address_hint=0, writable=True)
        for fd in fds:
            os.close(fd)
        self.page = ProgressPage(memoryview((ctypes.c_ubyte * SEGMENT_BYTES).from_address(self.address)).cast("B"))
        self.words = StreamWords(self.page, self.address, self.driver, DEVICE)
        stream = torch.cuda.current_stream(DEVICE)
        self.driver.write_in_stream(stream.cuda_stream, self.address + SEGMENT_BYTES // 2, 1)  # the first is slow
        stream.synchronize()

    def copies(self) -> list[int]:
        """Both copies of the word, as they are now."""
        return [ctypes.c_uint64.from_address(self.address + offset).value for offset in COPY_OFFSETS_BYTES]

    def close(self) -> None:
        """Unregister and unmap; nothing may be under way."""
        torch.cuda.synchronize(DEVICE)
        self.page.close()
        self._host.unmap(self.address, SEGMENT_BYTES)


def occupy(milliseconds: float) -> None:
    """Keep the current stream busy for about so long, or longer."""
    torch.cuda._sleep(int(milliseconds * _CYCLES_PER_MS))


def environment() -> dict[str, str]:
    """In which a program finds this repository, installed or not."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


def run_python(*arguments: str, seconds: float = 90.0) -> "subprocess.CompletedProcess[str]":
    """Run the interpreter with these arguments."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=seconds, check=False)
