"""`leto doctor` runs everywhere, and each complaint has a remedy."""

import json
import resource
import subprocess
import sys

import pytest
from tests.fake_nvml import FakeGpu, FakeNvml

from leto_strategy.cli import doctor, main
from leto_strategy.cli.doctor import resources, software
from leto_strategy.cli.doctor.finding import Finding
from leto_strategy.cli.doctor.gpu import GPU_CHECKS
from leto_strategy.cli.doctor.machine import Machine
from leto_strategy.cli.doctor.no_gpu import CPU_CHECKS
from leto_strategy.devices.driver import CudaDevice, DriverReport
from leto_strategy.devices.nvml import Nvml
from leto_strategy.erasure import compiler

GIB = 2**30
H200 = CudaDevice("NVIDIA H200", (9, 0), virtual_memory=True, posix_handles=True, compute_mode=0)
FINE = FakeGpu()
SHMEM = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


class Described(Machine):
    """A machine that is what a test says; in everything else one on which all is well."""

    num_nodes = 2
    nvml = Nvml(FakeNvml(FINE, FINE))
    cuda = DriverReport((13, 0), (H200, H200))
    file_limit = 2**20
    torch = "2.13.0+cu130"
    comparable: bool | None = True

    def __init__(self, **facts: object) -> None:
        self.environ = {}
        self.files = {SHMEM: "always [advise] never"}
        self.programs = {"c++": "/usr/bin/c++"}
        self.assemblers = {"/triton/ptxas": (13, 3)}
        self.names = {"python"}
        for name, value in facts.items():
            assert hasattr(self, name), name
            setattr(self, name, value)

    def text(self, path: str) -> str | None:
        return self.files.get(path)

    def program(self, *names: str) -> str | None:
        return next((self.programs[name] for name in names if name in self.programs), None)

    def version_of(self, distribution: str) -> str | None:
        return self.torch

    def ptxas(self) -> dict[str, tuple[int, int]]:
        return self.assemblers

    def process_names(self) -> set[str]:
        return self.names

    def pids_comparable(self) -> bool | None:
        return self.comparable


def found(name: str, **facts: object) -> Finding:
    """The finding of this name on such a machine."""
    (finding,) = [finding for finding in doctor.examine(Described(**facts), checks=()) if finding.name == name]
    return finding


def test_this_machine_is_examined_without_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    names = [check["name"] for check in report["checks"]]
    assert len(names) == len(set(names))
    assert len(names) - len(doctor.CHECKS) in (len(CPU_CHECKS), len(GPU_CHECKS))
    assert all(check["remedy"] for check in report["checks"] if check["level"] != "ok")
    assert not [check for check in report["checks"] if "could not be checked" in check["found"]]


def test_the_table_shows_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for name in ("python", "torch", "lightning", "entry point", "memfd_create", "memory", "/dev/shm", "gpu"):
        assert name in text
    assert "Leto runs here" in text


def test_a_check_that_breaks_is_a_finding() -> None:
    def check_broken_thing() -> Finding:
        raise RuntimeError("no such file")

    broken, fine, *_ = doctor.examine(Described(), checks=(check_broken_thing, software.check_python))
    assert (broken.name, broken.level) == ("broken thing", "warn")
    assert "no such file" in broken.found
    assert fine.level == "ok"


def test_a_failed_check_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    broken = Described(cuda=DriverReport((13, 0), problem="cuInit: CUDA_ERROR_UNKNOWN (999)"))
    assert doctor.run(as_json=False, machine=broken) == 1
    text = capsys.readouterr().out
    assert "CUDA_ERROR_UNKNOWN" in text
    assert "→ install the driver" in text
    assert "checks failed" in text
    assert doctor.run(as_json=True, machine=broken) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_parity_without_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "describe", lambda: (False, "numpy"))
    finding = software.check_erasure_code()
    assert finding.level == "warn"
    assert "C compiler" in finding.remedy


@pytest.mark.parametrize(
    ("environment", "level"),
    [({}, "ok"), ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}, "ok"), ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "warn")],
)
def test_a_switched_off_autoload_is_told(environment: dict[str, str], level: str) -> None:
    finding = software.autoload_finding(environment)
    assert finding.level == level
    assert level == "ok" or "import leto_strategy" in finding.remedy


def test_limits_are_judged() -> None:
    unlimited = resource.RLIM_INFINITY
    assert resources.files_finding(1024, 1024).level == "warn"
    assert resources.files_finding(1024, 2**20).level == "ok"
    assert resources.files_finding(unlimited, unlimited).level == "ok"
    assert resources.memory_finding(16 * GIB, limit=None, used=0).level == "ok"
    assert resources.memory_finding(16 * GIB, limit=4 * GIB, used=3 * GIB).level == "warn"
    assert resources.memory_finding(GIB, limit=None, used=0).level == "warn"
    assert resources.shared_memory_finding(size=64 * 2**20, free=64 * 2**20).level == "warn"
    assert resources.shared_memory_finding(size=8 * GIB, free=8 * GIB).level == "ok"


