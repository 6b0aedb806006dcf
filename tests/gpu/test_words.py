"""Words that the stream stores: never ahead of what they speak of, twice, and a failed device is no endless wait."""

import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch

from leto_strategy.errors import RecordError
from leto_strategy.progress import Marker, Phase, encode
from tests.gpu.rig import MARKS, Page, occupy, run_python

pytestmark = MARKS

BUSY_MS = 400.0
READY, SYNCED = Marker(7, Phase.READY), Marker(7, Phase.SYNCED)


@pytest.fixture
def page(context: None) -> Iterator[Page]:
    page = Page()
    yield page
    page.close()


def test_a_word_waits_for_the_kernel_ahead_of_it_and_the_host_does_not(page: Page) -> None:
    occupy(1.0)
    torch.cuda.synchronize()
    before, after = torch.cuda.Event(), torch.cuda.Event()
    begin = time.monotonic()
    before.record()
    occupy(BUSY_MS)
    page.words.publish(READY)
    after.record()
    host_seconds = time.monotonic() - begin
    seen_while_busy = 0
    while not after.query():
        copies = page.copies()
        busy = not after.query()
        if busy and time.monotonic() - begin < BUSY_MS / 3000:
            assert copies == [0, 0]
            seen_while_busy += 1
    assert seen_while_busy > 10
    assert host_seconds < BUSY_MS / 4000
    assert page.words.newest == READY
    torch.cuda.synchronize()
    assert page.copies() == [encode(READY)] * 2
    assert page.page.marker == READY


def test_words_come_in_their_order_and_the_second_copy_never_first(page: Page) -> None:
    markers = [Marker(1, Phase.READY), Marker(1, Phase.SYNCED)]
    for chunk in range(40):
        markers += [Marker(1, Phase.UNDO, chunk), Marker(1, Phase.COMMIT, chunk)]
    markers.append(Marker(1, Phase.DONE))
    order = [0, *map(encode, markers)]
    done = torch.cuda.Event()
    for marker in markers:
        page.words.publish(marker)
        occupy(1.0)
    done.record()
    places = [0]
    while not done.query() or places[-1] < len(markers):
        second = page.copies()[1]  # read first, since it is stored last
        first = page.copies()[0]
        assert order.index(first) >= order.index(second)
        places.append(order.index(second))
    assert places == sorted(places)
    assert len(set(places)) > len(markers) // 2, "the host has seen most of them come"


def test_the_host_waits_only_where_the_stream_is_behind(page: Page) -> None:
    long = timedelta(seconds=30)
    page.words.publish(READY)
    torch.cuda.synchronize()
    assert page.words.wait_until(lambda marker: marker == READY, long) is False
    occupy(BUSY_MS)
    page.words.publish(SYNCED)
    begin = time.monotonic()
    assert page.words.wait_until(lambda marker: marker == SYNCED, long) is True
    assert time.monotonic() - begin > BUSY_MS / 4000
    occupy(BUSY_MS)
    with pytest.raises(RecordError, match="has not gone on"):
        page.words.wait_until(lambda marker: marker == READY, timedelta(milliseconds=20))


def test_a_wait_ends_when_the_device_has_failed() -> None:
    code = """
import os, sys, time, torch
from datetime import timedelta
from leto_strategy.progress import Marker, Phase
from leto_strategy.strategy.streams import _TRAP
from tests.gpu.rig import Page
torch.ones(1, device="cuda")
page = Page()
page.words.publish(Marker(1, Phase.READY))
torch.cuda.synchronize()
page.driver.launch(_TRAP, b"leto_trap", torch.cuda.current_stream().cuda_stream)
page.words.publish(Marker(1, Phase.SYNCED))
begin = time.monotonic()
try:
    page.words.wait_until(lambda marker: marker is not None and marker.phase == Phase.SYNCED, timedelta(seconds=30))
except RuntimeError as error:
    print("raised", time.monotonic() - begin, page.page.marker, type(error).__name__, str(error).splitlines()[0])
    sys.stdout.flush()
os._exit(0)
"""
    done = run_python("-c", code)
    assert done.stdout.startswith("raised"), (done.stdout, done.stderr[-3000:])
    print(done.stdout)
    assert float(done.stdout.split()[1]) < 5.0
    assert "READY(1)" in done.stdout, "the word behind the trap was not stored"
