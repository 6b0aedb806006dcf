"""Checks of GPUs: the driver, who may use them, and what training on them needs of memory and descriptors.

Each check judges facts of a `Machine` and finds out nothing by itself.
"""

from collections.abc import Callable

from leto_strategy.cli.doctor.finding import Finding, gib
from leto_strategy.cli.doctor.machine import Machine
from leto_strategy.devices.health import action_name

HANDLE_BYTES = 32 * 2**20
"""Protected memory of a GPU is made in handles of this size, each of which is a descriptor."""
FILES_BESIDE = 512
PTXAS_WANTED = (13, 3)
"""First CUDA release whose assembler knows the carry-less multiplication, `clmad`."""
_PROHIBITED, _EXCLUSIVE = 2, 3
_NEED_REPAIR = {1, 2, 6, 7}


def has_gpu(machine: Machine) -> bool:
    """Whether there is an NVIDIA GPU at all, usable or not."""
    return machine.num_nodes > 0 or machine.nvml.num_gpus() > 0


def check_driver(machine: Machine) -> Finding:
    """The driver can be loaded and initialised."""
    cuda, version = machine.cuda, machine.nvml.driver_version() or "unknown"
    found = f"NVIDIA driver {version}, CUDA up to {cuda.version[0]}.{cuda.version[1]}"
    if cuda.problem:
        remedy = (
            "install the driver's libcuda; in a container run it with --gpus all; after an update of the driver reboot"
        )
        return Finding("gpu driver", "fail", f"{found}: {cuda.problem}", remedy)
    if not cuda.devices:
        return Finding("gpu driver", "fail", f"{found}: no GPU is visible", "look at CUDA_VISIBLE_DEVICES")
    return Finding("gpu driver", "ok", found)


def check_gpus(machine: Machine) -> Finding:
    """Which GPUs CUDA sees."""
    models: dict[str, int] = {}
    for device in machine.cuda.devices:
        text = f"{device.name} (sm_{device.capability[0]}{device.capability[1]})"
        models[text] = models.get(text, 0) + 1
    memory = [memory.total for gpu in machine.nvml.gpus() if (memory := gpu.memory()) is not None]
    sizes = f", {gib(min(memory))} each" if memory else ""
    return Finding("gpu", "ok", ", ".join(f"{count} × {text}" for text, count in models.items()) + sizes)


def check_torch_build(machine: Machine) -> Finding:
    """A torch that was built for CUDA."""
    version = machine.version_of("torch") or "not installed"
    if version.endswith("+cpu"):
        return Finding("torch for CUDA", "warn", f"torch {version} is built for the CPU", "install torch's CUDA build")
    return Finding("torch for CUDA", "ok", f"torch {version}")


def check_virtual_memory(machine: Machine) -> Finding:
    """State lives in memory that no trainer owns: it must be possible to make it apart and to pass it on."""
    lacking = [d.name for d in machine.cuda.devices if not (d.virtual_memory and d.posix_handles)]
    if lacking:
        found = f"{', '.join(sorted(set(lacking)))}: no virtual memory management, or no file descriptors for it"
        remedy = "use a GPU and a driver that support both (not under vGPU or WSL); or train on the CPU"
        return Finding("gpu virtual memory", "fail", found, remedy)
    return Finding("gpu virtual memory", "ok", "memory can be made, exported and mapped by different processes")


def check_sharing(machine: Machine) -> Finding:
    """An active trainer and its shadow both have a context."""
    modes = {device.compute_mode for device in machine.cuda.devices}
    if _PROHIBITED in modes:
        return Finding("gpu sharing", "fail", "compute mode PROHIBITED", "nvidia-smi -c DEFAULT (as root)")
    if _EXCLUSIVE in modes:
        found = "compute mode EXCLUSIVE_PROCESS: a shadow can't be on the GPU beside the active trainer"
        return Finding("gpu sharing", "fail", found, "nvidia-smi -c DEFAULT (as root), or LetoStrategy(shadows=0)")
    return Finding("gpu sharing", "ok", "several processes may use a GPU")


