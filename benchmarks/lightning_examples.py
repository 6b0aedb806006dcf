"""Runs Lightning's own examples under plain "ddp", under "leto", and under "leto" with two SIGKILLs, and compares.

The scripts are not part of this repository. Fetch them, then give their directory:

    git clone --depth 1 --filter=blob:none --sparse https://github.com/Lightning-AI/pytorch-lightning
    git -C pytorch-lightning sparse-checkout set examples/pytorch
    pip install torchvision
    python benchmarks/lightning_examples.py pytorch-lightning/examples/pytorch --out /tmp/leto-examples

`example_data.py` writes small random data sets in the formats and places that the scripts look for, and random weights
for "pretrained" networks, so that nothing is downloaded but CIFAR-10. Two CPU ranks; what makes a run short is given by
the command line of LightningCLI or by Lightning's variables PL_TRAINER_*, which fill in what a script does not say. A
script that writes its Trainer out is run from a copy in which that call names the strategy; nothing else is different
but what `Script.edits` lists.

Prints one JSON line a script: what was killed, how it came back, and whether every file that the runs have left
(checkpoints, metrics, event files, images) and every result they printed is the same, bit for bit.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from leto_strategy.cli import jobs
from leto_strategy.errors import LetoError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.event_reader import event_directories, first_difference  # noqa: E402

from benchmarks.example_data import make_data  # noqa: E402

SECONDS_MAX = 400.0
LOOK_SECONDS = 0.005
_NOT_RESULTS = {"code", "Datasets", "data", "leto", "output.txt", "config.yaml"}
_PRINTED = re.compile(r"^(?:│|\s*tensor\(|\s+\[+-?\d)")


@dataclass(frozen=True)
class Script:
    """One script, and how it is made short enough and killed.

    Args:
        path: Below the directory of the scripts.
        arguments: Of its command line; a LightningCLI gets the strategy there, too.
        cli: It is a LightningCLI.
        variables: PL_TRAINER_*, without that beginning.
        edits: Text to exchange in the copy besides the strategy.
        planned: Faults that Leto itself lets happen: rank, point, step; more fields of `Fault` as a mapping.
        outside: Rank and least step of a trainer that this process kills as soon as `leto status` shows it there.
        find_unused: Both strategies need `find_unused_parameters`.
        unnamed: Files whose content is times of this run.
        note: What is special.
    """

    path: str
    arguments: tuple[str, ...] = ()
    cli: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    edits: tuple[tuple[str, str], ...] = ()
    planned: tuple[Mapping[str, Any], ...] = ()
    outside: tuple[int, int] | None = None
    find_unused: bool = False
    unnamed: str = r"$^"
    note: str = ""

    @property
    def name(self) -> str:
        """Its file's name."""
        return Path(self.path).stem


def kill(rank: int, point: str, step: int, **more: Any) -> dict[str, Any]:
    """A planned SIGKILL."""
    return {"rank": rank, "point": point, "fault": "kill", "step": step, **more}


_CPU = ("--trainer.accelerator=cpu", "--trainer.devices=2")
_SEEDED = (("import torch\n", "import torch; torch.manual_seed(5)\n"),)
_TWO = {"ACCELERATOR": "cpu", "DEVICES": "2"}
_MNIST = (
    *_CPU, "--trainer.max_epochs=2", "--trainer.limit_train_batches=20", "--trainer.limit_val_batches=4",
    "--trainer.limit_test_batches=4", "--trainer.limit_predict_batches=2", "--trainer.log_every_n_steps=3",
)  # fmt: skip

