"""How long a recovery takes: kills trainers with SIGKILL, from outside, at random moments.

    python benchmarks/recovery.py                   two CPU ranks of a small perceptron
    python benchmarks/recovery.py --device cuda     one GPU, a GPT of 10^9 parameters, fp32 state

Recovery time runs from the monotonic time just before `os.kill` until the last rank of the next generation enters the
first forward pass that was not done yet, as the model's own `training_step` notes it; nothing is taken from the product
but the division into phases. Shadow: a shadow generation was ready at the kill. Cold: `shadows=0`, so that processes
are started after the kill, forked from the zygote (default) or as new interpreters. Afterwards the same training runs
undisturbed, and losses, samples and weights of every step and rank are compared, bit for bit.

On a GPU the model enters when its first kernel is over, and `regained_ms` goes on until the gradients of the step that
was redone are there again. `after_fence_ms` is the part of the time in which all dead processes were gone already. The
run stands still while shadows start, and is killed at a random moment of the steps that follow.

Limits: a shadow recovery can't be faster than the kernel's reaping of the processes (some 10 ms each, 80 to 200 ms of
one that has a CUDA context) and the redone fetch of one batch; a cold one can't be faster than the imports and the
set-up of a Trainer.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.exact import read_rows
from benchmarks.harness import (
    Lines,
    Setting,
    Workload,
    add_setting,
    described,
    median,
    scratch_directory,
    setting_of,
    spread,
    write_rows,
)

PHASES = ("detect", "reap", "localise", "rebuild", "restore")
AFTER_FENCE = ("localise", "rebuild", "restore")
START_SECONDS_MAX = 120.0
RECOVERY_SECONDS_MAX = 60.0
STEPS_BEFORE_END, LARGE_STEPS_BEFORE_END = 150, 8
KILL_AFTER_SECONDS, LARGE_KILL_AFTER_SECONDS = (0.1, 0.5), (1.5, 2.5)
"""When the kill comes, after a generation is prepared, or goes on training."""


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
        regained_ms: Kill until the gradients of the step that was redone are there again; None where none was redone.
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
    regained_ms: float | None = None

    @property
    def after_fence_ms(self) -> float:
        """Time after the last dead process was gone."""
        return float(sum(getattr(self, f"{name}_ms") for name in AFTER_FENCE))


def measure(out: Path, kind: Kind, num_kills: int, *, setting: Setting, rng: random.Random) -> list[Measurement]:
    """Train, kill `num_kills` times, and end; the notes of all steps stay in `out`."""
    options = json.dumps({"shadows": kind.shadows, "zygote": kind.zygote, **setting.options()})
    steps_before_end = STEPS_BEFORE_END if setting.num_parameters is None else LARGE_STEPS_BEFORE_END
    with Workload(out, ["--exact", "--options", options], setting=setting) as run:
        found = []
        for number in range(num_kills):
            found.append(_kill_once(run, kind, number, rng))
            print(f"  {kind.name} {number + 1}/{num_kills}: {found[-1].total_ms:.0f} ms", file=sys.stderr)
        run.stop_at(run.num_steps + steps_before_end)
        run.go_on()
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

    if run.large:
        run.hold()
    run.wait_for(prepared, seconds=START_SECONDS_MAX, what=f"a generation to kill ({kind.name} {number})")
    run.go_on()
    time.sleep(rng.uniform(*(LARGE_KILL_AFTER_SECONDS if run.large else KILL_AFTER_SECONDS)))
    promoted = run.last("promoted")
    assert promoted is not None
    rank = rng.randrange(run.num_ranks)
    before = [Lines(run.out / f"forwards.r{r}.jsonl").new() for r in range(run.num_ranks)]
    rows = [read_rows(run.out, r) for r in range(run.num_ranks)]
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
        done = set(rows[r]) or {line["step"] for line in _steps(run.out, r) if line["monotonic_ns"] < killed_ns}
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
        regained_ms=_regained_ms(run, first, killed_ns) if run.large and record["mode"] == "redo" else None,
        **{f"{name}_ms": round(value, 3) for name, value in phases.items()},
    )


def _regained_ms(run: Workload, first: Sequence[dict[str, Any]], killed_ns: int) -> float:
    """When the last rank had the gradients again of the step that it entered first."""
    wanted = {(rank, note["pid"], note["step"]) for rank, note in enumerate(first)}

    def found() -> dict[tuple[int, int, int], int] | None:
        lines = [(rank, n) for rank in range(run.num_ranks) for n in Lines(run.out / f"gradients.r{rank}.jsonl").new()]
        times = {(rank, n["pid"], n["step"]): n["monotonic_ns"] for rank, n in lines}
        return times if wanted <= times.keys() else None

    times = run.wait_for(found, seconds=RECOVERY_SECONDS_MAX, what="gradients")
    return float(round((max(times[key] for key in wanted) - killed_ns) / 1e6, 3))


def _steps(out: Path, rank: int) -> list[dict[str, Any]]:
    """A rank's notes of the steps that are over; of a large model with what its rows say."""
    notes, rows = Lines(out / f"steps.r{rank}.jsonl").new(), read_rows(out, rank)
    return [note | rows[note["step"]] for note in notes if note["step"] in rows] if rows else notes


