"""Capture and restore of every random number generator a training script uses in its main process.

Reading a generator's state through its own interface takes tens of microseconds, and most steps draw from none but
torch's, which hooks leave alone. So the raw memory of the generators serves to notice that nothing was drawn; the state
itself is always read through the interface.
"""

import ctypes
import platform
import random
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

STREAMS = ("torch", "random", "numpy")
"""The global streams, in the order of `fingerprints`."""

RngState = tuple[bytes, tuple[Any, ...], tuple[Any, ...], torch.Tensor | None, list[torch.Tensor]]
"""torch, random, NumPy, CUDA, further generators."""

_OBJECT_HEAD_BYTES = 16
_MT19937_BYTES = 625 * 4  # 624 words and a position
_TORCH_STATE = struct.Struct("<QiiQ4992sdddi4xf?3x")
"""What `get_state` of torch's generator returns: seed, words left, whether seeded, position, 624 words of 64 bits, then
x, y, rho and validity of a normal variate, and another one of single precision with its validity."""
_TORCH_HEAD = struct.Struct("<Qi?3xI")  # the same in memory, where a word has 32 bits and is followed by the variates
_TORCH_TAIL_BYTES = 24


def capture_rng(generators: Sequence[torch.Generator] = ()) -> RngState:
    """State of torch's, Python's, NumPy's and CUDA's generators and of `generators`, cheap to pack."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return (
        _torch.state()[0],
        _python.state(),
        _numpy.state(),
        cuda,
        [generator.get_state() for generator in generators],
    )


def restore_rng(state: RngState, generators: Sequence[torch.Generator] = ()) -> None:
    """Set every generator to a captured state."""
    torch_state, (version, words, gauss), numpy_state, cuda, others = state
    torch.set_rng_state(torch.frombuffer(bytearray(torch_state), dtype=torch.uint8))
    random.setstate((version, tuple(array("I", words)), gauss))
    _restore_numpy(numpy_state)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
    for generator, value in zip(generators, others, strict=False):  # evaluation loaders may come later
        generator.set_state(value)


def _restore_numpy(state: tuple[Any, ...]) -> None:
    if len(state) > 1:
        name, keys, position, has_gauss, cached = state
        values: Any = (name, numpy.frombuffer(keys, dtype=numpy.uint32), position, has_gauss, cached)
    else:
        (values,) = state
        name = values["bit_generator"]
    module: Any = numpy.random
    if type(module.get_bit_generator()).__name__ != name:
        module.set_bit_generator(getattr(module, name)())
    module.set_state(values)


def fingerprints() -> tuple[Any, Any, Any]:
    """Comparable states of the three global streams, in the order of `STREAMS`."""
    return _torch.state()[0], _python.state(), _numpy.state()


class _Remembered:
    """A generator's state, read again only when its raw memory has changed.

    Args:
        read: Reads the state through the generator's interface.
        memory: Returns all bytes the state is made of, or None where they aren't known.
    """

    def __init__(self, read: Callable[[], tuple[Any, ...]], memory: Callable[[], Any]) -> None:
        self._read, self._memory = read, memory
        self._last: tuple[Any, tuple[Any, ...]] = (None, ())

    def state(self) -> tuple[Any, ...]:
        """The state now."""
        memory = self._memory()
        if memory is None:
            return self._read()
        if memory != self._last[0]:
            self._last = (memory, self._read())
        return self._last[1]


def _read_torch() -> tuple[bytes]:
    state = torch.default_generator.get_state()
    return (ctypes.string_at(state.data_ptr(), state.numel()),)


def _read_python() -> tuple[Any, ...]:
    version, words, gauss = random.getstate()
    return version, array("I", words).tobytes(), gauss


def _read_numpy() -> tuple[Any, ...]:
    """NumPy's tuple of five, or a dictionary alone where the script has set another bit generator than MT19937."""
    state: Any = numpy.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return (state,)
    state = numpy.random.get_state()
    name, keys, position, has_gauss, cached = state
    return name, keys.tobytes(), position, has_gauss, cached


