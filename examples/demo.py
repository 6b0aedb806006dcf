"""Trains a small GPT, kills it four times with SIGKILL, and compares it with undisturbed runs.

It trains on one GPU where there is one, else on two CPU ranks. `make demo`, or `python examples/demo.py`. Three kills
are planned inside the trainers, at a point of a step; one comes from here, at a random moment. Everything that is said
about equality is computed from what the runs wrote: losses by their bits, batches by their sample numbers and a hash of
their bytes, weights by their bytes. Exit status 1 where anything differs or a planned kill did not happen. The training
itself is `gpt.py` beside this file; it is run as a user would run it.
"""

import argparse
import json
import math
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.comparison import NUM_RANKS, Check, Lines, compare, read_notes
from examples.picture import Curve, Failure, draw
from leto_strategy.system import set_parent_death_signal

ROOT = Path(__file__).resolve().parents[1]
PHASES = ("detect", "reap", "localise", "rebuild", "restore")
SILENT_SECONDS_MAX = 90.0
STOP_SECONDS_MAX = 12.0
LOOK_SECONDS = 0.01
LINES_WITHOUT_TERMINAL = 5


@dataclass(frozen=True)
class Place:
    """Where the demo trains.

    Args:
        accelerator: As in the Trainer.
        num_ranks: Number of ranks.
        steps: Steps of a run: long enough for new shadows to be there before the next kill.
        model: Arguments of `gpt.py`: sizes at which a step takes about a tenth of a second.
        text: For people.
    """

    accelerator: str
    num_ranks: int
    steps: int
    model: tuple[str, ...]
    text: str

    def arguments(self) -> list[str]:
        """Arguments of `gpt.py`."""
        return ["--accelerator", self.accelerator, "--devices", str(self.num_ranks), *self.model]


CPU = Place("cpu", NUM_RANKS, 150, (), f"{NUM_RANKS} CPU ranks")
GPU = Place("gpu", 1, 300, ("--width", "768", "--layers", "12", "--batch-size", "64"), "one GPU")


def choose_place(accelerator: str) -> Place:
    """Where to train: as asked, or on a GPU if there is one. No CUDA context is made for the question."""
    import torch

    on_gpu = torch.cuda.is_available() if accelerator == "auto" else accelerator == "gpu"
    return GPU if on_gpu else CPU


@dataclass
class Kill:
    """One SIGKILL.

    Args:
        rank: Who is killed.
        step: In which step, or, from outside, in which step at the earliest.
        text: What the timeline says.
        point: Where in the step, see `leto_strategy.faults.POINTS`; "" for a kill from outside.
        chunk: Chunk of the update.
        killed_ns: CLOCK_MONOTONIC ns just before a kill from outside, else 0.
        recovery: The event that says how it ended.
    """

    rank: int
    step: int
    text: str
    point: str = ""
    chunk: int | None = None
    killed_ns: int = 0
    failed_step: int | None = None
    recovery: dict[str, Any] = field(default_factory=dict)

    def phases_ms(self) -> dict[str, float]:
        """Milliseconds by phase; a kill from outside is counted from its call of `kill`, not from being noticed."""
        phases = {name: self.recovery["phases_ms"].get(name) or 0.0 for name in PHASES}
        if self.killed_ns:
            entered_ns = self.recovery["seen_entered_ns"]
            phases["detect"] = max(0.0, (entered_ns - self.killed_ns) / 1e6 - sum(phases.values()))
        return phases


