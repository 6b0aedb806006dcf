"""vectors.json, the format for other implementations: recomputed here with nothing of ours, and by every backend."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from leto_strategy.erasure.backend import Backend
from leto_strategy.erasure.code import ErasureCode
from leto_strategy.erasure.second_tier import TwoTierCode

FILE: dict[str, Any] = json.loads(Path(__file__).with_name("vectors.json").read_text())
VECTORS: list[dict[str, Any]] = FILE["vectors"]
PAGE_BYTES = 4096


def times(a: int, b: int) -> int:
    """Multiply by shifting `a`, as in a course on finite fields."""
    result = 0
    while b:
        if b % 2:
            result ^= a
        a *= 2
        if a >= 2**32:
            a ^= 2**32 + 2**7 + 2**3 + 2**2 + 1
        b //= 2
    return result


@cache
def one_over(a: int) -> int:
    """a^(2^32 - 2)."""
    result = 1
    for _ in range(31):
        a = times(a, a)
        result = times(result, a)
    return result


def lagrange(j: int, y: int, num_parity: int) -> int:
    """The polynomial that is 1 at j and 0 at the other numbers below `num_parity`, at y."""
    result = 1
    for t in range(num_parity):
        if t != j:
            result = times(result, times(y ^ t, one_over(j ^ t)))
    return result


def parity_of(pages: list[bytes], num_parity: int) -> list[bytes]:
    result = []
    for j in range(num_parity):
        sums = [0] * (len(pages[0]) // 4)
        for i, page in enumerate(pages):
            factor = lagrange(j, num_parity + i, num_parity)
            for place in range(len(sums)):
                sums[place] ^= times(factor, int.from_bytes(page[4 * place : 4 * place + 4], "little"))
        result.append(b"".join(word.to_bytes(4, "little") for word in sums))
    return result


def unhex(pages: list[str]) -> list[bytes]:
    return [bytes.fromhex(page) for page in pages]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"D{v['num_data']}-H{v['num_parity']}-S{v['num_second']}")
def test_the_vectors_are_what_the_documentation_defines(vector: dict[str, Any]) -> None:
    data, parity = unhex(vector["data"]), unhex(vector["parity"])
    assert len(data) == vector["num_data"]
    assert parity_of(data, vector["num_parity"]) == parity
    assert parity_of(parity, vector["num_second"]) == unhex(vector["second"])


def as_pages(pages: list[bytes]) -> Tensor:
    """Repeat short pages until they are as long as a real one, with zeros behind."""
    repeated = [(page * (PAGE_BYTES // len(page))).ljust(PAGE_BYTES, b"\0") for page in pages]
    return torch.frombuffer(bytearray(b"".join(repeated)), dtype=torch.int32).view(len(pages), -1)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"D{v['num_data']}-H{v['num_parity']}-S{v['num_second']}")
def test_every_backend_makes_the_vectors(backend: Backend, vector: dict[str, Any]) -> None:
    two = TwoTierCode(ErasureCode(vector["num_data"], vector["num_parity"], PAGE_BYTES), vector["num_second"])
    data_DW, parity_HW = as_pages(unhex(vector["data"])), as_pages(unhex(vector["parity"]))
    encoded = two.first.encode(data_DW, backend=backend)
    assert torch.equal(encoded, parity_HW)
    second = two.second.encode(parity_HW, backend=backend)
    assert torch.equal(second, as_pages(unhex(vector["second"])))


def test_the_vectors_cover_both_ways_to_encode() -> None:
    assert FILE["format"] == 1
    assert {vector["num_parity"] for vector in VECTORS} >= {1, 2, 3, 16, 20, 64}
    assert any(vector["num_parity"] == 16 and vector["num_data"] % 16 for vector in VECTORS)
