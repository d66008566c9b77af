"""mma.sync of float64 (PTX ISA 9.7.14.5): IEEE products and sums, of the 16 x N tiles of a warp.

A tensor core takes 16 rows, 8 columns and 8 or 16 terms of their sums at once, or 8 rows and 4
terms. Which terms are those of which lane is free as long as it is the same for both operands: a
lane that holds columns 2 t and 2 t + 1 of a result has just what it needs of that, when the result
is an operand. From shared memory, terms t and t + 4 come one by one, for an operand wants rows g
and g + 8 in neighbouring registers: two terms at once would have to be moved apart.
"""

from typing import NamedTuple

from llvmlite import ir

from numba_flash.cuda.ptx.emit import F64, I32, emit, pointers
from numba_flash.cuda.runtime.lang import intrinsic, types

LINE = 128  # bytes of shared memory that an access can take from all banks


class SwizzledRows(NamedTuple):
    """How an operand lies in shared memory: the chunk c of 16 bytes of row r in the place ``c ^
    swizzle(r)`` of its row (`numba_flash.cuda.sm80.operands.products_float64`).

    Attributes
    ----------
    pitch : int
        Bytes from one row in memory to the next, a multiple of 128.
    across : bool
        A row in memory is a term of the sums; else a row of A, or a column of B.
    """

    pitch: int
    across: bool


def _one_mma(builder, shape, c, a, b):
    names = [f"${i}" for i in range(2 * len(c) + len(a) + len(b))]
    ends = len(c), len(c) + len(a), len(c) + len(a) + len(b)
    lists = names[: ends[0]], names[ends[0] : ends[1]], names[ends[1] : ends[2]]
    operands = ", ".join("{" + ", ".join(each) + "}" for each in (*lists, names[ends[2] :]))
    text = f"mma.sync.aligned.{shape}.row.col.f64.f64.f64.f64 {operands};"
    return emit(builder, text, [*a, *b, *c], [F64] * len(c), memory=False)


def _mma(builder, terms, c, a, b):
    """``c + a b``: 16 x 8, over 8 or 16 terms, so many `terms` of them at once; 4 of 8 rows.

    Elements of a are those of rows g and g + 8, for one term after the other; of c, two of row g
    and two of row g + 8.
    """
    if terms > 4:
        return _one_mma(builder, f"m16n8k{terms}", c, a, b)
    new = []
    for row in range(2):
        half = c[2 * row :][:2]
        for k, right in enumerate(b):
            half = _one_mma(builder, "m8n8k4", half, [a[2 * k + row]], [right])
        new += half
    return new


def _load(builder, address, operand, group, step, paired):
    """A lane's two terms of 8 rows, or columns, of an operand, the `group`-th of the 8; 8 terms of
    the sums are a `step`. They are 4 apart, or neighbours if `paired`.
    """
    apart = 1 if paired else 4

    def one(flipped, at):
        """An element so many bytes on, where the chunk's number differs in some bits."""
        base = builder.xor(address, ir.Constant(I32, flipped))
        return emit(builder, f"ld.shared.f64 $0, [$1+{at}];", [base], [F64])

    if operand.across:
        chunks = [(group + term) % 2 * LINE // 2 for term in range(2)]
        rows = [(8 * step + apart * term) * operand.pitch + group // 2 * LINE for term in range(2)]
        return one(chunks[0], rows[0]) + one(chunks[1], rows[1])
    at, flipped = 8 * group * operand.pitch + step // 2 * LINE, step % 2 * LINE // 2
    return one(flipped, at) + one(flipped + LINE // 4, at)


def product_swizzled(m_tiles, n_tiles, steps, a, b, terms, fresh=False):
    """Function ``multiply(acc, a, b)`` of kernels: ``acc += A B`` of float64, or ``acc = A B`` if
    `fresh`.

    A has 16 `m_tiles` rows, B 8 `n_tiles` columns, the sum runs over 8 `steps`; `b`, and `a` unless
    it is None, are `SwizzledRows`, and kernels give a lane's address; then `a` is an array of
    registers, ordered like acc, and a lane's terms are neighbours, else 4 apart. Registers of acc:
    of 8 columns after the other, for one tile of rows after the other. A tensor core takes so many
    `terms` at once.
    """
    width = max(1, terms // 8)  # steps of one product
    paired = a is None

    def row_pair(builder, held, address, m, step):
        """A's elements of a tile of 16 rows and a step, in the order of `_mma`."""
        if a is None:
            x = held[4 * (m * steps + step) :][:4]
            return [x[0], x[2], x[1], x[3]]
        upper, lower = (_load(builder, address, a, 2 * m + i, step, paired) for i in range(2))
        return [upper[0], lower[0], upper[1], lower[1]]

    def column_pairs(builder, address, n, steps):
        return [x for step in steps for x in _load(builder, address, b, n, step, paired)]

    @intrinsic
    def multiply(context, acc, left, right):
        def codegen(context, builder, signature, values):
            sums = pointers(context, builder, acc, values[0], 4 * m_tiles * n_tiles)
            zero = ir.Constant(F64, 0)
            totals = [zero if fresh else builder.load(x) for x in sums]
            held = []
            if a is None:
                words = pointers(context, builder, left, values[1], 4 * m_tiles * steps)
                held = [builder.load(x) for x in words]
            for first in range(0, steps, width):
                these = range(first, first + width)
                rows = [
                    [x for step in these for x in row_pair(builder, held, values[1], m, step)]
                    for m in range(m_tiles)
                ]
                for n in range(n_tiles):
                    columns = column_pairs(builder, values[2], n, these)
                    for m in range(m_tiles):
                        own = slice(4 * (m * n_tiles + n), 4 * (m * n_tiles + n) + 4)
                        totals[own] = _mma(builder, terms, totals[own], rows[m], columns)
            for pointer, value in zip(sums, totals, strict=True):
                builder.store(value, pointer)
            return context.get_dummy_value()

        return types.void(acc, left, right), codegen

    return multiply


def product_float64(rows, cols, tall):
    """Function ``multiply(acc, a, b)`` of kernels: ``acc[r, c] += A B`` of float64, 8 terms of each
    sum, in registers: IEEE sums. A thread has `rows` rows and `cols` columns of acc, an even number
    of both. A tensor core that is not `tall` takes 8 rows and 4 terms at once.

    With t = lane % 4 and g = lane // 4: ``a[r]`` and ``a[rows + r]`` are terms t and t + 4 of the
    thread's row r, ``b[2 j]`` and ``b[2 j + 1]`` those of column 8 j + g; columns c of acc are 8
    (c // 2) + 2 t + c % 2.
    """

    @intrinsic
    def multiply(context, acc, a, b):
        def codegen(context, builder, signature, values):
            sums = pointers(context, builder, acc, values[0], rows * cols)
            left = [builder.load(x) for x in pointers(context, builder, a, values[1], 2 * rows)]
            right = [builder.load(x) for x in pointers(context, builder, b, values[2], cols)]
            for j in range(cols // 2):
                for r in range(0, rows, 2):
                    places = [
                        sums[(r + half) * cols + 2 * j + c] for half in range(2) for c in range(2)
                    ]
                    held = [left[rows * k + r + half] for k in range(2) for half in range(2)]
                    old = [builder.load(x) for x in places]
                    new = _mma(builder, 8 if tall else 4, old, held, right[2 * j :][:2])
                    for place, value in zip(places, new, strict=True):
                        builder.store(value, place)
            return context.get_dummy_value()

        return types.void(acc, a, b), codegen

    return multiply
