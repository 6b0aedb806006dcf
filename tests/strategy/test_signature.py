"""The signature that LightningCLI reads: every option of Leto and those of DDPStrategy, typed and documented."""

import inspect
from dataclasses import fields
from datetime import timedelta
from importlib import import_module
from typing import Any

import pytest
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import Strategy

from leto_strategy.config import LetoConfig
from leto_strategy.strategy.signature import DDP_OPTIONS


@pytest.fixture(params=["lightning", "pytorch_lightning"])
def strategy(request: pytest.FixtureRequest) -> Any:
    return import_module(f"leto_strategy.strategy.{request.param}").LetoStrategy


def test_it_has_every_option_with_type_default_and_text(strategy: Any) -> None:
    parameters = inspect.signature(strategy).parameters
    assert set(parameters) == {field.name for field in fields(LetoConfig)} | DDP_OPTIONS
    assert all(p.annotation is not inspect.Parameter.empty for p in parameters.values())
    assert not any(isinstance(p.annotation, str) for p in parameters.values())
    for field in fields(LetoConfig):
        assert parameters[field.name].default == (field.default if field.name != "faults" else [])
    for name in parameters:
        assert f"    {name}: " in strategy.__doc__


def test_its_defaults_are_those_without_arguments(strategy: Any) -> None:
    parameters = inspect.signature(strategy).parameters
    explicit = strategy(**{name: parameter.default for name, parameter in parameters.items()})
    assert explicit.leto == strategy().leto == LetoConfig()
    assert explicit._timeout == timedelta(minutes=30)


def test_a_bare_off_of_yaml_is_understood() -> None:
    bare: Any = False
    assert LetoConfig(zygote=bare).zygote == "off"


def test_the_parser_of_lightning_cli_takes_it_by_class_path(capsys: pytest.CaptureFixture[str]) -> None:
    parser = LightningArgumentParser()
    parser.add_argument("--strategy", type=Strategy)
    value = {"class_path": "leto_strategy.LetoStrategy", "init_args": {"shadows": 0, "hang_timeout": 60}}
    with pytest.raises(SystemExit):
        parser.parse_object({"strategy": value})
    assert "say which one LetoStrategy is for" in capsys.readouterr().err, "both distributions are imported"
    value["class_path"] = "leto_strategy.strategy.lightning.LetoStrategy"
    config = parser.parse_object({"strategy": value})
    strategy = parser.instantiate_classes(config).strategy
    assert strategy.leto == LetoConfig(shadows=0, hang_timeout=60)
