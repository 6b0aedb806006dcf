"""State manager of one rank (paper section 4): owns retained memory and hands it to trainers; never touches it.

`python -I -m leto_strategy.memory.manager --control-fd N`, started by the supervisor. One thread, one selector, no call
that waits for a peer, so that no client can hold up another. Without torch and CUDA context it costs a few MiB.

The rule that makes it replaceable: **whatever a client is told, the supervisor's mirror held before.** A change of the
catalogue is created here, sent to the mirror with its fds, acknowledged, committed, and only then answered. Killed
before the mirror has it, nobody knows of it and the kernel frees it; killed after, the next manager adopts it, and the
client that asks again gets it as if nothing had happened. One change is under way at a time.
"""

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Never

from leto_strategy.errors import ProtocolError, ResourceError
from leto_strategy.memory import wire
from leto_strategy.memory.backend import Backends
from leto_strategy.memory.clients import ClientServer
from leto_strategy.memory.guard import SessionGuard
from leto_strategy.memory.holdings import Holdings, close_fds, fds_of
from leto_strategy.memory.places import owner_backends
from leto_strategy.memory.requests import RequestHandler, Transaction
from leto_strategy.system import open_pidfd, peer_credentials, raise_file_limit

CONTROL_LIMITS = wire.Limits(message_bytes=64 << 20, message_fds=8192, pending_bytes=128 << 20)

_CONFIGURE_TIME_MAX = timedelta(seconds=30)
_END_TIME_MAX = timedelta(seconds=0.8)  # everything is over within 1 s of the supervisor's end
_TICK_SECONDS = 1.0
_FILES_WANTED = 4096


class _Bye(Exception):
    """The supervisor needs this manager no more."""


class _SupervisorGone(Exception):
    """The supervisor has ended without a bye."""


