"""What is left of a gradient scaler's step when the update alone is finished by another process."""

from typing import Any

import torch
from torch.amp.grad_scaler import OptState


def finish_scaling(scaler: Any, optimizer: Any) -> None:
    """Let a scaler update its scale as after a step that was made: scale and growth count are restored already.

    Args:
        scaler: The `torch.amp.GradScaler`.
        optimizer: The optimizer that stepped, its gradients finite.
    """
    device = torch.device(scaler._device)
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)
    state = scaler._per_optimizer_states[id(optimizer)]
    state["found_inf_per_device"] = {device: torch.zeros((), device=device)}
    state["stage"] = OptState.STEPPED
    scaler.update()
