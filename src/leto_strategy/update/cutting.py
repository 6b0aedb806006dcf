"""Whether a tensor may be cut: does an update give each element the same bits wherever it stands?

Elementwise kernels have two bodies, one for whole vectors and one for what is left at the end of a tensor or of a
thread's share. Where the two round differently (measured: SGD and Adam with coupled weight decay in bf16 and fp16, all
fused kernels) an element's result depends on its place, so that a piece must be the whole tensor, with its own
strides. The answer is measured on the machine itself, since kernels differ between processors and versions of torch.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from leto_strategy.update.optimizers import OptimizerAdapter

_NUM_ELEMENTS = 16411  # the rarest difference found so far is one in 300; prime, so that no vector width divides it
_CUTS = (0, 1, 8, 13, 64, 127, 1000, 1003, 2048, 4095, 9000, _NUM_ELEMENTS)
_STEP = 3.0

_known: dict[tuple[object, ...], bool] = {}


def is_cuttable(
    adapter: OptimizerAdapter, group_index: int, group: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> bool:
    """Say whether an update may be cut anywhere without changing a bit. Takes about a millisecond once per kind.

    Neither the global random state nor any argument is changed. The answer holds for all later values of the
    hyper-parameters: those that select a kernel are either probed as they are, or in the less favourable setting.
    """
    options = _unfavourable(group)
    if options.get("fused"):  # on GPUs the difference is too rare to be found by a short probe
        return False
    key = (type(adapter), dtype, device.type, *((name, _selects(value)) for name, value in sorted(options.items())))
    if key not in _known:
        _known[key] = _same_bits(adapter, group_index, options, dtype, device)
    return _known[key]


def _unfavourable(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with those values that a schedule may start from, but that hide an operation, replaced."""
    options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    lr = options["lr"]
    options["lr"] = torch.full_like(lr, 1e-2) if isinstance(lr, Tensor) else 1e-2
    if isinstance(options["weight_decay"], Tensor) or options["weight_decay"] == 0:
        options["weight_decay"] = 0.1
    return options


def _selects(value: object) -> object:
    """Return what of an option's value can select another kernel: truth and type, not the number."""
    if isinstance(value, tuple):
        return tuple(_selects(item) for item in value)
    return value if value is None or isinstance(value, bool) else type(value)


def _same_bits(
    adapter: OptimizerAdapter, group_index: int, options: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> bool:
    names = ("parameter", "gradient", *adapter.moment_names(options))
    whole = _example(names, dtype, device)
    cut = {name: tensor.clone() for name, tensor in whole.items()}
    scattered = {name: _with_stride_two(tensor) for name, tensor in whole.items()}  # all of it in the scalar body
    parts = [{name: tensor[start:stop] for name, tensor in cut.items()} for start, stop in pairwise(_CUTS)]
    for pieces in ([whole], [scattered], parts):
        _update(adapter, group_index, options, pieces)
    return all(torch.equal(whole[name], other[name]) for name in names for other in (scattered, cut))


def _example(names: tuple[str, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    scale = {"parameter": 1.0, "gradient": 0.1}
    values = {
        name: torch.randn(_NUM_ELEMENTS, generator=generator, dtype=torch.float64) * scale.get(name, 0.01)
        for name in names
    }
    # Second moments are squares.
    return {name: (t.abs() if "_sq" in name else t).to(device=device, dtype=dtype) for name, t in values.items()}


def _with_stride_two(tensor: Tensor) -> Tensor:
    scattered = torch.zeros(2 * tensor.numel(), dtype=tensor.dtype, device=tensor.device)[::2]
    return scattered.copy_(tensor)


@torch.no_grad()
def _update(
    adapter: OptimizerAdapter, group_index: int, options: Mapping[str, Any], pieces: list[dict[str, Tensor]]
) -> None:
    for piece in pieces:
        moments = {name: [tensor] for name, tensor in piece.items() if name not in ("parameter", "gradient")}
        adapter.update(group_index, options, [piece["parameter"]], [piece["gradient"]], moments, [_STEP])
