"""What a check of `leto doctor` returns."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Args:
        name: What was looked at.
        level: "ok"; "warn": Leto runs, with the limits that `found` tells; "fail": Leto can't run.
        found: What is there.
        remedy: What to do; empty where there is nothing to do.
    """

    name: str
    level: Level
    found: str
    remedy: str = ""


def gib(num_bytes: int) -> str:
    """A number of bytes for people."""
    return f"{num_bytes / GIB:.1f} GiB"
