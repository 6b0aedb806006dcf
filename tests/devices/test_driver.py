"""The driver is asked through a stand-in for libcuda: what it says, and what its errors are called."""

import io

import pytest

from leto_strategy.devices.driver import CudaDevice, DriverReport, cuda_driver, hold_context

ATTRIBUTES = {20: 3, 75: 9, 76: 0, 102: 1, 103: 0}


class FakeCuda:
    """Calls that write into the references they are given, and return a code."""

    def __init__(self, **codes):
        self._codes = codes
        self.calls = []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            if name in self._codes:
                return self._codes[name]
            self._answer(name, *arguments)
            return 0

        return call

    def _answer(self, name, *arguments):
        match name:
            case "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_NOT_INITIALIZED"
            case "cuDriverGetVersion":
                arguments[0]._obj.value = 13010
            case "cuDeviceGetCount":
                arguments[0]._obj.value = 1
            case "cuDeviceGetName":
                arguments[0].value = b"NVIDIA H200"
            case "cuDeviceGetAttribute":
                arguments[0]._obj.value = ATTRIBUTES[arguments[1]]


def test_what_the_driver_says_is_passed_on():
    cuda = FakeCuda()
    assert cuda_driver(cuda) == DriverReport((13, 1), (CudaDevice("NVIDIA H200", (9, 0), True, False, 3),))
    assert not {"cuCtxCreate", "cuDevicePrimaryCtxRetain"} & set(cuda.calls), "no context is made"


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetAttribute"])
def test_an_error_is_a_problem_with_its_name(call):
    driver = cuda_driver(FakeCuda(**{call: 3}))
    assert (driver.version, driver.devices) == ((13, 1), ())
    assert driver.problem == f"{call}: CUDA_ERROR_NOT_INITIALIZED (3)"


def test_a_library_that_is_not_there_is_a_problem():
    class Empty:
        pass

    assert cuda_driver(Empty()).problem


def test_a_context_is_held_until_the_input_ends(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    cuda = FakeCuda()
    hold_context(cuda)
    assert capsys.readouterr().out == "ready\n"
    assert cuda.calls[-1] == "cuDevicePrimaryCtxRetain"
