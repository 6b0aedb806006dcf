"""The two distributions of Lightning, `lightning` and `pytorch_lightning`, and their modules that Leto needs."""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Flavour:
    """Modules of one distribution.

    Args:
        name: "lightning.pytorch" or "pytorch_lightning".
        fabric: "lightning.fabric" or "lightning_fabric".
    """

    name: str
    fabric: str

    def pytorch(self, module: str) -> Any:
        """A module below the distribution's PyTorch package."""
        return import_module(f"{self.name}.{module}")

    def fabric_module(self, module: str) -> Any:
        """A module below the distribution's Fabric package."""
        return import_module(f"{self.fabric}.{module}")


@cache
def flavour(name: str) -> Flavour:
    """The distribution by the name of its PyTorch package."""
    return Flavour(name, "lightning.fabric" if name.startswith("lightning.") else "lightning_fabric")
