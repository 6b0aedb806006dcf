"""What lets a GPU give other bits when it runs the same step again, said once and never refused.

A recovery redoes at most one step, in another process: what differs between two runs may differ there.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch

from leto_strategy.strategy.flavour import Flavour

_CUBLAS_WORKSPACES = (":4096:8", ":16:8")


def warn_irreproducible(trainer: Any, flavour: Flavour) -> None:
    """Warn of what may keep a recovered run on GPUs from having the bits of an undisturbed one."""
    if {device.type for device in trainer.strategy.parallel_devices or []} != {"cuda"}:
        return
    texts = irreproducible(
        benchmark=torch.backends.cudnn.benchmark,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        environ=os.environ,
    )
    if texts:
        flavour.pytorch("utilities.rank_zero").rank_zero_warn(
            "After a failure strategy='leto' redoes the interrupted step. Training goes on exactly only if that step"
            " gives the same bits again, and here it may not: " + "; ".join(texts) + "."
        )


def irreproducible(*, benchmark: bool, deterministic: bool, warn_only: bool, environ: Mapping[str, str]) -> list[str]:
    """One text, with the remedy, for each thing that makes a GPU's kernels or their choice vary.

    Args:
        benchmark: torch.backends.cudnn.benchmark.
        deterministic: torch.are_deterministic_algorithms_enabled().
        warn_only: torch.is_deterministic_algorithms_warn_only_enabled().
        environ: Environment of the trainers.
    """
    texts = []
    if benchmark:
        texts.append(
            "cuDNN picks its kernels by measuring them (torch.backends.cudnn.benchmark), in each process anew: use"
            " Trainer(benchmark=False)"
        )
    if not deterministic:
        texts.append("kernels that add in a varying order are allowed: use Trainer(deterministic=True)")
    elif warn_only:
        texts.append(
            "kernels that add in a varying order are allowed where there is no other (deterministic='warn'): use"
            " Trainer(deterministic=True)"
        )
    if environ.get("CUBLAS_WORKSPACE_CONFIG") not in _CUBLAS_WORKSPACES:
        texts.append(
            "cuBLAS may divide its work differently each time: set CUBLAS_WORKSPACE_CONFIG=:4096:8, as"
            " Trainer(deterministic=True) does"
        )
    return texts
