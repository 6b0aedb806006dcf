"""Every way to start a training: undisturbed equal to plain `ddp`, killed equal to that, bit for bit.

Faults are injected from outside, as `leto inject` does, so that scripts are those of users.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from leto_strategy.cli import jobs
from leto_strategy.cli.inject import Injection
from tests.e2e.entries import CLI_CONFIG, ENTRIES, PLAIN, Entry
from tests.e2e.harness import ROOT, Workshop, reap_adopted

TRAINING = Path(__file__).with_name("entry_training.py")

Kill = tuple[int, str, int]


def lay_out(directory: Path, files: dict[str, str], flavour: str = "lightning.pytorch") -> None:
    directory.mkdir(parents=True, exist_ok=True)
    training = TRAINING.read_text().replace('FLAVOUR = "lightning.pytorch"', f"FLAVOUR = {flavour!r}")
    for name, text in {**files, "training.py": training}.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("lightning.pytorch.Trainer", f"{flavour}.Trainer") if "conf" in name else text)


def start(directory: Path, command: Sequence[str], **env: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{directory}", "OMP_NUM_THREADS": "1", **env},
        stdout=(directory / "output.txt").open("w"),
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(
    process: "subprocess.Popen[str]", directory: Path, kills: Sequence[Kill] = (), *, seconds: float = 150.0
) -> str:
    """Wait for a script's end; plan `kills` in each fit that it starts. Returns its output."""
    deadline = time.monotonic() + seconds
    while process.poll() is None:
        if time.monotonic() > deadline:
            process.kill()
            process.wait()
            pytest.fail(f"still running:\n{(directory / 'output.txt').read_text()[-3000:]}")
        for waiting in directory.rglob("waiting") if kills else ():
            (job,) = fits(directory) & set(jobs.find_jobs())
            if sum(arm(job, kill) for kill in kills) == len(kills):
                waiting.rename(waiting.with_name("armed"))
        time.sleep(0.02)
    output = (directory / "output.txt").read_text()
    assert process.returncode == 0, output[-5000:]
    return output


_armed: set[tuple[str, Kill]] = set()


def arm(job: str, kill: Kill) -> bool:
    """Plan a kill in a running job, once; false while that rank has no memory yet."""
    if (job, kill) not in _armed:
        rank, point, step = kill
        request = Injection(rank=rank, fault="kill", at_step=step, point=point).request()
        if not jobs.ask(job, request, timeout=timedelta(seconds=5)).get("ok"):
            return False
        _armed.add((job, kill))
    return True


def fits(directory: Path) -> set[str]:
    """Jobs that train and have been started so far."""
    return {e["job"] for e in events(directory) if e["event"] == "job_started" and e["function"] == "fit"}


def events(directory: Path) -> list[dict[str, Any]]:
    lines = [line for path in directory.rglob("leto/events.jsonl") for line in path.read_text().splitlines(True)]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def run(directory: Path, command: Sequence[str], kills: Sequence[Kill] = (), **env: str) -> str:
    """Run a script to its end; where it is to be killed, its training waits until that is planned."""
    if kills:
        (directory / "gated").touch()
    return finish(start(directory, command, **env), directory, kills)


def run_beside_ddp(directory: Path, script: str, arguments: Sequence[str], kills: Sequence[Kill]) -> str:
    """Run a script, whose last argument is the strategy, below `ddp` and `leto` at once; the output of the latter."""
    for strategy in ("ddp", "leto"):
        lay_out(directory / strategy, {"train.py": script})
    ddp = start(directory / "ddp", ["train.py", *arguments, "ddp"])
    try:
        output = run(directory / "leto", ["train.py", *arguments, "leto"], kills)
    finally:
        finish(ddp, directory / "ddp")
    return output


