"""Times as the device sees them: between places of a GPU's stream, and the host does not wait. On the CPU its own.

What a transaction adds to a step can be told apart only in a trainer that has one: `parts_of` runs those parts again,
when training is over.
"""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

REPETITIONS = 7


class DeviceClock:
    """Marks places of the current stream.

    Args:
        device: A GPU, or the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.marks: list[Any] = []

    def mark(self) -> None:
        """Remember when the device comes to this place."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter_ns())

    def between_ms(self) -> list[float]:
        """Milliseconds from each mark to the next; waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return [begin.elapsed_time(end) for begin, end in pairwise(self.marks)]
        return [(end - begin) / 1e6 for begin, end in pairwise(self.marks)]


def median_ms(run: Callable[[], None], device: torch.device) -> float:
    """Median time of some work on the device, after it ran once."""
    run()
    clock = DeviceClock(device)
    for _ in range(REPETITIONS):
        clock.mark()
        run()
    clock.mark()
    return statistics.median(clock.between_ms())


def parts_of(session: Any) -> dict[str, float]:
    """Milliseconds that parts of a step take, of a session whose training is over: undo, gradients, words.

    Args:
        session: A `FitSession` with the transactional updater.
    """
    updater, words, device = session.updater, session.words, session._device
    gradients = [gradient for gradient in updater._gradients if gradient.numel()]
    copies = [torch.empty_like(gradient) for gradient in gradients]
    num_words = 3 + 2 * len(updater._chunks)

    def save() -> None:
        for chunk in updater._chunks:
            chunk.save()

    def copy() -> None:
        for gradient, other in zip(gradients, copies, strict=True):
            gradient.copy_(other)

    def publish() -> None:
        for _ in range(num_words):
            words.publish(words.newest)

    with torch.no_grad():
        found = {"undo": save, "gradient_copy": copy, "words": publish}
        times = {name: median_ms(run, device) for name, run in found.items()}
    return times | {"num_words": float(num_words)}
