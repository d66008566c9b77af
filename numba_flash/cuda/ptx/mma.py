"""ldmatrix (PTX ISA 9.7.14.5.15) and mma.sync (9.7.14.5): products of the 16 x N tiles of a warp, B
in shared memory, A there or in registers, accumulators in registers.

A product is made of 8 x 8 matrices of 16-bit elements. ldmatrix loads four of them, 16 x 16
elements; lane l gives the address of row l % 8 of matrix l // 8.
"""

from typing import Any, NamedTuple

from llvmlite import ir

from numba_flash.cuda.ptx.emit import F32, I32, emit, pointers
from numba_flash.cuda.runtime.lang import intrinsic, types, u32

# Low ones of split float32 are so many times larger: those of small numbers, too, are normal.
LOW = 2.0**11
LINE = 128  # bytes, of shared memory


class Matrices(NamedTuple):
    """How an operand lies in shared memory, seen from a lane's address.

    Attributes
    ----------
    tile, step : int
        Bytes from 16 rows (of A) or columns (of B) of the product to the next, and from 16 along
        the sum to the next.
    transposed : bool
        Its rows in memory run along the sum (of A: do not), so that ldmatrix has to transpose.
    swizzled : bool
        Rows are whole lines of 128 bytes, in which the 16-byte chunk c of row r lies in the place
        ``c ^ (r % 8)``: see `numba_flash.cuda.score.swizzle`.
    """

    tile: int
    step: int
    transposed: bool
    swizzled: bool = False


def _load_tile(builder, address, operand, tile, step):
    """That of 16 rows or columns, and of a step; a lane's own chunk is in its address."""
    offset = tile * operand.tile + step * operand.step
    if operand.swizzled:
        turned = 32 * (tile if operand.transposed else step) % LINE
        address, offset = builder.xor(address, ir.Constant(I32, turned)), offset - turned
    return _load(builder, address, offset, operand.transposed)


def _load(builder, address, offset, transposed):
    trans = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0, $1, $2, $3}}, [$4+{offset}];"
    return emit(builder, text, [address], [I32] * 4)


