"""Kernels run in Triton's interpreter here, on the CPU: whether they do is fixed when they are imported."""

from collections.abc import Iterator

import pytest
import torch

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TRITON_INTERPRET", "1")
    from benchmarks.kernel_data import Place

    from leto_strategy.triton_kernels import _probe_kernels, compiler, warm_up

KERNELS = (_probe_kernels, warm_up)
"""All modules with kernels are imported now: `warm_up` imports the rest."""


@pytest.fixture(scope="module", autouse=True)
def _interpreted() -> Iterator[None]:
    """The interpreter also looks at the variable when a kernel runs."""
    assert compiler.INTERPRETED, "the kernels were imported for a GPU before: run these tests in a process of their own"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    """Host memory with pages of 4 KiB, and the seed that the run printed."""
    torch.manual_seed(request.config.getoption("--seed"))
    return Place(torch.device("cpu"))
