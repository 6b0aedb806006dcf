"""What a user sees of a job while it runs: one line per recovery, and what protects less than promised."""

import sys
from typing import Any, Self

from rich.console import Console as RichConsole
from rich.markup import escape

_SAID = ("warning", "shadows_off", "zygote_failed")
"""Events whose text the user sees: something protects less than promised, or costs more."""


class Console:
    """Prints events of a job on standard error."""

    def __enter__(self) -> Self:
        self._console = RichConsole(stderr=True, highlight=False, soft_wrap=True)
        return self

    def __exit__(self, *exception: object) -> None:
        if sys.stderr is not None:
            sys.stderr.flush()

    def show(self, event: dict[str, Any]) -> None:
        """Print the line of an event that has one."""
        line = describe(event)
        if line is not None and sys.stderr is not None:
            self._console.print(line)


def describe(event: dict[str, Any]) -> str | None:
    """The line of an event in rich markup, or None."""
    name = event.get("event")
    if name == "recovered":
        return _recovered(event)
    if name in _SAID:
        return f"[bold]leto[/bold] {escape(event['text'])}"
    return None


def _recovered(event: dict[str, Any]) -> str:
    phases = {name: value for name, value in event["phases_ms"].items() if value is not None}
    parts = " · ".join(f"{name} {value:.0f}" for name, value in phases.items())
    total, repeated = event["total_ms"], event["steps_repeated"]
    took = "before its last step ended" if total is None else f"in [bold]{total:.0f} ms[/bold]"
    lost = "no finished work repeated" if not repeated else f"{repeated} step begun again"
    return (
        f"[bold]leto[/bold] recovered from {event['cause']} of rank {event['rank']} at step {event['step']}:"
        f" a {event['level']} trainer took over {took} ({parts}); {lost}"
    )