def _mma(builder, kind, steps, c, a, b):
    """``c + a b``: 16 x 8, over 16 at once or, where the tensor cores take 8 of float16, in two
    `steps`.
    """
    for step in range(steps):
        left, right = a[step * 4 // steps :][: 4 // steps], b[step * 2 // steps :][: 2 // steps]
        names = [f"${i}" for i in range(8 + len(left) + len(right))]
        lists = names[:4], names[4:][: len(left)], names[4 + len(left) :][: len(right)], names[-4:]
        operands = ", ".join("{" + ", ".join(each) + "}" for each in lists)
        text = f"mma.sync.aligned.m16n8k{16 // steps}.row.col.f32.{kind}.{kind}.f32 {operands};"
        c = emit(builder, text, [*left, *right, *c], [F32] * 4, memory=False)
    return c


class ProductsFrom(NamedTuple):
    """Functions of kernels: ``multiply(acc, left, right)``, and ``multiply_from(acc, left, right,
    start)``, whose sums begin with `start`; see `product`.
    """

    multiply: Any
    multiply_from: Any


def product(m_tiles, n_tiles, steps, a, b, bfloat16, turing, fresh=False):
    """Function ``multiply(acc, a, b)`` of kernels: ``acc += A B``, or ``acc = A B`` if `fresh`.

    A has 16 `m_tiles` rows, B 16 `n_tiles` columns, the sum runs over 16 `steps`. `b`, and `a`
    unless it is None, are their `Matrices`; then `a` is an array of registers, four for each tile
    and step. Registers of acc: of 8 columns after the other, for one tile of rows after the other.
    """
    return begun_product(m_tiles, n_tiles, steps, a, b, bfloat16, turing, fresh).multiply


def begun_product(m_tiles, n_tiles, steps, a, b, bfloat16, turing, fresh=False, by_row=False):
    """`ProductsFrom`: that, and ``acc = start + A B``, of one number for each row, two of a lane
    for each tile of them, or one for each column, two of a lane for 8 of them. They take no
    instruction: tensor cores add to other registers than those they write to.
    """
    kind = "bf16" if bfloat16 else "f16"
    mma_steps = 2 if turing else 1
    count = m_tiles * n_tiles * 2

    def one_step(builder, sums, fragments, address, step):
        for n in range(n_tiles):
            right = _load_tile(builder, address, b, n, step)
            for m in range(m_tiles):
                for half in range(2):
                    i = (m * n_tiles + n) * 2 + half
                    pair = right[2 * half :][:2]
                    sums[i] = _mma(builder, kind, mma_steps, sums[i], fragments[m], pair)

    def run(context, builder, acc, left, values, start):
        """The sums, four of each of `count`, that begin with what `start` makes of registers."""
        registers = pointers(context, builder, acc, values[0], 4 * count)
        sums = start(registers)
        if a is None:
            count_a = 4 * m_tiles * steps
            held = [builder.load(x) for x in pointers(context, builder, left, values[1], count_a)]
        for step in range(steps):
            if a is None:
                fragments = [held[4 * (m * steps + step) :][:4] for m in range(m_tiles)]
            else:
                at = [m * a.tile + step * a.step for m in range(m_tiles)]
                fragments = [_load(builder, values[1], x, a.transposed) for x in at]
            one_step(builder, sums, fragments, values[2], step)
        new = [value for each in sums for value in each]
        for pointer, value in zip(registers, new, strict=True):
            builder.store(value, pointer)
        return context.get_dummy_value()

    @intrinsic
    def multiply(context, acc, left, right):
        def codegen(context, builder, signature, values):
            def old(registers):
                zero = ir.Constant(F32, 0)
                loaded = [zero if fresh else builder.load(pointer) for pointer in registers]
                return [loaded[4 * i :][:4] for i in range(count)]

            return run(context, builder, acc, left, values, old)

        return types.void(acc, left, right), codegen

    @intrinsic
    def multiply_from(context, acc, left, right, start):
        def codegen(context, builder, signature, values):
            def given(registers):
                pairs = m_tiles if by_row else 2 * n_tiles
                own = [
                    builder.load(x) for x in pointers(context, builder, start, values[3], 2 * pairs)
                ]
                sums = []
                for i in range(count):
                    m, column = divmod(i, 2 * n_tiles)
                    x, y = own[2 * (m if by_row else column) :][:2]
                    sums.append([x, x, y, y] if by_row else [x, y, x, y])
                return sums

            return run(context, builder, acc, left, values, given)

        return types.void(acc, left, right, start), codegen

    return ProductsFrom(multiply, multiply_from)


def load_matrices(m_tiles, steps, a):
    """Function ``load(fragments, address)`` of kernels: A of a `product` into registers."""

    @intrinsic
    def load(context, fragments, address):
        def codegen(context, builder, signature, values):
            count = 4 * m_tiles * steps
            registers = pointers(context, builder, fragments, values[0], count)
            for m in range(m_tiles):
                for step in range(steps):
                    at = m * a.tile + step * a.step
                    loaded = _load(builder, values[1], at, a.transposed)
                    first = 4 * (m * steps + step)
                    for pointer, value in zip(registers[first:][:4], loaded, strict=True):
                        builder.store(value, pointer)
            return context.get_dummy_value()

        return types.void(fragments, u32), codegen

    return load


class Planes(NamedTuple):
    """Of operands that are ``high + low / LOW``, where the low ones lie.

    Attributes
    ----------
    a, b : int
        Bytes from the high one in shared memory; of registers, how many come before.
    """

    a: int
    b: int


def planes_product(
    m_tiles, n_tiles, steps, a, b, planes, at_once, fresh=False, groups=1, scaled=False
):
    """Function ``multiply(acc, left, right, factors)`` of kernels: ``acc += A B`` of float32 A and
    B that are ``high + low / LOW`` with float16, without the product of the low ones, or high ones
    alone if `planes` is None; else as `product`.

    Tensor cores cut their sums off, so no sum stays there for longer than this product, or one of
    its `groups` of steps: they begin with 0, the products with low ones in registers of their own,
    where little is cut off, and are rounded to nearest when they are added; if they are `scaled`,
    each group times its element of the array `factors`. `at_once` tiles of columns are summed at
    the same time.
    """

    def fragments(builder, held, address, operand, tile, step, low):
        if operand is None:
            first = 4 * (tile * steps + step) + low
            return held[first:][:4]
        at = tile * operand.tile + step * operand.step + low
        return _load(builder, address, at, operand.transposed)

    def one_step(builder, main, more, held, values, first, step):
        left, right = values
        high, *low = (
            [fragments(builder, held, left, a, m, step, plane) for m in range(m_tiles)]
            for plane in ((0, planes.a) if planes else (0,))
        )
        for n in range(at_once):
            b_high, *b_low = (
                fragments(builder, None, right, b, first + n, step, plane)
                for plane in ((0, planes.b) if planes else (0,))
            )
            for m in range(m_tiles):
                for half in range(2):
                    i, pair = (m * at_once + n) * 2 + half, slice(2 * half, 2 * half + 2)
                    if planes:
                        more[i] = _mma(builder, "f16", 1, more[i], low[0][m], b_high[pair])
                        more[i] = _mma(builder, "f16", 1, more[i], high[m], b_low[0][pair])
                    main[i] = _mma(builder, "f16", 1, main[i], high[m], b_high[pair])

    def empty(builder, registers, main, more, first, factor, begin):
        """Add sums to their registers, or store them there if they `begin`."""
        for i in range(len(main)):
            m, rest = divmod(i, 2 * at_once)
            for e in range(4):
                pointer = registers[((m * n_tiles + first) * 2 + rest) * 4 + e]
                total = main[i][e]
                if planes:
                    total = builder.fma(more[i][e], ir.Constant(F32, 1 / LOW), total)
                old = ir.Constant(F32, 0) if begin else builder.load(pointer)
                if factor is not None:
                    total = builder.fma(total, factor, old)
                elif not begin:
                    total = builder.fadd(old, total)
                builder.store(total, pointer)

    @intrinsic
    def multiply(context, acc, left, right, factors):
        def codegen(context, builder, signature, values):
            registers = pointers(context, builder, acc, values[0], 8 * m_tiles * n_tiles)
            held, factor = [], [None] * groups
            if a is None:
                words = pointers(context, builder, left, values[1], 8 * m_tiles * steps)
                held = [builder.load(x) for x in words]
            if scaled:
                given = pointers(context, builder, factors, values[3], groups)
                factor = [builder.load(x) for x in given]
            size = steps // groups
            for first in range(0, n_tiles, at_once):
                for group, own in enumerate(factor):
                    zeros = [ir.Constant(F32, 0)] * 4
                    main, more = ([zeros] * (2 * m_tiles * at_once) for _ in range(2))
                    for step in range(group * size, (group + 1) * size):
                        one_step(builder, main, more, held, values[1:3], first, step)
                    empty(builder, registers, main, more, first, own, fresh and group == 0)
            return context.get_dummy_value()

        return types.void(acc, left, right, factors), codegen

    return multiply


def joined_product(
    m_tiles, n_tiles, steps, b, planes, at_once, fresh=False, scaled=False, last=False
):
    """Function ``multiply(acc, left, right, factor)`` of kernels: as `planes_product` of A in
    registers, but of planes of A and B that are ``high + low``. So products with low ones need no
    sum of their own: what they make is where the sum of the high ones begins, small beside it, so
    that little is cut off before the high ones come.

    If it is `scaled`, the product is multiplied by the first element of the array `factor`. Low
    ones of A come first, or `last`, so that A B and its transpose B^T A^T can be the same bits.
    """

    def sums_of(builder, held, right, first):
        """Of `at_once` tiles of columns from the `first` on, in the order of registers of acc."""
        count = 2 * m_tiles * at_once
        sums = [[ir.Constant(F32, 0)] * 4 for _ in range(count)]

        def left(m, step, plane):
            return held[4 * (m * steps + step) + plane :][:4]

        def add(step, plane, fragments):
            for i in range(count):
                m, (n, half) = i // (2 * at_once), divmod(i % (2 * at_once), 2)
                pair = fragments[n][2 * half :][:2]
                sums[i] = _mma(builder, "f16", 1, sums[i], left(m, step, plane), pair)

        def load(step, plane):
            at = [(first + n) * b.tile + step * b.step + plane for n in range(at_once)]
            return [_load(builder, right, x, b.transposed) for x in at]

        high = []
        for step in range(steps):
            high.append(load(step, 0))
            low = load(step, planes.b)
            if last:
                add(step, 0, low)
            add(step, planes.a, high[step])
            if not last:
                add(step, 0, low)
        for step in range(steps):
            add(step, 0, high[step])
        return sums

    @intrinsic
    def multiply(context, acc, left, right, factor):
        def codegen(context, builder, signature, values):
            registers = pointers(context, builder, acc, values[0], 8 * m_tiles * n_tiles)
            words = pointers(context, builder, left, values[1], 8 * m_tiles * steps)
            held = [builder.load(x) for x in words]
            if scaled:
                (given,) = pointers(context, builder, factor, values[3], 1)
                power = builder.load(given)
            for first in range(0, n_tiles, at_once):
                for i, own in enumerate(sums_of(builder, held, values[2], first)):
                    m, rest = divmod(i, 2 * at_once)
                    for e in range(4):
                        at = 4 * (2 * (m * n_tiles + first) + rest) + e
                        pointer, total = registers[at], own[e]
                        old = None if fresh else builder.load(pointer)
                        if scaled:
                            total = builder.fma(total, power, old)
                        elif not fresh:
                            total = builder.fadd(old, total)
                        builder.store(total, pointer)
            return context.get_dummy_value()

        return types.void(acc, left, right, factor), codegen

    return multiply