class StateManager:
    """The manager of one rank.

    Args:
        control: the connection to the supervisor.
        configuration: its first frame: job, rank, address, device, and where there was a predecessor its catalogue and
            fds.
        backends: what makes the memory; by default what the device of the configuration needs.
        reach: called with the name of each step of a change: received, created, mirrored, acknowledged, committed,
            answered. Tests end the process there.

    Raises:
        ProtocolError: the configuration is malformed.
        OSError: the address is taken.
    """

    def __init__(
        self,
        control: wire.FrameConnection,
        configuration: wire.Frame,
        *,
        backends: Backends | None = None,
        reach: Callable[[str], None] = lambda step: None,
    ) -> None:
        message, fds = configuration
        job, rank, address, token = (message.get(key) for key in ("job", "rank", "address", "token"))
        if message.get("op") != "configure" or type(rank) is not int:
            raise ProtocolError("the first frame is configure, with a rank")
        if not (isinstance(job, str) and job and isinstance(address, str) and address):
            raise ProtocolError("configure needs a job and an address")
        device = message.get("device", {})
        self._control = control
        self._reach = reach
        self._guard = SessionGuard(job)
        self._holdings = Holdings.adopt(message["catalogue"], fds) if message.get("catalogue") else Holdings()
        self._transaction: Transaction | None = None
        self._selector = selectors.DefaultSelector()
        self._server = ClientServer(address, selector=self._selector, on_requests=self._advance)
        self._handler = RequestHandler(
            self._holdings,
            backends or owner_backends(device),
            device=device,
            rank=rank,
            token=token or "",
            reply=self._server.reply,
            begin=self._begin,
            reach=reach,
        )

    def run(self) -> int:
        """Serve until the supervisor says bye or is gone; the exit code of the process."""
        try:
            self._selector.register(self._control, selectors.EVENT_READ, self._on_control)
            self._watch_supervisor()
            self._tell({"op": "listening", "version": self._holdings.catalogue.version, "pid": os.getpid()})
            ticked = time.monotonic()
            while True:
                for key, events in self._selector.select(_TICK_SECONDS):
                    key.data(events)
                if time.monotonic() - ticked >= _TICK_SECONDS:
                    ticked = time.monotonic()
                    self._server.drop_stalled()
        except _Bye:
            return 0
        except _SupervisorGone:
            return 0 if self._guard.end_all(timeout=_END_TIME_MAX) else 1

    def _watch_supervisor(self) -> None:
        """Notice its end also where its side of the socket lives on in a process that it forked."""
        pid = peer_credentials(self._control.socket).pid  # 0 in another pid namespace
        pidfd = open_pidfd(pid) if pid > 0 else None
        if pid > 0 and pidfd is None:
            raise _SupervisorGone
        if pidfd is not None:
            self._selector.register(pidfd, selectors.EVENT_READ, _supervisor_gone)

    def _tell(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        try:
            self._control.queue(message, fds or [])
        except ConnectionError:
            raise _SupervisorGone from None
        self._set_control_interest()

    def _set_control_interest(self) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._control.wants_write else 0)
        if self._selector.get_key(self._control).events != events:
            self._selector.modify(self._control, events, self._on_control)

    def _on_control(self, events: int) -> None:
        """A malformed message from the supervisor is a bug: it ends this manager, which is replaced, and no trainer."""
        if events & selectors.EVENT_WRITE:
            try:
                self._control.flush()
            except ConnectionError:
                raise _SupervisorGone from None
        for message, fds in self._control.receive():
            close_fds(fds)
            self._obey(message)
        if self._control.at_end:
            raise _SupervisorGone
        self._set_control_interest()
        self._advance()

    def _obey(self, message: dict[str, Any]) -> None:
        match message:
            case {"op": "mirrored", "version": version}:
                self._reach("acknowledged")
                self._commit(self._taken(version))
            case {"op": "watch", "pids": list(pids)}:
                if not all(type(pid) is int and pid > 1 for pid in pids):
                    raise ProtocolError("watch: not pids")
                self._guard.watch(pids)
            case {"op": "bye"}:
                raise _Bye
            case _:
                raise ProtocolError(f"unknown message {message!r:.100} from the supervisor")

    def _begin(self, transaction: Transaction) -> None:
        assert self._transaction is None
        change, handles = transaction.change, transaction.handles
        try:
            self._tell({"op": "change", **change.to_message()}, fds_of(change, handles))
        except OSError:  # no descriptors left, and the mirror knows of nothing
            close_fds(fds_of(change, handles))
            raise
        self._transaction = transaction
        self._reach("mirrored")

    def _taken(self, version: object) -> Transaction:
        transaction, self._transaction = self._transaction, None
        if transaction is None or version != transaction.change.version:
            raise ProtocolError(f"version {version!r:.40} was not sent to the mirror")
        return transaction

    def _commit(self, transaction: Transaction) -> None:
        self._holdings.apply(transaction.change, transaction.handles)
        self._reach("committed")
        transaction.answer()

    def _advance(self) -> None:
        """Answer what waits. What would change the catalogue waits on while another change is under way."""
        requests, waiting = self._server.requests, []
        while requests:
            client, message = requests.popleft()
            if client.gone:
                continue
            if self._transaction is not None and message.get("op") in ("allocate", "free"):
                waiting.append((client, message))
                continue
            try:
                self._handler.answer(client, message)
            except ProtocolError:
                self._server.drop(client)
        requests.extend(waiting)


def main(arguments: list[str], *, reach: Callable[[str], None] = lambda step: None) -> int:
    """Entry point of the process: take the control connection, wait for the configuration, serve."""
    if len(arguments) != 2 or arguments[0] != "--control-fd":
        print("usage: python -I -m leto_strategy.memory.manager --control-fd N", file=sys.stderr)
        return 2
    # Ctrl-C in a terminal is the supervisor's business, and writing to a dead peer is an error, not an end.
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(signum, signal.SIG_IGN)
    with contextlib.suppress(ResourceError):  # an allocation that runs out of descriptors says so itself
        raise_file_limit(_FILES_WANTED)
    with wire.FrameConnection(socket.socket(fileno=int(arguments[1])), limits=CONTROL_LIMITS) as control:
        try:
            configuration = control.receive_one(timeout=_CONFIGURE_TIME_MAX)
        except (EOFError, TimeoutError):
            return 1
        return StateManager(control, configuration, reach=reach).run()


def _supervisor_gone(events: int) -> Never:
    raise _SupervisorGone


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
