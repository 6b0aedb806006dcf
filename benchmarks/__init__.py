"""Measurements, each a script with `--help`: recovery time, and what Leto costs while nothing fails."""
