"""Real SIGKILLs inside protected updates and recoveries, with lost pages: memory is shared, each process another."""

import os
import random
import signal
import traceback
from collections.abc import Callable

import pytest
import torch

from leto_strategy.progress import Marker, Phase
from update.coded_rig import STEP, CodedRig, Crash
from update.test_coded_crash import Pattern, Trial, patterns, surely_recoverable, with_one_more

NUM_KILLS = 200
NUM_KILLS_NIGHTLY = 1000


def in_child(work: Callable[[], None]) -> bool:
    """Run in a forked process; whether SIGKILL has ended it, which must else end well."""
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL


def dies_at(rig: CodedRig, store: int, seed: int) -> Callable[[], None]:
    """What a trainer does until it is killed in the middle of a store, or is done."""

    def work() -> None:
        try:
            with rig.watching(store, seed):
                rig.resume()
        except Crash:
            os.kill(os.getpid(), signal.SIGKILL)

    return work


@pytest.mark.timeout(600)
def test_sigkills_with_lost_pages_leave_every_byte(seed: int, request: pytest.FixtureRequest) -> None:
    rng = random.Random(seed)
    rig = CodedRig()
    trial = Trial(rig)
    rig.block[:] = trial.images[0]
    with rig.watching():
        rig.resume()
    num_stores, full = rig.stores.count, patterns(rig)
    kills = 0
    while kills < (NUM_KILLS_NIGHTLY if request.config.getoption("--nightly") else NUM_KILLS):
        rig.block[:] = trial.images[0]
        assert in_child(dies_at(rig, rng.randrange(num_stores), rng.getrandbits(30)))
        kills += 1
        over = rig.page.marker == Marker(STEP, Phase.DONE)
        drawn = (with_one_more(rig, rng, rng.choice(full)) for _ in range(1000))
        lost: Pattern = next(pattern for pattern in drawn if surely_recoverable(set(pattern)))
        rig.lose(lost, rng)
        # Now its first stores: those of the rebuilding.
        kills += in_child(dies_at(rig, rng.randrange(12), rng.getrandbits(30)))
        spared = trial._unneeded(set(lost)) if over or rig.page.marker == Marker(STEP, Phase.DONE) else set()
        assert not in_child(rig.resume)
        assert rig.page.marker == Marker(STEP, Phase.DONE)
        assert rig.marks.lost() == set()
        expected = {page: content for page, content in trial.expected.items() if page not in spared}
        assert [page for page, content in expected.items() if rig.bytes_of(page) != content] == []
