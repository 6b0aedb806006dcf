import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leto_strategy.erasure import field, words

symbols = st.integers(0, field.FIELD_SIZE - 1)
FACTORS_OF_ORDER = (3, 5, 17, 257, 65537)  # (2^32 - 1) is their product


@settings(deadline=None)
@given(symbols, symbols)
def test_the_product_is_that_of_the_definition(a: int, b: int) -> None:
    assert field.multiply(a, b) == field.multiply_slowly(a, b)


@settings(deadline=None)
@given(symbols, symbols, symbols)
def test_products_are_commutative_associative_and_distributive(a: int, b: int, c: int) -> None:
    assert field.multiply(a, b) == field.multiply(b, a)
    assert field.multiply(a, field.multiply(b, c)) == field.multiply(field.multiply(a, b), c)
    assert field.multiply(a, b ^ c) == field.multiply(a, b) ^ field.multiply(a, c)


@settings(deadline=None)
@given(symbols.filter(bool))
def test_every_symbol_but_0_has_an_inverse(a: int) -> None:
    assert field.multiply(a, field.inverse(a)) == 1
    assert field.inverse(a) == field.power(a, field.FIELD_SIZE - 2)


def test_0_has_no_inverse() -> None:
    with pytest.raises(ZeroDivisionError):
        field.inverse(0)
    with pytest.raises(ZeroDivisionError):
        field.inverses([1, 0])


@settings(deadline=None)
@given(st.lists(symbols.filter(bool), max_size=20))
def test_many_inverses_are_those_of_one_at_a_time(values: list[int]) -> None:
    assert field.inverses(values) == [field.inverse(value) for value in values]


def test_the_polynomial_is_irreducible() -> None:
    """Rabin's test: x^(2^32) = x, and x^(2^16) - x shares no factor with the polynomial."""
    value = 2
    for exponent in range(1, 33):
        value = field.multiply_slowly(value, value)
        if exponent == 16:
            a, b = field.POLYNOMIAL, value ^ 2
            while b:
                while a.bit_length() >= b.bit_length():
                    a ^= b << (a.bit_length() - b.bit_length())
                a, b = b, a
            assert a == 1
    assert value == 2


def test_x_plus_1_generates_the_group_and_x_does_not() -> None:
    order = field.FIELD_SIZE - 1
    assert field.power(field.GENERATOR, order) == 1
    assert all(field.power(field.GENERATOR, order // factor) != 1 for factor in FACTORS_OF_ORDER)
    assert field.power(2, order // 3) == 1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(symbols, symbols), min_size=1, max_size=50))
def test_tensors_multiply_as_numbers_do(pairs: list[tuple[int, int]]) -> None:
    a, b = (torch.tensor(values) for values in zip(*pairs, strict=True))
    assert words.multiply(a, b).tolist() == [field.multiply(x, y) for x, y in pairs]


def test_tensors_invert_as_numbers_do(rng: random.Random) -> None:
    values = [1, 2, field.FIELD_SIZE - 1] + [rng.randrange(1, field.FIELD_SIZE) for _ in range(20)]
    assert words.inverse(torch.tensor(values)).tolist() == field.inverses(values)


@settings(deadline=None)
@given(st.lists(symbols, min_size=1))
def test_words_keep_all_bits(values: list[int]) -> None:
    stored = words.to_words(torch.tensor(values))
    assert stored.dtype == torch.int32
    assert words.to_symbols(stored).tolist() == values