def check_mps(machine: Machine) -> Finding:
    """Under MPS all processes share one context: the fault of one ends the others, the shadow included."""
    signs = {name for name in machine.process_names() if name.startswith("nvidia-cuda-mps")}
    signs |= {name for name in ("CUDA_MPS_PIPE_DIRECTORY",) if name in machine.environ}
    if signs:
        found = f"{', '.join(sorted(signs))}: under MPS a device error of a trainer takes its shadow along"
        return Finding("mps", "warn", found, "stop it: echo quit | nvidia-cuda-mps-control, and unset its variables")
    return Finding("mps", "ok", "not running")


def check_nvml(machine: Machine) -> Finding:
    """The fence asks NVML whether the contexts of dead trainers are gone."""
    if machine.nvml.problem:
        remedy = "in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility; else install the driver's libnvidia-ml"
        found = f"{machine.nvml.problem}: recovery goes by reaped processes alone, and can't tell a broken GPU"
        return Finding("nvml", "warn", found, remedy)
    comparable = machine.pids_comparable()
    if comparable is None:
        return Finding("nvml", "ok", "works; whether it counts processes as we do could not be tried")
    if not comparable:
        found = "works, but counts processes in another PID namespace: recovery goes by reaped processes alone"
        return Finding("nvml", "warn", found, "run the container in the host's PID namespace (docker run --pid=host)")
    return Finding("nvml", "ok", "works, and lists our processes under their pids")


def check_health(machine: Machine) -> Finding:
    """What the driver says against the GPUs; the same evidence is compared at each recovery."""
    complaints, broken = [], False
    for index, gpu in enumerate(machine.nvml.gpus()):
        health = gpu.health()
        broken |= health.lost or health.recovery_action in _NEED_REPAIR
        facts = {
            "lost, or in need of a reset": health.lost,
            f"the driver asks to {action_name(health.recovery_action)}": bool(health.recovery_action),
            "a bad row of memory could not be replaced": bool(health.remap_failed),
            "bad rows of memory wait for a reset to be replaced": bool(health.remap_pending),
            f"{health.uncorrectable_errors} uncorrectable memory errors": bool(health.uncorrectable_errors),
        }
        complaints += [f"GPU {index}: {text}" for text, holds in facts.items() if holds]
    if complaints:
        remedy = "nvidia-smi -q says more; nvidia-smi --gpu-reset, or do what the driver asks for"
        return Finding("gpu health", "fail" if broken else "warn", "; ".join(complaints), remedy)
    return Finding("gpu health", "ok", "no complaint of the driver")


def check_persistence(machine: Machine) -> Finding:
    """Without it the driver starts anew whenever nobody has used a GPU."""
    if any(gpu.is_persistent() is False for gpu in machine.nvml.gpus()):
        found = "persistence mode is off: the first context after a pause takes seconds"
        return Finding("gpu persistence", "warn", found, "nvidia-smi -pm 1 (as root), or run nvidia-persistenced")
    return Finding("gpu persistence", "ok", "the driver stays loaded, or does not say")


def check_handles(machine: Machine) -> Finding:
    """A state manager holds a descriptor for each handle, the supervisor those of all ranks."""
    limit = machine.file_limit
    total = sum(memory.total for gpu in machine.nvml.gpus() if (memory := gpu.memory()) is not None)
    wanted = FILES_BESIDE + total // HANDLE_BYTES
    found = f"{wanted} open files if all memory of all GPUs is retained, in handles of {HANDLE_BYTES >> 20} MiB"
    if 0 <= limit < wanted:
        remedy = f"raise the hard limit of open files, now {limit} (ulimit -Hn, limits.conf, docker --ulimit nofile)"
        return Finding("gpu memory handles", "warn", found, remedy)
    return Finding("gpu memory handles", "ok", f"{found}; the limit is {limit if limit >= 0 else 'unlimited'}")