def run_undisturbed(out: Path, num_steps: int, *, setting: Setting) -> None:
    """The same training with no kill."""
    options = json.dumps({"shadows": 0 if setting.num_parameters else 1})
    with Workload(out, ["--exact", "--options", options], setting=setting) as run:
        run.stop_at(num_steps)
        run.finish(seconds=START_SECONDS_MAX + num_steps * 0.5)
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
        if "weights" in result and want.get(result["steps"] - 1, {}).get("weights") != result["weights"]:
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
        "after_fence_ms_median": median(one.after_fence_ms for one in by_kind[SHADOW.name]),
        "regained_ms_median": median(one.regained_ms for one in by_kind[SHADOW.name]),
        "cold_regained_ms_median": median(one.regained_ms for one in by_kind[COLD.name]),
        "phases_ms": phases(SHADOW),
        "cold_phases_ms": phases(COLD),
        "steps_repeated": max(repeated, default=0),
        "finished_steps_repeated": sum(one.finished_steps_repeated for one in measurements),
        "exact": not found,
        "differences": list(found[:5]),
        "spread_ms": {name: spread([one.total_ms for one in ones]) for name, ones in by_kind.items()},
        "after_fence_spread_ms": spread([one.after_fence_ms for one in by_kind[SHADOW.name]]),
        "other_level": sum((one.level == "shadow") != (one.kind == SHADOW.name) for one in measurements),
        "modes": dict(Counter(one.mode for one in measurements)),
        **context,
    }


def parse_options() -> argparse.Namespace:
    """The command line; what it leaves out depends on the device."""
    parser = argparse.ArgumentParser(description="Recovery time after SIGKILLs at random moments.")
    parser.add_argument("--json", action="store_true", help="print one JSON line last (else an indented object)")
    parser.add_argument("--kills", type=int, default=12, help="kills with shadows ready; half as many cold, at least 5")
    parser.add_argument("--cold-kills", type=int, default=None, help="kills with no shadows")
    parser.add_argument("--no-zygote-kills", type=int, default=None, help="cold kills with zygote='off' too")
    add_setting(parser)
    parser.add_argument("--seed", type=int, default=None, help="of moments and ranks; printed")
    parser.add_argument("--save", action="store_true", help="append the rows to benchmarks/data/, which is kept")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(2**31)
    if options.cold_kills is None:
        options.cold_kills = max(5, options.kills // 2)
    if options.no_zygote_kills is None:
        options.no_zygote_kills = 3 if options.device == "cpu" else 0
    return options


def main() -> int:
    """Measure, compare, and print; returns 1 where the killed runs were not exact."""
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    setting = setting_of(options)
    rng = random.Random(options.seed)
    context = {"ranks": setting.num_ranks, "seed": options.seed, **described(setting)}
    print(f"seed {options.seed}", file=sys.stderr)
    kinds = ((SHADOW, options.kills), (COLD, options.cold_kills), (COLD_NEW, options.no_zygote_kills))
    with scratch_directory("leto-recovery-", setting.device) as name:
        out, measurements, directories = Path(name), [], []
        for kind, num in kinds:
            if num:
                directories.append(out / kind.name)
                measurements += measure(directories[-1], kind, num, setting=setting, rng=rng)
        steps = max(json.loads((d / "result.json").read_text())["steps"] for d in directories)
        print(f"  undisturbed, {steps} steps", file=sys.stderr)
        run_undisturbed(out / "undisturbed", steps, setting=setting)
        found = [d for one in directories for d in differences(out / "undisturbed", one, num_ranks=setting.num_ranks)]
    summary = summarise(measurements, found, context)
    summary["rows"] = os.path.relpath(
        write_rows("recovery", [asdict(m) for m in measurements], context, save=options.save)
    )
    print(json.dumps(summary, indent=None if options.json else 2))
    return int(not summary["exact"])


if __name__ == "__main__":
    sys.exit(main())
