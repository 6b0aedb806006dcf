"""A stand-in for the supervisor's side of the operator socket."""

import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from leto_strategy.cli import jobs
from leto_strategy.memory import wire

Answer = Callable[[dict[str, Any]], dict[str, Any]]


class StandIn:
    """Listens as jobs do and answers each request with what `answer` returns."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self._ended: list[Callable[[], None]] = []

    def start(self, job: str, answer: Answer) -> None:
        server = wire.listen(f"leto/{os.getuid()}/{job}", timeout=timedelta(seconds=1))
        server.settimeout(0.05)
        stop = threading.Event()

        def serve() -> None:
            with server:
                while not stop.is_set():
                    try:
                        accepted, _ = server.accept()
                    except TimeoutError:
                        continue
                    with wire.FrameConnection(accepted) as connection:
                        request = connection.receive_one(timeout=timedelta(seconds=2)).message
                        self.requests.append(request)
                        connection.send(answer(request), timeout=timedelta(seconds=2))

        thread = threading.Thread(target=serve, name=f"stand-in {job}")
        thread.start()
        self._ended += [stop.set, thread.join]

    def end(self) -> None:
        for end in self._ended:
            end()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Jobs that tests of other workers or a person run at the same time are left out of sight."""
    mine = f"clitest{os.getpid()}"
    find_jobs = jobs.find_jobs
    monkeypatch.setattr(jobs, "find_jobs", lambda: [job for job in find_jobs() if mine in job])
    supervisor = StandIn()
    yield supervisor
    supervisor.end()


@pytest.fixture
def job_name() -> str:
    return f"clitest{os.getpid()}"
