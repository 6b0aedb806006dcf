"""The Resumable Model Updater: crash-consistent optimizer updates over retained memory. Paper, section 5."""

from leto_strategy.update.layout import StateLayout
from leto_strategy.update.optimizers import OptimizerAdapter, adapter_for
from leto_strategy.update.protection import NoProtection, Protection
from leto_strategy.update.publication import StatePublisher, pack_steps, unpack_steps
from leto_strategy.update.slots import Bucket, TensorSlot
from leto_strategy.update.state import RetainedState
from leto_strategy.update.transaction import ResumableModelUpdater

__all__ = [
    "StateLayout",
    "TensorSlot",
    "Bucket",
    "RetainedState",
    "ResumableModelUpdater",
    "StatePublisher",
    "pack_steps",
    "unpack_steps",
    "OptimizerAdapter",
    "adapter_for",
    "Protection",
    "NoProtection",
]
