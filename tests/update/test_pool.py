"""The same over a real state manager: a trainer is killed inside an update, a shadow mapped read-only goes on."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from leto_strategy.memory.backend import Kind, RegionSpec
from leto_strategy.progress import PAGE_BYTES, Marker, Phase, ProgressPage
from leto_strategy.update import ResumableModelUpdater, RetainedState, StateLayout, StatePublisher, adapter_for
from leto_strategy.update.pieces import pieces_of
from leto_strategy.update.words import HostWords
from memory.stand_in import Rank
from update.rig import Rig, bytes_of, random_gradients


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    try:
        yield rank.start()
    finally:
        rank.close()


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(4)
    module = nn.Sequential(
        nn.Linear(50, 40), nn.Linear(40, 30), nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    )
    return module, AdamW(module.parameters())


@pytest.mark.parametrize("point", ["chunk_undo_copied", "chunk_updating", "chunk_committed"])
def test_a_shadow_mapped_read_only_finishes_the_update_of_a_killed_trainer(rank: Rank, point: str) -> None:
    gradients = random_gradients(build()[0], 1)
    undisturbed = Rig(build, chunk_bytes=8000)
    undisturbed.set_gradients(gradients)
    undisturbed.update(0)

    def die(reached: str, step: int, chunk: int) -> None:
        if (reached, chunk) == (point, 1):
            os.kill(os.getpid(), signal.SIGKILL)

    active_pool, shadow_pool = rank.pool(), rank.pool(writable=False)
    active = Rig(build, chunk_bytes=8000, reach=die, pool=active_pool)
    assert active.state.created
    page_spec = RegionSpec("progress", PAGE_BYTES, Kind.RECORD)
    active.page = ProgressPage(active_pool.buffer(active_pool.allocate([page_spec])[0]))
    active.page.publish(Marker(0, Phase.SYNCED))
    active.set_gradients(gradients)
    updater = ResumableModelUpdater(
        active.layout, pieces_of(active.layout, active.state), HostWords(active.page), active.adapter, reach=die
    )
    arguments = {
        "groups": active.optimizer.param_groups,
        "steps_before": active.steps,
        "touched": active.touched,
    }

    module, optimizer = build()
    adapter = adapter_for(optimizer)
    layout = StateLayout.plan(list(module.named_parameters()), optimizer, adapter, chunk_bytes=8000)
    layout.require_signature(active.layout.signature())
    state = RetainedState(layout, shadow_pool)
    assert not state.created
    assert state.parameter(layout.slots[0]).data_ptr() != active.state.parameter(active.layout.slots[0]).data_ptr()
    shadow_page = shadow_pool.attach("progress")

    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)  # a forked child must not enter a pool of threads that it does not have
            updater.run(0, **arguments)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"the trainer ended with {status}"

    shadow_pool.make_writable()
    page = ProgressPage(shadow_pool.buffer(shadow_page))  # a buffer taken before can't be written
    survivor = ResumableModelUpdater(layout, pieces_of(layout, state), HostWords(page), adapter)
    steps = survivor.run(0, resume=page.marker, **arguments)
    publisher = StatePublisher(layout, state, adapter)
    state.attach_parameters()
    publisher.publish_state(optimizer, steps)
    for (name, ours), (_, theirs) in zip(module.named_parameters(), undisturbed.module.named_parameters(), strict=True):
        assert bytes_of(ours) == bytes_of(theirs), name
        entry, expected = optimizer.state[ours], undisturbed.optimizer.state[theirs]
        assert list(entry) == list(expected)
        assert all(bytes_of(entry[key]) == bytes_of(expected[key]) for key in entry)
