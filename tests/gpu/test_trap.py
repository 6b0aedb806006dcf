"""A torn update on a real device: a kernel of one instruction traps between two writes of a chunk."""

import pytest

from tests.gpu.checks import RecordingWorkshop, trapped
from tests.gpu.rig import MARKS

pytestmark = [*MARKS, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.parametrize("devices", [1, 2])
def test_an_update_torn_by_a_trap_is_finished_exactly(workshop: RecordingWorkshop, devices: int) -> None:
    trapped(workshop, devices)
