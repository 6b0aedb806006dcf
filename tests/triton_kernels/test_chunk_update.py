"""The update of a chunk, both ways: state, undo copies, flags, bf16 copy and parity, bit for bit."""

import pytest
import torch
from benchmarks.kernel_data import Place, table
from benchmarks.update_checks import STEPS, Chunk, check_update_chunk

from leto_strategy.triton_kernels import chunk_update, compiler
from leto_strategy.triton_kernels.adam import AdamStep, Rounding, adam_torch
from leto_strategy.triton_kernels.chunk_update import ChunkCode, update_chunk, way_of
from leto_strategy.triton_kernels.launch_shapes import FusedShape, Order, Way

BF16 = torch.bfloat16


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step.rounding}-{'W' if step.decoupled else ''}{step.step}")
def test_every_form_of_adam(place: Place, step: AdamStep) -> None:
    check_update_chunk(place, num=1, step=step, way=Way.PAGES, dtype=BF16, copy=True, clip=0.37, height=1)


@pytest.mark.parametrize(
    ("num", "height", "rotate", "scattered"),
    [(3, 1, True, False), (3, 5, False, True), (2, 20, True, False), (17, 16, True, True)],
)
def test_any_code_and_any_place_of_pages(place: Place, num: int, height: int, rotate: bool, scattered: bool) -> None:
    check_update_chunk(
        place, num=num, step=STEPS[1], way=Way.PAGES, height=height, rotate=rotate, scattered=scattered, clip=0.5
    )


@pytest.mark.parametrize("order", Order)
def test_one_pass(place: Place, order: Order) -> None:
    shape = FusedShape(order=order)
    check_update_chunk(place, num=32, step=STEPS[1], way=Way.FUSED, dtype=BF16, copy=True, clip=0.3, shape=shape)


def test_one_pass_in_place(place: Place) -> None:
    check_update_chunk(place, num=16, step=STEPS[7], way=Way.FUSED, rotate=False)


def test_both_ways_write_the_same_bits(place: Place) -> None:
    results = []
    for way in Way:
        torch.manual_seed(5)
        chunk = Chunk(place, 16, copy=True)
        chunk.update(STEPS[1], 0.5, 7, way)
        results.append([*chunk.result(), chunk.out, chunk.copy, chunk.undo[0]])
    for fused, pages in zip(*results, strict=True):
        assert torch.equal(fused, pages)


@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("decoupled", [True, False])
def test_a_step_is_adam(place: Place, rounding: Rounding, decoupled: bool) -> None:
    """Within a few roundings of double precision; which roundings they are is checked elsewhere, bit for bit."""
    step = AdamStep(1e-3, (0.9, 0.95), 1e-8, 0.1, 3, decoupled=decoupled, rounding=rounding)
    chunk = Chunk(place, 1, height=1)
    p, m, v = chunk.old.clone()
    expected = adam_torch(p, m, v, chunk.grad, step, clip=0.5)
    chunk.update(step, 0.5, 1, Way.PAGES)
    g = chunk.grad.abs() * 0.5 + (0.0 if decoupled else 0.1) * p.abs()
    root = expected[2].sqrt() + 1e-8
    change = 1e-3 * (m.abs() + g) / root * (1 + g / root)
    sizes = (p.abs() + change, m.abs() + g, v + g * g)  # of the terms of each sum
    for got, want, size in zip(chunk.result(), expected, sizes, strict=True):
        assert bool(((got - want).abs() <= 2**-20 * size + 1e-30).all()), (
            "beyond rounding, and beyond subnormal numbers"
        )


def test_bf16_is_rounded_to_nearest_even(place: Place) -> None:
    words = place.random_words(1)
    words[0, 2:10] = torch.tensor(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x00018000, 0x7F800000, 0x80000001 - 2**32, 0x00008000]
    )
    chunk = Chunk(place, 1, copy=True, height=1)
    chunk.now[0].copy_(words.view(torch.float32).nan_to_num(1.0, 3e38, -3e38))
    step = AdamStep(0.0, (0.9, 0.95), 1e-8, 0.0, 3)  # parameters stay as they are
    chunk.update(step, 1.0, 1, Way.PAGES)
    assert torch.equal(chunk.copy.view(torch.int16), chunk.now[0].bfloat16().view(torch.int16))


# which way


def test_the_fused_pass_takes_whole_blocks_and_sixteen_parity_pages(place: Place) -> None:
    assert way_of((chunk := Chunk(place, 16)).pages, chunk.code) is Way.FUSED
    assert way_of((chunk := Chunk(place, 17)).pages, chunk.code) is Way.PAGES
    assert way_of((chunk := Chunk(place, 16, scattered=True)).pages, chunk.code) is Way.PAGES
    assert way_of((chunk := Chunk(place, 16, height=5)).pages, chunk.code) is Way.PAGES


def test_without_clmad_a_gpu_takes_two_passes(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = Chunk(place, 16)
    monkeypatch.setattr(chunk_update, "INTERPRETED", False)
    assert way_of(chunk.pages, chunk.code) is Way.PAGES
    with compiler.products(clmad=True):
        assert way_of(chunk.pages, chunk.code) is Way.FUSED


def test_the_slower_way_is_said_once(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(chunk_update, "INTERPRETED", False)
    done: list[str] = []
    monkeypatch.setattr(chunk_update, "update_pages", lambda *_: done.append("pages"))
    monkeypatch.setattr(chunk_update.parity_kernels, "update", lambda *_, **__: done.append("parity"))
    compiler.say_once.cache_clear()
    chunk = Chunk(place, 3)
    for number in (1, 2):
        chunk.update(STEPS[0], 1.0, number, way_of(chunk.pages, chunk.code))
    assert caplog.text.count("event=unfused_update") == 1
    assert done == ["pages", "parity"] * 2


# arguments


def test_arguments_are_checked(place: Place) -> None:
    chunk = Chunk(place, 16)
    clip = torch.ones(1)

    def update(**changed: object) -> None:
        arguments = {
            "chunk": chunk.pages, "code": chunk.code, "parity": table(chunk.parity), "out": table(chunk.out),
            "coefficients": chunk.coefficients, "clip": clip, "flags": chunk.flags, "number": 1, "step": STEPS[0],
        }  # fmt: skip
        update_chunk(**{**arguments, **changed})  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="number must be positive"):
        update(number=0)
    with pytest.raises(ValueError, match="out must not overlap"):
        update(out=table(chunk.parity))
    with pytest.raises(ValueError, match="out must not overlap"):
        update(out=table(chunk.moved[0]))
    with pytest.raises(ValueError, match="clip must be fp32"):
        update(clip=torch.ones(1, dtype=torch.float64))
    with pytest.raises(ValueError, match="coefficients must be fp32"):
        update(coefficients=torch.zeros(7))
    with pytest.raises(ValueError, match="three sequences of 1"):
        update(code=ChunkCode(first_pages=([0], [16], [])), way=Way.FUSED)
    with pytest.raises(ValueError, match="multiples of 16"):
        update(code=ChunkCode(first_pages=([0], [8], [32])))
    with pytest.raises(ValueError, match="either first_pages or matrix_PH"):
        ChunkCode()
    ragged = Chunk(place, 3)
    with pytest.raises(ValueError, match="whole blocks of 16"):
        ragged.update(STEPS[0], 1.0, 1, Way.FUSED)
