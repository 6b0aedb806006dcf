from collections.abc import Iterator

import pytest

from memory.stand_in import Rank


@pytest.fixture
def rank() -> Iterator[Rank]:
    """A rank with a manager that listens; a manager that dies is replaced."""
    rank = Rank()
    try:
        yield rank.start()
    finally:
        rank.close()
