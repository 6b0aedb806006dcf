"""What is said between the processes is checked where it is heard."""

import json

import pytest

from leto_strategy.errors import ProtocolError
from leto_strategy.processes.messages import (
    Entered,
    ErrorReport,
    LaunchSpec,
    Ready,
    Script,
    SignalRequest,
    parse_launcher_message,
    parse_trainer_message,
)
from leto_strategy.processes.timings import Timings


def launch(**changes):
    spec = LaunchSpec(
        job="abc123",
        argv=("python", "train.py"),
        env={"A": "b"},
        cwd="/",
        world=2,
        call=0,
        function="fit",
        script=Script("train.py", None, ("train.py",), "/x"),
        loggers=({"kind": "csv_logs", "version": 3}, {"kind": "none"}),
        hang_timeout=2,
    )
    return json.loads(json.dumps({**spec.to_json(), **changes}))


def test_a_launch_survives_json():
    frame = launch()
    assert LaunchSpec.from_json(frame) == LaunchSpec.from_json(json.loads(json.dumps(frame)))
    assert LaunchSpec.from_json(frame).loggers == ({"kind": "csv_logs", "version": 3}, {"kind": "none"})
    assert LaunchSpec.from_json(frame).script.path0 == "/x"


@pytest.mark.parametrize(
    "changes",
    [
        {"op": "status"},
        {"job": "a/b"},
        {"job": None},
        {"world": 0},
        {"world": True},
        {"world": "2"},
        {"devices": ["cuda:0"]},
        {"devices": ["cuda:0", "cpu"]},
        {"devices": ["cuda:0", "cuda"]},
        {"devices": ["cuda:0", "cuda:01"]},
        {"devices": ["mps:0", "mps:0"]},
        {"devices": "cuda:0"},
        {"shadows": 2},
        {"argv": []},
        {"argv": ["python", 3]},
        {"env": {"A": 1}},
        {"max_restarts": 0},
        {"reap_timeout": 0},
        {"hang_timeout": -1},
        {"script": {"path": None, "module": None, "argv": [], "path0": ""}},
        {"script": "train.py"},
        {"faults": ["kill"]},
        {"faults": [{"rank": 0, "point": "nowhere"}]},
        {"faults": [{"rank": 0, "place": "forward"}]},
        {"timings": {"nonsense": 1}},
        {"surprise": 1},
    ],
)
def test_a_wrong_launch_is_refused(changes):
    with pytest.raises(ProtocolError):
        LaunchSpec.from_json(launch(**changes))


@pytest.mark.parametrize(
    ("devices", "gpus"),
    [((), ()), (("cpu", "cpu"), ()), (("cuda:1", "cuda:0"), (0, 1)), (("cuda:10", "cuda:10"), (10,))],
)
def test_a_launch_names_the_device_of_each_rank(devices, gpus):
    spec = LaunchSpec.from_json(launch(devices=list(devices)))
    assert (spec.devices, spec.gpus) == (devices, gpus)


def test_trainer_messages():
    assert parse_trainer_message({"op": "ready"}) == Ready()
    assert parse_trainer_message({"op": "entered", "step": 3}) == Entered(3)
    report = parse_trainer_message({"op": "error", "kind": "device", "message": "m"})
    assert report == ErrorReport("device", "", "m", "", None)


@pytest.mark.parametrize(
    "frame",
    [
        {},
        {"op": 3},
        {"op": ["ready"]},
        {"op": "entered"},
        {"op": "entered", "step": "3"},
        {"op": "error", "kind": "whatever"},
        {"op": "error", "kind": "exception", "message": 3},
        {"op": "error", "kind": "exception", "step": 1.5},
    ],
)
def test_a_wrong_trainer_message_is_refused(frame):
    with pytest.raises(ProtocolError):
        parse_trainer_message(frame)


def test_a_long_traceback_is_cut():
    report = parse_trainer_message({"op": "error", "kind": "exception", "traceback": "x" * 1_000_000})
    assert len(report.traceback) == 256 * 1024


def test_launcher_messages():
    assert parse_launcher_message({"op": "signal", "signum": 2}) == SignalRequest(2)
    for frame in ({"op": "signal", "signum": 0}, {"op": "signal", "signum": 9999}, {"op": "launch"}, {}):
        with pytest.raises(ProtocolError):
            parse_launcher_message(frame)


def test_timings_can_be_shortened_only_by_name():
    assert Timings.with_overrides({"delivery": 1}).delivery == 1
    for wrong in ({"nonsense": 1}, {"delivery": -1}, {"delivery": "1"}, {"delivery": True}):
        with pytest.raises(ProtocolError):
            Timings.with_overrides(wrong)