SCRIPTS = (
    Script(
        "bug_report/bug_report_model.py",
        variables=_TWO,
        edits=_SEEDED,
        planned=(kill(1, "chunk_updating", 0), kill(0, "batch_end", 0, generation=1)),
        note="it has one step, so both kills are planned; it has no seed",
    ),
    Script(
        "basics/autoencoder.py",
        _MNIST,
        cli=True,
        planned=(kill(1, "chunk_updating", 7),),
        outside=(0, 24),
    ),
    Script(
        "basics/backbone_image_classifier.py",
        _MNIST,
        cli=True,
        planned=(kill(0, "chunk_updating", 11),),
        outside=(1, 25),
    ),
    Script(
        "basics/transformer.py",
        variables=_TWO
        | {
            "LIMIT_TRAIN_BATCHES": "12",
            "LIMIT_VAL_BATCHES": "3",
            "LIMIT_TEST_BATCHES": "3",
            "MAX_STEPS": "30",
            "LOG_EVERY_N_STEPS": "1",
        },
        planned=(kill(1, "chunk_updating", 5),),
        outside=(0, 16),
    ),
    Script(
        "domain_templates/generative_adversarial_net.py",
        variables={
            "MAX_EPOCHS": "2",
            "LIMIT_TRAIN_BATCHES": "12",
            "LIMIT_VAL_BATCHES": "2",
            "LOG_EVERY_N_STEPS": "2",
        },
        edits=(*_SEEDED, ('accelerator="gpu", devices=1', 'accelerator="cpu", devices=2')),
        planned=(kill(1, "snapshot_middle", 9),),
        outside=(0, 15),
        find_unused=True,
        note='it asks for one GPU in its code; it has no seed; with two ranks "ddp" needs find_unused_parameters, too',
    ),
    Script(
        "domain_templates/computer_vision_fine_tuning.py",
        (
            "fit",
            *_CPU,
            "--trainer.max_epochs=4",
            "--trainer.limit_train_batches=3",
            "--trainer.limit_val_batches=2",
            "--trainer.log_every_n_steps=1",
            "--data.batch_size=2",
            "--finetuning.milestones=[1,2]",
        ),
        cli=True,
        planned=(kill(1, "snapshot_middle", 4),),
        outside=(0, 8),
    ),
    Script(
        "domain_templates/imagenet.py",
        (
            "fit",
            *_CPU,
            "--model.data_path=data/imagenet",
            "--model.batch_size=8",
            "--model.workers=0",
            "--trainer.max_epochs=2",
            "--trainer.limit_train_batches=6",
            "--trainer.limit_val_batches=2",
        ),
        cli=True,
        planned=(kill(0, "chunk_updating", 3),),
        outside=(1, 8),
    ),
    Script(
        "domain_templates/reinforce_learn_Qnet.py",
        variables={"MAX_EPOCHS": "2", "LOG_EVERY_N_STEPS": "1"},
        find_unused=True,
        planned=(kill(0, "snapshot_middle", 4),),
        outside=(0, 16),
        note="its data share objects with the module: a killed run ends with StateChangedError; needs gym below 0.26",
    ),
    Script(
        "domain_templates/reinforce_learn_ppo.py",
        ("--steps_per_epoch", "512", "--batch_size", "64"),
        variables={"MAX_EPOCHS": "3", "LOG_EVERY_N_STEPS": "1"},
        planned=(kill(0, "snapshot_middle", 4),),
        outside=(0, 16),
        note="its data follow from weights: a killed run ends with StateChangedError; needs gym below 0.26",
    ),
    Script(
        "basics/profiler_example.py",
        (*_CPU, "--trainer.limit_train_batches=8", "--trainer.limit_val_batches=3", "--trainer.log_every_n_steps=1"),
        cli=True,
        planned=(kill(1, "chunk_updating", 2),),
        outside=(0, 5),
        edits=(
            (
                '"profiler": PyTorchProfiler()',
                '"profiler": {"class_path": "lightning.pytorch.profilers.PyTorchProfiler"}',
            ),
        ),
        unnamed=r"\.pt\.trace\.json$|fit-.*\.txt$",
        note="jsonargparse refuses its default profiler, under any strategy; traces hold times and are not compared",
    ),
)


