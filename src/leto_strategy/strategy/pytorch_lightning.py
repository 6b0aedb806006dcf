"""`LetoStrategy` for the distribution `pytorch_lightning`."""

from leto_strategy.strategy.factory import build_strategy
from leto_strategy.strategy.flavour import flavour

LetoStrategy = build_strategy(flavour("pytorch_lightning"), __name__)