def _view(address: int, size_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * size_bytes).from_address(address))


def _torch_memory() -> Callable[[], Any]:
    """Reads seed, position and words of torch's generator and, behind them, its two spare normal variates.

    The words are found by their values. What lies around them is compared with a state that has rare numbers for
    variates; where anything is elsewhere, nothing is remembered.
    """
    generator: Any = torch.default_generator
    saved = generator.get_state()
    if platform.python_implementation() != "CPython" or saved.numel() != _TORCH_STATE.size:
        return lambda: None
    seed, left, seeded, position, words, *_ = _TORCH_STATE.unpack(saved.numpy().tobytes())
    packed = struct.pack("<624I", *struct.unpack("<624Q", words))
    at = ctypes.string_at(generator._cdata, 512).find(packed[:128]) - _TORCH_HEAD.size
    if at < 0:
        return lambda: None
    memory = _view(generator._cdata + at, _TORCH_HEAD.size + len(packed) + _TORCH_TAIL_BYTES)
    double, single = 0.7310585786300049, 0.26894140243530273
    rare = _TORCH_STATE.pack(seed, left, seeded, position, words, 0.0, double, 0.0, 1, single, True)
    generator.set_state(torch.frombuffer(bytearray(rare), dtype=torch.uint8))
    seen = memory.tobytes()
    generator.set_state(saved)
    head, tail = _TORCH_HEAD.pack(seed, left, bool(seeded), position) + packed, seen[-_TORCH_TAIL_BYTES:]
    places = tail.find(struct.pack("<f", single)), tail.find(struct.pack("<d", double))
    if not seen.startswith(head) or min(places) < 0 or tail[places[0] + 4] != 1 or tail[places[1] + 8 :][:1] != b"\1":
        return lambda: None
    return memory.tobytes


def _python_memory() -> Callable[[], Any]:
    """Reads the words and the position of Python's generator, and its spare normal variate."""
    instance: Any = random._inst
    size_bytes = type(instance).__mro__[1].__basicsize__ - _OBJECT_HEAD_BYTES
    if platform.python_implementation() != "CPython" or size_bytes < _MT19937_BYTES:
        return lambda: None
    address = id(instance) + _OBJECT_HEAD_BYTES
    words = random.getstate()[1]
    if struct.pack(f"<{len(words) - 1}I", *words[:-1]) not in ctypes.string_at(address, size_bytes):
        return lambda: None
    memory = _view(address, size_bytes)
    return lambda: (memory.tobytes(), instance.gauss_next)


def _numpy_memory() -> Callable[[], Any]:
    """Reads the words and the position of NumPy's global generator, and the place of its spare normal variate.

    The place is found by setting the variate to a rare number twice and looking for both; where that finds no single
    place, nothing is remembered.
    """
    generator: Any = numpy.random.mtrand._rand
    saved: Any = numpy.random.get_state()
    if platform.python_implementation() != "CPython" or saved[0] != "MT19937":
        return lambda: None
    start, size_bytes = id(generator), type(generator).__basicsize__
    found: list[set[int]] = []
    try:
        for number in (0.7310585786300049, -0.2689414213699951):
            numpy.random.set_state((*saved[:3], 1, number))
            memory, wanted = ctypes.string_at(start, size_bytes), struct.pack("<d", number)
            found.append({at for at in range(0, size_bytes - 7, 8) if memory[at : at + 8] == wanted})
    finally:
        numpy.random.set_state(saved)
    places = found[0] & found[1]
    if len(places) != 1 or not generator._bit_generator.ctypes.state_address:
        return lambda: None
    found_in = generator._bit_generator
    words = _view(found_in.ctypes.state_address, _MT19937_BYTES)
    variate = _view(start + places.pop() - 8, 16)
    # A script may set another bit generator, whose words are elsewhere.
    return lambda: (words.tobytes(), variate.tobytes()) if generator._bit_generator is found_in else None


_torch = _Remembered(_read_torch, _torch_memory())
_python = _Remembered(_read_python, _python_memory())
_numpy = _Remembered(_read_numpy, _numpy_memory())
