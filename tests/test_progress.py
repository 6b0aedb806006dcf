import mmap
import multiprocessing
import os
import random
import signal
import struct
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leto_strategy.progress import (
    CHUNK_MAX,
    FAULTS_BYTES,
    FAULTS_OFFSET_BYTES,
    PAGE_BYTES,
    STEP_MAX,
    TIMELINE_MAX,
    Activity,
    Marker,
    Phase,
    ProgressPage,
    decode,
    encode,
    newest,
)

COPY_A, COPY_B = 0, 4096


@st.composite
def markers(draw: st.DrawFn, timeline_max: int = TIMELINE_MAX) -> Marker:
    phase = draw(st.sampled_from(Phase))
    chunk = draw(st.integers(0, CHUNK_MAX)) if phase in (Phase.UNDO, Phase.COMMIT) else 0
    return Marker(draw(st.integers(0, STEP_MAX)), phase, chunk, draw(st.integers(0, timeline_max)))


def history(steps: int, chunks: int, timelines: int = 1) -> Iterator[Marker]:
    """All markers of a job in the order in which a rank publishes them."""
    for timeline in range(timelines):
        for step in range(steps):
            yield Marker(step, Phase.READY, timeline=timeline)
            yield Marker(step, Phase.SYNCED, timeline=timeline)
            for chunk in range(chunks):
                yield Marker(step, Phase.UNDO, chunk, timeline)
                yield Marker(step, Phase.COMMIT, chunk, timeline)
            yield Marker(step, Phase.DONE, timeline=timeline)


def page_of(word_a: int, word_b: int) -> ProgressPage:
    buffer = bytearray(PAGE_BYTES)
    struct.pack_into("=Q", buffer, COPY_A, word_a)
    struct.pack_into("=Q", buffer, COPY_B, word_b)
    return ProgressPage(memoryview(buffer))


@given(markers())
def test_a_word_gives_back_its_marker(marker: Marker) -> None:
    word = encode(marker)
    assert 0 < word < 1 << 64
    assert decode(word) == marker


@given(markers(), markers())
def test_markers_and_positions_have_one_order(one: Marker, other: Marker) -> None:
    assert (one < other) == (one.position < other.position) == (other > one)
    assert (one <= other) == (other >= one)
    assert (one == other) == (one.position == other.position) == (encode(one) == encode(other))


def test_the_order_is_that_in_which_a_rank_passes_them() -> None:
    passed = list(history(steps=3, chunks=3, timelines=3))
    assert passed == sorted(passed)
    assert len(set(passed)) == len(passed)
    assert list(Phase) == sorted(Phase)


def test_the_last_chunk_is_before_done() -> None:
    assert Marker(5, Phase.COMMIT, CHUNK_MAX) < Marker(5, Phase.DONE) < Marker(6, Phase.READY)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"step": -1, "phase": Phase.READY}, "step -1"),
        ({"step": STEP_MAX + 1, "phase": Phase.READY}, "step"),
        ({"step": 0, "phase": Phase.COMMIT, "chunk": CHUNK_MAX + 1}, "larger chunks"),
        ({"step": 0, "phase": Phase.DONE, "chunk": 1}, "DONE has no chunk"),
        ({"step": 0, "phase": Phase.READY, "timeline": TIMELINE_MAX + 1}, "timeline"),
    ],
)
def test_a_field_that_does_not_fit_is_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Marker(**fields)  # type: ignore[arg-type]


def test_nothing_yet_is_no_marker() -> None:
    assert decode(0) is None
    assert newest([0, 0]) is None
    assert newest([]) is None
    assert decode((1 << 64) - 1) is None


@given(markers(), st.integers(1, (1 << 16) - 1), st.integers(0, 63))
def test_every_burst_of_up_to_16_wrong_bits_is_detected(marker: Marker, error: int, shift: int) -> None:
    garbled = encode(marker) ^ (error << shift & (1 << 64) - 1)
    assert garbled == encode(marker) or decode(garbled) is None