def check_large_pages(machine: Machine) -> Finding:
    """Host memory that is registered with the GPU in 4 KiB pages costs 160 ms a GiB whenever a trainer ends."""
    text = machine.text("/sys/kernel/mm/transparent_hugepage/shmem_enabled") or ""
    mode = text.partition("[")[2].partition("]")[0] or "unknown"
    number = (machine.text("/proc/sys/vm/nr_hugepages") or "0").strip()
    found = f"shared memory: {mode}; nr_hugepages {number}"
    if mode not in ("always", "within_size", "advise", "force") and number == "0":
        remedy = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled (as root), or reserve nr_hugepages"
        found += ": registered host memory in small pages costs 160 ms a GiB at each recovery"
        return Finding("huge pages", "warn", found, remedy)
    return Finding("huge pages", "ok", found)


def check_compiler(machine: Machine) -> Finding:
    """Triton compiles what starts its kernels, and the hook for memory shortage is a small C++ file."""
    compiler = machine.program("g++", "c++", "clang++")
    if compiler is None:
        found = "no C++ compiler: Triton kernels can't be started"
        return Finding("compiler", "warn", found, "install g++ (apt-get install g++)")
    return Finding("compiler", "ok", compiler)


def check_ptxas(machine: Machine) -> Finding:
    """Which assembler Triton uses."""
    assemblers = machine.ptxas()
    wanted = ".".join(map(str, PTXAS_WANTED))
    if not assemblers:
        return Finding(
            "ptxas", "warn", "none: Triton kernels can't be made", "reinstall triton, or set TRITON_PTXAS_PATH"
        )
    used, release = next(iter(assemblers.items()))
    found = f"release {release[0]}.{release[1]} ({used})"
    if release >= PTXAS_WANTED:
        return Finding("ptxas", "ok", found)
    newer = next((path for path, found_release in assemblers.items() if found_release >= PTXAS_WANTED), None)
    remedy = f"pip install 'nvidia-cuda-nvcc>={wanted}' and set TRITON_PTXAS_PATH to its bin/ptxas"
    found += f", older than {wanted}: no carry-less multiplication, parity is computed in slower ways"
    return Finding("ptxas", "warn", found, remedy if newer is None else f"export TRITON_PTXAS_PATH={newer}")


def check_module_loading(machine: Machine) -> Finding:
    """CUDA loads kernels when they are first used, unless told otherwise."""
    value = machine.environ.get("CUDA_MODULE_LOADING", "LAZY")
    if value.upper() != "LAZY":
        found = f"CUDA_MODULE_LOADING={value}: each trainer loads all kernels at its start and keeps them in GPU memory"
        return Finding("module loading", "warn", found, "unset it, or CUDA_MODULE_LOADING=LAZY")
    return Finding("module loading", "ok", "kernels are loaded when they are first used")


def check_nccl(machine: Machine) -> Finding:
    """Trainers inherit these; a watchdog of torch's must not act before Leto does."""
    named = {key: value for key, value in machine.environ.items() if key.startswith(("NCCL_", "TORCH_NCCL_"))}
    found = ", ".join(f"{key}={value}" for key, value in sorted(named.items())) or "no variable of NCCL is set"
    beat = named.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "")
    if beat.isdecimal() and int(beat) < 60:
        found += ": torch's own watchdog ends trainers that Leto would still wait for"
        return Finding("nccl", "warn", found, "unset TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, or 60 and more")
    return Finding("nccl", "ok", found)


GPU_CHECKS: tuple[Callable[[Machine], Finding], ...] = (
    check_driver,
    check_gpus,
    check_torch_build,
    check_virtual_memory,
    check_sharing,
    check_mps,
    check_nvml,
    check_health,
    check_persistence,
    check_handles,
    check_large_pages,
    check_compiler,
    check_ptxas,
    check_module_loading,
    check_nccl,
)
