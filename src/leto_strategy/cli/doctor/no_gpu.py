"""What is said in place of the checks of GPUs where there is none."""

from collections.abc import Callable

from leto_strategy.cli.doctor.finding import Finding
from leto_strategy.cli.doctor.machine import Machine


def check_huge_pages(machine: Machine) -> Finding:
    """For information: large pages make registered host memory faster to give back, on a GPU."""
    mode = machine.text("/sys/kernel/mm/transparent_hugepage/shmem_enabled") or ""
    chosen = mode.partition("[")[2].partition("]")[0] or "unknown"
    number = (machine.text("/proc/sys/vm/nr_hugepages") or "unknown").strip()
    return Finding("huge pages", "ok", f"hugetlb {number} pages, shmem THP {chosen}; not used on CPU")


def check_compiler(machine: Machine) -> Finding:
    """A C++ compiler, which only CUDA needs."""
    compiler = machine.program("g++", "c++", "clang++")
    return Finding("compiler", "ok", compiler or "none; training on CPU needs none")


def check_gpu(machine: Machine) -> Finding:
    """One line says it."""
    return Finding("gpu", "ok", "no NVIDIA GPU: training runs on the CPU")


CPU_CHECKS: tuple[Callable[[Machine], Finding], ...] = (check_huge_pages, check_compiler, check_gpu)