@given(st.lists(markers(), min_size=1, max_size=3), st.permutations([0, 1, 2]))
def test_the_newest_copy_wins_in_any_order(held: list[Marker], order: list[int]) -> None:
    words = [encode(marker) for marker in held] + [0] * (3 - len(held))
    assert newest(words[index] for index in order) == max(held)


def test_every_torn_copy_is_detected_or_harmless() -> None:
    """Publishing stores A, then B. One of them is torn at any byte, in either direction; the other is intact."""
    passed = list(history(steps=4, chunks=3))
    passed += [Marker(1 << bit, phase) for bit in range(27) for phase in (Phase.READY, Phase.DONE)]
    passed += [Marker((1 << bit) - 1, Phase.DONE) for bit in range(1, 27)]
    for old, new in _neighbours(passed):
        before, after = encode(old), encode(new)
        for num_bytes in range(9):
            low = (1 << 8 * num_bytes) - 1
            for torn in (before & ~low | after & low, after & ~low | before & low):
                # While A is written, B still holds the old word; while B is written, A holds the new one.
                assert page_of(torn, before).marker in (old, new)
                assert page_of(after, torn).marker == new


def _neighbours(passed: list[Marker]) -> Iterator[tuple[Marker, Marker]]:
    ordered = sorted(set(passed))
    for old, new in pairwise(ordered):
        if new.step - old.step <= 1:
            yield old, new


@given(
    markers(),
    st.binary(min_size=8, max_size=8).filter(lambda garbage: decode(int.from_bytes(garbage, "little")) is None),
)
def test_one_garbled_or_zeroed_copy_never_hides_the_word(marker: Marker, garbage: bytes) -> None:
    garbled = int.from_bytes(garbage, "little")
    for page in (page_of(encode(marker), garbled), page_of(garbled, encode(marker))):
        assert page.marker == marker
        assert not page.lost
        page.rewrite(page.marker)
        assert page.marker == marker


def test_a_word_is_lost_only_where_every_copy_is_damaged() -> None:
    damaged = encode(Marker(3, Phase.DONE)) ^ 1
    assert page_of(damaged, damaged ^ 2).lost
    assert page_of(damaged, damaged ^ 2).marker is None
    assert not page_of(0, 0).lost
    # A rank that dies in its very first store had nothing before: the other copy says so.
    assert not page_of(damaged, 0).lost
    assert page_of(damaged, 0).marker is None


def test_publish_and_rewrite_touch_both_copies_and_nothing_else() -> None:
    buffer = bytearray(PAGE_BYTES)
    page = ProgressPage(memoryview(buffer))
    marker = Marker(7, Phase.COMMIT, 3)
    page.publish(marker)
    word = struct.pack("=Q", encode(marker))
    assert buffer[COPY_A : COPY_A + 8] == buffer[COPY_B : COPY_B + 8] == word
    assert sum(map(bool, buffer)) == 2 * sum(map(bool, word))
    page.rewrite(Marker(6, Phase.DONE))
    assert page.marker == Marker(6, Phase.DONE)
    page.rewrite(None)
    assert not any(buffer)


def test_publish_never_goes_back_and_rewrite_never_forward() -> None:
    page = page_of(0, 0)
    page.publish(Marker(7, Phase.COMMIT, 3))
    page.publish(Marker(7, Phase.COMMIT, 3))  # a resumed transaction may say the same again
    with pytest.raises(AssertionError, match="take back"):
        page.publish(Marker(7, Phase.SYNCED))
    with pytest.raises(AssertionError, match="raise"):
        page.rewrite(Marker(7, Phase.DONE))
    with pytest.raises(AssertionError, match="raise"):
        page_of(0, 0).rewrite(Marker(0, Phase.READY))
    assert page.marker == Marker(7, Phase.COMMIT, 3)


