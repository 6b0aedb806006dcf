"""`leto train` as it is typed: one and two ranks, every source, sweeps, errors. No network."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LETO = str(Path(sys.executable).with_name("leto"))
SMALL = ("experiment=smoke", "trainer.enable_progress_bar=false")
DOCUMENTS = [
    f"{n} green bottles hanging on the wall, and if one should fall there are {n - 1}. " * 3 for n in range(60)
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]  # each process imports torch: seconds on a busy machine


def leto_train(folder: Path, *arguments: str, timeout: int = 110) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [LETO, "train", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def trained(folder: Path, *arguments: str) -> dict[str, Any]:
    """The summary of a run that must succeed."""
    result = leto_train(folder, *SMALL, f"hydra.run.dir={folder / 'out'}", *arguments)
    assert result.returncode == 0, result.stderr[-3000:]
    summary: dict[str, Any] = json.loads((folder / "out" / "summary.json").read_text())
    lines = [line for line in result.stdout.splitlines() if " steps, " in line]
    assert len(lines) == 1, "one line, from rank 0"
    assert f"loss {summary['loss']:.4f}" in lines[0]
    assert (folder / "out" / "metrics" / "version_0" / "metrics.csv").is_file()
    return summary


def stream_of_documents(folder: Path) -> tuple[str, ...]:
    """Options for a data set of two files that is streamed as FineWeb is."""
    for part in range(2):
        rows = (json.dumps({"text": text}) for text in DOCUMENTS[part::2])
        (folder / f"part{part}.jsonl").write_text("\n".join(rows) + "\n")
    files = f"data.data_files={folder}/part*.jsonl"
    return "data=fineweb", "data.path=json", "data.name=null", files, "data.validation_rows=4", "data.shuffle_windows=8"


def test_one_rank_trains_experts_on_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("".join(DOCUMENTS))
    summary = trained(tmp_path, "strategy=auto", "trainer.devices=1", "model=moe", "data=text", "data.path=corpus.txt")
    assert (summary["steps"], summary["ranks"], summary["tokens"]) == (10, 1, 10 * 8 * 32)
    assert summary["loss"] < 5.5
    assert summary["val_loss"] < 5.5


def test_two_ranks_train_on_a_stream(tmp_path: Path) -> None:
    summary = trained(tmp_path, "strategy=ddp", *stream_of_documents(tmp_path))
    assert (summary["steps"], summary["ranks"], summary["tokens"]) == (10, 2, 2 * 10 * 8 * 32)
    assert summary["loss"] < 5.5
    assert summary["val_loss"] < 5.5


def test_each_job_of_a_sweep_has_a_process_and_a_directory(tmp_path: Path) -> None:
    """With the network and the configuration of a user, which each process has to find."""
    document = (ROOT / "docs" / "training.md").read_text()
    (network,) = re.findall(r"^```python\n(.*?)^```$", document, flags=re.MULTILINE | re.DOTALL)
    (configuration,) = re.findall(r"^```yaml\n(.*?)^```$", document, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "mynet.py").write_text(network)
    (tmp_path / "own" / "model").mkdir(parents=True)
    (tmp_path / "own" / "model" / "mine.yaml").write_text(configuration)
    result = leto_train(
        tmp_path,
        "-m",
        "--config-dir=own",
        "model=mine",
        "trainer.max_steps=10",
        "trainer.enable_progress_bar=false",
        "strategy=auto",
        "trainer.devices=1",
        "module.learning_rate=1e-2,1e-3",
        f"hydra.sweep.dir={tmp_path / 'sweep'}",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    losses = [json.loads((tmp_path / "sweep" / f"{n}" / "summary.json").read_text())["loss"] for n in range(2)]
    assert losses[0] < losses[1]
    assert (tmp_path / "sweep" / "1" / ".hydra" / "config.yaml").is_file()


def test_what_is_wrong_is_said_in_one_line(tmp_path: Path) -> None:
    result = leto_train(tmp_path, "data=text", "data.path=nowhere.txt")
    assert result.returncode == 2
    assert result.stderr.strip() == f"leto train: data.path=nowhere.txt is no file (looked in {tmp_path})."
    assert not result.stdout


def test_help_shows_groups_and_fields(tmp_path: Path) -> None:
    result = leto_train(tmp_path, "--help")
    assert result.returncode == 0
    assert "strategy: auto, ddp, leto" in result.stdout
    assert "learning_rate: 0.003" in result.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("source", ["bytes", "stream"])
def test_a_killed_run_under_leto_ends_as_an_undisturbed_one(tmp_path: Path, source: str) -> None:
    faults = (
        "[{fault: kill, rank: 1, step: 4, point: backward}, {fault: kill, rank: 0, step: 7, point: chunk_updating}]"
    )
    data = stream_of_documents(tmp_path) if source == "stream" else ()
    summaries = {}
    for name, planned in (("quiet", "[]"), ("killed", faults)):
        (tmp_path / name).mkdir()
        arguments = ("strategy=leto", "model=moe", f"trainer.strategy.faults={planned}", *data)
        summaries[name] = trained(tmp_path / name, *arguments)
        summaries[name]["metrics"] = (tmp_path / name / "out" / "metrics" / "version_0" / "metrics.csv").read_bytes()
    assert summaries["killed"].pop("recoveries") == 2
    assert summaries["quiet"].pop("recoveries") == 0
    for summary in summaries.values():
        del summary["seconds"], summary["directory"]
    assert summaries["killed"] == summaries["quiet"]
