"""`leto doctor`: can this machine run Leto, and what to do where it can't.

Each check looks at one thing and returns a `Finding`; nothing here changes the machine or loads torch.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from leto_strategy.cli.doctor import kernel, resources, software
from leto_strategy.cli.doctor.finding import Finding
from leto_strategy.cli.doctor.gpu import GPU_CHECKS, has_gpu
from leto_strategy.cli.doctor.machine import Machine
from leto_strategy.cli.doctor.no_gpu import CPU_CHECKS

if TYPE_CHECKING:
    from rich.table import Table

PIPE_WIDTH = 200

CHECKS: tuple[Callable[[], Finding], ...] = (
    software.check_system,
    software.check_python,
    software.check_torch,
    software.check_lightning,
    software.check_entry_point,
    software.check_autoload,
    software.check_erasure_code,
    kernel.check_memfd,
    kernel.check_pidfd,
    kernel.check_sockets,
    kernel.check_processes,
    kernel.check_loopback,
    resources.check_files,
    resources.check_memory,
    resources.check_shared_memory,
)
"""Checks that every machine needs; those of GPUs follow."""


def run(*, as_json: bool, machine: Machine | None = None) -> int:
    """Run all checks and print them; returns 1 if one failed."""
    findings = examine(machine)
    failed = any(finding.level == "fail" for finding in findings)
    if as_json:
        print(json.dumps({"ok": not failed, "checks": [asdict(finding) for finding in findings]}))
    else:
        from rich.console import Console

        console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
        console.print(render(findings))
        console.print(summary(findings))
    return int(failed)


def examine(machine: Machine | None = None, *, checks: Sequence[Callable[[], Finding]] = CHECKS) -> list[Finding]:
    """All findings, in the order in which a reader wants them. A check that breaks is a finding, not a traceback.

    Args:
        machine: The machine whose GPUs are looked at; None: this one.
        checks: What is checked before.
    """
    machine = machine or Machine()
    findings = [_outcome(check.__name__, check) for check in checks]
    for check in GPU_CHECKS if has_gpu(machine) else CPU_CHECKS:
        findings.append(_outcome(check.__name__, partial(check, machine)))
    return findings


def _outcome(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:
        name = name.removeprefix("check_").replace("_", " ")
        return Finding(name, "warn", f"could not be checked: {type(error).__name__}: {error}", "please report it")


def render(findings: list[Finding]) -> "Table":
    """The findings as a table."""
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("check", no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in findings:
        found = Text(finding.found)
        if finding.remedy and finding.level != "ok":
            found.append(f"\n→ {finding.remedy}", style=styles[finding.level])
        table.add_row(Text(finding.level, style=styles[finding.level]), finding.name, found)
    return table


def summary(findings: list[Finding]) -> str:
    """One closing sentence."""
    failed = sum(finding.level == "fail" for finding in findings)
    warned = sum(finding.level == "warn" for finding in findings)
    if failed:
        return f"{failed} of {len(findings)} checks failed: Leto can't run here before they are put right."
    if warned:
        return f"Leto runs here; {warned} of {len(findings)} checks have something to say."
    return f"Leto runs here: all {len(findings)} checks are fine."
