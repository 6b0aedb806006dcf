"""What the checks of GPUs ask of the machine, in one place, so that a test can describe any machine."""

import os
import re
import resource
import select
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from leto_strategy.cli.doctor.software import installed
from leto_strategy.devices.driver import DriverReport, cuda_driver
from leto_strategy.devices.nvml import Nvml, open_nvml

_ANSWER_SECONDS = 20.0
_HOLD_CONTEXT = "from leto_strategy.devices.driver import hold_context; hold_context()"


class Machine:
    """This machine as far as GPUs go: all facts, no judgement. A test overrides what it wants to be otherwise."""

    environ: Mapping[str, str] = os.environ

    @cached_property
    def num_nodes(self) -> int:
        """Device files of NVIDIA GPUs."""
        return len(list(Path("/dev").glob("nvidia[0-9]*")))

    @cached_property
    def nvml(self) -> Nvml:
        """NVML."""
        return open_nvml()

    @cached_property
    def cuda(self) -> DriverReport:
        """CUDA's driver."""
        return cuda_driver()

    @property
    def file_limit(self) -> int:
        """Hard limit of open files, -1 for none."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def text(self, path: str) -> str | None:
        """Content of a file of the kernel, None where there is no such file."""
        try:
            return Path(path).read_text()
        except OSError:
            return None

    def program(self, *names: str) -> str | None:
        """Path of the first of these programs that is there."""
        return next((path for name in names if (path := shutil.which(name))), None)

    def version_of(self, distribution: str) -> str | None:
        """Version of an installed Python distribution."""
        return installed(distribution)

    def ptxas(self) -> dict[str, tuple[int, int]]:
        """PTX assemblers by path, with their CUDA release; the one that Triton uses comes first."""
        bundled = _folder_of("triton") / "backends" / "nvidia" / "bin"
        chosen = self.environ.get("TRITON_PTXAS_PATH")
        candidates = [chosen or bundled / "ptxas", bundled / "ptxas-blackwell"]
        candidates += sorted(_folder_of("nvidia").glob("cu*/bin/ptxas"), reverse=True)
        candidates += [shutil.which("ptxas") or ""]
        releases = {str(path): _release(str(path)) for path in candidates if path}
        return {path: release for path, release in releases.items() if release is not None}

    def process_names(self) -> set[str]:
        """Names of the processes that can be seen."""
        names = (self.text(f"/proc/{name}/comm") for name in os.listdir("/proc") if name.isdecimal())
        return {name.strip() for name in names if name}

    def pids_comparable(self) -> bool | None:
        """Whether NVML lists a process of ours under the pid that we know; None where that can't be tried."""
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _HOLD_CONTEXT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None
        with process:
            try:
                os.set_blocking(process.stdout.fileno(), False)
                if not _readable(process.stdout.fileno(), _ANSWER_SECONDS) or process.stdout.read() != b"ready\n":
                    return None
                lists = [gpu.compute_pids() for gpu in self.nvml.gpus()]
            finally:
                process.kill()
        known = [pids for pids in lists if pids is not None]
        return any(process.pid in pids for pids in known) if known else None


def _readable(fd: int, seconds: float) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(seconds * 1000))


def _folder_of(package: str) -> Path:
    """Folder of an installed package, found without loading it; one that is not there where it is not installed."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        spec = None
    places = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(places))) if places else Path("/nonexistent")


def _release(path: str) -> tuple[int, int] | None:
    """CUDA release of a PTX assembler, None where it can't be run."""
    try:
        result = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"release (\d+)\.(\d+)", result.stdout)
    return (int(found[1]), int(found[2])) if found else None
