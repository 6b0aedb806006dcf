"""What the driver says about the health of a GPU at one moment; two of these are the evidence around a failure."""

from dataclasses import asdict, dataclass
from typing import Any

RECOVERY_ACTIONS = {
    0: "none",
    1: "reset the GPU",
    2: "reboot the node",
    3: "stop peer-to-peer traffic",
    4: "drain and reset the GPU",
    5: "recover the IMEX domain",
    6: "reset the PCIe bus of the GPU",
    7: "reboot the system",
}
"""NVML's `nvmlDeviceGpuRecoveryAction_t`, in words."""


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """Evidence about one GPU; None is "unknown" in every field.

    Args:
        recovery_action: What the driver wants to be done to the GPU, a key of `RECOVERY_ACTIONS` or a newer one.
        uncorrectable_errors: ECC errors since the driver was loaded that could not be corrected.
        remap_pending: Rows of memory wait for the next reset to be replaced. No harm by itself.
        remap_failed: A bad row could not be replaced.
        lost: The driver can't reach the GPU any more, or demands a reset before it says anything else.
    """

    recovery_action: int | None = None
    uncorrectable_errors: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    lost: bool = False

    def to_json(self) -> dict[str, Any]:
        """The fields by name, the action in words."""
        return {**asdict(self), "recovery_action": action_name(self.recovery_action)}


def action_name(action: int | None) -> str | None:
    """A recovery action in words, None where it is unknown."""
    return None if action is None else RECOVERY_ACTIONS.get(action, f"action {action}")
