"""What Leto costs while nothing fails: the time of its step records, and its step against plain `ddp`.

The limit first. A step writes two records, START and MID, of 26 KB and 11 KB for a small model (`bytes` in the
output). Nearly all of it is state of random generators: torch 5 KB, Python 2.5 KB, NumPy 2.5 KB; START holds those of
the epoch's begin and of its sampler's first draw, too. Copied once at 10 GB/s (4 µs) and checksummed at 4 GB/s (9 µs,
zlib's crc32), 37 KB cost 13 µs a step, and the words, 3 a step and 2 a chunk, are stores of 16 bytes. All above that is
Python walking over loops, metrics, callbacks, attributes and generators. The undo copy of the update moves as many
bytes as parameters and moments have; it grows with the model and is part of `step_time_ratio`, not of the records.

`record_ms_per_step` is the median, over the steps of all ranks of a run, of what `timers.py` finds for records and
words, for the model where it is larger. `step_time_ratio` is the median quotient of the median step times of
neighbouring runs with "leto" and "ddp", which take turns, without timers; `cpu_ratio` the same of the processor time
that rank 0 used, which does not see waiting for a busy machine.

With `--device cuda` a GPT of 10^9 parameters is trained instead, on one GPU, and the runs take turns
(`overhead_large.py`). There the host runs ahead, and its time for records is no part of a step's time. What the
transaction costs is given per parameter: `added_ps_per_parameter` is the whole difference of two steps,
`undo_ps_per_parameter` the copy of parameters and moments (24 bytes moved: 5 ps at 4.8 TB/s),
`gradient_copy_ps_per_parameter` that of gradients into retained memory (8 bytes: 1.7 ps). What is left of the
difference is `records_and_words_percent_of_step`.
"""

import argparse
import json
import os
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import overhead_large
from benchmarks.harness import (
    Lines,
    Setting,
    Workload,
    add_setting,
    described,
    median,
    scratch_directory,
    setting_of,
    write_rows,
)
from benchmarks.timers import OTHER_PARTS
from leto_strategy.system import descendants

WARMUP_STEPS = 30
RUN_SECONDS_MAX = 240.0
Measured = tuple[dict[str, Any], list[dict[str, Any]]]
LOOKS_PER_RUN = 3


@dataclass(frozen=True)
class Model:
    """A size of the workload.

    Args:
        name: Its name.
        width: Size of the hidden layers.
        depth: Number of hidden layers.
        batch_size: Samples a rank and step.
        steps: Steps that are timed in a run.
    """

    name: str
    width: int
    depth: int
    batch_size: int
    steps: int

    def arguments(self) -> list[str]:
        """The arguments of `workload.py`."""
        return ["--width", str(self.width), "--depth", str(self.depth), "--batch-size", str(self.batch_size)]


TINY, SMALL = Model("tiny", 64, 3, 8, 200), Model("small", 512, 6, 64, 100)


@dataclass(frozen=True)
class RunTimes:
    """One run.

    Args:
        model: Name of the model.
        strategy: Name of the strategy.
        repetition: Number of the repetition.
        step_ms: Median time between the ends of neighbouring steps of rank 0.
        cpu_ms: Median processor time of rank 0's process in a step.
        rss_mib: Largest peak memory of a rank's process.
        job_pss_mib: Largest sum seen over all processes of the run, shared memory counted once; with Leto these are
            shadows, supervisor, managers and zygote, too.
    """

    model: str
    strategy: str
    repetition: int
    step_ms: float
    cpu_ms: float
    rss_mib: float
    job_pss_mib: float