@pytest.mark.parametrize(
    ("name", "version", "level"),
    [
        ("torch", "2.13.0+cpu", "ok"),
        ("torch", "2.11.0", "ok"),
        ("torch", "2.9.1", "fail"),
        ("torch", None, "fail"),
        ("lightning", "2.6.6", "ok"),
        ("lightning", "2.5.0", "fail"),
        ("lightning", "3.0.0rc1", "ok"),
    ],
)
def test_versions_are_compared_as_numbers(name: str, version: str | None, level: str) -> None:
    finding = software.distribution_finding(name, version)
    assert finding.level == level
    assert level == "ok" or finding.remedy.startswith("pip install")


# GPUs


def test_a_machine_without_a_gpu_says_so_in_one_line() -> None:
    findings = doctor.examine(Described(num_nodes=0, nvml=Nvml(None)), checks=())
    assert [finding.level for finding in findings] == ["ok"] * len(CPU_CHECKS)
    assert [finding.found for finding in findings if "gpu" in finding.name] == [
        "no NVIDIA GPU: training runs on the CPU"
    ]


def test_a_machine_where_all_is_well_has_nothing_to_say() -> None:
    findings = doctor.examine(Described(), checks=())
    assert len(findings) == len(GPU_CHECKS)
    assert [finding for finding in findings if finding.level != "ok" or finding.remedy] == []
    assert "2 × NVIDIA H200 (sm_90), 128.0 GiB each" in found("gpu").found
    assert found("gpu driver").found == "NVIDIA driver 580.95.05, CUDA up to 13.0"


def test_a_gpu_whose_device_file_is_hidden_is_found_by_its_driver() -> None:
    assert found("gpu driver", num_nodes=0).level == "ok"


OLD = {"/triton/ptxas": (12, 8)}


