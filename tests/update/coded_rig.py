"""A protected state in one block of memory, whose every store is an event that can be stopped, before or in the middle.

One undisturbed update is recorded as images of all memory between events. A crash is such an image with a random part
of the next event's changes; so no process has to die, and tens of thousands of crashes take a minute. What runs is the
product's own code; only the numbers of its stores are intercepted: operators of torch that write, the two operations of
the erasure code, and the words.
"""

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from leto_strategy.erasure import code as erasure_code
from leto_strategy.erasure.backend import Backend
from leto_strategy.erasure.backends import cpu_backend
from leto_strategy.erasures import Page, PageKind
from leto_strategy.geometry import align_up
from leto_strategy.marks import ProtectionWords
from leto_strategy.memory.backend import Region, RegionSpec
from leto_strategy.progress import PAGE_BYTES, Marker, Phase, ProgressPage
from leto_strategy.update import ResumableModelUpdater, RetainedState, StateLayout, StatePublisher, adapter_for
from leto_strategy.update.coded import CodedProtection
from leto_strategy.update.paging import Paging
from leto_strategy.update.pieces import pieces_of
from leto_strategy.update.protected_memory import ProtectedMemory
from leto_strategy.update.words import HostWords
from update.rig import map_memfd, random_gradients

STEP = 5
PAGING = Paging(page_bytes=4096, num_data=4, num_parity=2, num_second=1)
_CAPACITY_BYTES = 1 << 20


class Crash(Exception):
    """A process ended here."""


class BlockPool:
    """The calls of `ResilientMemoryPool` that protected state makes, over one block for everything."""

    device = "cpu"
    on_device = False

    def __init__(self) -> None:
        self.base = map_memfd(_CAPACITY_BYTES)
        self.end = PAGE_BYTES  # the progress page comes first
        self._regions: dict[str, Region] = {}

    def allocate(self, specs: Sequence[RegionSpec]) -> list[Region]:
        arenas: dict[str, list[RegionSpec]] = {}
        for spec in specs:
            arenas.setdefault(spec.arena or f"region:{spec.name}", []).append(spec)
        for members in arenas.values():
            if members[0].name in self._regions:
                continue
            start, offset = self.end, 0
            for spec in members:
                offset = align_up(offset, spec.alignment_bytes)
                self._regions[spec.name] = Region(spec, start, offset, created=True)
                offset += spec.size_bytes
            self.end = align_up(start + offset, 4096)
            assert self.end <= _CAPACITY_BYTES
        return [self._regions[spec.name] for spec in specs]

    def address(self, region: Region) -> int:
        return self.base + region.segment + region.offset_bytes

    def buffer(self, region: Region) -> memoryview:
        size = region.spec.size_bytes
        return memoryview((ctypes.c_ubyte * size).from_address(self.address(region))).cast("B")


class Stores:
    """Counts events; at the chosen one it lets a random part happen and raises `Crash`."""

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory
        self.count = 0
        self.stop_at: int | None = None
        self.rng = random.Random(0)
        self.images: list[np.ndarray] | None = None

    def event(self, do: Callable[[], Any], *, atomic: bool = False) -> Any:
        number, self.count = self.count, self.count + 1
        if self.images is not None:
            self.images.append(self._memory.copy())
        if number != self.stop_at:
            return do()
        before = self._memory.copy()
        do()
        self._memory[:] = part_of(before, self._memory.copy(), self.rng, atomic=atomic)
        raise Crash


def part_of(before: np.ndarray, after: np.ndarray, rng: random.Random, *, atomic: bool) -> np.ndarray:
    """Memory in the middle of an event: some of the bytes that it changes are changed."""
    share = rng.choice((0.0, 0.5, 1.0)) if not atomic else rng.choice((0.0, 1.0))
    if share == 1.0:
        return after
    result = before.copy()
    if share:
        changed = np.flatnonzero(before != after)
        if len(changed) <= 8:  # one word: stored whole or not at all
            return result
        landed = changed[np.random.default_rng(rng.getrandbits(32)).random(len(changed)) < rng.random()]
        result[landed] = after[landed]
    return result


class WatchedWords:
    """A memoryview of words whose stores are events."""

    def __init__(self, words: memoryview, stores: Stores) -> None:
        self._words, self._stores = words, stores

    def __getitem__(self, place: Any) -> Any:
        return self._words[place]

    def __setitem__(self, place: int, word: int) -> None:
        self._stores.event(lambda: self._words.__setitem__(place, word), atomic=True)

    def release(self) -> None:
        self._words.release()


class WatchedBackend(Backend):
    """The host's backend, each of whose operations is an event."""

    name = "watched"

    def __init__(self, stores: Stores) -> None:
        self._inner, self._stores = cpu_backend(), stores
        self.strip_words = self._inner.strip_words

    def parity(self, *args: Any, **options: Any) -> None:
        self._stores.event(lambda: self._inner.parity(*args, **options))

    def combine(self, *args: Any, **options: Any) -> None:
        self._stores.event(lambda: self._inner.combine(*args, **options))


