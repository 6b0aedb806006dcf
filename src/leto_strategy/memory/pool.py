"""Resilient Memory Pool, the trainer's side (paper section 4.3): find or make regions by name, and map them.

Regions outlive trainer and manager. A shadow's pool maps read-only, so that a stray write before promotion is SIGSEGV
and not silent corruption; `make_writable` is the promotion. Mappings live until the process ends, whatever happens to
this object, since tensors over them have lifetimes of their own; only `free` unmaps.
"""

import ctypes
import json
import os
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple, Self

from leto_strategy.errors import AllocationMismatchError, PoolError, ProtocolError, ResourceError
from leto_strategy.memory import wire
from leto_strategy.memory.backend import DEFAULT_SHARD, Backends, MemoryBackend, Place, Region, RegionSpec
from leto_strategy.memory.catalogue import (
    Segment,
    integers_from_list,
    segment_from_list,
    spec_from_list,
    spec_to_list,
)
from leto_strategy.memory.cuda import CudaBackend
from leto_strategy.memory.holdings import close_fds
from leto_strategy.memory.libcuda import CudaDriver
from leto_strategy.memory.places import name_of, trainer_backends

_REQUEST_BYTES_MAX = (4 << 20) - (1 << 20)  # what a manager takes, less room for the list of known segments
_LIMITS = wire.Limits(message_bytes=64 << 20, message_fds=8192, pending_bytes=64 << 20)


class _Mapping(NamedTuple):
    address: int
    size_bytes: int
    place: Place


