"""Kills inside the update and lost pages together: at every store, in its middle, in recovery too, byte for byte.

How a crash is made is in `coded_rig`. Each case is a few numbers, so that a failure is run again by `Trial.replay`.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise

import numpy as np
import pytest
import torch

from leto_strategy.erasures import Page, PageKind
from leto_strategy.errors import PagesLostError
from leto_strategy.progress import Marker, Phase
from update.coded_rig import STEP, CodedRig, Crash, part_of

H1 = 2
NUM_PARTS = 10
_GRADIENTS = (PageKind.GRADIENT, PageKind.GRADIENT_PARITY)
_HOST = (PageKind.FIRST, PageKind.SECOND)
Pattern = tuple[Page, ...]


@dataclass(frozen=True)
class Case:
    """One crash.

    Args:
        image: The store at which the update is killed.
        lost: Pages lost with it.
        kills: Stores of each recovery at which that is killed in turn.
        more: Pages lost with each of those kills.
        seed: Of everything random.
    """

    image: int
    lost: Pattern
    kills: tuple[int, ...] = ()
    more: tuple[Pattern, ...] = ()
    seed: int = 0


@dataclass
class Trial:
    """A rig with the images of one undisturbed step, and what it left."""

    rig: CodedRig
    images: list[np.ndarray] = field(default_factory=list)
    expected: dict[Page, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        self.rig.start()
        self.images = self.rig.images_of_a_step()
        self.expected = {page: self.rig.bytes_of(page) for page in self.rig.kept()}
        memory = self.rig.memory
        for group, code in enumerate(memory.codes):
            assert code.verify(memory.data[group], memory.first[group]) == (), f"first tier of group {group}"
            assert memory.code.second.verify(memory.first[group], memory.second[group]) == (), f"second tier of {group}"

    @property
    def stores(self) -> list[int]:
        """The stores that change memory."""
        pairs = enumerate(pairwise(self.images))
        return [n for n, (before, after) in pairs if not np.array_equal(before, after)]

    def replay(self, case: Case) -> str | None:
        """Run a case; what is wrong, or None."""
        rig, rng = self.rig, random.Random(case.seed)
        before, after = self.images[case.image], self.images[min(case.image + 1, len(self.images) - 1)]
        changed = np.count_nonzero(before != after)
        rig.block[:] = part_of(before, after, rng, atomic=changed <= 8)
        rig.lose(case.lost, rng)
        lost, spared = set(case.lost), set[Page]()
        refused = False
        for kill, more in zip((*case.kills, None), (*case.more, ()), strict=True):
            spared |= self._unneeded(lost)
            try:
                if kill is None:
                    with torch.no_grad():
                        rig.resume()
                else:
                    with rig.watching(kill, rng.getrandbits(30)):
                        rig.resume()
            except Crash:
                pass
            except PagesLostError:
                refused = True
                break
            except AssertionError as error:
                return f"assertion: {error}"
            rig.lose(more, rng)
            lost |= set(more)
        if refused:
            return "refused though it must be recoverable" if surely_recoverable(lost) else None
        return self._difference(spared)

    def _unneeded(self, lost: set[Page]) -> set[Page]:
        """Gradients that need not come back: the update is over, or has used them and too many are lost."""
        over = self.rig.page.marker == Marker(STEP, Phase.DONE)
        gradients = [page for page in lost if page.kind in _GRADIENTS]
        num_lost = Counter(page.group for page in gradients)
        return {page for page in gradients if over or num_lost[page.group] > H1}

    def _difference(self, spared: set[Page]) -> str | None:
        rig = self.rig
        if rig.page.marker != Marker(STEP, Phase.DONE):
            return f"the word says {rig.page.marker}"
        if rig.marks.lost():
            return f"still marked: {rig.marks.lost()}"
        wrong = [
            page for page, content in self.expected.items() if page not in spared and rig.bytes_of(page) != content
        ]
        return f"other bytes in {wrong}" if wrong else None


def surely_recoverable(lost: set[Page]) -> bool:
    """State and gradients are separate code words, up to H1 of each may be lost; a single host page costs nothing."""
    state = [page for page in lost if page.kind not in _GRADIENTS]
    free = sum(page.kind in _HOST for page in state) == 1
    return len(state) - free <= H1 and len(lost) - len(state) <= H1


def patterns(rig: CodedRig) -> list[Pattern]:
    """Erasures up to the limit: each page alone, every pair of pages that one code word may have, and no page."""
    pages = rig.shape.pages()
    of = {kind: [page for page in pages if page.kind is kind] for kind in PageKind}
    pairs: list[Pattern] = [()]
    pairs += [(page,) for page in pages]
    data, first, device, undo = (of[k] for k in (PageKind.DATA, PageKind.FIRST, PageKind.DEVICE, PageKind.UNDO))
    gradients, gradient_parity = of[PageKind.GRADIENT], of[PageKind.GRADIENT_PARITY]
    for one, other in (
        (data, data),
        (data, first),
        (gradients, gradients),
        (gradients, gradient_parity),
        (device, device),
    ):
        pairs += [(a, b) for a in one for b in other if a.group == b.group and (a < b or one is not other)]
    pairs += [(undo[0], undo[1])]
    pairs += [(a, b) for a in undo for b in (*data, *device)]
    pairs += [(a, b) for a in data[::2] for b in device]
    return [tuple(sorted(pattern)) for pattern in pairs]


def with_one_more(rig: CodedRig, rng: random.Random, pattern: Pattern) -> Pattern:
    """A first-tier host page as well, and two gradient pages: all that may be lost at the same time."""
    pages = rig.shape.pages()
    more = rng.choice([page for page in pages if page.kind is PageKind.FIRST])
    group = rng.randrange(len(rig.shape.gradient_groups))
    gradients = rng.sample([page for page in pages if page.kind in _GRADIENTS and page.group == group], H1)
    return tuple(sorted({*(page for page in pattern if page.kind not in _HOST), more, *gradients}))


def all_cases(trial: Trial, seed: int, *, rounds: int) -> Iterator[Case]:
    """Every store with every pattern; every third with a second kill, every ninth with a third one."""
    rng = random.Random(seed)
    pages = trial.rig.shape.pages()
    everything = patterns(trial.rig)
    for number in range(rounds):
        for image in trial.stores:
            for pattern in everything:
                lost = with_one_more(trial.rig, rng, pattern) if rng.random() < 0.25 else pattern
                kills = tuple(rng.randrange(32) for _ in range(rng.choice((0, 0, 0, 0, 0, 0, 1, 1, 2))))
                more = tuple((rng.choice(pages),) if rng.random() < 0.3 else () for _ in kills)
                yield Case(image, lost, kills, more, rng.getrandbits(32) + number)


@pytest.fixture(scope="module")
def trial() -> Trial:
    return Trial(CodedRig())


def test_the_instance_has_everything_that_the_protocol_speaks_of(trial: Trial) -> None:
    groups = trial.rig.shape.groups
    assert [group.num_pages for group in groups] == [4, 4, 4, 1]
    assert [len(group.chunks) for group in groups] == [2, 2, 2, 0]
    assert {page.kind for page in trial.rig.shape.pages()} == set(PageKind)
    assert len(trial.stores) > 100
    assert len(patterns(trial.rig)) > 190


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_every_store_of_an_update_with_every_erasure_up_to_the_limit(
    trial: Trial, seed: int, part: int, request: pytest.FixtureRequest
) -> None:
    rounds = 10 if request.config.getoption("--nightly") else 1
    count = 0
    for case in islice(all_cases(trial, seed, rounds=rounds), part, None, NUM_PARTS):
        wrong = trial.replay(case)
        assert wrong is None, f"{case}: {wrong}"
        count += 1
    assert count * NUM_PARTS >= 20_000 * rounds, count


def test_every_store_of_a_recovery_is_survived_too(trial: Trial, seed: int, request: pytest.FixtureRequest) -> None:
    rng = random.Random(seed)
    step = 1 if request.config.getoption("--nightly") else 8
    full = [pattern for pattern in patterns(trial.rig) if len(pattern) == H1]
    count = 0
    for image in trial.stores[rng.randrange(step) :: step]:
        drawn = (with_one_more(trial.rig, rng, rng.choice(full)) for _ in range(1000))
        pattern = next(lost for lost in drawn if surely_recoverable(set(lost)))
        trial.rig.block[:] = trial.images[image]
        trial.rig.lose(pattern, rng)
        with trial.rig.watching():
            trial.rig.protection.recover(trial.rig.page.marker)
        for kill in range(trial.rig.stores.count):
            case = Case(image, pattern, (kill,), ((),), rng.getrandbits(32))
            wrong = trial.replay(case)
            assert wrong is None, f"{case}: {wrong}"
            count += 1
    assert count >= 50


def test_a_start_that_is_interrupted_anywhere_is_made_again(seed: int) -> None:
    rig = CodedRig()
    with rig.watching():
        rig.protection.encode()
    stores, expected = rig.stores.count, {page: rig.bytes_of(page) for page in rig.kept()}
    assert stores > 8
    for stop in range(stores):
        for kind in (PageKind.FIRST, PageKind.SECOND):
            for group in range(len(rig.shape.groups)):
                rig.memory.parity_bytes(kind, group).random_(0, 256)
        try:
            with rig.watching(stop, seed + stop):
                rig.protection.encode()
        except Crash:
            pass
        rig.protection.encode()
        assert {page: rig.bytes_of(page) for page in rig.kept()} == expected
        assert rig.marks.lost() == set()
