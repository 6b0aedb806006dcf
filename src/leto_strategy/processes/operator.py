"""The operator's socket: `leto status` and `leto inject` ask here. Abstract address ``leto/<uid>/<job>``.

Only the same user is heard. Whoever sends anything else than the two requests loses the connection, and nothing else
happens: no request can end or change the job but the injection of a fault, which is what it is for.
"""

import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from leto_strategy.errors import ProtocolError
from leto_strategy.faults import Fault
from leto_strategy.memory.wire import FrameConnection, Limits, listen, require_same_user
from leto_strategy.processes.generation import Generation, Link, TrainerProcess, close_all
from leto_strategy.processes.job import Job
from leto_strategy.processes.messages import get
from leto_strategy.system import kill_processes

CONNECTIONS_MAX = 16
IDLE_SECONDS_MAX = 30.0
_LIMITS = Limits(message_bytes=64 * 1024, message_fds=0, pending_bytes=1 << 20)
_AT_ONCE = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segv": signal.SIGSEGV}
_ROLES = ("active", "shadow", "manager")


def operator_address(job: str) -> str:
    """Abstract address of a job's operator socket."""
    return f"leto/{os.getuid()}/{job}"


class OperatorServer:
    """Answers operators.

    Args:
        job: The job.
        note_fault: Told of a fault that is done now: rank, and CLOCK_MONOTONIC ns just before it.
    """

    def __init__(self, job: Job, *, note_fault: Callable[[int, int], None]) -> None:
        self._job = job
        self._note_fault = note_fault
        self._started = time.time()
        self._socket: socket.socket | None = None
        self._links: set[Link] = set()

    def start(self) -> None:
        """Listen; without the socket training goes on all the same."""
        try:
            self._socket = listen(operator_address(self._job.spec.job), timeout=timedelta(0))
        except OSError as error:
            self._job.events.emit("warning", text=f"`leto status` and `leto inject` don't work for this job: {error}")
            return
        self._job.loop.watch(self._socket, self._accept)

    def close(self) -> None:
        """Stop listening and close all connections."""
        if self._socket is not None:
            self._job.loop.forget(self._socket)
            self._socket.close()
            self._socket = None
        for link in list(self._links):
            link.close()
        self._links.clear()

    def _accept(self) -> None:
        assert self._socket is not None
        try:
            sock, _ = self._socket.accept()
        except OSError:
            return
        try:
            require_same_user(sock)
            if len(self._links) >= CONNECTIONS_MAX:
                raise PermissionError("too many operators")
        except OSError:
            sock.close()
            return

        def drop() -> None:
            link.close()
            self._links.discard(link)

        def on_frame(frame: dict[str, Any], fds: list[int]) -> None:
            close_all(fds)
            link.send(self._answer(frame))

        link = Link(
            self._job.loop,
            FrameConnection(sock, limits=_LIMITS),
            on_frame=on_frame,
            on_lost=lambda reason: self._links.discard(link),
        )
        self._links.add(link)
        self._job.loop.after(IDLE_SECONDS_MAX, drop)

    def _answer(self, frame: dict[str, Any]) -> dict[str, Any]:
        match frame.get("op"):
            case "status":
                return self._status()
            case "inject":
                try:
                    self._inject(frame)
                except ValueError as error:
                    return {"ok": False, "error": str(error)}
                return {"ok": True}
            case _:
                raise ProtocolError("an operator asks for status or inject")

    # Status.

    def _status(self) -> dict[str, Any]:
        job = self._job
        processes = [{"role": "supervisor", "rank": None, "pid": os.getpid()}]
        processes += [
            {"role": "manager", "rank": rank.rank, "pid": rank.pid} for rank in job.managers.ranks if rank.pid
        ]
        if job.launcher.zygote_pid is not None:
            processes.append({"role": "zygote", "rank": None, "pid": job.launcher.zygote_pid})
        for role, generation in (("active", job.active), ("shadow", job.shadows.generation)):
            for trainer in generation or ():
                assert generation is not None
                processes.append(self._trainer_status(role, generation, trainer))
        return {
            "job": job.spec.job,
            "function": job.spec.function,
            "world": job.spec.world,
            "started": self._started,
            "root_dir": job.spec.root_dir,
            "argv": list(job.spec.argv),
            "state": self._state(),
            "recoveries": [record.to_json() for record in job.recoveries],
            "processes": processes,
        }

    def _state(self) -> str:
        job = self._job
        if job.ending or job.stop_signum is not None:
            return "ending"
        if job.suspended:
            return "suspended"
        if job.active is None or (job.recoveries and not job.active.first_step_seen):
            return "recovering"
        return "training" if job.active.promoted else "starting"

    def _trainer_status(self, role: str, generation: Generation, trainer: TrainerProcess) -> dict[str, Any]:
        # The page shows the active trainer's work; a shadow has none.
        page = self._job.managers.page(trainer.rank) if role == "active" and generation.promoted else None
        marker = page.marker if page else None
        state = "starting"
        if trainer.finished:
            state = "finished"
        elif generation.promoted:
            state = "training"
        elif trainer.ready:
            state = "ready"
        return {
            "role": role,
            "rank": trainer.rank,
            "pid": trainer.pid,
            "generation": generation.number,
            "state": state,
            "level": "L3" if trainer.ready or generation.promoted else "L1",
            "step": page.step if page else None,
            "activity": page.activity.name.lower() if page else None,
            "phase": str(marker) if marker else None,
        }

    # Injection.

    def _inject(self, frame: dict[str, Any]) -> None:
        job = self._job
        rank, fault = get(frame, "rank", int), get(frame, "fault", str)
        role = get(frame, "role", str, "active")
        at_step, point = get(frame, "at_step", int, None), get(frame, "point", str, None)
        pages, group = get(frame, "pages", int, None), get(frame, "group", int, None)
        if role not in _ROLES:
            raise ValueError(f"no role {role[:40]!r}: use one of {', '.join(_ROLES)}")
        if not 0 <= rank < job.spec.world:
            raise ValueError(f"no rank {rank}: this job has ranks 0 to {job.spec.world - 1}")
        if at_step is not None or point is not None or (fault not in _AT_ONCE and role == "active"):
            if role != "active":
                raise ValueError(f"a {role} passes no points: leave out step and point")
            # Without a point it happens in the next forward pass.
            where = point or "forward"
            loss = {"pages": 1 if pages is None else pages, "group": group}
            self._job.managers.arm(Fault(rank=rank, point=where, fault=fault, step=at_step, **loss))
            pid = self._pid_of(rank, role)
        else:
            pid = self._do(rank, fault, role)
        job.events.emit("fault_injected", rank=rank, pid=pid, fault=fault, role=role, at_step=at_step, point=point)

    def _do(self, rank: int, fault: str, role: str) -> int:
        if fault not in _AT_ONCE:
            raise ValueError(f"a {role} can't be made to {fault[:40]!r}: use one of {', '.join(_AT_ONCE)}")
        pid = self._pid_of(rank, role)
        if pid is None:
            raise ValueError(f"there is no {role} of rank {rank} now")
        if role == "active":
            self._note_fault(rank, time.monotonic_ns())
        kill_processes([pid], _AT_ONCE[fault])
        return pid

    def _pid_of(self, rank: int, role: str) -> int | None:
        job = self._job
        if role == "manager":
            return job.managers.ranks[rank].pid if job.managers.ranks else None
        generation = job.active if role == "active" else job.shadows.generation
        trainer = generation.trainers[rank] if generation is not None else None
        return trainer.pid if trainer is not None and trainer.alive else None
