"""Reads TensorBoard event files for comparison: everything of each event but its wall-clock time."""

import struct
from pathlib import Path
from typing import Any


def read_events(path: Path) -> list[str]:
    """The events of a file as text; an incomplete record at the end is an error."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.graph_pb2 import GraphDef

    data, at, events = path.read_bytes(), 0, []
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        payload = data[at + 12 : at + 12 + length]
        assert len(payload) == length, f"{path} ends inside a record"
        at += 12 + length + 4
        event = Event.FromString(payload)
        event.ClearField("wall_time")
        maps = str(GraphDef.FromString(event.graph_def)) if event.graph_def else ""  # a map has no order
        if maps:
            event.ClearField("graph_def")
        hparams = "".join(_hparams_of(value) for value in event.summary.value)
        events.append(str(event) + maps + hparams)
    return events


def _hparams_of(value: Any) -> str:
    """Hyper-parameters are a map, which each process may write in another order: they are read and sorted."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    plugin = value.metadata.plugin_data
    if plugin.plugin_name != "hparams":
        return ""
    text = str(HParamsPluginData.FromString(plugin.content))
    plugin.content = b""
    return text


def event_directories(root: Path) -> dict[str, list[list[str]]]:
    """For each directory below `root` that has event files: their events, in the order of the files' names."""
    found: dict[str, list[list[str]]] = {}
    for path in sorted(root.rglob("events.out.tfevents.*"), key=_numbers_as_numbers):
        found.setdefault(str(path.parent.relative_to(root)), []).append(read_events(path))
    return found


def _numbers_as_numbers(path: Path) -> list[Any]:
    """TensorBoard's own writer counts its files without leading zeros."""
    return [
        str(path.parent),
        *[(word.isdigit(), int(word) if word.isdigit() else word) for word in path.name.split(".")],
    ]


def first_difference(expected: dict[str, list[list[str]]], actual: dict[str, list[list[str]]]) -> str | None:
    """The first difference of what `event_directories` has returned for two runs."""
    if expected.keys() != actual.keys():
        return f"event directories: expected {sorted(expected)}, actual {sorted(actual)}"
    for directory, files in expected.items():
        if len(files) != len(actual[directory]):
            return f"{directory}: expected {len(files)} event files, actual {len(actual[directory])}"
        for want, have in zip(files, actual[directory], strict=True):
            if want != have:
                return f"{directory}: {_where(want, have)}"
    return None


def _where(want: list[Any], have: list[Any]) -> str:
    for i, (a, b) in enumerate(zip(want, have, strict=False)):
        if a != b:
            return f"event {i}: expected {a[:300]!r}, actual {b[:300]!r}"
    return f"expected {len(want)} events, actual {len(have)}: {(want + have)[min(len(want), len(have))][:300]!r}"
