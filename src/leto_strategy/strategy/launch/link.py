"""A trainer's connection to the supervisor: ready, promoted, failed, finished."""

import socket
import traceback
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

    def ready(self) -> dict[str, Any]:
        """Say that everything is prepared and wait, for as long as it takes, to be promoted."""
        self._say({"op": "ready"})
        return self._expect("promote")

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
        while True:
            try:
                frame = self._connection.receive_one(timeout=_WAIT_TIMEOUT)
                break
            except TimeoutError:
                continue  # a shadow waits for as long as nothing fails
        assert frame.message["op"] == op, f"expected {op}, got {frame.message}"
        return frame.message


def _type_name(error: BaseException) -> str:
    cls = type(error)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def kind_of(error: BaseException) -> str:
    """How the supervisor's table calls an exception."""
    text = str(error)
    name = type(error).__name__
    if isinstance(error, KeyboardInterrupt):
        return "keyboard_interrupt"
    if name == "SIGTERMException":
        return "sigterm"
    if isinstance(error, SystemExit):
        return "system_exit"
    if isinstance(error, RuntimeError) and "DataLoader worker" in text and ("killed" in text or "exited" in text):
        return "worker_killed"
    if name in ("OutOfMemoryError", "MemoryError") or "out of memory" in text:
        return "out_of_memory"
    if name == "AcceleratorError" or "CUDA error" in text or "device-side assert" in text:
        return "device"
    if name.startswith("Dist") or "gloo" in text.lower() or "NCCL" in text or "Connection closed by peer" in text:
        return "communicator"
    return "exception"
