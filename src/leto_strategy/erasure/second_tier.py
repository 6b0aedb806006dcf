"""The second tier: parity of the parity. It repairs first-tier pages from one another, without the device's data.

It is the same code once more, with the H1 parity pages of the first tier as its data: the j-th page of the second
tier at the point j, first-tier page i at H2 + i. For H2 = 1 every coefficient is 1, so its page is the XOR of the
first tier's. Its memory is the host's. It repairs only groups that
are closed (rule T5): in an open group both tiers are behind the parity in force, and are written again from that.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from leto_strategy.erasure.code import ErasureCode


class TierPlan(NamedTuple):
    """Which lost pages which tier rebuilds.

    Args:
        first_from_second: First-tier pages that the second tier rebuilds, before anything else.
        first_from_data: First-tier pages that count as erasures of the group, because the second tier can't help.
        second: Second-tier pages to encode again, afterwards.
    """

    first_from_second: tuple[int, ...]
    first_from_data: tuple[int, ...]
    second: tuple[int, ...]


@dataclass(frozen=True)
class TwoTierCode:
    """Both tiers of one protection group.

    Args:
        first: Code of the group.
        num_second: Pages of the second tier, H2, 1 to 64.
    """

    first: ErasureCode
    num_second: int = 1

    def __post_init__(self) -> None:
        if self.num_second < 1:
            raise ValueError(f"num_second must be positive, got {self.num_second}")
        self.second  # noqa: B018 - checks the rest

    @property
    def second(self) -> ErasureCode:
        """The code of the second tier, whose data are the first tier's parity pages."""
        return ErasureCode(self.first.num_parity, self.num_second, self.first.page_bytes)

    def plan(self, *, lost_first: Iterable[int], lost_second: Iterable[int]) -> TierPlan:
        """Share the repair of a closed group's lost host pages between the tiers."""
        first, second = tuple(sorted(lost_first)), tuple(sorted(lost_second))
        if len(first) + len(second) <= self.num_second:
            return TierPlan(first, (), second)
        return TierPlan((), first, second)
