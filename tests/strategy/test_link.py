"""What an exception of a trainer is called: one row a text, as torch and its libraries write them."""

import pytest
import torch

from leto_strategy.recovery.classification import REPORT_KINDS
from leto_strategy.strategy.launch.link import kind_of

NCCL_CUDA = (
    "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL "
    "version 2.28.9\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 700 'an illegal "
    "memory access was encountered'"
)
NCCL_REMOTE = (
    "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error, NCCL version "
    "2.28.9\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
)
NCCL_SYSTEM = "NCCL error in: NCCLUtils.hpp:268, unhandled system error (run with NCCL_DEBUG=INFO for details)"
ECC = "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported"
GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2222"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700), "device"),
        (torch.AcceleratorError(ECC, 214), "device"),
        (RuntimeError(ECC), "device"),
        (RuntimeError("CUDA error: unspecified launch failure"), "device"),
        (RuntimeError("CUDA error: device-side assert triggered"), "device"),
        (RuntimeError("CUDA error: misaligned address"), "device"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"), "device"),
        (RuntimeError("CUDA driver error: unknown error"), "device"),
        (RuntimeError("CUDA driver error: device not ready"), "device"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "device"),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), "device"),
        (torch.distributed.DistBackendError(NCCL_CUDA), "device"),
        (torch.distributed.DistBackendError(NCCL_REMOTE), "communicator"),
        (torch.distributed.DistBackendError(NCCL_SYSTEM), "communicator"),
        (torch.distributed.DistNetworkError("The client socket has timed out"), "communicator"),
        (RuntimeError(GLOO), "communicator"),
        (RuntimeError("NCCL communicator was aborted on rank 1."), "communicator"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), "out_of_memory"),
        (torch.AcceleratorError("CUDA error: out of memory", 2), "out_of_memory"),
        (RuntimeError("CUDA driver error: out of memory"), "out_of_memory"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "out_of_memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "out_of_memory"),
        (torch.distributed.DistBackendError(f"{NCCL_CUDA} Cuda failure 2 'out of memory'"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (RuntimeError("DataLoader worker (pid 77) is killed by signal: Killed."), "worker_killed"),
        (RuntimeError("DataLoader worker (pid(s) 77) exited unexpectedly"), "worker_killed"),
        (KeyboardInterrupt(), "keyboard_interrupt"),
        (SystemExit(3), "system_exit"),
        (ValueError("the CUDA error of my own"), "exception"),
        (KeyError("gloo"), "exception"),
        (OSError("no NCCL here"), "exception"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "exception"),
    ],
)
def test_an_exception_is_called(error: BaseException, kind: str) -> None:
    assert kind_of(error) == kind
    assert kind in REPORT_KINDS
