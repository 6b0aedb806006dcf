"""End-to-end fixtures: one fork server and one set of undisturbed runs for the session."""

from collections.abc import Iterator

import pytest

from leto_strategy import system
from tests.e2e.harness import Workshop


@pytest.fixture(autouse=True)
def adopting() -> Iterator[None]:
    """Orphans of a test become children of this process, as the harness needs it; afterwards no more."""
    system.become_subreaper()
    yield
    system.become_subreaper(False)


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    """Where cases are run."""
    workshop = Workshop(tmp_path_factory.mktemp("e2e"))
    yield workshop
    workshop.close()
