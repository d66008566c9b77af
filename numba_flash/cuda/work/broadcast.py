"""Which tiles of scores were made of a tile of a bias: along the axes that the bias broadcasts, all
of them. A block of threads owns the tile and walks over those.
"""

from typing import NamedTuple

from numba_flash.cuda.runtime.lang import i32, inline, once, u32


class Walk(NamedTuple):
    """A tile of scores: its batch element, head, and numbers along rows and columns; or how many of
    each there are. All are int32.
    """

    b0: int
    b1: int
    head: int
    i: int
    j: int


@inline
def divide(number, size, counts):
    """The coordinate of `number` along an axis of this size, if that `counts`, and the rest."""
    quotient = i32(u32(number) // u32(size)) if counts else number
    return (i32(number - quotient * size) if counts else i32(0)), quotient


@inline
def advance(x, size, counts, carry):
    """The next coordinate along an axis of this size, if that `counts` and there is a `carry`, and
    the carry to the axis before.
    """
    if not counts:
        return x, carry
    x = i32(x + carry)
    return (x, i32(0)) if x < size else (i32(0), i32(1))


@once
def build_coordinates(summed):
    """``owned(number, sizes)``: the `Walk` that a number means along the axes that are not
    `summed`, 0 along the others, and what is left of the number; ``walked(number, sizes)``: along
    those that are; ``following(walk, sizes)``: the walk of the next number.
    """
    SUM_0, SUM_1, SUM_H, SUM_I, SUM_J = summed

    @inline
    def owned(number, sizes):
        j, number = divide(number, sizes.j, not SUM_J)
        i, number = divide(number, sizes.i, not SUM_I)
        h, number = divide(number, sizes.head, not SUM_H)
        b1, number = divide(number, sizes.b1, not SUM_1)
        b0, number = divide(number, sizes.b0, not SUM_0)
        return Walk(b0, b1, h, i, j), number

    @inline
    def walked(number, sizes):
        j, number = divide(number, sizes.j, SUM_J)
        i, number = divide(number, sizes.i, SUM_I)
        h, number = divide(number, sizes.head, SUM_H)
        b1, number = divide(number, sizes.b1, SUM_1)
        b0, number = divide(number, sizes.b0, SUM_0)
        return Walk(b0, b1, h, i, j)

    @inline
    def following(walk, sizes):
        j, carry = advance(walk.j, sizes.j, SUM_J, i32(1))
        i, carry = advance(walk.i, sizes.i, SUM_I, carry)
        h, carry = advance(walk.head, sizes.head, SUM_H, carry)
        b1, carry = advance(walk.b1, sizes.b1, SUM_1, carry)
        b0, carry = advance(walk.b0, sizes.b0, SUM_0, carry)
        return Walk(b0, b1, h, i, j)

    return owned, walked, following
