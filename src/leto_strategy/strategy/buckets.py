"""Gradient buckets in a trainer's own memory, for updaters that don't keep gradients in retained memory.

The division follows from the list of parameters alone, so every generation sums in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from leto_strategy.geometry import cut_buckets, offsets
from leto_strategy.update.layout import BUCKET_BYTES_FIRST


@dataclass(frozen=True)
class Buckets:
    """Buckets in the order in which a backward pass usually completes them.

    Args:
        views: A gradient for each parameter, with the parameter's strides where it is dense.
        members: For each bucket the indices of its parameters.
        flat: For each bucket its memory as one tensor.
    """

    views: list[Tensor]
    members: list[list[int]]
    flat: list[Tensor]


def private_buckets(parameters: Sequence[Parameter], *, bucket_bytes: int) -> Buckets:
    """Allocate buckets for parameters given in order of registration.

    Args:
        parameters: They may be of several dtypes; a bucket holds one.
        bucket_bytes: Limit of a bucket; the first of each dtype is smaller, as with DistributedDataParallel.
    """
    views: list[Tensor] = [torch.empty(0)] * len(parameters)
    members: list[list[int]] = []
    flat: list[Tensor] = []
    backwards = list(reversed(range(len(parameters))))
    for dtype in dict.fromkeys(parameters[i].dtype for i in backwards):
        inside = [i for i in backwards if parameters[i].dtype == dtype]
        sizes = [parameters[i].numel() * dtype.itemsize for i in inside]
        for part in cut_buckets(sizes, first_bytes=BUCKET_BYTES_FIRST, bytes_each=bucket_bytes):
            chosen = [inside[k] for k in part]
            starts = offsets(sizes[k] for k in part)
            memory = torch.zeros(starts[-1] // dtype.itemsize, dtype=dtype, device=parameters[chosen[0]].device)
            for i, start in zip(chosen, starts, strict=False):
                views[i] = _view(memory, parameters[i], start // dtype.itemsize)
            members.append(chosen)
            flat.append(memory)
    return Buckets(views, members, flat)


def _view(memory: Tensor, parameter: Parameter, offset: int) -> Tensor:
    dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
    strides = parameter.stride() if dense else torch.empty(parameter.shape, device="meta").stride()
    return memory.as_strided(parameter.shape, strides, offset)
