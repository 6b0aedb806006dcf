"""Puts `pkg://leto_strategy.conf` on the search path of every Hydra application, after the application's own.

Hydra imports this file in every application, so it imports nothing of Leto and nothing heavy.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class LetoSearchPathPlugin(SearchPathPlugin):
    """Makes `+strategy=leto` known."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append Leto's configuration package; what the application defines itself wins."""
        search_path.append(provider="leto", path="pkg://leto_strategy.conf")
