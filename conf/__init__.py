"""Hydra configuration of Leto: `strategy/leto.yaml` composes `LetoStrategy`, as `+strategy=leto`; `train.yaml` is the
root of `leto train`.

The package holds YAML files only; the search-path plugin in `hydra_plugins.hydra_leto` publishes them to every Hydra
application, whose own files come first.
"""
