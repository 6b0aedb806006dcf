"""The Hydra application behind `leto train`: one run, or the jobs of a sweep.

Each job of a sweep is a process of its own: strategies start ranks by running this program again, and what one job
leaves in a process (a process group, environment variables) is none of the next one's business. Torch and Lightning are
imported where a run begins, so that `--help` and a sweep are light.
"""

import json
import subprocess
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from leto_strategy.errors import LetoError


@hydra.main(version_base="1.3", config_path="pkg://leto_strategy.conf", config_name="train")
def main(config: DictConfig) -> float | None:
    """Train as the configuration says; returns the last loss, which a sweeper may minimise."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return run_job()
    from leto_strategy.pretraining.run import train

    try:
        summary = train(config)
    except LetoError as error:  # it says what to do; what is wrong in a user's own code keeps its traceback
        print(f"leto train: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, ValueError) else 1) from error
    return None if summary is None else float(summary["loss"])


def run_job() -> float:
    """In a sweep, run this job in a process of its own; returns its last loss.

    Raises:
        RuntimeError: It failed.
    """
    job = HydraConfig.get()
    directory = Path(job.runtime.output_dir)
    command = [sys.executable, "-m", "leto_strategy.pretraining", f"--config-name={job.job.config_name}"]
    folders = [source.path for source in job.runtime.config_sources if source.provider == "command-line"]
    command += [f"--config-dir={folder}" for folder in folders]
    command += [*job.overrides.task, f"hydra.run.dir='{directory}'", "hydra.output_subdir=null"]
    status = subprocess.run(command, check=False).returncode
    if status:
        raise RuntimeError(f"Job {job.job.num} of the sweep ended with status {status}: {' '.join(job.overrides.task)}")
    return float(json.loads((directory / "summary.json").read_text())["loss"])