class ResilientMemoryPool:
    """A client of one rank's state manager. Make it with `connect`. Threads may share it; forked children may not.

    When the manager dies, the request under way and all later ones go to its successor at the same address: requests
    are idempotent, and what is mapped needs no manager.
    """

    def __init__(
        self, address: str, *, timeout: timedelta, writable: bool, token: str, backends: Backends | None, prefault: bool
    ) -> None:
        self.writable = writable
        self.version = 0  # of the catalogue, as of the last answer (rule R17)
        self.device = "cpu"
        """Where protected and retained regions lie, as torch writes it."""
        self._address = address
        self._timeout = timeout
        self._token = token
        self._backends = backends
        self._prefault = prefault
        self._name = secrets.token_hex(8)
        self._number = 0  # of the last allocation
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._connection: wire.FrameConnection | None = None
        self._closed = False
        self._mappings: dict[int, _Mapping] = {}
        self._regions: dict[tuple[str, str], Region] = {}

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        timeout: timedelta,
        writable: bool,
        token: str = "",
        backends: Backends | None = None,
        prefault: bool = False,
    ) -> Self:
        """Connect to the manager that listens on an abstract address.

        Args:
            address: without the leading zero byte.
            timeout: for each request, including a manager's replacement meanwhile.
            writable: False maps everything read-only until `make_writable`.
            token: what the manager was configured with; "" does not ask.
            backends: what maps the memory; by default what the manager says the rank's device needs.
            prefault: take all pages when a segment is mapped writable, instead of at the first touch.

        Raises:
            PoolError: no manager answered in time, or not one of this user and job.
        """
        pool = cls(
            address,
            timeout=timeout,
            writable=writable,
            token=token,
            backends=backends,
            prefault=prefault,
        )
        pool._request({"op": "ping"})
        return pool

    @property
    def on_device(self) -> bool:
        """Whether protected and retained regions lie on a GPU."""
        return self.device != "cpu"

    @property
    def regions(self) -> dict[tuple[str, str], Region]:
        """The regions that this pool has mapped, by (name, shard)."""
        return dict(self._regions)

    def allocate(self, specs: Sequence[RegionSpec]) -> list[Region]:
        """Find each region by name and shard or make it (zeroed), and map it. All or nothing.

        Specs of one arena lie back to back, in order, in one segment, each aligned. Ask for everything at once: two
        thousand regions take one message.

        Returns:
            The regions in the order of `specs`.

        Raises:
            AllocationMismatchError: one exists with another size, kind or place, or an arena exists in part.
            ResourceError: not enough memory, descriptors or mappings; no region of this call was made.
            PoolError: no manager in time.
            ValueError: two of the same name and shard, or more than about 30,000 specs in one call.
        """
        if len({spec.key for spec in specs}) < len(specs):
            raise ValueError("two regions of one allocation have the same name and shard")
        with self._exclusively():
            known = [self._regions.get(spec.key) for spec in specs]
            if all(region is not None and region.spec == spec for region, spec in zip(known, specs, strict=True)):
                return [replace(region, created=False) for region in known if region is not None]
            self._number += 1
            message = {"op": "allocate", "number": self._number, "specs": [spec_to_list(spec) for spec in specs]}
            if len(json.dumps(message)) > _REQUEST_BYTES_MAX:
                raise ValueError(f"{len(specs)} regions in one allocation are too many: allocate them in several calls")
            return self._request_regions(message)

    def attach(self, name: str, *, shard: str = DEFAULT_SHARD) -> Region:
        """Map a region that exists.

        Raises:
            PoolError: there is none, or no manager in time.
        """
        with self._exclusively():
            known = self._regions.get((name, shard))
            return known or self._request_regions({"op": "attach", "names": [[name, shard]]})[0]

    def free(self, name: str, *, shard: str = DEFAULT_SHARD) -> None:
        """Give a region up, for everybody. Its memory goes once its segment has no region and nobody maps it.

        A tensor over it is invalid from then on. Nothing happens if there is no such region.

        Raises:
            PoolError: no manager in time.
        """
        with self._exclusively():
            answer = self._request({"op": "free", "names": [[name, shard]], "known": list(self._mappings)})
            self._regions.pop((name, shard), None)
            for number in integers_from_list(answer.get("gone")):
                mapping = self._mappings.pop(number)
                self.backend(mapping.place).unmap(mapping.address, mapping.size_bytes)

    def address(self, region: Region) -> int:
        """Address of the region's first byte in this process.

        Raises:
            PoolError: this pool has not mapped it, or it was freed.
        """
        mapping = self._mappings.get(region.segment)
        if mapping is None:
            raise PoolError(f"region {region.spec.name} is not mapped")
        return mapping.address + region.offset_bytes

    def buffer(self, region: Region, *, writable: bool = False) -> memoryview:
        """The bytes of a region of host memory; a read-only view where the pool is not writable (yet).

        Args:
            region: Of kind `Kind.RECORD`.
            writable: Give a writable view in any case. Only on a GPU's job is its memory writable so early.

        Raises:
            PoolError: this pool has not mapped it, or it was freed.
        """
        assert region.spec.kind.place is Place.HOST or not self.on_device, f"{region.spec.name} is on a device"
        address = self.address(region)
        if not region.spec.size_bytes:
            return memoryview(b"")
        view = memoryview((ctypes.c_ubyte * region.spec.size_bytes).from_address(address)).cast("B")
        return view if self.writable or writable else view.toreadonly()

    def make_writable(self) -> None:
        """Promotion: let this process write to everything it has mapped and will map. Milliseconds, no page is lost.

        Raises:
            ResourceError: the kernel refused.
        """
        with self._exclusively():
            if self.writable:
                return
            for mapping in self._mappings.values():
                self.backend(mapping.place).protect(mapping.address, mapping.size_bytes, writable=True)
            self.writable = True

    def close(self) -> None:
        """Leave the manager. What is mapped stays mapped. May be called again."""
        with self._lock:
            self._closed = True
            self._disconnect()

    def _request_regions(self, message: dict[str, Any]) -> list[Region]:
        message["known"] = list(self._mappings)
        answer, fds = self._exchange(message)
        try:
            specs = [spec_from_list(item) for item in answer["specs"]]
            regions = [Region(spec, *place) for spec, place in zip(specs, answer["places"], strict=True)]
            self._map([segment_from_list(item) for item in answer["segments"]], fds)
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"not an answer of a manager: {error!r}") from None
        finally:
            close_fds(fds)
        self._regions.update((region.spec.key, region) for region in regions)
        return regions

    def _map(self, segments: list[Segment], fds: list[int]) -> None:
        begin = 0
        for segment in segments:
            handles = fds[begin : begin + segment.num_handles]
            begin += segment.num_handles
            backend = self.backend(segment.place)
            address = backend.map(
                handles, segment.size_bytes, address_hint=segment.address_hint, writable=self.writable
            )
            self._mappings[segment.number] = _Mapping(address, segment.size_bytes, segment.place)
            if self._prefault and self.writable:
                backend.populate(address, segment.size_bytes)

    @property
    def driver(self) -> CudaDriver | None:
        """The driver of the GPU on which regions lie; None on the CPU."""
        backend = self.backend(Place.DEVICE)
        return backend.driver if isinstance(backend, CudaBackend) else None

    def backend(self, place: Place) -> MemoryBackend:
        """What maps the memory of a place."""
        assert self._backends is not None, "known since the first answer of a manager"
        return self._backends[place]

    def _request(self, message: dict[str, Any]) -> dict[str, Any]:
        answer, fds = self._exchange(message)
        close_fds(fds)
        return answer

    def _exchange(self, message: dict[str, Any]) -> wire.Frame:
        """Send a request, to one manager after the other if need be, and wait for its answer.

        Sending it again is safe whatever the last manager did with it: an allocation finds what it made, a removal
        finds nothing.
        """
        deadline = time.monotonic() + self._timeout.total_seconds()
        while True:
            try:
                connection = self._connected(deadline)
                connection.send(message, timeout=_left(deadline))
                answer = connection.receive_one(timeout=_left(deadline))
                break
            except (EOFError, OSError, ProtocolError) as error:
                self._disconnect()
                if isinstance(error, PermissionError) or time.monotonic() >= deadline:
                    raise PoolError(f"no state manager at {self._address} in {self._timeout}: {error}") from error
                time.sleep(0.002)
            except BaseException:  # interrupted: the answer that is on its way must not be taken for the next one's
                self._disconnect()
                raise
        if answer.message.get("op") == "error":
            close_fds(answer.fds)
            raise _error_from(answer.message)
        version = answer.message.get("version")
        self.version = version if isinstance(version, int) else self.version
        return answer

    def _connected(self, deadline: float) -> wire.FrameConnection:
        if self._connection is None:
            sock = wire.connect(self._address, timeout=_left(deadline))
            self._connection = wire.FrameConnection(sock, limits=_LIMITS)
            hello = {"op": "hello", "pool": self._name, "token": self._token}
            self._connection.send(hello, timeout=_left(deadline))
            welcome, fds = self._connection.receive_one(timeout=_left(deadline))
            close_fds(fds)
            if self._backends is None:
                device = welcome.get("device") or {}
                self._backends, self.device = trainer_backends(device), name_of(device)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _exclusively(self) -> threading.RLock:
        """The lock, but not for a forked child: on the parent's connection it would take the parent's answers."""
        if os.getpid() != self._pid:
            raise PoolError("a forked process can't use the pool of its parent: connect one of its own")
        if self._closed:
            raise PoolError("the pool was closed")
        return self._lock


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(0.0, deadline - time.monotonic()))


def _error_from(message: dict[str, Any]) -> Exception:
    text = str(message.get("message"))
    match message.get("kind"):
        case "mismatch":
            return AllocationMismatchError(text)
        case "resource":
            return ResourceError(message.get("errno"), text)
        case _:
            return PoolError(text)
