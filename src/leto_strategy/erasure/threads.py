"""Work on ranges of words, each on its own core. What does the work gives up the interpreter lock."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

ALIGNMENT_WORDS = 1024
"""Ranges start at multiples of this, the words of the smallest page."""


def run_in_ranges(work: Callable[[int, int], None], num_words: int, *, threads: int) -> None:
    """Call `work(start, stop)` on ranges that make up the words 0 to `num_words`, at most `threads` at a time."""
    num_units = -(-num_words // ALIGNMENT_WORDS)
    num_ranges = max(1, min(threads, num_units))
    bounds = [num_units * index // num_ranges * ALIGNMENT_WORDS for index in range(num_ranges)] + [num_words]
    if num_ranges == 1:
        work(0, num_words)
        return
    with ThreadPoolExecutor(num_ranges) as pool:
        for done in [pool.submit(work, *bounds[index : index + 2]) for index in range(num_ranges)]:
            done.result()
