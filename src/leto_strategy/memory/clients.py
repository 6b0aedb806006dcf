"""The state manager's side of its clients' connections: whom it accepts, how long it bears them, what it answers.

Nothing here waits for a client. One that breaks a rule of the wire, stalls in the middle of a message, does not read
its answer or asks twice at once is dropped, and no other notices.
"""

import errno
import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from leto_strategy.errors import ProtocolError
from leto_strategy.memory import wire

REQUEST_BYTES_MAX = 4 << 20  # about 40,000 regions in one allocation
_LIMITS = wire.Limits(message_bytes=REQUEST_BYTES_MAX, message_fds=0, pending_bytes=64 << 20)
_CLIENTS_MAX = 64
_HELLO_TIME_MAX = timedelta(seconds=5)
_MESSAGE_TIME_MAX = timedelta(seconds=10)  # from the first byte of a request, or of an answer, to its last


class Client:
    """One connection."""

    def __init__(self, connection: wire.FrameConnection) -> None:
        self.connection = connection
        self.pool = ""  # the name it gave in its first message; "" before that
        self.asked = False  # a request waits for its answer
        self.gone = False  # it was dropped
        self.owes_since: float | None = time.monotonic()  # it has to send or to read something before it is dropped


class ClientServer:
    """Accepts clients on an abstract address, collects their requests in `requests`, sends answers.

    Args:
        address: abstract address.
        selector: the manager's; its `data` are callables that take the event mask.
        on_requests: called when `requests` may have grown.
    """

    def __init__(self, address: str, *, selector: selectors.BaseSelector, on_requests: Callable[[], None]) -> None:
        self.requests: deque[tuple[Client, dict[str, Any]]] = deque()
        self._clients: set[Client] = set()
        self._selector = selector
        self._on_requests = on_requests
        # A predecessor that was killed a moment ago may still hold the address.
        self._listener = wire.listen(address, timeout=timedelta(seconds=5))
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def reply(self, client: Client, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Answer the request of `client`; does nothing if it is gone."""
        client.asked = False
        if client.gone:
            return
        try:
            client.connection.queue(message, fds)
            self._after_io(client)
        except (OSError, ProtocolError):
            self.drop(client)

    def drop(self, client: Client) -> None:
        """Close the connection. What it asked for and was not begun is forgotten."""
        if not client.gone:
            client.gone = True
            self._clients.remove(client)
            self._selector.unregister(client.connection)
            client.connection.close()

    def drop_stalled(self) -> None:
        """Drop those that have owed something for too long; call it about every second."""
        now = time.monotonic()
        for client in list(self._clients):
            limit = _MESSAGE_TIME_MAX if client.pool else _HELLO_TIME_MAX
            if client.owes_since is not None and now - client.owes_since > limit.total_seconds():
                self.drop(client)

    def _accept(self, events: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(0.01)  # the listener stays readable: don't spin
            return
        try:
            if len(self._clients) >= _CLIENTS_MAX:
                raise OSError(errno.EUSERS, "too many clients")
            wire.require_same_user(sock)
        except OSError:
            sock.close()
            return
        client = Client(wire.FrameConnection(sock, limits=_LIMITS))
        self._clients.add(client)
        self._selector.register(client.connection, selectors.EVENT_READ, self._handler_of(client))

    def _handler_of(self, client: Client) -> Callable[[int], None]:
        return lambda events: self._on_event(client, events)

    def _on_event(self, client: Client, events: int) -> None:
        if client.gone:  # dropped earlier in the same round of the selector
            return
        try:
            if events & selectors.EVENT_WRITE:
                client.connection.flush()
            for message, _ in client.connection.receive():
                if client.asked:
                    raise ProtocolError("a request before the answer to the last")
                client.asked = True
                self.requests.append((client, message))
            if client.connection.at_end:
                raise EOFError
            self._after_io(client)
        except (OSError, EOFError, ProtocolError):
            self.drop(client)
        self._on_requests()

    def _after_io(self, client: Client) -> None:
        connection = client.connection
        if not (connection.receiving or connection.wants_write or not client.pool):
            client.owes_since = None
        elif client.owes_since is None:
            client.owes_since = time.monotonic()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_write else 0)
        if self._selector.get_key(connection).events != events:
            self._selector.modify(connection, events, self._handler_of(client))