class Run:
    """One run of a script in a directory of its own.

    Args:
        script: What runs.
        mode: "ddp", "leto" or "killed".
        scripts: Directory of Lightning's scripts.
        out: Directory of the examples' runs and data.
    """

    def __init__(self, script: Script, mode: str, scripts: Path, out: Path) -> None:
        self.script, self.mode = script, mode
        self.directory = out / script.name / mode
        shutil.rmtree(self.directory, ignore_errors=True)
        code = self.directory / "code" / script.path
        code.parent.mkdir(parents=True)
        code.write_text(self._edited((scripts / script.path).read_text()))
        for name in ("Datasets", "data"):
            shutil.copytree(out / "inputs" / name, self.directory / name, copy_function=os.link)
        self._env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCH_HOME": str(out / "inputs" / "torch"),
            **{f"PL_TRAINER_{name}": value for name, value in script.variables.items()},
        }
        self._command = [sys.executable, str(code), *self._arguments()]
        self.killed: list[dict[str, Any]] = []

    def _strategy(self) -> str:
        name = "ddp" if self.mode == "ddp" else "leto"
        return f"{name}_find_unused_parameters_true" if self.script.find_unused else name

    def _edited(self, text: str) -> str:
        strategy = repr(self._strategy())
        if self.mode == "killed":
            options = f"find_unused_parameters={self.script.find_unused}, faults={list(self.script.planned)!r}"
            strategy = f"__import__('leto_strategy').LetoStrategy({options})"
        chosen = [] if self.script.cli else [("Trainer(", f"Trainer(strategy={strategy}, ")]
        edits = [*chosen, *self.script.edits]
        for old, new in edits:
            if old not in text:
                raise SystemExit(f"{self.script.path} has no {old!r}: it is not the version this was written for")
            text = text.replace(old, new)  # a docstring may show the same call
        return text

    def _arguments(self) -> list[str]:
        if not self.script.cli:
            return list(self.script.arguments)
        strategy = self._strategy()
        if self.mode == "killed":
            options = {"faults": [dict(fault) for fault in self.script.planned]}
            strategy = json.dumps({"class_path": "leto_strategy.LetoStrategy", "init_args": options})
        return [*self.script.arguments, f"--trainer.strategy={strategy}"]

    def finish(self) -> float:
        """Run it to its end, killing a trainer from outside where that is planned; returns its seconds.

        Raises:
            RuntimeError: It failed, or is not over in time.
        """
        begin = time.monotonic()
        with (self.directory / "output.txt").open("w") as output:
            process = subprocess.Popen(
                self._command, cwd=self.directory, env=self._env, stdout=output, stderr=subprocess.STDOUT
            )
        wanted = self.script.outside if self.mode == "killed" else None
        while process.poll() is None:
            if time.monotonic() > begin + SECONDS_MAX:
                process.kill()
                process.wait()
                raise RuntimeError(f"still running after {SECONDS_MAX} s: {self.tail()}")
            if wanted is not None and self._kill_from_outside(*wanted):
                wanted = None
            time.sleep(LOOK_SECONDS)
        if process.returncode != 0:
            raise RuntimeError(f"status {process.returncode}: {self.tail()}")
        return time.monotonic() - begin

    def _kill_from_outside(self, rank: int, step: int) -> bool:
        fits = [e["job"] for e in self.events("job_started") if e.get("function") == "fit"]
        for job in set(fits) & set(jobs.find_jobs()):
            try:
                status = jobs.ask(job, {"op": "status"}, timeout=timedelta(seconds=2))
            except (LetoError, OSError):
                continue
            for process in status.get("processes", ()):
                if process["role"] == "active" and process["rank"] == rank and (process.get("step") or 0) >= step:
                    os.kill(process["pid"], signal.SIGKILL)
                    self.killed.append({"rank": rank, "point": "from outside", "step": process["step"]})
                    return True
        return False

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Leto's events of these names."""
        path = self.directory / "leto" / "events.jsonl"
        lines = path.read_text().splitlines(True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in found if event["event"] in names]

    def tail(self) -> str:
        """The end of what it printed."""
        return (self.directory / "output.txt").read_text(errors="replace")[-3000:]

    def left(self) -> dict[str, str]:
        """A digest of everything that it has left."""
        found = {}
        for path in sorted(self.directory.rglob("*")):
            name = path.relative_to(self.directory)
            if not path.is_file() or name.parts[0] in _NOT_RESULTS or name.name in _NOT_RESULTS:
                continue
            if "tfevents" in name.name:
                continue
            if re.search(self.script.unnamed, name.name):
                found[re.sub(r"\d{6,}", "N", str(name))] = "not compared"
            elif path.suffix == ".ckpt":
                found.update({f"{name}: {key}": value for key, value in self._checkpoint(path)})
            else:
                content = path.read_bytes().replace(str(self.directory).encode(), b"<out>")
                found[str(name)] = hashlib.sha1(content).hexdigest()
        printed = (self.directory / "output.txt").read_text(errors="replace").splitlines()
        for line in filter(_PRINTED.match, printed):
            found[f"printed {line}"] = line
        return found

    def _checkpoint(self, path: Path) -> Iterator[tuple[str, str]]:
        import torch

        for key, value in torch.load(path, weights_only=False, map_location="cpu").items():
            digest = hashlib.sha1()
            for part in _flat(value):
                digest.update(part.replace(str(self.directory).encode(), b"<out>"))
            yield key, digest.hexdigest()


