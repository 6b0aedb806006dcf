"""Hydra configuration of Leto: `strategy/leto.yaml` composes `LetoStrategy`, as `+strategy=leto`.

The package holds YAML files only; the search-path plugin in `hydra_plugins.hydra_leto` publishes them to every Hydra
application. Running under Hydra comes with a later release, the options are those of `LetoConfig` already.
"""
