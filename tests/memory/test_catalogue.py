"""The pure part: planning, changing, and handing over which region lies where."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leto_strategy.errors import AllocationMismatchError, ProtocolError
from leto_strategy.memory.backend import Kind, Place, RegionSpec
from leto_strategy.memory.catalogue import Catalogue, Change, spec_from_list

SPECS = st.lists(
    st.builds(
        RegionSpec,
        name=st.integers(0, 30).map(lambda i: f"r{i}"),
        size_bytes=st.integers(0, 10_000),
        kind=st.sampled_from(Kind),
        shard=st.sampled_from(["0/1", "0/2", "1/2"]),
        arena=st.sampled_from(["", "a", "b", "c"]),
        alignment_bytes=st.sampled_from([1, 8, 512, 4096]),
    ),
    max_size=12,
    unique_by=lambda spec: spec.key,
)


GRANULARITY = {Place.HOST: 4096, Place.DEVICE: 2 << 20}


def created(change: Change) -> Change:
    """As after the backend made the segments, and over the wire."""
    message = json.loads(json.dumps(change.to_message()))
    for segment in message["segments"]:
        segment[2] = 1
    return Change.from_message(message)


@given(rounds=st.lists(st.tuples(SPECS, st.lists(st.integers(0, 30), max_size=5)), max_size=5))
@settings(max_examples=200, deadline=None)
def test_regions_never_overlap_and_a_mirror_follows(rounds: list[tuple[list[RegionSpec], list[int]]]) -> None:
    catalogue, mirror = Catalogue(), Catalogue()
    numbers: set[int] = set()
    for specs, removals in rounds:
        try:
            added = catalogue.plan(specs, creator="p:1", granularity_bytes=GRANULARITY.__getitem__)
        except AllocationMismatchError:
            added = None
        except ValueError:
            assert any(len({s.kind.place for s in specs if s.arena == arena}) == 2 for arena in "abc")
            added = None
        removed = catalogue.plan_removal((f"r{i}", "0/1") for i in removals)
        for change in (added, removed if added is None else None):
            if change is None:
                continue
            assert not numbers & {segment.number for segment in change.segments}, "a number was used twice"
            numbers |= {segment.number for segment in change.segments}
            change = created(change)
            assert catalogue.apply(change) == mirror.apply(change)
        assert mirror.snapshot() == catalogue.snapshot()
        assert Catalogue.from_snapshot(created(catalogue.snapshot())).snapshot() == catalogue.snapshot()
        check_places(catalogue)


def check_places(catalogue: Catalogue) -> None:
    ends: dict[int, int] = {}
    for entry in sorted(catalogue.regions.values(), key=lambda e: (e.segment, e.offset_bytes, e.spec.size_bytes)):
        assert entry.offset_bytes % entry.spec.alignment_bytes == 0
        assert entry.offset_bytes >= ends.get(entry.segment, 0)
        ends[entry.segment] = entry.offset_bytes + entry.spec.size_bytes
    assert ends.keys() == catalogue.segments.keys(), "a segment without regions"
    for number, end in ends.items():
        segment = catalogue.segments[number]
        inside = [entry.spec.kind for entry in catalogue.regions.values() if entry.segment == number]
        assert end <= segment.size_bytes
        assert segment.size_bytes % GRANULARITY[segment.place] == 0
        assert {kind.place for kind in inside} == {segment.place}
        assert segment.protected >= (Kind.PROTECTED in inside)
    places = sorted((s.address_hint, s.size_bytes) for s in catalogue.segments.values())
    assert all(address + size < following for (address, size), (following, _) in itertools.pairwise(places))


def base() -> Catalogue:
    catalogue = Catalogue()
    change = catalogue.plan([RegionSpec("a", 10, Kind.RETAINED)], creator="p:1", granularity_bytes=lambda _: 4096)
    assert change is not None
    catalogue.apply(created(change))
    return catalogue


def next_message() -> dict[str, Any]:
    change = base().plan([RegionSpec("b", 10, Kind.RETAINED)], creator="p:2", granularity_bytes=lambda _: 4096)
    assert change is not None
    return created(change).to_message()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["version"], 1),
        (["version"], 3),
        (["version"], True),
        (["version"], "2"),
        (["next"], [1, 1]),
        (["next"], [2, 1]),
        (["next"], [3]),
        (["segments"], {}),
        (["segments"], []),
        (["segments", 0, 0], 1),
        (["segments", 0, 1], 0),
        (["segments", 0, 1], -4096),
        (["segments", 0, 1], 9),
        (["segments", 0, 2], 0),
        (["segments", 0, 1], 1 << 80),
        (["regions"], None),
        (["regions", 0, 0], "a"),
        (["regions", 0, 0], "b b"),
        (["regions", 0, 1], 1.5),
        (["regions", 0, 2], "other"),
        (["regions", 0, 6], 1),
        (["regions", 0, 6], 7),
        (["regions", 0, 7], 4090),
        (["regions", 0, 8], None),
        (["regions", 0], "xxxxxxxxx"),
        (["removed"], [["b", "0/1"]]),
        (["removed"], [["a", "0/1"], ["a", "0/1"]]),
        (["removed"], [["a"]]),
        (["removed"], [[["a"], "0/1"]]),
    ],
)
def test_a_change_that_does_not_follow_is_refused_and_changes_nothing(path: list[Any], value: object) -> None:
    catalogue, message = base(), next_message()
    before = catalogue.snapshot()
    catalogue_of_right = base()
    catalogue_of_right.apply(Change.from_message(next_message()))
    place: Any = message
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(ProtocolError):
        catalogue.apply(Change.from_message(message))
    assert catalogue.snapshot() == before


@given(item=st.lists(st.none() | st.integers() | st.text(max_size=5) | st.floats(), max_size=8) | st.text() | st.none())
@settings(max_examples=200, deadline=None)
def test_whatever_is_no_spec_is_a_protocol_error(item: object) -> None:
    with pytest.raises(ProtocolError):
        spec_from_list(item)
