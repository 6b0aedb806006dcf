"""Exactness of the parity kernels: whole and ragged groups, every number of parity pages, lost pages, poisoned outputs.

A check takes a place and returns in words what it has compared; it raises AssertionError with what differs.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from benchmarks.kernel_data import POISON, Place, table
from leto_strategy.erasure.field import multiply
from leto_strategy.erasure.solve import solve
from leto_strategy.triton_kernels.pages import PageTable
from leto_strategy.triton_kernels.parity import apply_matrix, encode, reconstruct, update, xor
from leto_strategy.triton_kernels.references import apply_matrix_torch, xor_torch

UPDATES = ((16, 16, 32), (16, 48, 16), (16, 0, 7), (5, 3, 11), (20, 63, 1))
"""Parity pages, first page, number of pages of a chunk in a group of 64."""

LOSSES: tuple[tuple[list[int], list[int]], ...] = (
    ([5], []),
    ([0, 17, 47], [2, 15]),
    (list(range(16)), []),
    (list(range(20, 30)), [0, 1, 2, 3, 4, 5]),
    ([], [7]),
)
"""Lost data and parity pages of a group of 48 and 16."""


def check_encode(
    place: Place, *, num_pages: int, missing: Iterable[Sequence[int]] = (), first_page: int = 0, scattered: bool = False
) -> str:
    """16 parity pages by the FFT: all pages there, then some missing; back to back or anywhere."""
    data, out = place.random_words(num_pages), place.poisoned(16)
    rows = place.matrix(num_pages, 16, first=first_page)
    kept = [data[i].clone() for i in torch.randperm(num_pages).tolist()] if scattered else []
    pages = PageTable.of_tensors(kept) if scattered else table(data)
    if scattered:
        data = torch.stack(kept)
    for lost in ([], *missing):
        out.fill_(POISON)
        encode(pages.without(lost), table(out), first_page=first_page)
        holes = data.clone()
        holes[list(lost)] = 0
        assert torch.equal(out, apply_matrix_torch(holes, rows)), f"pages {list(lost)} missing"
    return f"{num_pages} pages from {first_page}{', anywhere' if scattered else ''}"


def check_encode_matrix(place: Place, *, num_pages: int, heights: Iterable[int]) -> str:
    """Any number of parity pages by a matrix."""
    data = place.random_words(num_pages)
    for height in heights:
        rows, out = place.matrix(num_pages, height), place.poisoned(height)
        encode(table(data), table(out), matrix_PH=rows)
        assert torch.equal(out, apply_matrix_torch(data, rows)), f"{height} parity pages"
    return f"{num_pages} pages, {list(heights)} parity pages"


def check_update(place: Place, *, num_pages: int, height: int, first: int, count: int) -> str:
    """The parity after a chunk has changed is that of the changed group."""
    data, rows = place.random_words(num_pages), place.matrix(num_pages, height)
    parity = apply_matrix_torch(data, rows)
    changed, out = data.clone(), place.poisoned(height)
    changed[first : first + count] = place.random_words(count)
    chunk = slice(first, first + count)
    matrix = None if height == 16 else rows[chunk].contiguous()
    first_page = first if height == 16 else 0
    update(
        table(data[chunk]), table(changed[chunk]), table(parity), table(out), first_page=first_page, matrix_PH=matrix
    )
    assert torch.equal(out, apply_matrix_torch(changed, rows)), f"{height} parity pages, {count} pages from {first}"
    return f"{height} parity pages, {count} of {num_pages} pages from {first}"


def check_reconstruct(
    place: Place, *, num_data: int, lost: list[int], lost_parity: list[int], by_matrix: bool = True
) -> str:  # fmt: skip
    """Lost pages come back, by the FFT and by one matrix over all that is left."""
    data, rows = place.random_words(num_data), place.matrix(num_data, 16)
    parity = apply_matrix_torch(data, rows)
    expected = torch.cat([data[lost], parity[lost_parity]])
    data[lost], parity[lost_parity] = POISON, POISON
    found = solve(lost, lost_parity, num_data=num_data, num_parity=16)
    solution = torch.zeros((len(expected), 16), dtype=torch.int64)
    solution[:, list(found.syndrome_rows)] = torch.tensor(found.matrix, dtype=torch.int64)
    out = place.poisoned(len(expected))
    reconstruct(
        table(data).without(lost), table(parity).without(lost_parity), solution.to(place.device), table(out)
    )  # fmt: skip
    assert torch.equal(out, expected), f"FFT, lost {lost} and parity {lost_parity}"
    if not by_matrix:
        return f"{num_data} pages, lost {lost} and parity {lost_parity}, by the FFT"
    full = torch.cat([_matrix_product(rows.cpu(), solution.T), solution.T]).contiguous().to(place.device)
    survivors = table(torch.cat([data, parity])).without([*lost, *(num_data + j for j in lost_parity)])
    out.fill_(POISON)
    apply_matrix(survivors, full, table(out))
    assert torch.equal(out, expected), f"matrix, lost {lost} and parity {lost_parity}"
    return f"{num_data} pages, lost {lost} and parity {lost_parity}"


def _matrix_product(a: Tensor, b: Tensor) -> Tensor:
    out = torch.zeros((a.shape[0], b.shape[1]), dtype=torch.int64)
    rows, columns = a.tolist(), b.T.tolist()
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            value = 0
            for x, y in zip(row, column, strict=True):
                value ^= multiply(x, y) if x and y else 0
            out[i, j] = value
    return out


def check_xor(place: Place, *, num_pages: int) -> str:
    """The second tier's sum."""
    data, out = place.random_words(num_pages), place.poisoned(1)
    xor(table(data), table(out))
    assert torch.equal(out[0], xor_torch(data))
    return f"{num_pages} pages"
