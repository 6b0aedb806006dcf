"""A trainer's connection to the supervisor: ready, promoted, failed, finished."""

import socket
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from leto_strategy.config import TrainerIdentity
from leto_strategy.memory.wire import FrameConnection

_SEND_TIMEOUT = timedelta(seconds=30)
_WAIT_TIMEOUT = timedelta(days=1)
_TEXT_MAX = 100_000


class SupervisorLink:
    """Blocking conversation with the supervisor; when its end of the socket closes, this trainer must not go on."""

    def __init__(self, identity: TrainerIdentity) -> None:
        self._connection = FrameConnection(socket.socket(fileno=identity.control_fd))

    def ready(self, prepare: Callable[[], None], work: Iterator[float] | None) -> dict[str, Any]:
        """Say that everything is prepared and wait, for as long as it takes, to be promoted.

        Args:
            prepare: Called when a promotion is near: the active generation is being killed.
            work: What may be done meanwhile, piece by piece; yields seconds until the next piece.
        """
        self._say({"op": "ready"})
        while True:
            message = self._receive(work)
            if message["op"] != "prepare":
                assert message["op"] == "promote", f"expected promote, got {message}"
                return message
            prepare()

    def entered(self, step: int) -> None:
        """Say that the first forward pass that was not done yet has begun."""
        self._say({"op": "entered", "step": step})

    def failed(self, error: BaseException, kind: str, step: int | None) -> dict[str, Any]:
        """Report an exception and wait for the order to raise it; a trainer that failed by a fault is killed here."""
        text = "".join(traceback.format_exception(error))
        if len(text) > _TEXT_MAX:
            text = text[: _TEXT_MAX // 2] + "\n[...]\n" + text[-_TEXT_MAX // 2 :]
        report = {"kind": kind, "type": _type_name(error), "message": str(error)[:_TEXT_MAX], "traceback": text}
        self._say({"op": "error", "step": step, **report})
        return self._expect("raise")

    def delivered(self) -> None:
        """Say that the exception is written."""
        self._say({"op": "delivered"})

    def finished(self) -> None:
        """Say that the function has returned, and wait until all ranks have ended."""
        self._say({"op": "finished"})
        self._expect("bye")

    def _say(self, message: dict[str, Any]) -> None:
        self._connection.send(message, timeout=_SEND_TIMEOUT)

    def _expect(self, op: str) -> dict[str, Any]:
        message = self._receive()
        assert message["op"] == op, f"expected {op}, got {message}"
        return message

    def _receive(self, work: Iterator[float] | None = None) -> dict[str, Any]:
        """The next message, and until it comes the work."""
        while True:
            seconds = None if work is None else next(work, None)
            try:
                timeout = _WAIT_TIMEOUT if seconds is None else timedelta(seconds=seconds)
                return self._connection.receive_one(timeout=timeout).message
            except TimeoutError:
                continue  # a shadow waits for as long as nothing fails


def _type_name(error: BaseException) -> str:
    cls = type(error)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


_DEVICE_ERRORS = (
    "CUDA error",
    "CUDA driver error",
    "Triton Error [CUDA]",
    "device-side assert",
    "illegal memory access",
    "unspecified launch failure",
    "uncorrectable ECC",
    "unhandled cuda error",  # NCCL: a call of CUDA's failed in it, because of what its own GPU did
    "CUBLAS_STATUS_EXECUTION_FAILED",
    "CUBLAS_STATUS_INTERNAL_ERROR",
    "CUDNN_STATUS_EXECUTION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR",
)
_COMMUNICATOR_ERRORS = ("gloo", "nccl", "connection closed by peer")


def kind_of(error: BaseException) -> str:
    """How the supervisor's table calls an exception.

    What torch and its libraries raise is told apart by its text, and is always a RuntimeError.
    """
    text = str(error)
    name = type(error).__name__
    if isinstance(error, KeyboardInterrupt):
        return "keyboard_interrupt"
    if name == "SIGTERMException":
        return "sigterm"
    if isinstance(error, SystemExit):
        return "system_exit"
    if name in ("OutOfMemoryError", "MemoryError"):
        return "out_of_memory"
    if not isinstance(error, RuntimeError):
        return "exception"
    if "DataLoader worker" in text and ("killed" in text or "exited" in text):
        return "worker_killed"
    if "out of memory" in text or "CUBLAS_STATUS_ALLOC_FAILED" in text:
        return "out_of_memory"
    # An error of the GPU often comes through the communicator: its own text says more than who raised it.
    if name == "AcceleratorError" or any(sign in text for sign in _DEVICE_ERRORS):
        return "device"
    if name.startswith("Dist") or any(sign in text.lower() for sign in _COMMUNICATOR_ERRORS):
        return "communicator"
    return "exception"
