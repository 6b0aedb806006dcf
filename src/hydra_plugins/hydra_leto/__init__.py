"""Hydra finds its plugins below `hydra_plugins`; this one publishes Leto's configuration."""
