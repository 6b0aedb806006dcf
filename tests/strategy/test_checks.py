"""Which devices are accepted, and what is said about bits that a GPU may not give twice."""

from types import SimpleNamespace
from typing import Any

import lightning.pytorch  # noqa: F401 -- sets variables of the environment when it is imported
import pytest
import pytorch_lightning  # noqa: F401
import torch

from leto_strategy.config import LetoConfig
from leto_strategy.errors import ConfigurationError, UnsupportedFeatureError
from leto_strategy.strategy.flavour import flavour
from leto_strategy.strategy.launch.checks import check_devices
from leto_strategy.strategy.launch.reproducibility import irreproducible, warn_irreproducible


def trainer_on(*devices: str, backend: str | None = None, num_nodes: int = 1, protection: str = "off") -> Any:
    """A Trainer as far as its devices go."""
    parallel = [torch.device(name) for name in devices]
    leto = LetoConfig(protection=protection)
    strategy = SimpleNamespace(parallel_devices=parallel, _process_group_backend=backend, leto=leto)
    return SimpleNamespace(strategy=strategy, num_nodes=num_nodes)


@pytest.mark.parametrize(
    ("devices", "backend"),
    [
        (["cpu"], None),
        (["cpu", "cpu", "cpu"], None),
        (["cuda:0"], None),
        (["cuda:0", "cuda:1"], None),
        (["cuda:3", "cuda:1"], "nccl"),
        (["cuda:0", "cuda:0"], "gloo"),
        (["cuda:0", "cuda:1", "cuda:0", "cuda:1"], "gloo"),
    ],
)
def test_cpus_and_gpus_are_accepted(devices: list[str], backend: str | None) -> None:
    check_devices(trainer_on(*devices, backend=backend))


@pytest.mark.parametrize(
    ("devices", "backend", "texts"),
    [
        ([], None, ["no device", "accelerator='gpu'"]),
        (["mps:0"], None, ["not on mps", "accelerator='cpu'"]),
        (["xla:0"], None, ["not on xla"]),
        (["cpu", "cuda:0"], "gloo", ["not on both at once", "cpu, cuda:0"]),
        (["cuda:0", "mps:0"], None, ["not on both at once"]),
        (["cuda:0", "cuda:0"], None, ["Several ranks on one GPU", "process_group_backend='gloo'"]),
        (["cuda:1", "cuda:0", "cuda:1"], "nccl", ["cuda:1, cuda:0, cuda:1", "a device for each rank"]),
    ],
)
def test_other_devices_are_refused(devices: list[str], backend: str | None, texts: list[str]) -> None:
    with pytest.raises(ConfigurationError) as error:
        check_devices(trainer_on(*devices, backend=backend))
    for text in texts:
        assert text in str(error.value)


def test_protection_is_refused_on_a_gpu() -> None:
    check_devices(trainer_on("cpu", protection="on"))
    with pytest.raises(UnsupportedFeatureError, match="on the CPU only"):
        check_devices(trainer_on("cuda:0", protection="on"))


def test_several_nodes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="num_nodes=1"):
        check_devices(trainer_on("cuda:0", num_nodes=2))


FIXED = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@pytest.mark.parametrize(
    ("benchmark", "deterministic", "warn_only", "environ", "remedies"),
    [
        (False, True, False, FIXED, []),
        (False, True, False, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, []),
        (True, True, False, FIXED, ["Trainer(benchmark=False)"]),
        (False, False, False, FIXED, ["Trainer(deterministic=True)"]),
        (False, True, True, FIXED, ["deterministic='warn'"]),
        (False, True, False, {}, ["CUBLAS_WORKSPACE_CONFIG=:4096:8"]),
        (False, True, False, {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, ["CUBLAS_WORKSPACE_CONFIG=:4096:8"]),
        (True, False, False, {}, ["benchmark=False", "deterministic=True", "CUBLAS_WORKSPACE_CONFIG=:4096:8"]),
    ],
)
def test_what_may_change_bits_on_a_gpu_is_named_with_its_remedy(
    benchmark: bool, deterministic: bool, warn_only: bool, environ: dict[str, str], remedies: list[str]
) -> None:
    texts = irreproducible(benchmark=benchmark, deterministic=deterministic, warn_only=warn_only, environ=environ)
    assert len(texts) == len(remedies)
    for text, remedy in zip(texts, remedies, strict=True):
        assert remedy in text


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_it_is_said_in_one_warning_and_only_on_gpus(
    name: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.warns(UserWarning, match="redoes the interrupted step") as said:
        warn_irreproducible(trainer_on("cuda:0", "cuda:1"), flavour(name))
    assert len(said) == 1
    assert "CUBLAS_WORKSPACE_CONFIG" in str(said[0].message)
    recwarn.clear()
    warn_irreproducible(trainer_on("cpu", "cpu"), flavour(name))
    assert not list(recwarn)
