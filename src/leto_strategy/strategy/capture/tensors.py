"""Small tensors as plain Python values: a record holds dozens, and pickling a tensor costs twenty times as much.

For places that hold tensors and numbers only: a tuple there is always a frozen tensor.
"""

from typing import Any

import numpy
import torch
from torch import Tensor

_CODES = {
    torch.float32: "f4", torch.float64: "f8", torch.int64: "i8", torch.int32: "i4", torch.uint8: "u1", torch.bool: "b1",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def freeze(value: Any) -> Any:
    """A plain CPU tensor as (code, shape, bytes), a scalar one as (code, None, number); one on a GPU as a copy there.

    All else as it is.
    """
    if type(value) is not Tensor:
        return value
    if value.is_cuda and not value.requires_grad:
        return value.clone()  # what is written to it later is not part of the record
    code = _CODES.get(value.dtype)
    if code is None or not value.is_cpu or value.requires_grad or value.layout is not torch.strided:
        return value
    if not value.ndim:
        return code, None, value.item()
    return code, tuple(value.shape), value.numpy().tobytes()


def thaw(value: Any) -> Any:
    """Inverse of `freeze`."""
    if type(value) is not tuple:
        return value
    code, shape, data = value
    if shape is None:
        return torch.tensor(data, dtype=_DTYPES[code])
    array = numpy.frombuffer(bytearray(data), dtype=code).reshape(shape)
    return torch.from_numpy(array)
