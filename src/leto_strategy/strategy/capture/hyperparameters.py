"""Hyper-parameters that a logger keeps, packed once: they hardly ever change, and a record is written at every step."""

from operator import is_
from typing import Any

from leto_strategy.strategy.capture.packing import pack, unpack


class PackedHyperparameters:
    """Packs a dictionary of hyper-parameters again only when another value is in it."""

    def __init__(self) -> None:
        self._seen: list[Any] = []
        self._data = b""

    def of(self, hparams: Any) -> bytes:
        """The packed form; a value that can't be packed becomes the name of its type, as in `hparams.yaml`."""
        seen = [*hparams.keys(), *hparams.values()] if isinstance(hparams, dict) else [hparams]
        if not self._data or len(seen) != len(self._seen) or not all(map(is_, seen, self._seen)):
            self._seen, self._data = seen, _pack(hparams)
        return self._data


def unpack_hyperparameters(data: bytes) -> Any:
    """Inverse of `PackedHyperparameters.of`."""
    return unpack(data)


def _pack(hparams: Any) -> bytes:
    try:
        return pack(hparams)
    except Exception:  # a user's object may raise anything
        if not isinstance(hparams, dict):
            return pack({})
        return pack({name: _portable(value) for name, value in hparams.items()})


def _portable(value: Any) -> Any:
    try:
        pack(value)
    except Exception:
        return type(value).__name__
    return value
