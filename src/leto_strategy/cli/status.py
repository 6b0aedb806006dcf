"""`leto status`: the running jobs of this user, as tables or as JSON.

What a supervisor answers is a dict of plain values; `render` turns one into text and never fails on a missing field, so
that a status of a newer or older job can be read too.
"""

import json
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from leto_strategy.cli import jobs

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

ANSWER_TIMEOUT = timedelta(seconds=2)
NO_JOBS = 'No job is running. Start one with Trainer(strategy="leto").'
NUM_RECOVERIES_SHOWN = 10
PIPE_WIDTH = 200

COLUMNS = ("role", "rank", "pid", "generation", "level", "state", "step", "activity", "phase")
PHASES = ("detect", "reap", "localise", "rebuild", "restore", "first_step")
_NUMBERS = {"rank", "pid", "generation", "step", "steps_repeated", "total_ms"}


def run(*, job: str | None, as_json: bool) -> int:
    """Ask every job and print the answers. No job is no error; returns 1 if a job did not answer.

    Args:
        job: Only this job; None: all.
        as_json: Print one object {"jobs": [...], "errors": {job: text}} instead of tables.

    Raises:
        jobs.JobNotFound: `job` does not run.
    """
    names = jobs.find_jobs()
    if job is not None:
        names = [jobs.choose_job(names, job)]
    statuses, errors = [], {}
    for name in names:
        try:
            statuses.append({"job": name, **jobs.ask(name, {"op": "status"}, timeout=ANSWER_TIMEOUT)})
        except jobs.JobUnreachable as error:
            errors[name] = str(error)
    if as_json:
        print(json.dumps({"jobs": statuses, "errors": errors}))
        return int(bool(errors))

    from rich.console import Console

    # A pipe has no width of its own: nothing is cut there.
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    if not names:
        console.print(NO_JOBS, highlight=False)
    for status in statuses:
        console.print(render(status, now=time.time()))
    for text in errors.values():
        console.print(text, style="red", markup=False, highlight=False)
    return int(bool(errors))


def render(status: Mapping[str, Any], *, now: float) -> "Group":
    """One job: a headline, its processes, its recoveries. `now` is the time in seconds since 1970."""
    from rich.console import Group
    from rich.text import Text

    recoveries = _dicts(status.get("recoveries"))
    parts: list[Any] = [Text(headline(status, now=now), style="bold"), process_table(_dicts(status.get("processes")))]
    if recoveries:
        parts += [Text(f"recoveries: {len(recoveries)}", style="bold")]
        if len(recoveries) > NUM_RECOVERIES_SHOWN:
            parts += [Text(f"the last {NUM_RECOVERIES_SHOWN}:")]
        parts += [recovery_table(recoveries[-NUM_RECOVERIES_SHOWN:])]
    return Group(*parts, Text())


def headline(status: Mapping[str, Any], *, now: float) -> str:
    """One line: which job this is, what it does, and since when.

    Args:
        status: What the supervisor answered.
        now: Seconds since 1970, as its field `started`.
    """
    words = [f"job {show(status.get('job'))}"]
    for name, unit in (("function", ""), ("world", " ranks"), ("state", "")):
        if status.get(name) is not None:
            words.append(f"{show(status[name])}{unit}")
    if isinstance(status.get("started"), (int, float)):
        words.append(f"for {duration(max(0.0, now - status['started']))}")
    return " · ".join(words)


def process_table(processes: list[Mapping[str, Any]]) -> "Table":
    """One row per process, by rank; the job's own processes first."""
    from rich.table import Table
    from rich.text import Text

    roles = ("user", "supervisor", "zygote", "manager", "active", "shadow")
    styles = {"active": "green", "shadow": "cyan"}

    def order(process: Mapping[str, Any]) -> tuple[int, int]:
        role = process.get("role")
        rank = process.get("rank")
        return rank if isinstance(rank, int) else -1, roles.index(role) if role in roles else len(roles)

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in _NUMBERS else "left", no_wrap=True)
    for process in sorted(processes, key=order):
        style = styles.get(str(process.get("role")), "")
        table.add_row(*(Text(show(process.get(column)), style=style) for column in COLUMNS))
    return table


def recovery_table(recoveries: list[Mapping[str, Any]]) -> "Table":
    """One row per recovery; times are milliseconds."""
    from rich.table import Table
    from rich.text import Text

    columns = {"step": "step", "rank": "rank", "cause": "cause", "level": "level", "mode": "mode"}
    columns |= {"steps_repeated": "repeated", "total_ms": "ms"}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for field, title in columns.items():
        table.add_column(title, justify="right" if field in _NUMBERS else "left", no_wrap=field != "cause")
    table.add_column("phases (ms)")
    for recovery in recoveries:
        table.add_row(*(Text(show(recovery.get(field))) for field in columns), Text(breakdown(recovery)))
    return table


def breakdown(recovery: Mapping[str, Any]) -> str:
    """The phases of a recovery and their milliseconds, in the order in which they happen."""
    times = recovery.get("phases_ms")
    if not isinstance(times, Mapping):
        return "–"
    seen = [str(name) for name, value in times.items() if value is not None]
    names = [phase for phase in PHASES if phase in seen] + sorted(name for name in seen if name not in PHASES)
    return ", ".join(f"{show(name.replace('_', ' '))} {show(times[name])}" for name in names)


def show(value: object) -> str:
    """A value as a cell: nothing known is a dash, numbers of milliseconds are short."""
    if value is None or value == "":
        return "–"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    text = str(value)
    # Names come from another process: no control characters on the terminal.
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def duration(seconds: float) -> str:
    """A duration in the two largest units that say something."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _dicts(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
