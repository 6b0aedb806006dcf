"""Which pages are lost, and the small system that rebuilds them. Python ints only: 16 lost pages take a few ms.

The words at one offset of all pages are a code word exactly if f(z) times the word at point z, summed over all
points z, is 0 for every polynomial f of degree below H (docs/erasure_code.md). Let S_j be what parity page j differs
by from the parity of the surviving data, 0 standing in for what is lost: its syndrome. Take any H points that hold
all lost ones, none of them a surviving data page's. The Lagrange polynomial f of a lost point z among them is 1 there
and 0 at the others, so

    lost word at z = sum over j < H of f(j) S_j,

and f(j) is 0 for each surviving parity page that was chosen to fill up the H points. That leaves as many syndromes as
pages are lost.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from leto_strategy.erasure.field import inverse, inverses, multiply, product_of
from leto_strategy.errors import TooManyErasures


@dataclass(frozen=True)
class Solution:
    """How to rebuild e lost pages from e syndromes.

    Args:
        lost_data: Lost data pages, ascending.
        lost_parity: Lost parity pages, ascending.
        syndrome_rows: The parity pages whose syndromes are used: the lost ones, and as many others as data pages are
            lost, ascending.
        matrix: Coefficients [e][e]: a row for each lost page, data first, a column for each of `syndrome_rows`.
    """

    lost_data: tuple[int, ...]
    lost_parity: tuple[int, ...]
    syndrome_rows: tuple[int, ...]
    matrix: tuple[tuple[int, ...], ...]


def solve(lost_data: Iterable[int], lost_parity: Iterable[int], *, num_data: int, num_parity: int) -> Solution:
    """Work out the matrix that turns syndromes into lost pages.

    Raises:
        ValueError: An index is outside the group, or named twice.
        TooManyErasures: More than H pages are lost.
    """
    data = checked_indices(lost_data, num_data, "lost_data")
    parity = checked_indices(lost_parity, num_parity, "lost_parity")
    if len(data) + len(parity) > num_parity:
        raise TooManyErasures(len(data) + len(parity), num_parity)
    surviving = [row for row in range(num_parity) if row not in parity]
    # The first surviving rows are used, the rest fills up the H points.
    rows = tuple(sorted((*parity, *surviving[: len(data)])))
    filling = surviving[len(data) :]
    lost_points = [num_parity + index for index in data] + list(parity)
    return Solution(data, parity, rows, _lagrange(lost_points, filling, rows))


def checked_indices(indices: Iterable[int], bound: int, name: str) -> tuple[int, ...]:
    """The indices in ascending order.

    Raises:
        ValueError: One is not in [0, bound), or comes twice.
    """
    result = tuple(sorted(indices))
    if result and not 0 <= result[0] <= result[-1] < bound:
        raise ValueError(f"{name} must lie in 0 to {bound - 1}, got {list(result)}")
    if len(set(result)) < len(result):
        raise ValueError(f"{name} names a page twice: {list(result)}")
    return result


def _lagrange(lost: Sequence[int], filling: Sequence[int], places: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The Lagrange polynomials of `lost`, among it and `filling`, at `places`, which `filling` avoids."""
    all_points = (*lost, *filling)
    at_place = [product_of(place ^ point for point in all_points if point != place) for place in places]
    matrix = []
    for point in lost:
        scale = inverse(product_of(point ^ other for other in all_points if other != point))
        row = [0] * len(places)
        # At a lost parity page's own place the polynomials are known: 1 for its own, 0 for the others.
        open_places = [index for index, place in enumerate(places) if place not in lost]
        differences = [places[index] ^ point for index in open_places]
        for index, inverted in zip(open_places, inverses(differences), strict=True):
            row[index] = multiply(multiply(at_place[index], inverted), scale)
        if point in places:
            row[places.index(point)] = 1
        matrix.append(tuple(row))
    return tuple(matrix)
