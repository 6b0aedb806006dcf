"""The field GF(2^32): its polynomial, and arithmetic on single symbols as Python ints. No torch here.

A symbol is a polynomial over GF(2) of degree below 32; bit k of the int is the coefficient of x^k. Addition is XOR.
Products are reduced by x^32 + x^7 + x^3 + x^2 + 1, which is irreducible. It is not primitive: x has order (2^32-1)/3,
and x + 1 generates the multiplicative group. docs/erasure_code.md has the whole definition.
"""

from collections.abc import Iterable, Sequence

SYMBOL_BITS = 32
SYMBOL_BYTES = 4
FIELD_SIZE = 1 << SYMBOL_BITS
REDUCTION = 0x8D
"""x^7 + x^3 + x^2 + 1: what x^32 is equal to."""

POLYNOMIAL = FIELD_SIZE | REDUCTION
GENERATOR = 3

_DIGIT_BITS = 4


def multiply_slowly(a: int, b: int) -> int:
    """The product by its definition, one bit of `b` at a time. What everything else is compared with, in the end."""
    product = 0
    for bit in range(SYMBOL_BITS):
        if b >> bit & 1:
            product ^= a << bit
    for bit in reversed(range(SYMBOL_BITS, 2 * SYMBOL_BITS)):
        if product >> bit & 1:
            product ^= POLYNOMIAL << (bit - SYMBOL_BITS)
    return product


def multiply(a: int, b: int) -> int:
    """The product, four bits of `b` at a time; about 2 µs."""
    a2, a4, a8 = a << 1, a << 2, a << 3
    a3, a12 = a2 ^ a, a8 ^ a4
    multiples = (
        (0, a, a2, a3, a4, a4 ^ a, a4 ^ a2, a4 ^ a3)
        + (a8, a8 ^ a, a8 ^ a2, a8 ^ a3)
        + (a12, a12 ^ a, a12 ^ a2, a12 ^ a3)
    )
    product = shift = 0
    while b:
        product ^= multiples[b & 15] << shift
        b >>= _DIGIT_BITS
        shift += _DIGIT_BITS
    return reduce(product)


def reduce(product: int) -> int:
    """The remainder of a polynomial of degree below 64."""
    while high := product >> SYMBOL_BITS:
        product = (product & (FIELD_SIZE - 1)) ^ high ^ high << 2 ^ high << 3 ^ high << 7
    return product


def power(a: int, exponent: int) -> int:
    """`a` to a non-negative power; `power(0, 0)` is 1."""
    result = 1
    while exponent:
        if exponent & 1:
            result = multiply(result, a)
        a = multiply(a, a)
        exponent >>= 1
    return result


def inverse(a: int) -> int:
    """The multiplicative inverse, by Euclid's algorithm on polynomials.

    Raises:
        ZeroDivisionError: `a` is 0.
    """
    if a == 0:
        raise ZeroDivisionError("0 has no inverse in GF(2^32)")
    # u = s * a and v = t * a modulo the polynomial hold throughout.
    u, v, s, t = a, POLYNOMIAL, 1, 0
    while u != 1:
        shift = u.bit_length() - v.bit_length()
        if shift < 0:
            u, v, s, t, shift = v, u, t, s, -shift
        u ^= v << shift
        s ^= t << shift
    return reduce(s)


def product_of(factors: Iterable[int]) -> int:
    """The product of all factors; 1 if there is none."""
    result = 1
    for factor in factors:
        result = multiply(result, factor)
    return result


def inverses(values: Sequence[int]) -> list[int]:
    """The inverse of every value, for one inversion and three products a value.

    Raises:
        ZeroDivisionError: One of them is 0.
    """
    before = [1]
    for value in values:
        before.append(multiply(before[-1], value))
    running = inverse(before[-1])
    result = [0] * len(values)
    for index in reversed(range(len(values))):
        result[index] = multiply(running, before[index])
        running = multiply(running, values[index])
    return result