class WatchedOperators(TorchDispatchMode):
    """Each operator of torch that writes to an argument is an event."""

    def __init__(self, stores: Stores) -> None:
        super().__init__()
        self._stores = stores

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            return self._stores.event(lambda: func(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def small_build() -> tuple[nn.Module, Optimizer]:
    """Six pages of parameters and six of momentum, in six chunks; one more page that is frozen."""
    generator = torch.Generator().manual_seed(1)
    module = nn.Module()
    for index, shape in enumerate(((1100,), (40, 60), (7,), (1900,))):
        module.register_parameter(f"p{index}", nn.Parameter(torch.randn(shape, generator=generator)))
    module.frozen = nn.Parameter(torch.randn(300, generator=generator), requires_grad=False)
    return module, SGD([p for p in module.parameters() if p.requires_grad], lr=0.1, momentum=0.9, foreach=False)


class CodedRig:
    """One protected rank."""

    def __init__(
        self,
        build: Callable[[], tuple[nn.Module, Optimizer]] = small_build,
        *,
        paging: Paging = PAGING,
        chunk_bytes: int = 2 * 4096,
        protection: type[CodedProtection] = CodedProtection,
        updater: type[ResumableModelUpdater] = ResumableModelUpdater,
    ) -> None:
        self.module, self.optimizer = build()
        adapter = adapter_for(self.optimizer)
        self.layout = StateLayout.plan(
            list(self.module.named_parameters()), self.optimizer, adapter, chunk_bytes=chunk_bytes, paging=paging
        )
        assert self.layout.shape is not None
        self.shape = self.layout.shape
        self.pool: Any = BlockPool()
        self.state = RetainedState(self.layout, self.pool)
        self.state.initialise()
        self.memory = ProtectedMemory(self.layout, self.state, self.pool)
        self.block = np.ctypeslib.as_array((ctypes.c_uint8 * self.pool.end).from_address(self.pool.base))
        self.stores = Stores(self.block)
        self.page = ProgressPage(memoryview((ctypes.c_char * PAGE_BYTES).from_address(self.pool.base)).cast("B"))
        self.page._words = WatchedWords(self.page._words, self.stores)  # type: ignore[assignment]
        self.words = HostWords(self.page)
        self.marks: ProtectionWords = self.memory.words()  # of the test, unwatched
        self.protection = protection(self.memory)
        watched: Any = WatchedWords(self.protection._words._words, self.stores)
        self.protection._words._words = watched
        self.updater = updater(
            self.layout, pieces_of(self.layout, self.state), self.words, adapter, protection=self.protection
        )
        self.steps = StatePublisher(self.layout, self.state, adapter).initial_steps()
        self.touched = [True] * len(self.layout.slots)
        self._gradients: dict[int, dict[str, Any]] = {}

    @contextmanager
    def watching(self, stop_at: int | None = None, seed: int = 0) -> Iterator[None]:
        """Count the stores, from 0."""
        self.stores.count, self.stores.stop_at, self.stores.rng = 0, stop_at, random.Random(seed)
        backend, threads = erasure_code.backend_for, erasure_code.default_threads
        watched = WatchedBackend(self.stores)
        erasure_code.backend_for, erasure_code.default_threads = (lambda device: watched), (lambda: 1)  # type: ignore[assignment]
        try:
            with torch.no_grad(), WatchedOperators(self.stores):
                yield
        finally:
            self.stores.stop_at = None
            erasure_code.backend_for, erasure_code.default_threads = backend, threads

    def write_gradients(self, step: int) -> None:
        """What forward and backward passes leave."""
        if step not in self._gradients:
            self._gradients[step] = random_gradients(self.module, step)
        for slot in self.layout.slots:
            self.state.gradient(slot).copy_(self._gradients[step][slot.name])

    def start(self) -> None:
        """The beginning of training, and one whole step, so that undo and device parity hold something old."""
        with self.watching():
            self.protection.encode()
            self.step_from(0)

    def step_from(self, step: int) -> None:
        """Do what is left of a step: what a trainer does that was promoted, or that begins it."""
        marker = self.page.marker
        if marker is not None and marker.step == step and marker.phase is Phase.DONE:
            return
        if marker is None or marker.step < step:
            self.write_gradients(step)
            self.protection.seal_gradients(step)
            self.words.publish(Marker(step, Phase.READY))
            self.words.publish(Marker(step, Phase.SYNCED))
        elif marker.phase is Phase.READY:
            self.words.publish(Marker(step, Phase.SYNCED))
        self.updater.run(
            step,
            groups=self.optimizer.param_groups,
            steps_before=[float(step > 0)] * len(self.steps),
            touched=self.touched,
            resume=self.page.marker,
        )

    def resume(self, step: int = STEP) -> None:
        """What a promoted trainer does."""
        self.protection.recover(self.page.marker)
        self.step_from(step)

    def lose(self, pages: Sequence[Page], rng: random.Random) -> None:
        """Destroy pages, then mark them."""
        for page in pages:
            start = self.memory.address(page) - self.pool.base
            self.block[start : start + PAGING.page_bytes] = np.frombuffer(rng.randbytes(PAGING.page_bytes), np.uint8)
        self.marks.mark_lost(pages)

    def images_of_a_step(self, step: int = STEP) -> list[np.ndarray]:
        """All memory before each store of a step, and at its end."""
        self.stores.images = []
        with self.watching():
            self.step_from(step)
        images, self.stores.images = self.stores.images, None
        return [*images, self.block.copy()]

    def bytes_of(self, page: Page) -> bytes:
        start = self.memory.address(page) - self.pool.base
        return self.block[start : start + PAGING.page_bytes].tobytes()

    def kept(self) -> list[Page]:
        """The pages that must be right at the end of a step."""
        return [page for page in self.shape.pages() if page.kind not in (PageKind.UNDO, PageKind.DEVICE)]