@pytest.mark.parametrize(
    ("name", "facts", "level", "text", "remedy"),
    [
        ("gpu driver", {"cuda": DriverReport(problem="libcuda.so.1: no such file")}, "fail", "libcuda", "--gpus all"),
        ("gpu driver", {"cuda": DriverReport((13, 0))}, "fail", "no GPU is visible", "CUDA_VISIBLE_DEVICES"),
        ("torch for CUDA", {"torch": "2.13.0+cpu"}, "warn", "built for the CPU", "CUDA build"),
        (
            "gpu virtual memory",
            {"cuda": DriverReport((13, 0), (H200, CudaDevice("A16-2Q", (8, 6), True, False, 0)))},
            "fail",
            "A16-2Q",
            "vGPU",
        ),
        (
            "gpu virtual memory",
            {"cuda": DriverReport((13, 0), (CudaDevice("P4", (6, 1), False, True, 0),))},
            "fail",
            "P4",
            "vGPU",
        ),
        (
            "gpu sharing",
            {"cuda": DriverReport((13, 0), (CudaDevice("H200", (9, 0), True, True, 3),))},
            "fail",
            "EXCLUSIVE_PROCESS",
            "shadows=0",
        ),
        (
            "gpu sharing",
            {"cuda": DriverReport((13, 0), (CudaDevice("H200", (9, 0), True, True, 2),))},
            "fail",
            "PROHIBITED",
            "nvidia-smi -c DEFAULT",
        ),
        ("mps", {"names": {"nvidia-cuda-mps-control"}}, "warn", "nvidia-cuda-mps-control", "echo quit"),
        ("mps", {"environ": {"CUDA_MPS_PIPE_DIRECTORY": "/x"}}, "warn", "CUDA_MPS_PIPE_DIRECTORY", "unset"),
        ("nvml", {"nvml": Nvml(FakeNvml(init_error=12))}, "warn", "NVML error 12", "libnvidia-ml"),
        ("nvml", {"nvml": Nvml(None)}, "warn", "nvidia-ml-py is not installed", "utility"),
        ("nvml", {"comparable": False}, "warn", "another PID namespace", "--pid=host"),
        (
            "gpu health",
            {"nvml": Nvml(FakeNvml(FINE, FakeGpu(action=1)))},
            "fail",
            "GPU 1: the driver asks",
            "gpu-reset",
        ),
        ("gpu health", {"nvml": Nvml(FakeNvml(FakeGpu(lost=True)))}, "fail", "GPU 0: lost", "nvidia-smi"),
        ("gpu health", {"nvml": Nvml(FakeNvml(FakeGpu(action=4)))}, "warn", "drain and reset", "nvidia-smi"),
        ("gpu health", {"nvml": Nvml(FakeNvml(FakeGpu(rows=(0, 1, 0, 1))))}, "warn", "not be replaced", "nvidia-smi"),
        ("gpu health", {"nvml": Nvml(FakeNvml(FakeGpu(rows=(0, 1, 1, 0))))}, "warn", "wait for a reset", "nvidia-smi"),
        ("gpu health", {"nvml": Nvml(FakeNvml(FakeGpu(errors=3)))}, "warn", "3 uncorrectable", "nvidia-smi -q"),
        ("gpu persistence", {"nvml": Nvml(FakeNvml(FakeGpu(persistent=0)))}, "warn", "is off", "nvidia-smi -pm 1"),
        ("gpu memory handles", {"file_limit": 8703}, "warn", "8704 open files", "now 8703"),
        ("huge pages", {"files": {SHMEM: "always advise [never] deny"}}, "warn", "160 ms", "echo advise"),
        ("huge pages", {"files": {}}, "warn", "unknown", "nr_hugepages"),
        ("compiler", {"programs": {}}, "warn", "no C++ compiler", "apt-get install g++"),
        ("ptxas", {"assemblers": OLD}, "warn", "older than 13.3", "nvidia-cuda-nvcc>=13.3"),
        (
            "ptxas",
            {"assemblers": {**OLD, "/nvidia/cu13/bin/ptxas": (13, 3)}},
            "warn",
            "release 12.8 (/triton/ptxas)",
            "export TRITON_PTXAS_PATH=/nvidia/cu13/bin/ptxas",
        ),
        ("ptxas", {"assemblers": {}}, "warn", "none", "TRITON_PTXAS_PATH"),
        ("module loading", {"environ": {"CUDA_MODULE_LOADING": "EAGER"}}, "warn", "EAGER", "LAZY"),
        ("nccl", {"environ": {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "10"}}, "warn", "watchdog", "unset"),
    ],
)
def test_each_complaint_about_gpus_has_a_remedy(
    name: str, facts: dict[str, object], level: str, text: str, remedy: str
) -> None:
    finding = found(name, **facts)
    assert finding.level == level
    assert text in finding.found
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("name", "facts", "text"),
    [
        ("nvml", {"comparable": None}, "could not be tried"),
        ("gpu memory handles", {"file_limit": 8704}, "the limit is 8704"),
        ("gpu memory handles", {"file_limit": -1}, "unlimited"),
        ("huge pages", {"files": {"/proc/sys/vm/nr_hugepages": "512\n"}}, "nr_hugepages 512"),
        ("module loading", {"environ": {"CUDA_MODULE_LOADING": "LAZY"}}, "first used"),
        ("nccl", {"environ": {"NCCL_BUFFSIZE": "1048576"}}, "NCCL_BUFFSIZE=1048576"),
        ("nccl", {"environ": {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "600"}}, "=600"),
        ("gpu health", {"nvml": Nvml(FakeNvml(FakeGpu(action=None, errors=None, rows=None)))}, "no complaint"),
    ],
)
def test_what_is_no_complaint(name: str, facts: dict[str, object], text: str) -> None:
    finding = found(name, **facts)
    assert (finding.level, finding.remedy) == ("ok", "")
    assert text in finding.found


def test_the_assembler_that_triton_uses_comes_first(tmp_path) -> None:
    for name, release in (("mine", "13.3"), ("other", "12.0")):
        script = tmp_path / name
        script.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release {release}, V{release}.0"\n')
        script.chmod(0o755)
    machine = Machine()
    machine.environ = {"TRITON_PTXAS_PATH": str(tmp_path / "mine")}
    path, release = next(iter(machine.ptxas().items()))
    assert (path, release) == (str(tmp_path / "mine"), (13, 3))
    machine.environ = {"TRITON_PTXAS_PATH": str(tmp_path / "missing")}
    assert str(tmp_path / "missing") not in machine.ptxas()


def test_facts_of_this_machine_are_found() -> None:
    machine = Machine()
    assert machine.text("/proc/self/comm")
    assert machine.text("/nonexistent") is None
    assert machine.program("nonexistent", "sh").endswith("/sh")
    assert machine.version_of("torch")
    assert machine.process_names()


@pytest.mark.skipif(Machine().cuda.problem == "", reason="there is a driver")
def test_a_context_that_can_not_be_made_says_nothing_about_pids() -> None:
    assert Machine().pids_comparable() is None
    code = "from leto_strategy.devices.driver import hold_context; hold_context()"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 1
