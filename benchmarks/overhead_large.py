"""What Leto costs a large model while nothing fails: two runs that are in memory at once take turns, a few steps each.

So both meet the same clocks and temperatures. Times of steps are the device's, from the end of a step to the end of the
next; the first and the last of each turn are left out.
"""

import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Lines, Setting, Workload, median

TURN_STEPS, TURNS = 8, 6
START_SECONDS_MAX, TURN_SECONDS_MAX = 150.0, 60.0
REHEARSAL_SECONDS = 5.0
"""How long a shadow that is ready may go on warming up."""
PS_PER_MS = 1e9


@dataclass(frozen=True)
class Contender:
    """A way to train.

    Args:
        name: Its name.
        strategy: Lightning's name of the strategy.
        shadows: Shadow trainers a rank, where that is Leto.
    """

    name: str
    strategy: str
    shadows: int = 0

    def arguments(self, setting: Setting) -> list[str]:
        """Arguments of `workload.py`."""
        if self.strategy != "leto":
            return ["--strategy", self.strategy]
        return ["--timers", "records", "--options", json.dumps({"shadows": self.shadows, **setting.options()})]


LETO, SHADOWED = Contender("leto", "leto"), Contender("leto, idle shadow", "leto", 1)


@dataclass(frozen=True)
class Result:
    """What a run was like.

    Args:
        contender: Who.
        pair: Number of the pair of runs that took turns.
        step_ms: Times of its steps.
        records: Nanoseconds of each step's records by part, on the host; empty without Leto.
        end: Its last note.
    """

    contender: Contender
    pair: int
    step_ms: list[float]
    records: list[dict[str, int]] = field(repr=False)
    end: dict[str, Any] = field(repr=False)

    @property
    def median_ms(self) -> float:
        """Median time of a step."""
        return float(statistics.median(self.step_ms))

    def row(self) -> dict[str, Any]:
        """One line of the table."""
        low, *_, high = statistics.quantiles(self.step_ms, n=5)
        times = {"step_ms": self.median_ms, "step_ms_p20": low, "step_ms_p80": high}
        return {
            "contender": self.contender.name,
            "pair": self.pair,
            **{name: round(value, 3) for name, value in times.items()},
            "slot_waits": self.end.get("slot_waits"),
            "reserved_mib": self.end["reserved_mib"],
        }


def take_turns(out: Path, number: int, pair: Sequence[Contender], setting: Setting) -> list[Result]:
    """Let a pair train in turns; both end with the same number of steps."""
    with ExitStack() as stack:
        runs: list[Workload] = []
        for index, contender in enumerate(pair):
            run = Workload(out / f"pair-{number}-{index}", contender.arguments(setting), setting=setting)
            run.hold(at=TURN_STEPS)
            stack.enter_context(run)
            runs.append(run)
        for run in runs:
            run.wait_until_held(at=TURN_STEPS, seconds=START_SECONDS_MAX)
        _wait_for_shadows(pair, runs)
        for turn in range(2, TURNS + 2):
            for run in runs if turn % 2 else reversed(runs):
                run.hold(at=turn * TURN_STEPS)
                run.wait_until_held(at=turn * TURN_STEPS, seconds=TURN_SECONDS_MAX)
        for run in runs:  # one more step, for the numbers to be written
            run.stop_at((TURNS + 1) * TURN_STEPS + 1)
            run.go_on()
            run.finish(seconds=TURN_SECONDS_MAX)
        results = [_result(contender, number, run.out) for contender, run in zip(pair, runs, strict=True)]
    for result in results:
        print(f"  {result.contender.name}: {result.median_ms:.2f} ms a step", file=sys.stderr)
    return results


def _wait_for_shadows(pair: Sequence[Contender], runs: Sequence[Workload]) -> None:
    for contender, run in zip(pair, runs, strict=True):
        if contender.shadows:
            run.wait_for(partial(run.last, "shadow_ready"), seconds=START_SECONDS_MAX, what="a shadow")
            time.sleep(REHEARSAL_SECONDS)


def _result(contender: Contender, pair: int, out: Path) -> Result:
    end = Lines(out / "end.r0.jsonl").new()[-1]
    # Mark i is the end of step i, so that the first time is that of step 1. The first turn is a warm-up.
    times = [(step, ms) for step, ms in enumerate(end.pop("device_ms"), start=1) if step >= TURN_STEPS]
    inner = [ms for step, ms in times if 0 < step % TURN_STEPS < TURN_STEPS - 1]
    notes = Lines(out / "steps.r0.jsonl").new()[TURN_STEPS:]
    return Result(contender, pair, inner, [note["parts_ns"] for note in notes if "parts_ns" in note], end)


def summarise(results: Sequence[Result], record_ms: Any, setting: Setting) -> dict[str, Any]:
    """Figures of pairs (Leto, plain) and (Leto, Leto with an idle shadow).

    Args:
        results: Of all runs.
        record_ms: Gives the milliseconds of a step's records from its parts.
        setting: What was trained.
    """
    by_pair: dict[int, dict[str, Result]] = {}
    for result in results:
        by_pair.setdefault(result.pair, {})[result.contender.name] = result
    leto, plain = by_pair[0][LETO.name], next(r for r in by_pair[0].values() if r.contender != LETO)
    parts = leto.end["parts_ms"]
    num_parameters = setting.num_parameters
    assert num_parameters is not None

    def ps(ms: float) -> float:
        return round(ms * PS_PER_MS / num_parameters, 3)

    records = median(map(record_ms, leto.records))
    assert records is not None
    # What is left of the difference without undo and gradients. The host's own time for records says nothing of it: it
    # runs ahead, and a part of that time is its wait for room in the stream's queue.
    rest_ms = leto.median_ms - plain.median_ms - parts["undo"] - parts["gradient_copy"]
    found = {
        "benchmark": "overhead",
        "step_ms": {result.contender.name: round(result.median_ms, 3) for result in by_pair[0].values()},
        "step_time_ratio": round(leto.median_ms / plain.median_ms, 5),
        "records_and_words_percent_of_step": round(100 * rest_ms / leto.median_ms, 4),
        "record_host_ms_per_step": records,
        "words_device_ms_per_step": round(parts["words"], 4),
        "words_per_step": int(parts["num_words"]),
        "added_ps_per_parameter": ps(leto.median_ms - plain.median_ms),
        "undo_ps_per_parameter": ps(parts["undo"]),
        "gradient_copy_ps_per_parameter": ps(parts["gradient_copy"]),
        "slot_waits": {f"{r.contender.name}, pair {r.pair}": r.end["slot_waits"] for r in results if r.records},
        "steps": (TURNS + 1) * TURN_STEPS + 1,
    }
    if 1 in by_pair:
        alone, beside = by_pair[1][LETO.name], by_pair[1][SHADOWED.name]
        found["idle_shadow_ratio"] = round(beside.median_ms / alone.median_ms, 5)
        found["idle_shadow_step_ms"] = {r.contender.name: round(r.median_ms, 3) for r in (alone, beside)}
    return found
