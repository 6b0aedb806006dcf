"""`LetoStrategy` for the distribution `lightning`."""

from leto_strategy.strategy.factory import build_strategy
from leto_strategy.strategy.flavour import flavour

LetoStrategy = build_strategy(flavour("lightning.pytorch"), __name__)
