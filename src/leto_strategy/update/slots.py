"""The nouns of a layout: a parameter with what is kept for it, and how parameters are put together."""

import hashlib
import re
from dataclasses import dataclass

import torch
from torch.nn import Parameter

_PLAIN_NAME = re.compile(r"[\x21-\x7e]{1,150}")


@dataclass(frozen=True, slots=True, eq=False)
class TensorSlot:
    """One parameter of the model and what is kept with it.

    Args:
        index: Place in `StateLayout.slots` where trained, in `StateLayout.frozen` where not.
        name: The first name under which the model has the parameter.
        parameter: The user's own object.
        group: Index of its parameter group; -1 where frozen.
        registration: Place in the order of the model's parameters.
        run: Index into `StateLayout.runs`; -1 where frozen or without elements.
        offset_elements: Start within its run.
        moments: Names of the optimizer's tensors, in torch's order.
        opens_page: Its parameter, moments and gradient start at a page, where pages are protected.
    """

    index: int
    name: str
    parameter: Parameter
    group: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    registration: int
    run: int
    offset_elements: int
    moments: tuple[str, ...]
    opens_page: bool = False

    @property
    def trained(self) -> bool:
        """Whether the optimizer changes it, so that it has a gradient and moments."""
        return self.group >= 0

    @property
    def num_elements(self) -> int:
        """Number of elements; 0 for an empty tensor, which has neither a region nor a place in chunks and buckets."""
        return self.parameter.numel()

    @property
    def size_bytes(self) -> int:
        """Bytes of the parameter; gradient and moments have the same."""
        return self.num_elements * self.dtype.itemsize

    def region_name(self, what: str) -> str:
        """Return the name of the region of "parameter", "gradient" or a moment."""
        return f"{what}/{_region_suffix(self.name)}"


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Neighbouring trained tensors of one dtype and one parameter group, each aligned, back to back in every arena."""

    index: int
    dtype: torch.dtype
    group: int
    slots: tuple[TensorSlot, ...]
    moments: tuple[str, ...]
    cuttable: bool

    @property
    def tensors(self) -> tuple[str, ...]:
        """What an update changes: the parameter and its moments."""
        return ("parameter", *self.moments)


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Gradients that are reduced together: one contiguous range of one arena, alignment gaps (zeros) included."""

    index: int
    dtype: torch.dtype
    slots: tuple[TensorSlot, ...]


def _region_suffix(name: str) -> str:
    """Return a parameter's name, or its hash where the pool can't take the name as it is."""
    return name if _PLAIN_NAME.fullmatch(name) else f"#{hashlib.sha256(name.encode()).hexdigest()}"
