from hypothesis import given, note, settings
from hypothesis import strategies as st

from leto_strategy.geometry import (
    ALIGNMENT_BYTES,
    CHUNK_BYTES_MIN,
    Extent,
    align_up,
    cut_buckets,
    cut_chunks,
    default_chunk_bytes,
    offsets,
)


def extents_of(plan: list[tuple[int, int, bool]]) -> list[Extent]:
    """One extent for each (run step, elements, cuttable), fp32, two moments; a run is all cuttable or not at all."""
    extents: list[Extent] = []
    run, cuttable, offset = 0, plan[0][2], 0
    for slot, (run_step, num_elements, wanted) in enumerate(plan):
        if run_step and slot:
            run, cuttable, offset = run + 1, wanted, 0
        extents.append(Extent(slot, run, offset, num_elements, 4, 3, cuttable))
        offset += align_up(num_elements * 4) // 4
    return extents


plans = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3000), st.booleans()), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None, print_blob=True)
@given(plan=plans, chunk_bytes=st.integers(1, 40_000))
def test_chunks_cover_every_element_once_and_in_order(plan: list[tuple[int, int, bool]], chunk_bytes: int) -> None:
    extents = extents_of(plan)
    chunks = cut_chunks(extents, chunk_bytes=chunk_bytes)
    note(f"{chunks}")
    segments = [segment for chunk in chunks for span in chunk.spans for segment in span.segments]
    for extent in extents:
        inside = [segment for segment in segments if segment.slot == extent.slot]
        bounds = [0, *(segment.stop for segment in inside)]
        assert [segment.start for segment in inside] == bounds[:-1]
        assert bounds[-1] == extent.num_elements
        assert extent.cuttable or len(inside) <= 1
        assert all(segment.start * extent.element_bytes % ALIGNMENT_BYTES == 0 for segment in inside)
    order = [(segment.slot, segment.start) for segment in segments]
    assert order == sorted(order)
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))


@settings(max_examples=200, deadline=None, print_blob=True)
@given(plan=plans, chunk_bytes=st.integers(2048, 40_000))
def test_a_chunk_is_larger_than_asked_only_for_one_tensor_that_can_not_be_cut(
    plan: list[tuple[int, int, bool]], chunk_bytes: int
) -> None:
    extents = extents_of(plan)
    for chunk in cut_chunks(extents, chunk_bytes=chunk_bytes):
        segments = [segment for span in chunk.spans for segment in span.segments]
        size = sum((segment.stop - segment.start) * 12 for segment in segments)
        assert size <= chunk_bytes or (len(segments) == 1 and not extents[segments[0].slot].cuttable)


@settings(max_examples=200, deadline=None, print_blob=True)
@given(plan=plans, chunk_bytes=st.integers(1, 40_000))
def test_spans_are_ranges_of_one_run_that_hold_their_segments(
    plan: list[tuple[int, int, bool]], chunk_bytes: int
) -> None:
    extents = extents_of(plan)
    for chunk in cut_chunks(extents, chunk_bytes=chunk_bytes):
        assert len({span.run for span in chunk.spans}) == len(chunk.spans)
        assert chunk.undo_bytes == sum(3 * align_up(4 * span.num_elements) for span in chunk.spans)
        for span in chunk.spans:
            first, last = extents[span.segments[0].slot], extents[span.segments[-1].slot]
            assert span.start == first.offset_elements + span.segments[0].start
            assert span.stop == last.offset_elements + span.segments[-1].stop
            assert all(extents[segment.slot].run == span.run for segment in span.segments)


def test_a_large_model_has_20_to_60_chunks_and_a_tiny_one_a_few() -> None:
    for num_elements, low, high in ((10**9, 20, 60), (10**7, 20, 60), (500_000, 3, 8), (5_000, 3, 8)):
        extents = [Extent(0, 0, 0, num_elements, 4, 3, True)]
        assert low <= len(cut_chunks(extents, chunk_bytes=default_chunk_bytes(num_elements * 12))) <= high
    assert default_chunk_bytes(8 * CHUNK_BYTES_MIN) == CHUNK_BYTES_MIN
    assert default_chunk_bytes(0) == ALIGNMENT_BYTES


@given(sizes=st.lists(st.integers(0, 5000), max_size=40), first=st.integers(1, 3000), each=st.integers(1, 9000))
def test_buckets_cover_all_gradients_and_close_when_full(sizes: list[int], first: int, each: int) -> None:
    buckets = cut_buckets(sizes, first_bytes=first, bytes_each=each)
    assert [index for bucket in buckets for index in bucket] == list(range(len(sizes)))
    for number, bucket in enumerate(buckets):
        limit = each if number else first
        assert sum(sizes[i] for i in bucket[:-1]) < limit
        assert number == len(buckets) - 1 or sum(sizes[i] for i in bucket) >= limit


def test_offsets_are_aligned_and_end_with_the_total() -> None:
    assert offsets([1, 512, 0, 513]) == [0, 512, 1024, 1024, 2048]
    assert offsets([]) == [0]