def time_steps(out: Path, model: Model, strategy: str, repetition: int, *, setting: Setting, steps: int) -> RunTimes:
    """Run one training and read its step times and memory."""
    arguments = [*model.arguments(), "--strategy", strategy]
    job_pss_mib = 0.0
    with Workload(out, arguments, setting=setting) as run:
        run.stop_at(WARMUP_STEPS + steps)
        # Looking into /proc takes time from the run: only while its steps are not timed, just before, and at its end.
        run.wait_for(lambda: run.num_steps >= WARMUP_STEPS // 2, seconds=RUN_SECONDS_MAX, what="the first steps")
        for _ in range(LOOKS_PER_RUN):
            job_pss_mib = max(job_pss_mib, _job_pss_mib(run.pid))
        run.finish(seconds=RUN_SECONDS_MAX)
    notes = Lines(out / "steps.r0.jsonl").new()[WARMUP_STEPS:]
    memory = [Lines(out / f"end.r{rank}.jsonl").new()[-1]["rss_mib"] for rank in range(setting.num_ranks)]
    step_ms, cpu_ms = _median_difference_ms(notes, "monotonic_ns"), _median_difference_ms(notes, "cpu_ns")
    return RunTimes(model.name, strategy, repetition, step_ms, cpu_ms, round(max(memory), 1), round(job_pss_mib, 1))


def _median_difference_ms(notes: Sequence[Mapping[str, Any]], field: str) -> float:
    differences = [(b[field] - a[field]) / 1e6 for a, b in pairwise(notes)]
    return round(float(statistics.median(differences)), 4)


def _job_pss_mib(pid: int) -> float:
    """Proportional set size of a process and all below it."""
    total_kib = 0
    for process in (pid, *descendants(pid)):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            total_kib += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):
            continue  # it has ended
    return total_kib / 1024


def time_records(out: Path, model: Model, timers: str, *, setting: Setting, steps: int) -> list[dict[str, int]]:
    """Run one training with timers; returns the parts of each step, nanoseconds and bytes, of all ranks."""
    with Workload(out, [*model.arguments(), "--timers", timers], setting=setting) as run:
        run.stop_at(WARMUP_STEPS + steps)
        run.finish(seconds=RUN_SECONDS_MAX)
    notes = [Lines(out / f"steps.r{rank}.jsonl").new()[WARMUP_STEPS:] for rank in range(setting.num_ranks)]
    return [note["parts_ns"] for of_rank in notes for note in of_rank]


def record_ms(parts_ns: Mapping[str, int]) -> float:
    """Milliseconds of one step that belong to records and words."""
    apart = (*OTHER_PARTS, "bytes")
    return sum(ns for part, ns in parts_ns.items() if part.partition(".")[0] not in apart) / 1e6