def test_telemetry_lies_where_the_contract_says_and_harms_no_word() -> None:
    buffer = bytearray(PAGE_BYTES)
    page = ProgressPage(memoryview(buffer))
    page.publish(Marker(1, Phase.DONE))
    assert page.activity is Activity.STARTING
    page.heartbeat += 1
    page.activity = Activity.CHECKPOINT
    page.entered_ns, page.generation, page.step, page.debugger, page.waits = 5, 6, 7, 8, (1 << 64) - 1
    assert struct.unpack_from("=7Q", buffer, 64) == (1, Activity.CHECKPOINT, 5, 6, 7, 8, (1 << 64) - 1)
    assert (page.heartbeat, page.entered_ns, page.generation, page.step) == (1, 5, 6, 7)
    assert page.activity == Activity.CHECKPOINT
    buffer[72] = 99
    assert ProgressPage(memoryview(buffer)).activity is Activity.STARTING
    page.faults()[:] = b"\xff" * FAULTS_BYTES
    assert buffer[FAULTS_OFFSET_BYTES - 1] == buffer[FAULTS_OFFSET_BYTES + FAULTS_BYTES] == 0
    assert page.marker == Marker(1, Phase.DONE)


def test_a_read_only_page_can_be_read() -> None:
    page = ProgressPage(memoryview(bytes(PAGE_BYTES)))
    assert page.marker is None
    assert page.heartbeat == 0
    with pytest.raises(ValueError, match="8192"):
        ProgressPage(memoryview(bytes(PAGE_BYTES - 1)))


def test_a_closed_page_lets_its_mapping_go() -> None:
    with mmap.mmap(-1, PAGE_BYTES) as mapping:
        view = memoryview(mapping)
        page = ProgressPage(view)
        page.publish(Marker(0, Phase.READY))
        page.close()
        view.release()


def _publish_for_ever(memory_fd: int, acknowledgement_fd: int, start: int) -> None:
    page = ProgressPage(memoryview(mmap.mmap(memory_fd, PAGE_BYTES)))
    acknowledged = memoryview(mmap.mmap(acknowledgement_fd, 4096)).cast("Q")
    for index, marker in enumerate(history(steps=100_000, chunks=3)):
        if index >= start:
            page.publish(marker)
            acknowledged[0] = index + 1


def test_after_a_sigkill_the_word_is_the_last_acknowledged_one_or_its_successor(request: pytest.FixtureRequest) -> None:
    seed = int(request.config.getoption("--seed"))
    rng = random.Random(seed)
    memory_fd, acknowledgement_fd = os.memfd_create("progress"), os.memfd_create("acknowledged")
    os.ftruncate(memory_fd, PAGE_BYTES)
    os.ftruncate(acknowledgement_fd, 4096)
    context = multiprocessing.get_context("fork")
    published = list(history(steps=20_000, chunks=3))
    try:
        with mmap.mmap(memory_fd, PAGE_BYTES) as memory, mmap.mmap(acknowledgement_fd, 4096) as acknowledgement:
            start = 0
            for _ in range(25):
                process = context.Process(target=_publish_for_ever, args=(memory_fd, acknowledgement_fd, start))
                process.start()
                deadline = time.monotonic() + 10
                while struct.unpack_from("=Q", acknowledgement)[0] <= start and time.monotonic() < deadline:
                    time.sleep(0.0005)
                time.sleep(rng.random() * 0.01)
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
                process.join(10)
                assert process.exitcode == -signal.SIGKILL
                process.close()
                (acknowledged,) = struct.unpack_from("=Q", acknowledgement)
                assert acknowledged > start, "the process published nothing in 10 s"
                with memoryview(memory) as view:
                    page = ProgressPage(view)
                    word = page.marker
                    page.close()
                assert word in published[acknowledged - 1 : acknowledged + 1], f"seed {seed}"
                start = published.index(word, acknowledged - 1)
    finally:
        os.close(memory_fd)
        os.close(acknowledgement_fd)
