"""The seam between the pool and the kind of memory it hands out (paper, section 4).

`MemfdBackend` implements it for host memory, `CudaBackend` for HBM. Two facts shape the seam:

* The owner (state manager, supervisor) never maps and never needs a CUDA context: it creates, exports and counts. The
  exported fds alone keep the memory alive, so they, and nothing else, pass from process to process.
* A segment may consist of several handles. CUDA frees and attaches slowly in small handles, and loses memory by handle,
  so protected state comes in 32 MiB handles and unprotected state in one. A memfd segment is always one handle.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

_NAME = re.compile(r"[\x21-\x7e]{1,200}")
_SHARD = re.compile(r"(\d{1,6})/(\d{1,6})")
_SIZE_BYTES_MAX = 1 << 46  # half of the user address space of x86-64
_ALIGNMENT_BYTES_MAX = 2 << 20

DEFAULT_SHARD = "0/1"


class Place(IntEnum):
    """Where memory lies. On a job without GPUs both are host memory."""

    HOST = 0
    DEVICE = 1


class Kind(StrEnum):
    """What becomes of a region's content when pages are lost."""

    PROTECTED = "protected"  # parameters and moments: survives a failure and is covered by parity
    RETAINED = "retained"  # gradients, undo, scratch: survives a failure, a lost page stays lost
    RECORD = "record"  # host memory for words and records, which keep their own copies and checks
    PARITY = "parity"  # host memory for the parity of protected regions; its second tier rebuilds the first

    @property
    def place(self) -> Place:
        """Where regions of this kind lie."""
        return Place.HOST if self in (Kind.RECORD, Kind.PARITY) else Place.DEVICE


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """What a trainer asks for. (`name`, `shard`) is the stable name under which a later trainer finds it again.

    Args:
        name: 1 to 200 printable ASCII characters without spaces.
        size_bytes: may be 0 (an empty tensor).
        kind: see `Kind`; part of the identity, a second allocation must name the same.
        shard: ``"index/count"`` of a sharded tensor; ``"0/1"`` for a whole one.
        arena: specs of one arena in one call lie back to back in one segment; "" gives the region its own.
        alignment_bytes: power of two up to 2 MiB. 512 lets any kernel use vector loads.

    Raises:
        ValueError: one of these does not hold.
    """

    name: str
    size_bytes: int
    kind: Kind
    shard: str = DEFAULT_SHARD
    arena: str = ""
    alignment_bytes: int = 512

    def __post_init__(self) -> None:
        """Check everything, since a spec may come from a socket."""
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError(f"region name {self.name!r:.60}: 1 to 200 printable ASCII characters without spaces")
        if type(self.size_bytes) is not int or not 0 <= self.size_bytes <= _SIZE_BYTES_MAX:
            raise ValueError(f"region {self.name}: size_bytes is {self.size_bytes!r:.60}")
        if not isinstance(self.kind, Kind):
            raise ValueError(f"region {self.name}: kind is {self.kind!r:.60}")
        match = _SHARD.fullmatch(self.shard) if isinstance(self.shard, str) else None
        if match is None or int(match[1]) >= int(match[2]):
            raise ValueError(f'region {self.name}: shard is {self.shard!r:.60}, not "index/count"')
        if not isinstance(self.arena, str) or (self.arena and not _NAME.fullmatch(self.arena)):
            raise ValueError(f"region {self.name}: arena is {self.arena!r:.60}")
        alignment = self.alignment_bytes
        if type(alignment) is not int or not 1 <= alignment <= _ALIGNMENT_BYTES_MAX or alignment & (alignment - 1):
            raise ValueError(f"region {self.name}: alignment_bytes is {alignment!r:.60}, not a power of two to 2 MiB")

    @property
    def key(self) -> tuple[str, str]:
        """(name, shard): what identifies the region."""
        return self.name, self.shard


@dataclass(frozen=True, slots=True)
class Region:
    """Where an allocation lies: `offset_bytes` into segment number `segment`.

    `created` is True only in the answer to the allocation that made it (also if that answer came from a manager that
    took over meanwhile). It says nothing of the content: who wrote what is what words and records are for.
    """

    spec: RegionSpec
    segment: int
    offset_bytes: int
    created: bool


class MemoryBackend(ABC):
    """Creates, exports, maps and protects segments of memory that outlive the processes that use them."""

    @property
    @abstractmethod
    def granularity_bytes(self) -> int:
        """Sizes of segments are multiples of this."""

    @abstractmethod
    def available_bytes(self) -> tuple[int, str]:
        """How much could be created and filled now, and the name of what limits it. Called by the owner."""

    @abstractmethod
    def committed_bytes(self, handles: Sequence[int], size_bytes: int) -> int:
        """How much of a segment is already taken from what `available_bytes` counts. Called by the owner."""

    @abstractmethod
    def create(self, size_bytes: int, *, label: str, protected: bool) -> list[int]:
        """Make a segment and return the fds of its handles in the order of their addresses. Owner only.

        Args:
            size_bytes: A multiple of the granularity.
            label: For people who look at the process.
            protected: A lost handle is to be rebuilt, so that it must be small beside what one failure may lose.

        Raises:
            ResourceError: no memory or no descriptors; nothing is left behind.
        """

    @abstractmethod
    def map(self, handles: Sequence[int], size_bytes: int, *, address_hint: int, writable: bool) -> int:
        """Map a segment and return its address: `address_hint` if that range is free, else any. Trainer only.

        The fds may be closed afterwards.

        Raises:
            ResourceError: no address space, or too many mappings.
        """

    @abstractmethod
    def protect(self, address: int, size_bytes: int, *, writable: bool) -> None:
        """Change the access of a mapping made by `map` and keep its page tables (a promotion waits for it)."""

    @abstractmethod
    def unmap(self, address: int, size_bytes: int) -> None:
        """Remove a mapping. Any tensor over it is invalid from then on."""

    @abstractmethod
    def populate(self, address: int, size_bytes: int) -> None:
        """Take all pages of a writable mapping now rather than at the first touch."""


Backends = Mapping[Place, MemoryBackend]
"""What makes and maps the memory of each place."""