def part_medians(steps: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """Median milliseconds of each part, longest first."""
    names = {name for step in steps for name in step if not name.startswith("bytes.")}
    found = {name: round(statistics.median(step.get(name, 0) for step in steps) / 1e6, 4) for name in names}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def record_bytes(steps: Sequence[Mapping[str, int]]) -> dict[str, float | None]:
    """Median bytes of each record."""
    names = ("bytes.start", "bytes.mid")
    return {name.removeprefix("bytes."): median((step.get(name) for step in steps), digits=0) for name in names}


def ratio(runs: Sequence[RunTimes], model: str, field: str) -> float | None:
    """Median of the quotients of neighbouring runs."""
    times = {(run.strategy, run.repetition): getattr(run, field) for run in runs if run.model == model}
    return median(times["leto", n] / times["ddp", n] for s, n in times if s == "leto" and ("ddp", n) in times)


def summarise(
    runs: Sequence[RunTimes],
    records: Mapping[str, list[dict[str, int]]],
    parts: Mapping[str, list[dict[str, int]]],
    context: Mapping[str, Any],
) -> dict[str, Any]:
    """The JSON line."""

    def of(field: str, model: str, strategy: str) -> float | None:
        return median(getattr(run, field) for run in runs if (run.model, run.strategy) == (model, strategy))

    names = [model.name for model in (TINY, SMALL)]
    by_model = {name: median(record_ms(step) for step in steps) for name, steps in records.items()}
    return {
        "benchmark": "overhead",
        "record_ms_per_step": max((value for value in by_model.values() if value is not None), default=None),
        "step_time_ratio": ratio(runs, SMALL.name, "step_ms"),
        "step_time_ratio_tiny": ratio(runs, TINY.name, "step_ms"),
        "cpu_ratio": ratio(runs, SMALL.name, "cpu_ms"),
        "cpu_ratio_tiny": ratio(runs, TINY.name, "cpu_ms"),
        "record_ms_by_model": by_model,
        "num_steps_timed": {name: len(steps) for name, steps in records.items()},
        "step_ms": {name: {s: of("step_ms", name, s) for s in ("leto", "ddp")} for name in names},
        "cpu_ms": {name: {s: of("cpu_ms", name, s) for s in ("leto", "ddp")} for name in names},
        "peak_rss_mib": {name: {s: of("rss_mib", name, s) for s in ("leto", "ddp")} for name in names},
        "job_pss_mib": {name: {s: of("job_pss_mib", name, s) for s in ("leto", "ddp")} for name in names},
        "bytes": {name: record_bytes(steps) for name, steps in parts.items()},
        "parts_ms": {name: part_medians(steps) for name, steps in parts.items()},
        **context,
    }


def measure_small(options: argparse.Namespace, setting: Setting, context: Mapping[str, Any], out: Path) -> Measured:
    """Two sizes of the perceptron under "leto" and "ddp"; summary and rows."""
    runs: list[RunTimes] = []
    records: dict[str, list[dict[str, int]]] = {}
    parts: dict[str, list[dict[str, int]]] = {}
    for model in (TINY, SMALL):
        steps = options.steps or model.steps
        where = out / f"records-{model.name}"
        records[model.name] = time_records(where, model, "records", setting=setting, steps=steps)
        print(f"  {model.name} records: {median(map(record_ms, records[model.name]))} ms", file=sys.stderr)
        for repetition in range(0 if options.records_only else options.repetitions):
            for strategy in ("leto", "ddp") if repetition % 2 == 0 else ("ddp", "leto"):
                where = out / f"{model.name}-{strategy}-{repetition}"
                run = time_steps(where, model, strategy, repetition, setting=setting, steps=steps)
                runs.append(run)
                print(f"  {model.name} {strategy} {repetition + 1}: {run.step_ms:.2f} ms a step", file=sys.stderr)
        where = out / f"parts-{model.name}"
        parts[model.name] = time_records(where, model, "parts", setting=setting, steps=steps)
    summary = summarise(runs, records, parts, context)
    by_model = summary["record_ms_by_model"]
    return summary, [asdict(run) for run in runs] or [{"model": m, "record_ms": v} for m, v in by_model.items()]


def measure_large(options: argparse.Namespace, setting: Setting, context: Mapping[str, Any], out: Path) -> Measured:
    """Leto against a plain strategy, and with an idle shadow against none; summary and rows."""
    plain = overhead_large.Contender(options.plain, options.plain)
    pairs = [(overhead_large.LETO, plain), (overhead_large.LETO, overhead_large.SHADOWED)]
    results = [
        result
        for number, pair in enumerate(pairs[: 1 if options.no_shadow else 2])
        for result in overhead_large.take_turns(out, number, pair, setting)
    ]
    summary = overhead_large.summarise(results, record_ms, setting)
    return {**summary, **context}, [result.row() for result in results]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Time of the step records, and step time against plain ddp.")
    parser.add_argument("--json", action="store_true", help="print one JSON line last (else an indented object)")
    parser.add_argument("--repetitions", type=int, default=3, help="pairs of runs, leto and ddp, for each model")
    parser.add_argument("--steps", type=int, default=None, help="timed steps of every run; default: by model")
    parser.add_argument("--records-only", action="store_true", help="leave out the comparison with ddp")
    parser.add_argument("--plain", default="auto", help="what a large model is trained with for comparison")
    parser.add_argument("--no-shadow", action="store_true", help="leave out what an idle shadow does to a large model")
    add_setting(parser)
    parser.add_argument("--save", action="store_true", help="append the rows to benchmarks/data/, which is kept")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    setting = setting_of(options)
    context = {"ranks": setting.num_ranks, **described(setting)}
    measure = measure_small if setting.num_parameters is None else measure_large
    with scratch_directory("leto-overhead-", setting.device) as name:
        summary, rows = measure(options, setting, context, Path(name))
    summary["rows"] = os.path.relpath(write_rows("overhead", rows, context, save=options.save))
    print(json.dumps(summary, indent=None if options.json else 2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