def _flat(value: Any) -> Iterator[bytes]:
    import torch

    if isinstance(value, torch.Tensor):
        yield repr((value.dtype, tuple(value.shape))).encode()
        yield value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(key)
            yield from _flat(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield re.sub(r" at 0x[0-9a-f]+", "", repr(value)).encode()


def differences(expected: Run, actual: Run) -> list[str]:
    """What two runs have left differently; plain "ddp" prints results of every rank."""
    want, have = expected.left(), actual.left()
    if expected.mode == "ddp":
        want = {name: value for name, value in want.items() if name in have or not name.startswith("printed ")}
    found = [f"{name} is missing" for name in want if name not in have]
    found += [f"{name} is too much" for name in have if name not in want]
    found += [f"{name} differs" for name in want if name in have and want[name] != have[name]]
    events = first_difference(event_directories(expected.directory), event_directories(actual.directory))
    return found + ([] if events is None else [events])


def examine(script: Script, scripts: Path, out: Path, modes: Sequence[str]) -> dict[str, Any]:
    """Run a script in each mode and compare: what its JSON line says."""
    row: dict[str, Any] = {"script": script.path, "note": script.note}
    runs: dict[str, Run] = {}
    for mode in modes:
        run = Run(script, mode, scripts, out)
        try:
            row[f"{mode}_s"] = round(run.finish(), 1)
        except RuntimeError as error:
            row[f"{mode}_error"] = str(error)
            continue
        runs[mode] = run
    if "leto" in runs:
        row["disturbed"] = len(runs["leto"].events("recovered"))
        row["compared"] = len(runs["leto"].left()) + len(list(runs["leto"].directory.rglob("*tfevents*")))
    if "killed" in runs:
        row["recovered"] = [
            {key: event.get(key) for key in ("cause", "rank", "step", "level", "mode", "total_ms", "steps_repeated")}
            for event in runs["killed"].events("recovered")
        ]
        row["kills"] = [*({k: f[k] for k in ("rank", "point", "step")} for f in script.planned), *runs["killed"].killed]
        row["all_kills_happened"] = len(row["recovered"]) == len(script.planned) + (script.outside is not None)
        if "leto" in runs:
            found = differences(runs["leto"], runs["killed"])
            row["identical"], row["differences"] = not found, found[:12]
    if "ddp" in runs and "leto" in runs:
        found = differences(runs["ddp"], runs["leto"])
        row["equal_to_ddp"], row["ddp_differences"] = not found, found[:12]
    return row


def main() -> int:
    """Examine the chosen scripts; 0 if all kills left nothing different."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("scripts", type=Path, help="Lightning's directory examples/pytorch")
    parser.add_argument("--out", type=Path, required=True, help="directory for data and runs")
    parser.add_argument("--only", nargs="*", default=[], help="names of scripts, e.g. transformer; all if left out")
    parser.add_argument("--modes", nargs="*", default=["ddp", "leto", "killed"], help="which runs to make")
    options = parser.parse_args()
    out = options.out.resolve()
    make_data(out / "inputs")
    good = True
    for script in SCRIPTS:
        if options.only and script.name not in options.only:
            continue
        row = examine(script, options.scripts.resolve(), out, options.modes)
        good &= bool(row.get("identical")) and row["all_kills_happened"]
        print(json.dumps(row), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
