"""Can training go on in place on these GPUs? One pure rule over the driver's evidence before and after a failure.

Retained memory has no parity yet, so bytes that the hardware lost can't be rebuilt: where the evidence says that some
may be, the job ends instead of training on. What is unknown is no evidence. A complaint that was there before the
failure, and with which the job has trained, ends nothing, unless the GPU needs a reset.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from leto_strategy.devices.health import DeviceHealth, action_name

_UNUSABLE_ACTIONS = {1, 2, 6, 7}
"""Resets and reboots: the driver says that nothing more can run. The others leave running work alone."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one GPU around a failure.

    Args:
        device: Torch's name of it.
        before: At the start of the job, or after its last recovery.
        after: Behind the fence. An unknown health has no fields.
    """

    device: str
    before: DeviceHealth
    after: DeviceHealth


def why_not_operable(evidence: Sequence[Evidence]) -> str | None:
    """Say of the first GPU on which training can't go on what is wrong with it; None where it can on all."""
    for item in evidence:
        if (complaint := _complaint(item.before, item.after)) is not None:
            return f"{item.device}: {complaint}"
    return None


def _complaint(before: DeviceHealth, after: DeviceHealth) -> str | None:
    if after.lost:
        return "the driver has lost the GPU, or it needs a reset"
    old, new = before.uncorrectable_errors, after.uncorrectable_errors
    if old is not None and new is not None and new != old:
        if new < old:
            return "the GPU was reset, and its memory with it"
        return f"{new - old} uncorrectable memory error{'s' if new - old > 1 else ''}: bytes of the state may be lost"
    if after.remap_failed and not before.remap_failed:
        return "a bad row of its memory could not be replaced"
    action = after.recovery_action
    if action and (action in _UNUSABLE_ACTIONS or action != before.recovery_action):
        return f"the driver asks to {action_name(action)}"
    return None
