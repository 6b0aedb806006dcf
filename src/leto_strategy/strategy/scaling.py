"""A gradient scaler's state, without a wait for the GPU; and the rest of its step when only an update is finished."""

from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from leto_strategy.strategy.capture.tensors import freeze, thaw


def capture_precision(plugin: Any) -> dict[str, Any]:
    """State of a precision plugin. Scale and growth count stay tensors: `GradScaler.state_dict` would wait."""
    scaler = getattr(plugin, "scaler", None)
    if scaler is None or not scaler.is_enabled() or type(scaler._scale) is not torch.Tensor:
        state: dict[str, Any] = plugin.state_dict()
        return state
    return {
        "scale": freeze(scaler._scale),
        "growth_factor": scaler._growth_factor,
        "backoff_factor": scaler._backoff_factor,
        "growth_interval": scaler._growth_interval,
        "_growth_tracker": freeze(scaler._growth_tracker),
    }


def restore_precision(plugin: Any, state: dict[str, Any]) -> None:
    """Inverse of `capture_precision`."""
    plugin.load_state_dict({name: _number(value) for name, value in state.items()})


def _number(value: Any) -> Any:
    value = thaw(value)
    return value.item() if isinstance(value, torch.Tensor) else value


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
