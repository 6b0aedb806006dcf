"""conf/: each field is an argument of what it builds and has a comment; every choice of every group composes."""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf

from leto_strategy.config import LetoConfig
from leto_strategy.pretraining.gpt import GPT

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "conf").rglob("*.yaml"))
GROUPS = {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in (ROOT / "conf").glob("[!_]*/")}
CHOICES = [f"{group}={name}" for group, names in GROUPS.items() for name in names]


@contextmanager
def composed(*overrides: str) -> Iterator[DictConfig]:
    with initialize_config_module("leto_strategy.conf", version_base="1.3"):
        yield compose("train", overrides=list(overrides))


def arguments_of(target: str) -> set[str]:
    parameters = inspect.signature(get_class(target).__init__).parameters.values()
    return {p.name for p in parameters if p.kind != p.VAR_KEYWORD} - {"self"}


def fields_of(node: DictConfig) -> set[str]:
    return {str(name) for name in node if not str(name).startswith("_")}


def test_the_groups_are_those_of_the_documents() -> None:
    assert set(GROUPS) == {"strategy", "model", "data", "trainer", "experiment"}


@pytest.mark.parametrize("choice", CHOICES)
def test_every_field_is_an_argument_of_what_it_builds(choice: str) -> None:
    with composed(choice) as config:
        for node in (config.model, config.data, config.module):
            assert fields_of(node) == arguments_of(node._target_), node._target_
        assert fields_of(config.trainer) <= arguments_of(config.trainer._target_)


def test_the_strategy_has_every_option_of_leto_with_its_default() -> None:
    with composed() as config:
        options = OmegaConf.to_container(config.trainer.strategy)
    assert isinstance(options, dict)
    assert options.pop("_target_") == "leto_strategy.LetoStrategy"
    defaults: dict[Any, Any] = {field.name: getattr(LetoConfig(), field.name) for field in fields(LetoConfig)}
    assert {**options, "faults": tuple(options["faults"])} == defaults


@pytest.mark.parametrize("name", ["ddp", "auto"])
def test_other_strategies_replace_it_by_a_name(name: str) -> None:
    with composed(f"strategy={name}") as config:
        assert config.trainer.strategy == name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_value_has_a_comment(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("#")
    body = "\n".join(lines).split("\nhydra:")[0].split("\n")
    values = [line for line in body if re.match(r"\s*\w+: \S", line) and "override" not in line]
    silent = [
        line
        for line in values
        if " # " not in line and not re.match(r"\s*(strategy|save_dir|_target_|network): ", line)
    ]
    assert not silent


@pytest.mark.parametrize("name", GROUPS["model"])
def test_a_model_has_the_size_that_its_file_tells(name: str) -> None:
    with composed(f"model={name}") as config, torch.device("meta"):
        network = instantiate(config.model)
    assert isinstance(network, GPT)
    count = sum(parameter.numel() for parameter in network.parameters()) / 1e6
    told = {"gpt_tiny": 0.8, "moe_tiny": 4.5, "moe": 4.5, "gpt_small": 85.1}[name]
    assert count == pytest.approx(told, rel=0.05)


def test_sizes_and_seed_are_set_in_one_place() -> None:
    with composed("model.context=77", "data.vocabulary=999", "seed=5", "trainer.max_steps=13") as config:
        assert (config.data.context, config.model.vocabulary) == (77, 999)
        assert (config.data.seed, config.module.decay_steps, config.module.network.context) == (5, 13, 77)
