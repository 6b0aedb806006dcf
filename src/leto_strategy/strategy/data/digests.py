"""A digest of batches: tells whether a data set that is iterated again gives the same ones.

Of a large tensor only pieces are looked at, so that it costs microseconds a batch, whatever its size.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy
import torch

_PIECE_BYTES = 4096
_NUM_PIECES = 4
_NUM_ITEMS_MAX = 1024
_SCALARS = (bool, int, float, complex, str, bytes, type(None))


def add_batch(digest: int, batch: Any) -> int:
    """The digest of all batches so far and this one; of objects that are not understood only the type counts."""
    kind = type(batch)
    if isinstance(batch, torch.Tensor):
        digest = _add(digest, f"{batch.dtype} {tuple(batch.shape)}".encode())
        plain = batch.device.type == "cpu" and batch.layout == torch.strided and not batch.is_quantized
        return _add_elements(digest, batch.detach().reshape(-1)) if plain else digest
    if isinstance(batch, numpy.ndarray):
        digest = _add(digest, f"{batch.dtype} {batch.shape}".encode())
        return digest if batch.dtype.hasobject else _add(digest, batch.reshape(-1)[:_PIECE_BYTES].tobytes())
    if kind in _SCALARS or isinstance(batch, numpy.generic):
        return _add(digest, repr(batch).encode())
    digest = _add(digest, kind.__qualname__.encode())
    if isinstance(batch, Mapping):
        for key, value in list(batch.items())[:_NUM_ITEMS_MAX]:
            digest = add_batch(add_batch(digest, key), value)
    elif isinstance(batch, (list, tuple)):
        for value in batch[:_NUM_ITEMS_MAX]:
            digest = add_batch(digest, value)
    return digest


def _add_elements(digest: int, elements: torch.Tensor) -> int:
    size = max(1, _PIECE_BYTES // max(1, elements.element_size()))
    starts = range(0, max(1, elements.numel()), max(size, -(-elements.numel() // _NUM_PIECES)))
    for start in starts:
        piece = elements[start : start + size].contiguous()
        digest = _add(digest, piece.view(torch.uint8).numpy() if piece.numel() else b"")
    return digest


def _add(digest: int, data: Any) -> int:
    return zlib.crc32(data, digest)
