"""The health rule, one row a case: what ends a job in place, and what does not."""

import pytest

from leto_strategy.devices.health import DeviceHealth
from leto_strategy.recovery.operability import Evidence, why_not_operable

FINE = DeviceHealth(0, 0, remap_pending=False, remap_failed=False)
UNKNOWN = DeviceHealth()


def health(**changes):
    values = {"recovery_action": 0, "uncorrectable_errors": 0, "remap_pending": False, "remap_failed": False}
    return DeviceHealth(**{**values, **changes})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (FINE, FINE),
        (UNKNOWN, UNKNOWN),
        (FINE, UNKNOWN),
        (UNKNOWN, FINE),
        (UNKNOWN, health(uncorrectable_errors=5)),
        (health(uncorrectable_errors=5), health(uncorrectable_errors=5)),
        (health(uncorrectable_errors=5), health(uncorrectable_errors=None)),
        (FINE, health(remap_pending=True)),
        (health(remap_failed=True), health(remap_failed=True)),
        (health(recovery_action=3), health(recovery_action=3)),
        (health(recovery_action=4), health(recovery_action=4)),
        (health(recovery_action=4), FINE),
        (health(recovery_action=99), health(recovery_action=99)),
    ],
)
def test_training_goes_on(before, after):
    assert why_not_operable([Evidence("cuda:0", before, after)]) is None


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (FINE, health(uncorrectable_errors=1), "1 uncorrectable memory error:"),
        (health(uncorrectable_errors=2), health(uncorrectable_errors=5), "3 uncorrectable memory errors:"),
        (health(uncorrectable_errors=2), FINE, "the GPU was reset"),
        (FINE, health(remap_failed=True), "could not be replaced"),
        (UNKNOWN, health(remap_failed=True), "could not be replaced"),
        (FINE, health(recovery_action=1), "asks to reset the GPU"),
        (health(recovery_action=1), health(recovery_action=1), "asks to reset the GPU"),
        (health(recovery_action=2), health(recovery_action=2), "asks to reboot the node"),
        (FINE, health(recovery_action=3), "stop peer-to-peer traffic"),
        (UNKNOWN, health(recovery_action=4), "drain and reset"),
        (health(recovery_action=4), health(recovery_action=6), "PCIe bus"),
        (FINE, health(recovery_action=99), "action 99"),
        (FINE, DeviceHealth(lost=True), "lost the GPU"),
        (UNKNOWN, DeviceHealth(lost=True), "lost the GPU"),
    ],
)
def test_training_ends(before, after, text):
    reason = why_not_operable([Evidence("cuda:0", FINE, FINE), Evidence("cuda:1", before, after)])
    assert reason is not None
    assert reason.startswith("cuda:1: ")
    assert text in reason


def test_no_gpu_is_no_complaint():
    assert why_not_operable([]) is None
