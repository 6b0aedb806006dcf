"""Backends to compare, and memory that holds garbage until something is written to it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from leto_strategy.erasure import backends, compiler
from leto_strategy.erasure.backend import Backend
from leto_strategy.erasure.bitsliced import BitslicedBackend
from leto_strategy.erasure.native import NativeBackend

POISON = 0x5A5A5A5B
NUMPY = "numpy"
POISONED_STACK = "poisoned stack"
NAMES = (*(variant.name for variant in compiler.VARIANTS), POISONED_STACK, NUMPY)


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests leave nothing in the user's cache."""
    folder = tmp_path_factory.mktemp("libraries")
    folder.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "folders", lambda: iter([folder]))
        backends.cpu_backend.cache_clear()
        yield
    backends.cpu_backend.cache_clear()


@pytest.fixture(scope="session")
def built() -> Callable[[str], Backend]:
    """Each backend by name, every variant that this processor runs built in the session's folder."""
    folder = next(iter(compiler.folders()))
    found: dict[str, Backend] = {}

    def build(name: str) -> Backend:
        if name not in found:
            found[name] = BitslicedBackend() if name == NUMPY else _native(name, folder)
        return found[name]

    return build


def _native(name: str, folder: Path) -> Backend:
    if compiler.find_compiler() is None:
        pytest.skip("there is no C compiler")
    usable = {variant.name: variant for variant in compiler.usable_variants()}
    # Scratch of the C code is on its stack.
    usable[POISONED_STACK] = replace(
        compiler.usable_variants()[0],
        name="poisoned",
        options=(*compiler.usable_variants()[0].options, "-ftrivial-auto-var-init=pattern"),
    )
    if name not in usable:
        pytest.skip(f"this processor can't run {name}")
    return NativeBackend(compiler.library(usable[name], places=[folder]), name=name)


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest, built: Callable[[str], Backend]) -> Backend:
    """Every backend in turn."""
    return built(request.param)


@pytest.fixture(autouse=True)
def _poisoned_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh integer memory holds garbage, so that what is read before it is written shows."""
    torch_empty, numpy_empty = torch.empty, np.empty

    def poisoned_tensor(*args: Any, **options: Any) -> Tensor:
        tensor = torch_empty(*args, **options)
        return tensor.fill_(POISON) if tensor.dtype in (torch.int32, torch.int64) else tensor

    def poisoned_array(*args: Any, **options: Any) -> Any:
        array = numpy_empty(*args, **options)
        if array.dtype == np.uint32:
            array.fill(POISON)
        return array

    monkeypatch.setattr(torch, "empty", poisoned_tensor)
    monkeypatch.setattr(np, "empty", poisoned_array)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The reference works on small tensors, which more threads make slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
