"""What the supervisor of a job on GPUs asks the driver: whose contexts are left on them, and how healthy they are.

The questions are asked in a thread of their own, because a driver in trouble may not answer: the loop waits for an
answer no longer than `patience`, and takes none for "unknown". The thread never forks, so no process depends on it.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from leto_strategy.devices.health import DeviceHealth
from leto_strategy.devices.nvml import Gpu, Nvml
from leto_strategy.devices.visible import AmbiguousDeviceError
from leto_strategy.processes.loop import Loop, Timer
from leto_strategy.recovery.operability import Evidence

_UNKNOWN = DeviceHealth()


@dataclass(frozen=True, slots=True)
class _Look:
    """What the thread saw: processes that are left (None: a GPU does not say); if none is, the health of each GPU."""

    left: frozenset[int] | None
    health: tuple[DeviceHealth, ...] = ()


class DeviceWatch:
    """The GPUs of one job.

    Args:
        loop: The supervisor's loop.
        ordinals: Torch's numbers of the GPUs.
        environ: Environment of the trainers, which decides what these numbers mean.
        open_nvml: Makes NVML ready; called in the thread.
        patience: Seconds to wait for an answer.
        emit: Writes an event.
    """

    def __init__(
        self,
        loop: Loop,
        ordinals: Iterable[int],
        environ: Mapping[str, str],
        *,
        open_nvml: Callable[[], Nvml],
        patience: float,
        emit: Callable[..., Any],
    ) -> None:
        self._loop = loop
        self._names = [f"cuda:{ordinal}" for ordinal in ordinals]
        self._ordinals = tuple(ordinals)
        self._environ = environ
        self._open_nvml = open_nvml
        self._patience = patience
        self._emit = emit
        self._questions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._answers: deque[Callable[[], None]] = deque()
        self._wake = -1
        self._thread: threading.Thread | None = None
        # Written by the thread once, before its first answer, and read by it alone.
        self._gpus: list[Gpu] = []
        # The loop's own.
        self._driver: str | None = None
        self._problem = "it has not answered yet"
        self._comparable: bool | None = None
        self._said = ""
        self._num_overdue = 0
        self._before = self._after = (_UNKNOWN,) * len(self._names)

    def start(self) -> None:
        """Begin to make NVML ready, beside the start of the trainers, and note how healthy the GPUs are."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._loop.watch(self._wake, self._on_wake)
        self._thread = threading.Thread(target=self._answer_all, name="leto-devices", daemon=True)
        self._thread.start()
        self._ask(self._open, self._on_open, patience=None)

    def close(self) -> None:
        """Ask nothing more. A thread that waits for the driver is left behind; it ends with this process."""
        if self._thread is None:
            return
        self._questions.put(None)
        self._thread.join(self._patience)
        self._loop.forget(self._wake)
        if not self._thread.is_alive():
            os.close(self._wake)
        self._thread = None

    def on_entered(self, pids: Iterable[int]) -> None:
        """Trainers compute: see whether the driver counts processes as we do. It does not in some containers."""
        wanted = frozenset(pids)
        if self._comparable is None and wanted:
            self._ask(lambda: self._which(wanted), self._on_listed, patience=self._patience)

    def await_gone(self, pids: frozenset[int], callback: Callable[[frozenset[int]], None]) -> None:
        """Look once which of these processes, all reaped, still have a context; `callback` gets them.

        None are left, too, where the driver does not say, or counts processes in another way. When none is left, the
        health of the GPUs has been read.
        """
        wanted = pids if self._comparable else frozenset()

        def answered(look: _Look | None) -> None:
            if wanted and (look is None or look.left is None):
                self._say_unknown("it does not answer")
            left = frozenset() if look is None or look.left is None else look.left
            if not left:
                self._after = look.health if look and look.health else (_UNKNOWN,) * len(self._names)
            callback(left)

        self._ask(lambda: self._look(wanted), answered, patience=self._patience)

    def evidence(self) -> list[Evidence]:
        """Health before and after the newest failure."""
        return [Evidence(*item) for item in zip(self._names, self._before, self._after, strict=True)]

    def on_recovered(self) -> None:
        """The GPUs were found operable: what is known now is where the next comparison starts."""
        pairs = zip(self._before, self._after, strict=True)
        self._before = tuple(before if after == _UNKNOWN else after for before, after in pairs)

    # In the loop: answers.

    def _on_open(self, answer: tuple[str, str | None, tuple[DeviceHealth, ...]] | None) -> None:
        if answer is not None:
            self._problem, self._driver, health = answer
            self._before = health or self._before

    def _on_listed(self, listed: frozenset[int] | None) -> None:
        if listed is None:
            self._say_unknown(self._problem or "it does not tell who uses the GPUs")
            return
        self._comparable = bool(listed)
        if listed:
            self._say("a fence waits until NVML lists no process of the failed trainers")
        else:
            self._say("a fence goes by reaped processes alone: NVML counts processes in another PID namespace")

    def _say_unknown(self, why: str) -> None:
        self._say(f"a fence goes by reaped processes alone, as NVML can't be asked: {why}")

    def _say(self, text: str) -> None:
        """Write what a fence goes by, when that is new."""
        if text != self._said:
            self._said = text
            self._emit("devices", names=self._names, driver=self._driver, pids_comparable=self._comparable, text=text)

    # The way between loop and thread.

    def _ask(self, question: Callable[[], Any], callback: Callable[[Any], None], *, patience: float | None) -> None:
        """Answer a question in the thread; the loop hears it, or None when its patience is over, once.

        While an overdue answer is waited for, patience is over at once.
        """
        timer: Timer | None = None
        overdue = False

        def give_up() -> None:
            nonlocal overdue
            overdue = True
            self._num_overdue += 1
            callback(None)

        def tell(answer: Any) -> None:
            if overdue:
                self._num_overdue -= 1
                return
            if timer is not None:
                timer.cancel()
            callback(answer)

        def work() -> None:
            try:
                answer = question()
            except Exception:  # a broken driver's answers must not end the thread
                answer = None
            self._answers.append(lambda: tell(answer))
            os.eventfd_write(self._wake, 1)

        if patience is not None:
            timer = self._loop.after(0 if self._num_overdue else patience, give_up, always=True)
        self._questions.put(work)

    def _on_wake(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass
        while self._answers:
            self._answers.popleft()()

    # In the thread: NVML.

    def _answer_all(self) -> None:
        while (work := self._questions.get()) is not None:
            work()

    def _open(self) -> tuple[str, str | None, tuple[DeviceHealth, ...]]:
        nvml = self._open_nvml()
        try:
            visible = nvml.visible(self._environ)
            self._gpus = [visible[ordinal] for ordinal in self._ordinals]
            problem = nvml.problem
        except AmbiguousDeviceError as error:
            problem = str(error)
        except IndexError:
            problem = nvml.problem or f"it sees only {len(visible)} GPUs"
        return problem, nvml.driver_version(), tuple(gpu.health() for gpu in self._gpus)

    def _which(self, pids: frozenset[int]) -> frozenset[int] | None:
        """Those of the processes that have a context on any of the GPUs; None where a GPU does not say."""
        lists = [gpu.compute_pids() for gpu in self._gpus]
        if not lists or any(listed is None for listed in lists):
            return None
        return frozenset(pid for listed in lists if listed for pid in listed & pids)

    def _look(self, pids: frozenset[int]) -> _Look:
        left = self._which(pids) if pids else frozenset()
        return _Look(left) if left else _Look(left, tuple(gpu.health() for gpu in self._gpus))
