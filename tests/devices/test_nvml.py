"""What NVML says is passed on, and what it does not say is unknown, never an exception."""

import pytest
from tests.fake_nvml import FakeGpu, FakeNvml

from leto_strategy.devices.health import DeviceHealth, action_name
from leto_strategy.devices.nvml import DeviceMemory, Nvml, open_nvml
from leto_strategy.devices.visible import AmbiguousDeviceError


def test_a_machine_without_a_driver_has_no_gpu():
    for nvml in (Nvml(None), Nvml(FakeNvml(FakeGpu(), init_error=12))):
        assert nvml.problem
        assert (nvml.num_gpus(), nvml.gpus(), nvml.driver_version(), nvml.visible({})) == (0, [], None, [])


def test_the_library_that_is_installed_never_raises_here():
    nvml = open_nvml()
    assert (nvml.driver_version() is None) == bool(nvml.problem)


def test_what_a_gpu_says_is_passed_on():
    nvml = Nvml(FakeNvml(FakeGpu(pids=[7, 9, 7], action=4, errors=3, rows=(1, 2, 1, 0), mode=3, persistent=0)))
    (gpu,) = nvml.visible({})
    assert nvml.driver_version() == "580.95.05"
    assert (gpu.uuid(), gpu.name()) == ("GPU-aaaa", "H200")
    assert gpu.compute_pids() == {7, 9}
    assert gpu.memory() == DeviceMemory(total=1 << 37, free=1 << 36, used=1 << 36)
    assert (gpu.compute_mode(), gpu.is_persistent()) == ("exclusive process", False)
    assert gpu.health() == DeviceHealth(4, 3, remap_pending=True, remap_failed=False)


def test_what_a_gpu_does_not_support_is_unknown():
    (gpu,) = Nvml(FakeNvml(FakeGpu(pids=None, action=None, errors=None, rows=None))).gpus()
    assert gpu.compute_pids() is None
    assert gpu.health() == DeviceHealth()


def test_an_empty_list_is_no_unknown_one():
    (gpu,) = Nvml(FakeNvml(FakeGpu())).gpus()
    assert gpu.compute_pids() == frozenset()


def test_a_lost_gpu_says_so():
    (gpu,) = Nvml(FakeNvml(FakeGpu(lost=True))).gpus()
    assert gpu.health() == DeviceHealth(lost=True)
    assert (gpu.compute_pids(), gpu.memory(), gpu.uuid(), gpu.compute_mode()) == (None, None, None, None)


def test_a_library_without_a_function_is_unknown():
    old = FakeNvml(FakeGpu(errors=2))
    old.nvmlDeviceGetFieldValues = None
    (gpu,) = Nvml(old).gpus()
    assert gpu.health().recovery_action is None
    assert gpu.health().uncorrectable_errors == 2


def test_torchs_numbers_follow_the_environment():
    nvml = Nvml(FakeNvml(FakeGpu("GPU-a"), FakeGpu("GPU-b")))
    assert [gpu.uuid() for gpu in nvml.visible({"CUDA_VISIBLE_DEVICES": "1,0"})] == ["GPU-b", "GPU-a"]
    assert [gpu.uuid() for gpu in nvml.visible({"CUDA_VISIBLE_DEVICES": "GPU-b"})] == ["GPU-b"]


def test_a_partitioned_gpu_is_refused_where_it_is_used():
    nvml = Nvml(FakeNvml(FakeGpu("GPU-a"), FakeGpu("GPU-b", mig=1)))
    assert len(nvml.visible({"CUDA_VISIBLE_DEVICES": "0"})) == 1
    with pytest.raises(AmbiguousDeviceError, match="MIG"):
        nvml.visible({})


def test_actions_have_words():
    assert (action_name(0), action_name(1), action_name(None)) == ("none", "reset the GPU", None)
    assert action_name(99) == "action 99"
    assert DeviceHealth(2, 1).to_json()["recovery_action"] == "reboot the node"
