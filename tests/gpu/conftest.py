"""What tests on a real GPU share. A test's own process has a context, so what must have none is another process."""

from collections.abc import Iterator

import pytest

from leto_strategy import system
from leto_strategy.memory.places import device_of
from memory.stand_in import Rank
from tests.gpu.checks import RecordingWorkshop
from tests.gpu.rig import HANDLE_BYTES


@pytest.fixture(scope="session")
def context() -> None:
    """This process's CUDA context."""
    import torch

    torch.ones(8, device="cuda").sum().item()


@pytest.fixture
def rank(context: None) -> Iterator[Rank]:
    """A rank on the first GPU, with a state manager of its own; one that dies is replaced."""
    rank = Rank(device=device_of("cuda:0", handle_bytes=HANDLE_BYTES))
    try:
        yield rank.start()
    finally:
        rank.close()


@pytest.fixture(scope="module")
def shared_workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordingWorkshop]:
    workshop = RecordingWorkshop(tmp_path_factory.mktemp("gpu"))
    yield workshop
    workshop.close()


@pytest.fixture
def workshop(shared_workshop: RecordingWorkshop, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingWorkshop]:
    """Where end-to-end cases train on the GPU."""
    monkeypatch.setenv("LETO_TEST_DEVICE", "cuda")
    system.become_subreaper()
    yield shared_workshop
    shared_workshop.end(None)
    system.become_subreaper(False)