def plan_kills(steps: int, num_ranks: int) -> list[Kill]:
    """The kills of a run of `steps` steps; the one without a point is done from here."""
    last = num_ranks - 1
    return [
        Kill(last, steps * 2 // 10, f"rank {last}, in its forward pass", "forward"),
        Kill(0, steps * 4 // 10, "rank 0, from outside, at random"),
        Kill(0, steps * 7 // 10, "rank 0, in the middle of its update", "chunk_updating", chunk=1),
        Kill(last, steps - 1, f"rank {last}, on the last step", "backward"),
    ]


# Showing.


class Screen:
    """What a person sees: a line for everything that happens, and a bar while a run goes on; without a terminal, lines.

    Args:
        steps: Steps of a run.
    """

    def __init__(self, steps: int) -> None:
        terminal = sys.stdout.isatty()
        self.console = Console(highlight=False, width=None if terminal else 110)
        self._steps, self._began = steps, time.monotonic()
        self._bar: Progress | None = None
        self._terminal = terminal

    def say(self, text: str) -> None:
        """One line of the timeline."""
        self.console.print(f"[dim]{time.monotonic() - self._began:6.1f} s[/dim]  {text}")

    @contextmanager
    def run(self, title: str) -> Iterator[None]:
        """A run, with a headline and, on a terminal, a bar."""
        self.say(f"[bold]{title}[/bold]")
        if not self._terminal:
            yield
            return
        columns = (TextColumn("          "), BarColumn(40), MofNCompleteColumn(), TextColumn("{task.description}"))
        # No thread of its own: it is refreshed where a step is seen.
        with Progress(*columns, console=self.console, transient=True, auto_refresh=False) as self._bar:
            self._task = self._bar.add_task("starting", total=self._steps)
            self._bar.refresh()
            yield
        self._bar = None

    def step(self, note: Mapping[str, Any]) -> None:
        """A step is done."""
        number, loss = note["step"] + 1, float.fromhex(note["loss"])
        if self._bar is not None:
            self._bar.update(self._task, completed=number, description=f"loss {loss:.3f}")
            self._bar.refresh()
        elif number % max(1, self._steps // LINES_WITHOUT_TERMINAL) == 0:
            self.say(f"step {number} of {self._steps}, loss {loss:.3f}")


# Running.


class Run:
    """One training run and what it leaves in its directory.

    Args:
        name: Directory below `out`.
        title: What the timeline says.
        out: The demo's directory.
        steps: Number of steps.
        strategy: Name of the strategy.
        kills: SIGKILLs, in the order of their steps.
        place: Where it trains.
    """

    def __init__(
        self, name: str, title: str, out: Path, *, steps: int, strategy: str, kills: list[Kill], place: Place
    ) -> None:
        self.title, self.directory, self.steps, self.strategy, self.kills = title, out / name, steps, strategy, kills
        self.place = place
        self._pids: list[int] = []
        self._ready = False
        self._entered_ns = 0
        self._waiting = list(kills)
        self._open: list[Kill] = []

    def train(self, screen: Screen, rng: random.Random) -> None:
        """Run it to its end.

        Raises:
            RuntimeError: It failed, or stood still; with the end of its output.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        for old in (*self.directory.glob("steps.r*.jsonl"), self.directory / "weights.pt"):
            old.unlink(missing_ok=True)
        (self.directory / "leto" / "events.jsonl").unlink(missing_ok=True)
        events, notes = Lines(self.directory / "leto" / "events.jsonl"), Lines(self.directory / "steps.r0.jsonl")
        moved = time.monotonic()
        with screen.run(self.title), self._process() as process:
            while True:
                status = process.poll()
                for event in events.new():
                    self._on_event(event, screen)
                for note in notes.new():
                    moved = time.monotonic()
                    screen.step(note)
                    self._kill_from_outside(note["step"] + 1, screen, rng)
                if status is not None:
                    break
                if time.monotonic() - moved > SILENT_SECONDS_MAX:
                    raise RuntimeError(f"no step for {SILENT_SECONDS_MAX:g} s\n{self._output()}")
                time.sleep(LOOK_SECONDS)
        if status != 0:
            raise RuntimeError(f"the training ended with status {status}\n{self._output()}")

    @contextmanager
    def _process(self) -> Iterator[subprocess.Popen[bytes]]:
        """`python gpt.py`, in a process group of its own, so that this process decides how it is ended."""
        arguments = ["--out", str(self.directory), "--steps", str(self.steps), "--strategy", self.strategy]
        arguments += self.place.arguments()
        planned = [
            {"rank": kill.rank, "step": kill.step, "point": kill.point, "chunk": kill.chunk}
            for kill in self.kills
            if kill.point
        ]
        if planned:
            arguments += ["--faults", json.dumps(planned)]
        with open(self.directory / "output.txt", "wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(ROOT / "examples" / "gpt.py"), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONWARNINGS": "ignore"},
                process_group=0,
                preexec_fn=lambda: set_parent_death_signal(signal.SIGTERM),
            )
        try:
            yield process
        finally:
            self._end(process)

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        """First as Ctrl-C would, so that everything below it is shut down in order; then for certain."""
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_SECONDS_MAX)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                pass
        try:
            os.killpg(process.pid, signal.SIGKILL)  # the second rank of plain ddp, where it is still there
        except ProcessLookupError:
            pass
        process.wait()

    def _output(self) -> str:
        return (self.directory / "output.txt").read_text(errors="replace")[-3000:]

    def _kill_from_outside(self, step: int, screen: Screen, rng: random.Random) -> None:
        kill = next((kill for kill in self._waiting if not kill.point), None)
        if kill is None or not self._ready or not kill.step <= step < self.steps - 1:
            return
        self._waiting.remove(kill)
        time.sleep(rng.uniform(0.0, 0.1))
        kill.killed_ns = time.monotonic_ns()
        os.kill(self._pids[kill.rank], signal.SIGKILL)
        self._open.append(kill)

    def _on_event(self, event: dict[str, Any], screen: Screen) -> None:
        match event["event"]:
            case "promoted":
                self._pids, self._ready = event["pids"], False
            case "shadow_ready":
                self._ready = True
            case "entered":
                self._entered_ns = event["monotonic_ns"]
            case "trainer_failed":
                kill = self._kill_of(event)
                text = f"{event['cause']} of rank {event['rank']}, unplanned" if kill is None else kill.text
                screen.say(f"[red]SIGKILL[/red] {text} (pid {event['pid']}, step {event['step']})")
            case "recovered":
                self._on_recovered(event, screen)

    def _kill_of(self, event: Mapping[str, Any]) -> Kill | None:
        """The kill that a failure comes from."""
        for kill in self._open:
            if kill.failed_step is None and kill.rank == event["rank"]:
                kill.failed_step = event["step"]
                return kill
        for kill in self._waiting:
            if kill.point and (kill.rank, kill.step) == (event["rank"], event["step"]):
                self._waiting.remove(kill)
                self._open.append(kill)
                kill.failed_step = event["step"]
                return kill
        return None

    def _on_recovered(self, event: dict[str, Any], screen: Screen) -> None:
        kill = next((kill for kill in self._open if not kill.recovery), None)
        if kill is None:
            screen.say(f"recovered from something unplanned: {event}")
            return
        kill.recovery = {**event, "seen_entered_ns": self._entered_ns}
        phases = kill.phases_ms()
        parts = " · ".join(f"{name} {value:.0f}" for name, value in phases.items())
        screen.say(
            f"[green]back[/green] in [bold]{sum(phases.values()):.0f} ms[/bold] ({parts}), {event['level']} trainer"
        )


# The whole of it.


def compare_all(runs: list[Run]) -> dict[str, list[Check]]:
    """Compare the first run with each of the others."""
    killed = runs[0]
    return {
        run.title: compare(run.directory, killed.directory, steps=killed.steps, num_ranks=killed.place.num_ranks)
        for run in runs[1:]
    }


def all_identical(comparisons: Mapping[str, list[Check]]) -> bool:
    """Nothing differs anywhere."""
    return all(check.identical for checks in comparisons.values() for check in checks)


def summarise(out: Path, kills: list[Kill], comparisons: Mapping[str, list[Check]], seed: int) -> dict[str, Any]:
    """Everything the demo found, for other programs; also written to `summary.json`."""
    identical = all_identical(comparisons)
    recovered = bool(kills) and all(kill.recovery for kill in kills)
    summary = {
        "identical": identical,
        "all_kills_recovered": recovered,
        "seed": seed,
        "comparisons": {name: [asdict(check) for check in checks] for name, checks in comparisons.items()},
        "kills": [
            {
                "rank": kill.rank,
                "step": kill.failed_step,
                "where": kill.point or "outside",
                "total_ms": round(sum(kill.phases_ms().values()), 3) if kill.recovery else None,
                "phases_ms": {k: round(v, 3) for k, v in kill.phases_ms().items()} if kill.recovery else None,
                "level": kill.recovery.get("level"),
                "steps_repeated": kill.recovery.get("steps_repeated"),
            }
            for kill in kills
        ],
        "machine": {"cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()},
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def show_kills(screen: Screen, kills: list[Kill]) -> None:
    """One row a kill, times in milliseconds."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("killed with SIGKILL", "step", "back in ms", *PHASES, "begun again"):
        table.add_column(column, justify="left" if column.startswith("killed") else "right")
    for kill in kills:
        if kill.recovery:
            times = [f"{value:.0f}" for value in kill.phases_ms().values()]
            total, again = f"[bold]{sum(kill.phases_ms().values()):.0f}[/bold]", str(kill.recovery["steps_repeated"])
            table.add_row(kill.text, str(kill.failed_step), total, *times, again)
        else:
            table.add_row(kill.text, "–", "[red]none[/red]")
    screen.console.print()
    screen.console.print(table)
    screen.console.print("[dim]begun again: steps whose forward pass was under way; no finished step ever is[/dim]\n")


def show_comparisons(screen: Screen, comparisons: Mapping[str, list[Check]]) -> None:
    """One row a comparison."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("the killed run against", "what", "values", "different", ""):
        table.add_column(column, justify="right" if column in ("values", "different") else "left")
    for title, checks in comparisons.items():
        for check in checks:
            verdict = "[green]identical[/green]" if check.identical else f"[bold red]differs[/bold red]: {check.first}"
            table.add_row(title, check.what, f"{check.num_compared:,}", f"{check.num_different:,}", verdict)
    screen.console.print(table)


def paint(out: Path, runs: Mapping[str, Path], kills: list[Kill], summary: Mapping[str, Any]) -> Path | None:
    """Draw the losses; None where matplotlib is missing."""
    killed = _curve("killed four times" if len(kills) == 4 else f"killed {len(kills)} times", runs["killed"])
    quiet = _curve("undisturbed", runs["undisturbed"])
    failures = [
        Failure(
            kill.failed_step,
            f"SIGKILL {kill.text.replace(', ', chr(10), 1)}",
            sum(kill.phases_ms().values()) if kill.recovery else None,
        )
        for kill in kills
        if kill.failed_step is not None
    ]
    same = summary["identical"]
    verdict = f"{len(failures)} × kill -9, and the loss is {'bit-identical' if same else 'NOT identical'}"
    path = out / "loss.png"
    try:
        draw(path, killed, quiet, failures, verdict=verdict, good=same)
    except ImportError:
        return None
    return path


def _curve(name: str, directory: Path) -> Curve:
    by_rank = [read_notes(directory, rank) for rank, _ in enumerate(directory.glob("steps.r*.jsonl"))]
    steps = sorted(set.intersection(*(set(notes) for notes in by_rank)))
    losses = [sum(float.fromhex(notes[step][0]["loss"]) for notes in by_rank) / len(by_rank) for step in steps]
    ends = [by_rank[0][step][0]["monotonic_ns"] / 1e6 for step in steps]
    return Curve(name, losses, [math.nan, *(b - a for a, b in pairwise(ends))])


def main() -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(description="Train, kill -9 four times, compare with undisturbed runs.")
    parser.add_argument("--out", type=Path, default=ROOT / "examples" / "out", help="directory of all that is written")
    parser.add_argument("--accelerator", choices=("auto", "cpu", "gpu"), default="auto", help="auto: a GPU if there is")
    parser.add_argument("--steps", type=int, default=None, help="steps of each run, at least 10; default: by device")
    parser.add_argument("--seed", type=int, default=None, help="of the moment of the kill from outside")
    parser.add_argument("--no-ddp", action="store_true", help="leave out the run with Lightning's own ddp")
    parser.add_argument("--compare-only", action="store_true", help="only compare again what is in --out")
    options = parser.parse_args()
    place = choose_place(options.accelerator)
    steps = place.steps if options.steps is None else options.steps
    if steps < 10:
        parser.error(f"--steps {steps}: use at least 10")
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if out == ROOT / "examples" / "out":
        (out / ".gitignore").write_text("*\n")
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    screen, kills = Screen(steps), plan_kills(steps, place.num_ranks)

    def run_of(name: str, what: str, strategy: str, kills: list[Kill]) -> Run:
        title = f'strategy="{strategy}", {what}'
        return Run(name, title, out, steps=steps, strategy=strategy, kills=kills, place=place)

    runs = [
        run_of("killed", "killed four times", "leto", kills),
        run_of("undisturbed", "undisturbed", "leto", []),
        run_of("ddp", "undisturbed", "ddp", []),
    ]
    runs = runs[:2] if options.no_ddp else runs
    if options.compare_only:
        comparisons = compare_all(runs)
        show_comparisons(screen, comparisons)
        return int(not all_identical(comparisons))
    screen.console.print(f"A GPT on the text of CPython's documentation, {place.text}, {steps} steps; seed {seed}\n")
    try:
        for run in runs:
            run.train(screen, random.Random(seed))
    except RuntimeError as error:
        screen.console.print("[bold red]The demo failed:[/bold red]", escape(str(error)))
        return 1
    except KeyboardInterrupt:
        screen.console.print("Interrupted; everything that was started has been ended")
        return 130
    comparisons = compare_all(runs)
    summary = summarise(out, kills, comparisons, seed)
    show_kills(screen, kills)
    show_comparisons(screen, comparisons)
    picture = paint(out, {run.directory.name: run.directory for run in runs}, kills, summary)
    where = f"Picture: {picture}" if picture else "No picture: pip install 'leto-strategy[demo]'"
    screen.console.print(f"\n{where}\nSummary: {out / 'summary.json'}", soft_wrap=True)
    good = summary["identical"] and summary["all_kills_recovered"]
    verdict = "[green]Identical, bit for bit.[/green]" if good else "[bold red]Not as it should be.[/bold red]"
    screen.say(f"[bold]{verdict}[/bold]")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
