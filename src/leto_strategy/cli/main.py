"""Entry point of the command `leto`: parses the command line and calls one subcommand.

Imports are light, so that `leto status` in a loop costs nothing: each subcommand imports what it needs when it runs.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NoReturn

from leto_strategy.errors import LetoError

LATER = {
    "simulate": "there is no replacement yet",
}
"""Subcommands of later releases, and what to do until then."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `leto` and return its exit status: 0 done, 1 it did not work, 2 the command line is wrong.

    Args:
        argv: Arguments after the program's name; None: those of this process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in LATER:
        print(f"leto {arguments[0]}: comes with a later release; {LATER[arguments[0]]}", file=sys.stderr)
        return 2
    if arguments[:1] == ["train"]:
        train(arguments[1:])
    parser = build_parser()
    if arguments[:1] == ["run"] and arguments[1:2] not in (["-h"], ["--help"]):
        arguments[1:1] = ["--"]  # everything after it is the script's
    options = parser.parse_args(arguments)
    try:
        status = _dispatch(options, parser)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `leto ... | head`; the interpreter must not stumble over it again when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ValueError as error:  # what the user typed
        print(f"leto {options.command}: {error}", file=sys.stderr)
        return 2
    except (LetoError, OSError) as error:
        print(f"leto {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def train(arguments: Sequence[str]) -> NoReturn:
    """Become the Hydra application, which does not return.

    It replaces this process, as `python -m leto_strategy.pretraining`: so Hydra, Lightning and Leto each find a command
    line that they can run again for a rank, and this one stays light.

    Args:
        arguments: Hydra's overrides and options, as they were typed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "leto_strategy.pretraining", *arguments])


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="leto", description="Look at, test and check jobs that Leto protects.")
    parser.add_argument("--version", action="version", version=f"leto {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    status = commands.add_parser("status", help="show your running jobs: processes, progress, recoveries")
    status.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    status.add_argument("--job", metavar="JOB", help="only this job; a unique beginning of its name will do")

    run = commands.add_parser(
        "run",
        help="run a script under Leto that does not name a strategy",
        usage="leto run [-h] script.py [ARGUMENT ...]\n       leto run [-h] -m package.module [ARGUMENT ...]",
        description='Run a script: each Trainer without a strategy, or with strategy="auto", gets strategy="leto".'
        " A strategy that the script names is left alone.",
    )
    run.add_argument("script", nargs="*", help="the script, or -m and a module, and its arguments")

    inject = commands.add_parser(
        "inject",
        help="make a process of a running job fail",
        description="Make a trainer fail, now or at a point of a step. The job recovers: that is what it is for.",
    )
    inject.add_argument("--rank", type=int, metavar="R", help="rank of the process")
    inject.add_argument(
        "--fault",
        choices=("kill", "hang", "stop", "page-loss", "host-page-loss"),
        help="SIGKILL, an endless wait, SIGSTOP, or lost pages of protected state, or of its parity, and SIGKILL",
    )
    inject.add_argument("--pages", type=int, metavar="N", help="pages that each protection group loses (default: 1)")
    inject.add_argument("--group", type=int, metavar="G", help="the group that loses pages (default: every one)")
    inject.add_argument("--at-step", type=int, metavar="S", help="step at which it fails (default: the next that fits)")
    inject.add_argument("--point", metavar="P", help="where in the step; --list-points shows all (default: at once)")
    inject.add_argument("--job", metavar="JOB", help="which job; needed only if several run")
    inject.add_argument(
        "--role",
        choices=("active", "shadow", "manager"),
        default="active",
        help="which process of the rank (default: active)",
    )
    inject.add_argument("--list-points", action="store_true", help="print the points and what they mean, and exit")

    commands.add_parser("train", help="train a small GPT: a Hydra application; leto train --help", add_help=False)

    doctor = commands.add_parser("doctor", help="check whether this machine can run Leto")
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


def _dispatch(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if options.command == "status":
        from leto_strategy.cli import status

        return status.run(job=options.job, as_json=options.json)
    if options.command == "run":
        from leto_strategy.cli import run

        return run.run(options.script)
    if options.command == "inject":
        from leto_strategy.cli import inject

        if options.list_points:
            return inject.list_points()
        if options.rank is None or options.fault is None:
            parser.error("inject needs --rank and --fault, for example: leto inject --rank 1 --fault kill")
        return inject.run(
            inject.Injection(
                rank=options.rank,
                fault=options.fault,
                pages=options.pages,
                group=options.group,
                at_step=options.at_step,
                point=options.point,
                role=options.role,
            ),
            job=options.job,
        )
    from leto_strategy.cli import doctor

    return doctor.run(as_json=options.json)


def _version() -> str:
    try:
        return metadata.version("leto-strategy")
    except metadata.PackageNotFoundError:
        return "(not installed)"
