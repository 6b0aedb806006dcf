"""Torch's numbers of GPUs become the machine's, or are refused; never guessed."""

import pytest

from leto_strategy.devices.visible import AmbiguousDeviceError, visible_gpus

UUIDS = ["GPU-aa11", "GPU-aa22", "GPU-bb33"]


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("0,1,2", [0, 1, 2]),
        ("2, 0", [2, 0]),
        ("GPU-bb33,1", [2, 1]),
        ("GPU-b", [2]),
        ("GPU-aa", []),
        ("1,-1,0", [1]),
        ("1,7,0", [1]),
        ("NoDevFiles", []),
        ("aa11", []),
    ],
)
def test_the_variable_is_read_as_cuda_does(value, indices):
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert visible_gpus(environ, uuids=UUIDS, models=["H200"] * 3) == indices


@pytest.mark.parametrize("value", ["MIG-GPU-aa11/1/0", "0,MIG-5f3c", "mig-5f3c"])
def test_mig_instances_are_refused(value):
    with pytest.raises(AmbiguousDeviceError, match="MIG"):
        visible_gpus({"CUDA_VISIBLE_DEVICES": value}, uuids=UUIDS, models=["H200"] * 3)


def test_a_gpu_that_is_named_twice_is_refused():
    with pytest.raises(AmbiguousDeviceError, match="twice"):
        visible_gpus({"CUDA_VISIBLE_DEVICES": "1,GPU-aa22"}, uuids=UUIDS, models=["H200"] * 3)


@pytest.mark.parametrize("value", [None, "1"])
def test_numbers_of_different_models_need_the_order_of_the_bus(value):
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    models = ["H200", "L4", "H200"]
    with pytest.raises(AmbiguousDeviceError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        visible_gpus(environ, uuids=UUIDS, models=models)
    found = visible_gpus({**environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, uuids=UUIDS, models=models)
    assert found == ([0, 1, 2] if value is None else [1])
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-bb33"}, uuids=UUIDS, models=models) == [2]
