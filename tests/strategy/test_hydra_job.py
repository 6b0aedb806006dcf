"""Hydra jobs seen from the user's process: which job runs, what its trainers get, and what can't work."""

import pickle
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hydra import main
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from leto_strategy.autoload import autoload
from leto_strategy.errors import ConfigurationError, UnsupportedFeatureError
from leto_strategy.strategy.launch import hydra_job


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Run a function as a Hydra application with a command line."""
    autoload()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("a: 1\nstamp: ${now:%f}\nlate: ${now:%S.%f}\n")

    def run_application(function: Callable[[Any], Any], *arguments: str) -> None:
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", ["app.py", *arguments, "hydra/job_logging=none", "hydra/hydra_logging=none"])
        main(config_path=str(tmp_path), config_name="config", version_base=None)(function)()

    return run_application


def test_outside_of_an_application_there_is_no_job() -> None:
    assert hydra_job.current_job() is None
    hydra_job.check_job(None, None)


def test_trainers_get_the_values_that_the_job_has_seen(run: Callable[..., None]) -> None:
    def task(config: Any) -> None:
        seen.append(config.stamp)
        packed.append(pickle.loads(hydra_job.pack_job(hydra_job.current_job())))
        nows.append(hydra_job.nows())
        launched.append(hydra_job.launch_time())
        assert launched[-1].strftime("%S.%f") == config.late, "what is asked for later is the launch's time, too"
        assert hydra_job.launch_time() == launched[-1]

    seen: list[str] = []
    packed: list[Any] = []
    nows: list[dict[str, str]] = []
    launched: list[datetime] = []
    run(task, "-m", "a=1,2")
    assert [config.a for config in packed] == [1, 2]
    assert [config.stamp for config in packed] == seen, "resolved values travel"
    assert [values["%f"] for values in nows] == seen, "each job has its own"
    assert len(set(launched)) == 2
    assert packed[1].hydra.runtime.output_dir.endswith("/1")
    assert packed[1].hydra.job.num == 1


def test_one_application_with_its_own_launcher_is_what_works(run: Callable[..., None]) -> None:
    def task(config: Any) -> None:
        jobs.append(hydra_job.current_job())

    jobs: list[Any] = []
    run(task)
    run(task)
    run(task, "-m", "a=1,2")
    hydra_job.check_job(jobs[0], None)
    hydra_job.check_job(jobs[3], jobs[2])
    with pytest.raises(UnsupportedFeatureError, match="two Hydra applications"):
        hydra_job.check_job(jobs[1], jobs[0])
    with pytest.raises(UnsupportedFeatureError, match="move it into the function"):
        hydra_job.check_job(None, jobs[0])
    other = OmegaConf.create(OmegaConf.to_container(jobs[2], resolve=False))
    other.hydra.launcher._target_ = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
    with pytest.raises(ConfigurationError, match=r"JoblibLauncher .* hydra/launcher=basic"):
        hydra_job.check_job(other, None)


def test_a_configuration_that_cannot_be_pickled_is_named(run: Callable[..., None]) -> None:
    def task(config: Any) -> None:
        job = OmegaConf.create({"f": lambda: None}, flags={"allow_objects": True})
        with pytest.raises(ConfigurationError, match="can't be pickled"):
            hydra_job.pack_job(job)
        reached.append(True)

    reached: list[bool] = []
    run(task)
    assert reached
