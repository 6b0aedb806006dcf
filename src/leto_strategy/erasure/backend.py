"""The seam between the code and what computes it: two operations over tables of pages.

A backend gets checked arguments: tables of one device, outputs that overlap nothing but the same row of `base`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from leto_strategy.erasure.pages import PageTable


class Backend(ABC):
    """Computes sums of pages with coefficients of the field.

    Every backend makes the same bytes. Inputs may hold zero pages (`pages.ZERO_PAGE`); outputs may not.
    """

    name: str
    """Shown by `leto doctor` and in benchmarks."""

    strip_words: int
    """Words of each page that `verify` and `reconstruct` handle at a time; their scratch has H pages of this size."""

    @abstractmethod
    def parity(
        self,
        out: PageTable,
        *,
        indices: Sequence[int],
        new: PageTable,
        old: PageTable | None,
        base: PageTable | None,
        threads: int,
    ) -> None:
        """out_j = base_j + sum over k of C[indices[k], j] (new_k + old_k), for the generator matrix C of len(out) rows.

        Args:
            out: All H parity pages.
            indices: Which data pages `new` are, ascending.
            new: Their content.
            old: What they held before; None: zeros.
            base: Parity to add to, H pages, zero pages allowed; each is the page of `out` at its place or overlaps
                none of them. None: zeros.
            threads: Cores to use.
        """

    @abstractmethod
    def combine(self, out: PageTable, *, matrix: Sequence[Sequence[int]], pages: PageTable, threads: int) -> None:
        """out_r = sum over k of matrix[r][k] pages_k.

        Args:
            out: One page a row.
            matrix: Coefficients.
            pages: One page a column.
            threads: Cores to use.
        """
