"""What can't work says so at once: which option, what to write instead; nothing is started and nothing left behind."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import ROOT, TINY, UserProcess, Workshop
from tests.e2e.test_processes import of_this_job
from tests.e2e.tiny import Case

REFUSED: dict[str, tuple[Case, list[str]]] = {
    "unknown option": (Case(options={"shadow": 1}), ["no option 'shadow'", "shadows"]),
    "value out of range": (Case(options={"shadows": 2}), ["shadows=2", "use 1, or 0"]),
    "negative timeout": (Case(options={"hang_timeout": -1}), ["hang_timeout=-1", "greater than 0"]),
    "DDP option that is not supported": (Case(options={"static_graph": True}), ["static_graph", "not supported"]),
    "several nodes": (Case(trainer={"num_nodes": 2}), ["num_nodes=1"]),
}


def require_refusal(process: UserProcess, texts: list[str]) -> None:
    assert process.wait(60) == 1
    output = process.output()
    for text in texts:
        assert text in output, output[-3000:]
    assert not process.events(), "nothing was started"
    assert process.steps() == 0


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_cannot_work_is_named_before_anything_starts(workshop: Workshop, name: str) -> None:
    case, texts = REFUSED[name]
    require_refusal(workshop.start(case), texts)


def test_an_optimizer_that_the_transaction_cannot_follow_is_named_with_those_it_can(workshop: Workshop) -> None:
    process = workshop.start(Case(optimizer="rmsprop", options={"updater": "transactional"}))
    assert process.wait(60) == 1
    output = process.output()
    assert "RMSprop" in output
    assert "Adam" in output
    assert "SGD" in output
    assert of_this_job(process) == []


def test_a_root_directory_that_cannot_be_written_is_named(workshop: Workshop) -> None:
    case = workshop.prepare(Case(logger=False, callbacks=[]))
    blocked = Path(case.out, "blocked")
    blocked.write_text("a file where a directory is wanted")
    case = replace(case, trainer={"default_root_dir": str(blocked)})
    process = workshop.server.start(case)
    assert process.wait(60) == 1
    assert "default_root_dir" in process.output()
    assert "can't write to" in process.output()


def run_script(text: str, tmp_path: Path, *, before: Callable[[], Any] | None = None, **env: str) -> Any:
    """Run a script in a new interpreter."""
    script = tmp_path / "script.py"
    script.write_text(text)
    return subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": ROOT, **env},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
        preexec_fn=before,
        check=False,
    )


SCRIPT = """
import logging, warnings
warnings.filterwarnings("ignore")
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
class Model(BoringModel):
    def configure_optimizers(self):
        import torch
        return torch.optim.AdamW(self.parameters())
trainer = pl.Trainer(strategy="leto", max_epochs=1, limit_train_batches=4, limit_val_batches=1, logger=False,
                     enable_checkpointing=False, enable_progress_bar=False, {options})
trainer.fit(Model())
print("END", trainer.global_step)
"""


def test_the_shortest_script_without_a_guard_just_works(tmp_path: Path) -> None:
    done = run_script(SCRIPT.format(options="accelerator='cpu', devices=2"), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("END 4") == 1, "the rest of the script belongs to the user's process"


def test_too_few_open_files_are_named_with_the_remedy(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    done = run_script(SCRIPT.format(options="accelerator='cpu', devices=2"), tmp_path, before=limit)
    assert done.returncode == 1
    assert "ResourceError" in done.stderr
    assert "ulimit -n" in done.stderr


def test_an_external_launcher_is_refused(tmp_path: Path) -> None:
    done = run_script(SCRIPT.format(options="accelerator='cpu', devices=2"), tmp_path, LOCAL_RANK="0", WORLD_SIZE="2")
    assert done.returncode == 1
    assert "starts its own processes" in done.stderr


def test_a_program_from_standard_input_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-"],
        input=SCRIPT.format(options="accelerator='cpu', devices=1"),
        env={**os.environ, "PYTHONPATH": ROOT},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 1
    assert "put it into a file" in done.stderr


def test_a_prompt_is_refused_with_what_to_do(tmp_path: Path) -> None:
    text = "import sys; sys.ps1 = '>>> '\n" + SCRIPT.format(options="accelerator='cpu', devices=1")
    done = run_script(text, tmp_path)
    assert done.returncode == 1
    assert "python train.py" in done.stderr


def test_a_tiny_dev_shm_is_named_when_workers_need_it(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare to mount a small /dev/shm")
    case = Case(out=str(tmp_path), num_workers=1, logger=False, callbacks=[], devices=1)
    import json

    mount = "mount -t tmpfs -o size=1m tmpfs /dev/shm && exec"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{mount} {sys.executable} {TINY}"],
        env={**os.environ, "TINY_CASE": json.dumps(vars(case)), "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    if "unshare failed" in done.stderr or "mount:" in done.stderr:
        pytest.skip("this machine allows no mount namespace")
    assert done.returncode == 1
    assert "/dev/shm" in done.stderr
    assert "num_workers=0" in done.stderr
