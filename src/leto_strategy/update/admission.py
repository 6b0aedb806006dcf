"""Which parameters can be kept in retained memory and updated exactly; the others are refused by name.

Checked before anything is allocated, so that a refusal leaves nothing behind.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import torch
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from leto_strategy.update.optimizers import TRAINED_DTYPES


def groups_of_parameters(optimizer: Optimizer, names: Mapping[int, str]) -> dict[int, int]:
    """Return the index of the parameter group of each parameter, both by identity.

    Args:
        optimizer: The optimizer.
        names: Names of the module's parameters by identity.

    Raises:
        ValueError: the optimizer has a parameter that the module has not.
    """
    group_of: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise ValueError(
                    f"parameter {place} of group {index} of the optimizer, with shape {tuple(parameter.shape)}, is not "
                    "a parameter of the module: register it on the module"
                )
            group_of[id(parameter)] = index
    return group_of


def check_parameters(named_parameters: Sequence[tuple[str, Parameter]], trained: Collection[int]) -> None:
    """Refuse parameters that can't be moved to retained memory and stay what they are.

    Args:
        named_parameters: Each parameter once.
        trained: Identities of those that the optimizer changes.

    Raises:
        ValueError: names the parameter and what to do.
    """
    for name, parameter in named_parameters:
        _check(name, parameter, trained=id(parameter) in trained)
    devices = {str(parameter.device) for _, parameter in named_parameters if id(parameter) in trained}
    if len(devices) > 1:
        raise ValueError(f"the parameters of a rank must be on one device, these are on {', '.join(sorted(devices))}")
    _check_overlaps(named_parameters)


def _check(name: str, parameter: Parameter, *, trained: bool) -> None:
    if is_lazy(parameter) or parameter.is_meta:
        raise ValueError(
            f"parameter {name} has no values yet: initialise the module before fit (a lazy or meta module)"
        )
    if type(parameter.data) is not torch.Tensor or parameter.layout != torch.strided:
        raise ValueError(
            f'parameter {name} is a {type(parameter.data).__name__}, strategy="leto" keeps dense tensors only'
        )
    if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        raise ValueError(
            f"parameter {name} is a view with gaps or repeated elements (shape {tuple(parameter.shape)}, strides "
            f"{parameter.stride()}): make it torch.nn.Parameter(tensor.contiguous())"
        )
    if trained and parameter.dtype not in TRAINED_DTYPES:
        supported = ", ".join(str(dtype) for dtype in TRAINED_DTYPES)
        raise ValueError(f'parameter {name} is {parameter.dtype}, strategy="leto" trains {supported}')


def _check_overlaps(named_parameters: Sequence[tuple[str, Parameter]]) -> None:
    """Refuse distinct parameters that share memory: moving each to its own region would end the sharing silently."""
    filled = [(name, p) for name, p in named_parameters if p.numel()]
    filled.sort(key=lambda item: (str(item[1].device), item[1].data_ptr()))
    for (name, one), (other_name, other) in pairwise(filled):
        if one.device == other.device and other.data_ptr() < one.data_ptr() + one.numel() * one.element_size():
            raise ValueError(
                f"parameters {name} and {other_name} share memory but are two objects: use one "
                "parameter under both names"
            )
