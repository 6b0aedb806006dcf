"""What the loss marks of a rank mean for a recovery: read by the supervisor, behind the fence (rules R12, R14)."""

from collections.abc import Callable

from leto_strategy.erasures import Shape, assess
from leto_strategy.errors import PagesLostError
from leto_strategy.marks import SHAPE_REGION, WORDS_REGION, ProtectionWords
from leto_strategy.progress import Marker


def losses_of(buffer_of: Callable[[str], memoryview], marker: Marker | None) -> tuple[str, bool]:
    """Count what a rank has lost.

    Args:
        buffer_of: Returns the bytes of a region of the rank by its name; KeyError where there is none.
        marker: The rank's word.

    Returns:
        What is lost of the state beyond its parity, "" for nothing; and whether gradients are that are still needed.
    """
    try:
        text = bytes(buffer_of(SHAPE_REGION)).rstrip(b"\0")
    except KeyError:
        return "", False
    if not text:
        return "", False
    shape = Shape.from_json(text.decode())
    words = ProtectionWords(buffer_of(WORDS_REGION), shape)
    try:
        found = assess(shape, marker, words.drained(), words.lost())
    except PagesLostError as error:
        return str(error), False
    return "; ".join(found.state_beyond), bool(found.gradients_beyond)
