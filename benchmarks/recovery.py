"""How long a recovery takes: kills trainers of a small model with SIGKILL, from outside, at random moments.

Recovery time runs from the monotonic time just before `os.kill` until the last rank of the next generation enters the
first forward pass that was not done yet, as the model's own `training_step` notes it; nothing is taken from the product
but the division into phases. Shadow: a shadow generation was ready at the kill. Cold: `shadows=0`, so that processes
are started after the kill, forked from the zygote (default) or as new interpreters. Afterwards the same training runs
undisturbed, and losses, samples and weights of every step and rank are compared, bit for bit.

Limits: a shadow recovery can't be faster than the kernel's reaping of two processes (some 10 ms each) and the redone
fetch of one batch; a cold one can't be faster than the imports and the set-up of a Trainer.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Lines, Workload, machine, median, spread, write_rows

PHASES = ("detect", "reap", "localise", "rebuild", "restore")
START_SECONDS_MAX = 120.0
RECOVERY_SECONDS_MAX = 60.0
STEPS_BEFORE_END = 150


@dataclass(frozen=True)
class Kind:
    """A way to recover.

    Args:
        name: Its name.
        shadows: Shadow trainers a rank.
        zygote: Option of the strategy.
    """

    name: str
    shadows: int
    zygote: str


SHADOW, COLD, COLD_NEW = Kind("shadow", 1, "auto"), Kind("cold", 0, "auto"), Kind("cold_zygote_off", 0, "off")


@dataclass(frozen=True)
class Measurement:
    """One kill.

    Args:
        kind: Name of the way of recovery that was to be measured.
        level: Level that the product reports.
        rank: The killed rank.
        step: Step it was in, as far as the supervisor knew.
        mode: How the next generation entered.
        total_ms: Kill until the last rank's new forward.
        detect_ms: Kill until noticed; others see `RecoveryRecord`.
        reap_ms: The fence.
        localise_ms: Reading words, and the decision.
        rebuild_ms: Waiting for the next generation at its gate.
        restore_ms: From promotion to the new forward.
        steps_repeated: Steps whose forward pass some rank entered again, counted from the model's notes.
        finished_steps_repeated: Those among them that this rank had finished before.
    """

    kind: str
    level: str
    rank: int
    step: int | None
    mode: str
    total_ms: float
    detect_ms: float
    reap_ms: float
    localise_ms: float
    rebuild_ms: float
    restore_ms: float
    steps_repeated: int
    finished_steps_repeated: int


def measure(out: Path, kind: Kind, num_kills: int, *, num_ranks: int, rng: random.Random) -> list[Measurement]:
    """Train, kill `num_kills` times, and end; the notes of all steps stay in `out`."""
    options = json.dumps({"shadows": kind.shadows, "zygote": kind.zygote})
    with Workload(out, ["--exact", "--options", options], num_ranks=num_ranks) as run:
        found = []
        for number in range(num_kills):
            found.append(_kill_once(run, kind, number, rng))
            print(f"  {kind.name} {number + 1}/{num_kills}: {found[-1].total_ms:.0f} ms", file=sys.stderr)
        run.stop_at(run.num_steps + STEPS_BEFORE_END)
        run.finish(seconds=START_SECONDS_MAX)
    return found


def _kill_once(run: Workload, kind: Kind, number: int, rng: random.Random) -> Measurement:
    def prepared() -> bool:
        """The active generation is in new work, and there are shadows where there should be."""
        promoted, entered = run.last("promoted"), run.last("entered")
        if promoted is None or entered is None or entered["generation"] != promoted["generation"]:
            return False
        if sum(event["event"] == "recovered" for event in run.events) != number:
            return False
        ready = run.last("shadow_ready")
        return not kind.shadows or (ready is not None and ready["generation"] > promoted["generation"])

    run.wait_for(prepared, seconds=START_SECONDS_MAX, what=f"a generation to kill ({kind.name} {number})")
    time.sleep(rng.uniform(0.1, 0.5))
    promoted = run.last("promoted")
    assert promoted is not None
    rank = rng.randrange(run.num_ranks)
    before = [Lines(run.out / f"forwards.r{r}.jsonl").new() for r in range(run.num_ranks)]
    old_pids = set(promoted["pids"])
    killed_ns = time.monotonic_ns()
    os.kill(promoted["pids"][rank], signal.SIGKILL)

    def recovered() -> dict[str, Any] | None:
        return next((e for e in run.events if e["event"] == "recovered" and e["number"] == number + 1), None)

    record = run.wait_for(recovered, seconds=RECOVERY_SECONDS_MAX, what=f"recovery {number} ({kind.name})")
    forwards = [Lines(run.out / f"forwards.r{r}.jsonl").new() for r in range(run.num_ranks)]
    first = [next(n for n in notes if n["monotonic_ns"] > killed_ns and n["pid"] not in old_pids) for notes in forwards]
    total_ms = (max(note["monotonic_ns"] for note in first) - killed_ns) / 1e6
    phases = {name: record["phases_ms"].get(name) or 0.0 for name in PHASES}
    phases["detect"] = max(0.0, total_ms - sum(phases.values()))  # the product does not know of a kill from outside
    again, finished_again = set(), 0
    for r, note in enumerate(first):
        done = {line["step"] for line in _steps(run.out, r) if line["monotonic_ns"] < killed_ns}
        old = {line["step"] for line in forwards[r] if line["pid"] in old_pids} | {n["step"] for n in before[r]}
        again |= {note["step"]} & old
        finished_again += note["step"] in done
    return Measurement(
        kind=kind.name,
        level=record["level"],
        rank=rank,
        step=record["step"],
        mode=record["mode"],
        total_ms=round(total_ms, 3),
        steps_repeated=len(again),
        finished_steps_repeated=finished_again,
        **{f"{name}_ms": round(value, 3) for name, value in phases.items()},
    )


def _steps(out: Path, rank: int) -> list[dict[str, Any]]:
    return Lines(out / f"steps.r{rank}.jsonl").new()


def run_undisturbed(out: Path, num_steps: int, *, num_ranks: int) -> None:
    """The same training with no kill."""
    with Workload(out, ["--exact"], num_ranks=num_ranks) as run:
        run.stop_at(num_steps)
        run.finish(seconds=START_SECONDS_MAX + num_steps * 0.1)
    assert run.last("recovered") is None, "the undisturbed run was disturbed"


def differences(expected: Path, actual: Path, *, num_ranks: int) -> list[str]:
    """Where a killed run and the (longer) undisturbed one are not the same, bit for bit: steps and final weights."""
    found = []
    result = json.loads((actual / "result.json").read_text())
    for rank in range(num_ranks):
        want = {note["step"]: _exact(note) for note in _steps(expected, rank)}
        have = [(note["step"], _exact(note)) for note in _steps(actual, rank)]
        found += [f"rank {rank}, step {step}" for step, values in have if want.get(step) != values]
        missing = set(range(result["steps"])) - {step for step, _ in have}
        found += [f"rank {rank}, step {step} is missing" for step in sorted(missing)]
        if want.get(result["steps"] - 1, {}).get("weights") != result["weights"]:
            found.append(f"final weights, against rank {rank}")
    return found


def _exact(note: dict[str, Any]) -> dict[str, Any]:
    return {name: note[name] for name in ("loss", "ids", "weights")}


def summarise(measurements: Sequence[Measurement], found: Sequence[str], context: dict[str, Any]) -> dict[str, Any]:
    """The JSON line."""
    by_kind: dict[str, list[Measurement]] = {kind.name: [] for kind in (SHADOW, COLD, COLD_NEW)}
    for one in measurements:
        if (one.level == "shadow") == (one.kind == SHADOW.name):
            by_kind[one.kind].append(one)
    repeated = Counter(one.steps_repeated for one in measurements)

    def phases(kind: Kind) -> dict[str, float | None]:
        return {name: median(getattr(one, f"{name}_ms") for one in by_kind[kind.name]) for name in PHASES}

    return {
        "benchmark": "recovery",
        "shadow_ms_median": median(one.total_ms for one in by_kind[SHADOW.name]),
        "cold_ms_median": median(one.total_ms for one in by_kind[COLD.name]),
        "cold_zygote_off_ms_median": median(one.total_ms for one in by_kind[COLD_NEW.name]),
        "phases_ms": phases(SHADOW),
        "cold_phases_ms": phases(COLD),
        "steps_repeated": max(repeated, default=0),
        "finished_steps_repeated": sum(one.finished_steps_repeated for one in measurements),
        "exact": not found,
        "differences": list(found[:5]),
        "spread_ms": {name: spread([one.total_ms for one in ones]) for name, ones in by_kind.items()},
        "other_level": sum((one.level == "shadow") != (one.kind == SHADOW.name) for one in measurements),
        "modes": dict(Counter(one.mode for one in measurements)),
        **context,
    }


def main() -> int:
    """Measure, compare, and print; returns 1 where the killed runs were not exact."""
    parser = argparse.ArgumentParser(description="Recovery time after SIGKILLs at random moments.")
    parser.add_argument("--json", action="store_true", help="print one JSON line last (else an indented object)")
    parser.add_argument("--kills", type=int, default=12, help="kills with shadows ready; half as many cold, at least 5")
    parser.add_argument("--cold-kills", type=int, default=None, help="kills with no shadows")
    parser.add_argument("--no-zygote-kills", type=int, default=3, help="cold kills with zygote='off' too")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=None, help="of moments and ranks; printed")
    parser.add_argument("--save", action="store_true", help="append the rows to benchmarks/data/, which is kept")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    cold = max(5, options.kills // 2) if options.cold_kills is None else options.cold_kills
    rng = random.Random(seed)
    context = {"ranks": options.ranks, "seed": seed, **machine()}
    print(f"seed {seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="leto-recovery-") as name:
        out, measurements, directories = Path(name), [], []
        for kind, num in ((SHADOW, options.kills), (COLD, cold), (COLD_NEW, options.no_zygote_kills)):
            if num:
                directories.append(out / kind.name)
                measurements += measure(directories[-1], kind, num, num_ranks=options.ranks, rng=rng)
        steps = max(json.loads((d / "result.json").read_text())["steps"] for d in directories)
        print(f"  undisturbed, {steps} steps", file=sys.stderr)
        run_undisturbed(out / "undisturbed", steps, num_ranks=options.ranks)
        found = [d for one in directories for d in differences(out / "undisturbed", one, num_ranks=options.ranks)]
    summary = summarise(measurements, found, context)
    summary["rows"] = os.path.relpath(
        write_rows("recovery", [asdict(m) for m in measurements], context, save=options.save)
    )
    print(json.dumps(summary, indent=None if options.json else 2))
    return int(not summary["exact"])


if __name__ == "__main__":
    sys.exit(main())
