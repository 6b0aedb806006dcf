import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def _torch_has_started() -> None:
    """The first step of any optimizer loads torch's compiler and looks for a GPU: no leak of the test that is first."""
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.Adam([parameter]).step()
