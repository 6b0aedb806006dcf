"""What a state manager answers: looks at its holdings, makes what is new, and leaves every change to the manager."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from leto_strategy.errors import AllocationMismatchError, PoolError, ProtocolError, ResourceError
from leto_strategy.memory.backend import Backends
from leto_strategy.memory.catalogue import (
    Change,
    Entry,
    Key,
    integers_from_list,
    key_from_list,
    segment_to_list,
    spec_from_list,
    spec_to_list,
)
from leto_strategy.memory.clients import Client
from leto_strategy.memory.holdings import Handles, Holdings, check_capacity, create_segments


class Transaction(NamedTuple):
    """A change that is made but not committed: call `answer` once it is in the holdings."""

    change: Change
    handles: Handles
    answer: Callable[[], None]


class RequestHandler:
    """Answers one request after the other.

    Args:
        holdings: the manager's; read here, changed by the manager only.
        backends: what makes the memory.
        device: what clients map device memory with, as in `memory.places.backends_of`; told to clients.
        rank: told to clients.
        token: what a client that sends one must send.
        reply: sends an answer and fds, which stay the holdings'.
        begin: takes a change that has to be mirrored and committed, or closes its handles and raises OSError. None is
            under way when a request that may lead to one comes to `answer`.
        reach: called with the name of each step.
    """

    def __init__(
        self,
        holdings: Holdings,
        backends: Backends,
        *,
        device: dict[str, Any],
        rank: int,
        token: str,
        reply: Callable[[Client, dict[str, Any], Sequence[int]], None],
        begin: Callable[[Transaction], None],
        reach: Callable[[str], None],
    ) -> None:
        self._holdings = holdings
        self._backends = backends
        self._device = device
        self._rank = rank
        self._token = token
        self._reply = reply
        self._begin = begin
        self._reach = reach

    def answer(self, client: Client, message: dict[str, Any]) -> None:
        """Answer a request, or begin the change that has to come before its answer.

        Raises:
            ProtocolError: it is malformed: drop the client.
        """
        try:
            self._dispatch(client, message)
        except (PoolError, OSError) as error:  # out of memory or descriptors: this client's problem only
            self._reply(client, _error_message(error), ())

    def _dispatch(self, client: Client, message: dict[str, Any]) -> None:
        match message:
            case _ if not client.pool:
                self._greet(client, message)
            case {"op": "allocate", "specs": list(specs), "number": int(number)}:
                self._reach("received")
                self._allocate(client, message, specs, creator=f"{client.pool}:{number}")
            case {"op": "attach", "names": list(names)}:
                entries = [self._entry(key_from_list(name)) for name in names]
                self._reply_regions(client, message, entries)
            case {"op": "free", "names": list(names)}:
                self._free(client, message, [key_from_list(name) for name in names])
            case {"op": "ping"}:
                self._reply(client, {"op": "pong", "version": self._holdings.catalogue.version}, ())
            case _:
                raise ProtocolError("unknown request")

    def _greet(self, client: Client, message: dict[str, Any]) -> None:
        pool, token = message.get("pool"), message.get("token")
        if message.get("op") != "hello" or not isinstance(pool, str) or not 1 <= len(pool) <= 64:
            raise ProtocolError("the first message is hello")
        if token and token != self._token:
            raise ProtocolError("the token of another job")
        client.pool = pool
        version = self._holdings.catalogue.version
        self._reply(client, {"op": "welcome", "version": version, "rank": self._rank, "device": self._device}, ())

    def _allocate(self, client: Client, message: dict[str, Any], items: list[Any], *, creator: str) -> None:
        specs = [spec_from_list(item) for item in items]
        catalogue, backends = self._holdings.catalogue, self._backends
        _known_segments(message)
        try:
            change = catalogue.plan(
                specs, creator=creator, granularity_bytes=lambda place: backends[place].granularity_bytes
            )
        except ValueError as error:
            raise ProtocolError(str(error)) from None

        def answer() -> None:
            entries = [catalogue.regions[spec.key] for spec in specs]
            self._reply_regions(client, message, entries, creator=creator)

        if change is None:
            answer()
            return
        check_capacity(specs, change, self._holdings, backends)
        change, handles = create_segments(change, backends)
        self._reach("created")
        self._begin(Transaction(change, handles, answer))

    def _free(self, client: Client, message: dict[str, Any], keys: Iterable[Key]) -> None:
        catalogue = self._holdings.catalogue
        known = _known_segments(message)
        change = catalogue.plan_removal(keys)

        def answer() -> None:
            gone = [number for number in known if number not in catalogue.segments]
            self._reply(client, {"op": "freed", "version": catalogue.version, "gone": gone}, ())

        if change is None:
            answer()
        else:
            self._begin(Transaction(change, {}, answer))

    def _entry(self, key: Key) -> Entry:
        entry = self._holdings.catalogue.regions.get(key)
        if entry is None:
            raise PoolError(f"there is no region {key[0]} (shard {key[1]})")
        return entry

    def _reply_regions(
        self, client: Client, message: dict[str, Any], entries: list[Entry], *, creator: str | None = None
    ) -> None:
        """Where each region lies, and the segments among them that the client has not mapped, with their fds."""
        segments, known = self._holdings.catalogue.segments, set(_known_segments(message))
        new = [number for number in dict.fromkeys(entry.segment for entry in entries) if number not in known]
        reply = {
            "op": "regions",
            "version": self._holdings.catalogue.version,
            "specs": [spec_to_list(entry.spec) for entry in entries],
            "places": [[entry.segment, entry.offset_bytes, entry.creator == creator] for entry in entries],
            "segments": [segment_to_list(segments[number]) for number in new],
        }
        self._reply(client, reply, [fd for number in new for fd in self._holdings.handles[number]])
        self._reach("answered")


def _known_segments(message: dict[str, Any]) -> list[int]:
    """Numbers of the segments that the client has mapped already."""
    return integers_from_list(message.get("known", []))


def _error_message(error: PoolError | OSError) -> dict[str, Any]:
    if isinstance(error, OSError):
        remedy = "" if isinstance(error, ResourceError) else ": the state manager needs more, see `ulimit -n`"
        return {"op": "error", "kind": "resource", "message": f"{error.strerror}{remedy}", "errno": error.errno}
    kind = "mismatch" if isinstance(error, AllocationMismatchError) else "pool"
    return {"op": "error", "kind": kind, "message": str(error)}
