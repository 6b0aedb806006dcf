"""A torch tensor over memory at a known address, on any device: the one thing that takes a DLPack capsule.

Nobody owns the memory through it: mappings live until the process ends, or until the pool frees them.
"""

import ctypes
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

_CPU, _CUDA = 1, 2
_UNSIGNED = 1


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", _Device), ("ndim", ctypes.c_int), ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class _ManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_new_capsule: Any = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_alive: list[Any] = []
"""Descriptions of the tensors: torch looks at them when a tensor ends, and nobody else knows when that is."""


def bytes_at(address: int, size_bytes: int, device: str) -> torch.Tensor:
    """A tensor of bytes, shape [size_bytes], over memory that is mapped at `address`.

    Args:
        address: Of the first byte; for a GPU in its address space.
        size_bytes: At least 1.
        device: "cpu" or "cuda:N".
    """
    ordinal = torch.device(device).index
    place = _Device(_CPU, 0) if ordinal is None else _Device(_CUDA, ordinal)
    shape = (ctypes.c_int64 * 1)(size_bytes)
    managed = _ManagedTensor(_Tensor(address, place, 1, _DataType(_UNSIGNED, 8, 1), shape, None, 0), None, None)
    _alive.append((managed, shape))
    tensor: torch.Tensor = from_dlpack(_new_capsule(ctypes.addressof(managed), b"dltensor", None))
    return tensor
