"""Paths of torch and Lightning that are slow the first time: lazy imports, class checks, look-ups of versions.

Together they take tens of milliseconds, which a shadow can spend before it is needed.
"""

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from leto_strategy.strategy.capture.rng import capture_rng, restore_rng
from leto_strategy.strategy.flavour import Flavour


def rehearse_host(flavour: Flavour) -> None:
    """Go through them once; the random generators are as before."""
    before = capture_rng()
    with torch.autograd.profiler.record_function("leto"):
        pass
    combined: Any = flavour.pytorch("utilities.combined_loader").CombinedLoader(
        DataLoader(TensorDataset(torch.zeros(1))), "max_size_cycle"
    )
    next(iter(combined))
    result = flavour.pytorch("trainer.connectors.logger_connector.result")
    metadata = result._Metadata("training_step", "leto")
    metadata.sync = result._Sync()
    result._ResultMetric(metadata, True)
    restore_rng(before)


def rehearse_device(device: torch.device) -> None:
    """Kernels and transfers of a recovery itself."""
    value = torch.zeros(4, device=device)
    value.copy_(torch.ones(4))
    torch.cat([value.view(torch.uint8), torch.zeros(1, dtype=torch.int64, device=device).view(torch.uint8)]).cpu()
    value.clone().fill_(1.0).zero_()
    assert bool(torch.tensor(1, device=device) == 1)
    torch.cuda.synchronize(device)
