"""Is training exact through kills inside updates that take memory pages with them? The paper's figure 12, on the CPU.

    python benchmarks/recovery_correctness.py --json

In every tenth iteration a trainer dies inside its update: in the middle of a chunk, with new parity computed and not
committed, or with parity half copied back to host memory, in turn. Every protection group loses as many data pages as
it has parity pages, and one page of its parity in host memory. Afterwards the same training runs undisturbed and
unprotected, and losses, samples and weights of every step and rank are compared, bit for bit. Pages that are lost are
told to the recovery by marks (docs/operating.md); their bytes are destroyed.
"""

import argparse
import json
import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Setting, Workload, described, median, scratch_directory, write_rows
from benchmarks.recovery import differences
from leto_strategy.faults import Fault

KILL_EVERY = 10
POINTS = ("chunk_updating", "parity_updated", "parity_first")
NUM_PARITY, PAGE_BYTES = 16, 4096
OPTIONS: dict[str, Any] = {
    "protection": "on",
    "page_kib": PAGE_BYTES >> 10,
    "protection_pages": 128,
    "parity_pages": NUM_PARITY,
    "chunk_bytes": 32 * PAGE_BYTES,
}
MODEL = ["--width", "256", "--exact"]
"""Some 140,000 parameters: a dozen chunks in four groups."""
SECONDS_MAX = 300.0


def plan(num_iterations: int, num_ranks: int, rng: random.Random) -> list[Fault]:
    """A kill with lost pages in every tenth iteration, points and ranks in turn."""
    faults = []
    for number, step in enumerate(range(KILL_EVERY // 2, num_iterations, KILL_EVERY)):
        point = POINTS[number % len(POINTS)]
        chunk = None if point == "parity_first" else rng.randrange(8)
        faults.append(Fault(number % num_ranks, point, "page-loss", step, chunk=chunk, pages=NUM_PARITY, host_pages=1))
    return faults


def train(out: Path, options: dict[str, Any], num_iterations: int, *, setting: Setting) -> list[dict[str, Any]]:
    """Train and return the recoveries."""
    with Workload(out, [*MODEL, "--options", json.dumps(options)], setting=setting) as run:
        run.stop_at(num_iterations)
        run.finish(seconds=SECONDS_MAX)
        run.look()
    return [event for event in run.events if event["event"] == "recovered"]


def summarise(
    recoveries: Sequence[dict[str, Any]], num_planned: int, found: Sequence[str], context: dict[str, Any]
) -> dict[str, Any]:
    """The JSON line."""
    pages = [recovery["pages"] for recovery in recoveries]
    return {
        "benchmark": "recovery_correctness",
        "exact": not found and len(recoveries) == num_planned,
        "kills": len(recoveries),
        "kills_planned": num_planned,
        "pages_rebuilt": sum(one["rebuilt"] for one in pages),
        "localise_ms": median(one["localise_ms"] for one in pages),
        "rebuild_ms": median(one["rebuild_ms"] for one in pages),
        "handle_mib": None,
        "page_kib": OPTIONS["page_kib"],
        "differences": list(found[:5]),
        **context,
    }


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Exactness through kills inside updates that lose memory pages.")
    parser.add_argument("--json", action="store_true", help="print one JSON line last (else an indented object)")
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=None, help="of the chunks; printed")
    parser.add_argument("--save", action="store_true", help="append the rows to benchmarks/data/, which is kept")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(2**31)
    return options


def main() -> int:
    """Train twice, compare, print; returns 1 where the disturbed run was not exact, or not disturbed as planned."""
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    setting = Setting("cpu", options.ranks)
    context = {"ranks": options.ranks, "iterations": options.iterations, "seed": options.seed, **described(setting)}
    print(f"seed {options.seed}", file=sys.stderr)
    faults = plan(options.iterations, options.ranks, random.Random(options.seed))
    with scratch_directory("leto-correctness-", "cpu") as name:
        out = Path(name)
        planned = {**OPTIONS, "faults": [fault.to_json() for fault in faults]}
        recoveries = train(out / "killed", planned, options.iterations, setting=setting)
        chunk_bytes = {"chunk_bytes": OPTIONS["chunk_bytes"]}
        assert not train(out / "undisturbed", chunk_bytes, options.iterations, setting=setting)
        found = differences(out / "undisturbed", out / "killed", num_ranks=options.ranks)
    summary = summarise(recoveries, len(faults), found, context)
    rows = [
        {"number": one["number"], "rank": one["rank"], "step": one["step"], "mode": one["mode"], **one["pages"]}
        for one in recoveries
    ]
    if rows:
        summary["rows"] = os.path.relpath(write_rows("recovery_correctness", rows, context, save=options.save))
    print(json.dumps(summary, indent=None if options.json else 2))
    return int(not summary["exact"])


if __name__ == "__main__":
    sys.exit(main())
