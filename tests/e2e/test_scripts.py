"""Whole scripts as users write them, in new interpreters: ways to start, calls after fit, the commands beside a run."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from leto_strategy.cli import jobs
from leto_strategy.memory import wire
from tests.e2e.harness import ROOT, Workshop, reap_adopted
from tests.e2e.test_bad_input import run_script
from tests.e2e.test_processes import finish, wait_for_shadow
from tests.e2e.tiny import Case

HEAD = """
import logging, warnings
warnings.filterwarnings("ignore")
import torch
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
class Model(BoringModel):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
quiet = dict(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
"""

AFTER_FIT = (
    HEAD
    + """
class Watcher(pl.Callback):
    events = []
    def on_leto_event(self, trainer, event):
        self.events.append(event["event"])
pl.seed_everything(3, verbose=False)
trainer = pl.Trainer(strategy=STRATEGY, devices=2, max_epochs=1, limit_train_batches=6, limit_val_batches=2,
                     callbacks=[Watcher()], default_root_dir=ROOT, **quiet)
model = Model()
before = dict(__import__("os").environ)
trainer.fit(model, datamodule=BoringDataModule())
if trainer.global_rank == 0:
    print("RESULT step", trainer.global_step, trainer.current_epoch, trainer.state.status, trainer.num_training_batches)
    print("RESULT weights", [p.detach().double().sum().item().hex() for p in model.parameters()])
trainer.save_checkpoint(ROOT + "/final.ckpt")
validated = trainer.validate(model, datamodule=BoringDataModule(), verbose=False)
predicted = trainer.predict(model, datamodule=BoringDataModule())
if trainer.global_rank == 0:
    checkpoint = torch.load(ROOT + "/final.ckpt", weights_only=False)
    states = checkpoint["optimizer_states"][0]["state"].values()
    momenta = [s["momentum_buffer"].double().sum().item().hex() for s in states]
    print("RESULT checkpoint", checkpoint["global_step"], momenta, sorted(checkpoint["loops"]))
    print("RESULT lr", [g["lr"] for g in trainer.optimizers[0].param_groups])
    print("RESULT validated", validated)
    print("RESULT predicted", len(predicted), predicted[0].double().sum().item().hex())
    print("EVENTS", "job_started" in Watcher.events, "job_finished" in Watcher.events)
    print("ENVIRON", sorted(k for k in __import__("os").environ if k.startswith("LETO")),
          __import__("threading").active_count())
"""
)


def results(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("RESULT")]


def test_everything_a_script_does_after_fit_is_as_with_ddp(workshop: Workshop, tmp_path: Path) -> None:
    printed = {}
    for strategy in ("leto", "ddp"):
        root = tmp_path / strategy
        root.mkdir()
        text = f"STRATEGY, ROOT = {strategy!r}, {str(root)!r}\n{AFTER_FIT}"
        done = run_script(text, tmp_path, OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr[-4000:]
        printed[strategy] = done.stdout
    reap_adopted(workshop.server)  # ranks of plain ddp
    assert results(printed["leto"]) == results(printed["ddp"])
    assert len(results(printed["leto"])) == 6
    assert "EVENTS True True" in printed["leto"]
    assert "ENVIRON [] 1" in printed["leto"]


MODULE = (
    HEAD
    + """
import argparse, sys
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
arguments = parser.parse_args()
def main():
    trainer = pl.Trainer(strategy="leto", devices=2, max_steps=arguments.steps, limit_val_batches=0, **quiet)
    trainer.fit(Model())
    print("END", __name__, trainer.global_step, sys.argv[1:])
if __name__ == "__main__":
    main()
"""
)


def test_a_package_run_with_dash_m_and_arguments_works(tmp_path: Path) -> None:
    package = tmp_path / "mytraining"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(MODULE)
    done = subprocess.run(
        [sys.executable, "-m", "mytraining.train", "--steps", "3"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("END __main__ 3 ['--steps', '3']") == 1, done.stdout


def leto(*arguments: str) -> Any:
    """Run the command line tool."""
    return subprocess.run(
        [sys.executable, "-m", "leto_strategy", *arguments],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_status_and_inject_work_on_a_running_job(workshop: Workshop) -> None:
    process = workshop.start(Case(slow=0.15, batches=12))
    wait_for_shadow(process)
    job = process.events()[0]["job"]
    status = json.loads(leto("status", "--json").stdout)
    mine = next(s for s in status["jobs"] if s["job"] == job)
    roles = sorted(p["role"] for p in mine["processes"] if p["role"] != "zygote")
    assert roles == ["active", "active", "manager", "manager", "shadow", "shadow", "supervisor"]
    assert str(mine["processes"][0]["pid"]) in leto("status").stdout
    planned = leto(
        "inject", "--job", job, "--rank", "0", "--fault", "kill", "--at-step", "9", "--point", "chunk_updating"
    )
    assert planned.returncode == 0, planned.stderr
    now = leto("inject", "--job", job, "--rank", "1", "--fault", "kill")
    assert now.returncode == 0, now.stderr
    wrong = leto("inject", "--job", job, "--rank", "7", "--fault", "kill")
    assert wrong.returncode != 0
    assert "rank" in wrong.stderr + wrong.stdout
    assert process.wait(120) == 0, process.output()[-3000:]
    recoveries = [e for e in process.events() if e["event"] == "recovered"]
    assert [r["rank"] for r in recoveries] == [1, 0]
    finish(workshop, process)


@contextmanager
def hammering(addresses: list[str], seed: int) -> Iterator[list[int]]:
    """Throw garbage at sockets from a thread; yields the number of connections so far."""
    done = [0]
    stop = threading.Event()
    rng = random.Random(seed)

    def hammer() -> None:
        while not stop.is_set() and done[0] < 4000:
            for address in addresses:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                sock.settimeout(0.02)
                try:
                    sock.connect(b"\0" + address.encode())
                    sock.sendall(garbage(rng))
                    if rng.random() < 0.3:
                        sock.recv(64)
                except OSError:
                    pass
                finally:
                    sock.close()
                done[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=hammer)
    thread.start()
    try:
        yield done
    finally:
        stop.set()
        thread.join()


def garbage(rng: random.Random) -> bytes:
    """Bytes that are no frame, half a frame, or a frame that means nothing."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 400))
    message = {"op": rng.choice(["allocate", "free", "status", "inject", "hello", "mirrored", 7, None, "x" * 300])}
    message |= {rng.choice(["specs", "names", "rank", "job"]): rng.choice([[], {}, -1, 2**70, "y", [[[[]]]]])}
    data = b"".join(data for data, _ in wire.encode(message))
    return data if kind == 1 else data[: rng.randrange(1, len(data))] if kind == 2 else data + rng.randbytes(20)


def test_garbage_on_every_socket_disturbs_nobody(workshop: Workshop, pytestconfig: pytest.Config) -> None:
    process = workshop.start(Case(slow=0.05, batches=80))
    wait_for_shadow(process)
    job = process.events()[0]["job"]
    listening = [line.split("@", 1)[1] for line in Path("/proc/net/unix").read_text().splitlines() if job in line]
    addresses = sorted(set(listening))
    assert len(addresses) == 3, "the operator's and two managers'"
    with hammering(addresses, pytestconfig.getoption("seed")) as done:
        process.wait_for(lambda _: done[0] > 500)
        os.kill(jobs_pid(job, "active"), signal.SIGKILL)
        assert process.wait(120) == 0, process.output()[-3000:]
    assert done[0] > 1000, "more came while it recovered and went on"
    assert [e["event"] for e in process.events()].count("recovered") == 1
    assert not [e for e in process.events() if e["event"] == "manager_failed"]
    finish(workshop, process)


def jobs_pid(job: str, role: str) -> int:
    from datetime import timedelta

    status = jobs.ask(job, {"op": "status"}, timeout=timedelta(seconds=5))
    return next(p["pid"] for p in status["processes"] if p["role"] == role)


CAUGHT = (
    HEAD
    + """
class Refused(Model):
    def training_step(self, batch, batch_idx):
        raise ValueError("no training today")
class Hooks(pl.Callback):
    def on_exception(self, trainer, module, exception):
        print("ON_EXCEPTION", type(exception).__name__)
def fit(model, *callbacks):
    trainer = pl.Trainer(strategy="leto", devices=1, max_steps=2, limit_val_batches=0, callbacks=[Hooks(), *callbacks],
                         enable_checkpointing=False, **quiet)
    try:
        trainer.fit(model, datamodule=BoringDataModule())
    except Exception as error:
        print("CAUGHT", type(error).__name__, error, len(trainer.callbacks) > 0, trainer.datamodule is not None)
    return trainer
fit(Model(), pl.callbacks.ModelPruning("l1_unstructured"))
fit(Refused())
print("END", fit(Model()).global_step)
"""
)


def test_a_script_that_catches_failures_goes_on_with_its_next_call(tmp_path: Path) -> None:
    done = run_script(CAUGHT, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.split(" ")[0] in ("CAUGHT", "END", "ON_EXCEPTION")]
    assert lines[0] == "ON_EXCEPTION UnsupportedFeatureError"
    assert lines[1].startswith("CAUGHT UnsupportedFeatureError")
    assert lines[2:] == ["ON_EXCEPTION ValueError", "CAUGHT ValueError no training today True True", "END 2"]


UNSEEDED = (
    HEAD
    + """
import json, os, random
import numpy
drawn = {"torch": torch.rand(1).item(), "random": random.random(), "numpy": float(numpy.random.rand())}
order = list({f"word{i}" for i in range(20)})
class Noting(Model):
    def setup(self, stage):
        with open(f"{ROOT}/rank{self.trainer.global_rank}.jsonl", "a") as file:
            file.write(json.dumps([drawn, order]) + "\\n")
def main():
    faults = [{"rank": 1, "point": "chunk_updating", "step": 1}, {"rank": 0, "point": "forward", "step": 3}]
    strategy = LetoStrategy(zygote=ZYGOTE, faults=faults)
    trainer = pl.Trainer(strategy=strategy, devices=2, max_steps=5, limit_val_batches=0, **quiet)
    model = Noting()
    trainer.fit(model)
    print("RECOVERED", len(strategy.recoveries))
    trainer.test(model, verbose=False)
    print("USER", json.dumps(drawn))
from leto_strategy import LetoStrategy
if __name__ == "__main__":
    main()
"""
)


@pytest.mark.parametrize("zygote", ["on", "off"])
def test_a_script_without_seeds_draws_the_same_in_every_trainer_of_a_rank(zygote: str, tmp_path: Path) -> None:
    done = run_script(f"ROOT, ZYGOTE = {str(tmp_path)!r}, {zygote!r}\n{UNSEEDED}", tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert "RECOVERED 2" in lines
    (user,) = (json.loads(line.removeprefix("USER ")) for line in lines if line.startswith("USER "))
    drawn, orders = {}, set()
    for rank in (0, 1):
        notes = [json.loads(line) for line in (tmp_path / f"rank{rank}.jsonl").read_text().splitlines()]
        assert len(notes) >= 4, "two generations that failed, one that ended, one that tested"
        assert all(note == notes[0] for note in notes), notes
        drawn[rank] = notes[0][0]
        orders.add(tuple(notes[0][1]))
    assert all(drawn[0][name] == user[name] for name in ("torch", "numpy"))  # imports of the script draw from `random`
    assert all(drawn[1][name] != user[name] for name in user), "ranks are as independent as processes of ddp"
    assert len(orders) == 1


TARGET_NETWORK = (
    HEAD
    + """
class Pair(Model):
    def __init__(self):
        super().__init__()
        self.target = torch.nn.Linear(32, 2)
    def training_step(self, batch, batch_idx):
        if batch_idx % 2 == 0:
            self.target.load_state_dict(self.layer.state_dict())
        with torch.no_grad():
            wanted = self.target(batch)
        return {"loss": ((self.layer(batch) - wanted - 1) ** 2).mean()}
    def configure_optimizers(self):
        return torch.optim.Adam(self.layer.parameters(), lr=0.1)
pl.seed_everything(3, verbose=False)
from leto_strategy import LetoStrategy
strategy = LetoStrategy(find_unused_parameters=True, faults=FAULTS)
trainer = pl.Trainer(strategy=strategy, devices=2, max_steps=6, limit_val_batches=0, **quiet)
model = Pair()
trainer.fit(model)
print("RECOVERED", len(strategy.recoveries))
print("RESULT", [p.detach().double().sum().item().hex() for p in model.parameters()])
"""
)


def test_a_target_network_beside_the_trained_one_is_exact(tmp_path: Path) -> None:
    faults = [{"rank": 1, "point": "snapshot_middle", "step": 2}, {"rank": 0, "point": "backward", "step": 4}]
    printed = {}
    for number in (0, 2):
        done = run_script(f"FAULTS = {faults[:number]!r}\n{TARGET_NETWORK}", tmp_path)
        assert done.returncode == 0, done.stderr[-4000:]
        assert f"RECOVERED {number}" in done.stdout
        assert "the optimizer does not hold 'target.weight'" in done.stderr
        printed[number] = results(done.stdout)
    assert printed[0] == printed[2] != []