def differences(expected: Path, actual: Path) -> list[str]:
    """What two trainings left differently: steps of each rank, rows, checkpoints, result."""
    found = []
    for path in sorted(expected.glob("steps.r*.jsonl")):
        want, have = (list(dict.fromkeys((d / path.name).read_text().splitlines())) for d in (expected, actual))
        found += [f"{path.name}: {a} / {b}" for a, b in zip(want, have, strict=False) if a != b]
        found += [] if len(want) == len(have) else [f"{path.name}: {len(want)} and {len(have)} steps"]
    want, have = (json.loads((d / "result.json").read_text()) for d in (expected, actual))
    found += [f"{key}: {value} / {have.get(key)}" for key, value in want.items() if value != have.get(key)]
    for path in sorted(expected.glob("logs/*/metrics.csv")):
        if path.read_bytes() != (actual / path.relative_to(expected)).read_bytes():
            found.append(f"{path.relative_to(expected)} differs")
    files = [sorted(str(p.relative_to(d)) for p in d.glob("*/*.ckpt")) for d in (expected, actual)]
    if files[0] != files[1]:
        return [*found, f"files: {files}"]
    return found + [f"{name} differs" for name in files[0] if digest(expected / name) != digest(actual / name)]


def digest(path: Path) -> str:
    checkpoint = torch.load(path, weights_only=False)
    kept = {key: checkpoint[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step")}
    torch.set_printoptions(precision=20, threshold=100_000)
    try:
        return repr(kept)
    finally:
        torch.set_printoptions(profile="default")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the training leaves under plain `ddp`."""
    directory = tmp_path_factory.mktemp("reference")
    lay_out(directory, {"train.py": PLAIN})
    run(directory, ["train.py", "ddp"])
    return directory / "out"


@pytest.mark.slow
@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.status == "exact"], ids=lambda e: e.name)
@pytest.mark.timeout(200)
def test_a_training_started_in_this_way_survives_kills_exactly(
    workshop: Workshop, reference: Path, tmp_path: Path, entry: Entry
) -> None:
    lay_out(tmp_path, entry.files, entry.flavour)
    output = run(tmp_path, entry.command, entry.kills, **entry.env)
    reap_adopted(workshop.server)
    outs = [path for pattern in entry.outs for path in tmp_path.glob(pattern)]
    assert len(outs) == len(entry.outs)
    assert output.count(f"END {len(entry.kills)}") == len(outs), output[-4000:]
    for out in outs:
        assert differences(reference, out) == []
        require_one_log(out)


def require_one_log(out: Path) -> None:
    """A Hydra job's log has what the user's process and rank 0 logged, a repeated step apart once; and one `.hydra`."""
    for log in [*out.parent.glob("app.log"), *out.parent.glob("outputs/*/*/app.log")]:
        lines = [line.split(" - ")[1] for line in log.read_text().splitlines() if "[app]" in line]
        assert lines.count("end") == 1
        assert len([line for line in lines if line.startswith("begin")]) == 1
        steps = [line for line in lines if line.startswith("step")]
        assert list(dict.fromkeys(steps)) == [f"step {step}" for step in range(8)]
        assert len(steps) <= 8 + 2
        saw = (log.parent / "saw.txt").read_text().splitlines()
        assert len(saw) >= 3, "the user's process and trainers"
        assert len(set(saw)) == 1, "all processes resolve the same values"
        assert len(list(log.parent.glob(".hydra/config.yaml"))) == 1


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.status == "refused"], ids=lambda e: e.name)
def test_what_cannot_work_says_what_to_do(tmp_path: Path, entry: Entry) -> None:
    lay_out(tmp_path, entry.files, entry.flavour)
    process = start(tmp_path, entry.command, **entry.env)
    assert process.wait(90) == 1
    assert entry.reason in (tmp_path / "output.txt").read_text()
    assert not events(tmp_path)


RESUME = """
import glob, json, os, sys
from importlib import import_module
import torch
from training import FLAVOUR, Data, Model, options, pl, report
callbacks = import_module(FLAVOUR + ".callbacks")
mode, strategy = sys.argv[1:]
class Loading(Model):
    loaded = 0
    def on_save_checkpoint(self, checkpoint):
        checkpoint["extra"] = [self.global_step]
    def on_load_checkpoint(self, checkpoint):
        self.loaded += checkpoint["extra"][0]
class Spoils(pl.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.is_global_zero:
            os.remove(path)
            with open(path, "w") as file:
                file.write("garbage")
class Writer(callbacks.BasePredictionWriter):
    def write_on_batch_end(self, trainer, module, prediction, indices, batch, batch_idx, dataloader_idx):
        with open(f"out/predicted.r{trainer.global_rank}.{batch_idx}", "w") as file:
            file.write(repr([value.hex() for value in prediction.double().flatten().tolist()]))
pl.seed_everything(7, verbose=False)
kwargs = options("first")
kwargs["callbacks"].append(callbacks.ModelCheckpoint(dirpath="first/steps", every_n_train_steps=2, save_top_k=-1))
pl.Trainer(**kwargs | {"max_epochs": 1}, strategy=strategy).fit(Loading("first"), datamodule=Data())
path = {"mid": "first/steps/epoch=0-step=2.ckpt", "end": "first/checkpoints/last.ckpt"}[mode]
pl.seed_everything(8, verbose=False)
kwargs = options("out")
kwargs["callbacks"] += [Writer("batch"), Spoils()] if mode == "end" else [Writer("batch")]
trainer, model = pl.Trainer(**kwargs | {"max_epochs": 3}, strategy=strategy), Loading("out")
trainer.fit(model, datamodule=Data(), ckpt_path=path, weights_only=False)
metrics = {"fitted": trainer.ckpt_path, "loaded": model.loaded}
last = "file://" + os.path.abspath("out/checkpoints/last.ckpt")
validated = trainer.validate(model, datamodule=Data(), ckpt_path="best", verbose=False)
best = os.path.relpath(trainer.ckpt_path)
tested = trainer.test(model, datamodule=Data(), ckpt_path=last, verbose=False)
predicted = trainer.predict(model, datamodule=Data(), ckpt_path="last")
trainer.save_checkpoint("out/hpc_ckpt_1.ckpt")
trainer.fit_loop.max_epochs = 4
trainer.fit(model, datamodule=Data(), ckpt_path="last")
again = trainer.validate(model, datamodule=Data(), ckpt_path="hpc", verbose=False)
files = {name: open(name).read() for name in sorted(glob.glob("out/predicted.*"))}
report(trainer, model, "out", validated=validated, tested=tested, means=model.means, best_path=best, files=files,
       again=again, predicted=[value.double().sum().item().hex() for value in predicted], **metrics)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["end", "mid"])
@pytest.mark.timeout(400)
def test_calls_that_load_a_checkpoint_are_those_of_ddp(workshop: Workshop, tmp_path: Path, mode: str) -> None:
    """At the end of an epoch, the checkpoint is destroyed while the call runs; in the middle of one, as ddp resumes."""
    kills = (1, "forward", 1), (0, "chunk_updating", 3)
    output = run_beside_ddp(tmp_path, RESUME, [mode], kills)
    reap_adopted(workshop.server)
    assert output.count("leto recovered") == 2 * len(kills), output[-3000:]
    assert differences(tmp_path / "ddp" / "out", tmp_path / "leto" / "out") == []


LIMITS = """
import os, sys
from training import Data, Model, options, pl, report
strategy = sys.argv[1]
class Fragile(Model):
    def test_step(self, batch, batch_idx):
        super().test_step(batch, batch_idx)
        if strategy == "leto" and batch_idx == 1 and self.global_rank == 1 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), 9)
pl.seed_everything(7, verbose=False)
kwargs = options("out")
kwargs |= {"max_epochs": -1, "max_steps": 3, "min_epochs": 1, "max_time": {"hours": 1}}
trainer, model = pl.Trainer(**kwargs, strategy=strategy), Fragile("out")
trainer.fit(model, datamodule=Data())
first = trainer.global_step
trainer.fit_loop.epoch_loop.max_steps = 10
trainer.fit(model, datamodule=Data())
tested = trainer.test(model, datamodule=Data(), verbose=False)
kwargs = options("out") | {"max_epochs": 5, "min_steps": 2, "max_steps": 7, "logger": False, "callbacks": []}
other = pl.Trainer(**kwargs, strategy=strategy, enable_checkpointing=False)
other.fit(model, datamodule=Data())
more = {"first": first, "tested": tested, "means": model.means, "other": [other.global_step, other.max_epochs]}
report(trainer, model, "out", **more)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_limits_and_calls_one_after_the_other_are_those_of_ddp(workshop: Workshop, tmp_path: Path) -> None:
    kills = (0, "mid_after", 1), (1, "chunk_committed", 2)
    output = run_beside_ddp(tmp_path, LIMITS, [], kills)
    reap_adopted(workshop.server)
    assert output.count("leto recovered") == len(kills) + 1, output[-3000:]
    assert differences(tmp_path / "ddp" / "out", tmp_path / "leto" / "out") == []


OWN_CLI = """
import os
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from training import Data, Model, report
class Saves(SaveConfigCallback):
    def save_config(self, trainer, module, stage):
        with open("saved.txt", "a") as file:
            text = self.parser.dump(self.config, skip_none=False)
            file.write(f"{stage.value} {len(text) > 500}\\n")
class Killed(Callback):
    def setup(self, trainer, module, stage):
        if os.path.exists("kill") and trainer.global_rank == 1:
            os.remove("kill")
            os.kill(os.getpid(), 9)
class CLI(LightningCLI):
    def after_fit(self):
        self.trainer.test(self.model, datamodule=self.datamodule, ckpt_path="best", verbose=False)
        report(self.trainer, self.model, "out")
CLI(Model, Data, save_config_callback=Saves, trainer_defaults={"callbacks": [Killed()], "strategy": "leto"})
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_configuration_is_saved_once_whoever_is_killed(tmp_path: Path) -> None:
    config = {"config.yaml": CLI_CONFIG.format(strategy="").replace("max_epochs: 2", "max_epochs: 1")}
    lay_out(tmp_path, {"cli.py": OWN_CLI, **config})
    (tmp_path / "kill").touch()
    run(tmp_path, ["cli.py", "fit", "--config=config.yaml"])
    saved = tmp_path / "out" / "logs" / "version_0" / "config.yaml"
    text = saved.read_text()
    assert text.startswith("# lightning.pytorch==")
    assert "strategy: leto" in text
    lines = (tmp_path / "saved.txt").read_text().splitlines()
    assert set(lines) == {"fit True"}
    assert len(lines) <= 2, "each generation of the beginning at most, no shadow, no later call"
    assert [e["role"] for e in events(tmp_path) if e["event"] == "generation_started"].count("active") == 3
    number = len(events(tmp_path))
    again = start(tmp_path, ["cli.py", "fit", "--config=config.yaml"])
    assert again.wait(90) == 1
    assert "to NOT exist" in (tmp_path / "output.txt").read_text()
    assert saved.read_text() == text
    assert len(events(tmp_path)) == number, "nothing was started"


def test_a_checkpoint_from_a_registry_is_refused(tmp_path: Path) -> None:
    text = PLAIN + "from training import Data, Model, options, pl\n"
    text = text.replace("train(strategy=", "sys.argv.append(") + "pl.Trainer(**options('out'), strategy='leto').fit("
    lay_out(tmp_path, {"train.py": text + "Model('out'), datamodule=Data(), ckpt_path='registry:mine:version:v2')\n"})
    process = start(tmp_path, ["train.py"])
    assert process.wait(90) == 1
    assert "download it first" in (tmp_path / "output.txt").read_text()
    assert not events(tmp_path)
