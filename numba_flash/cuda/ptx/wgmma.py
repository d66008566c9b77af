"""wgmma (PTX ISA 9.7.15): products of 64 x N tiles by a warp group; accumulators in registers, A in
registers or shared memory, B in shared memory.

Arguments in capitals are literals: integers that a kernel captures. A register array is a
`cuda.local.array`; the instruction gets its elements as operands, so that every use of one is
ordered after the instruction. Tiles in shared memory are given by the low words of their
descriptors.
"""

from numba_flash.cuda.ptx.emit import emit, literals, pointers, registers
from numba_flash.cuda.runtime.lang import intrinsic, types

# High word of the descriptor of a shared tile (9.7.15.5.1): rows of 128 bytes, swizzled, in groups
# of 8 that lie 64 x 16 bytes apart; of a narrow one: rows of 64 bytes.
DESCRIPTOR_HIGH, NARROW_HIGH = 1 << 30 | 64, 2 << 30 | 32
OF_PANEL = 4  # steps along 64 columns
ROWS_16, NARROW_ROWS_16 = 128, 64  # 16 rows, in units of 16 bytes


def _mma(n, bfloat16, acc, a, b, accumulate, transpose):
    kind = "bf16" if bfloat16 else "f16"
    return (
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} "
        f"{{{acc}}}, {a}, {b}, {accumulate}, 1, 1, {transpose};"
    )


def _descriptor(name, operand, offset, high=DESCRIPTOR_HIGH):
    return f"add.u32 low, ${operand}, {offset}; mov.b64 {name}, {{low, {high}}};"


def _step_offset(panel, step):
    """Of 16 more along the sum: after every 64 columns on by a panel, or rows, if that is 0."""
    return step // 4 * panel + step % 4 * 2 if panel else ROWS_16 * step


def _on_registers(builder, text, updated, read, results_only=False):
    """Emit `text` on the values behind the pointers `updated`, results and inputs, and then the
    values `read`.

    With `results_only` what was in `updated` before does not matter.
    """
    inputs = [] if results_only else [builder.load(pointer) for pointer in updated]
    kinds = [pointer.type.pointee for pointer in updated]
    for pointer, value in zip(updated, emit(builder, text, read, kinds, inputs), strict=True):
        builder.store(value, pointer)


@intrinsic
def wgmma_shared(context, acc, a, b, N, STEPS, A_PANEL, B_PANEL, ACCUMULATE, BFLOAT16):
    """``acc = A B^T``, or ``acc += A B^T`` with ACCUMULATE, committed as one group: A is 64 x 16
    STEPS, B is N x 16 STEPS.

    After every 64 columns an operand moves on by a panel, in units of 16 bytes; an operand with a
    panel of 0 lies there transposed.
    """
    given = literals(N, STEPS, A_PANEL, B_PANEL, ACCUMULATE, BFLOAT16)
    if given is None:
        return None
    n, steps, a_panel, b_panel, accumulate, bfloat16 = given

    def codegen(context, builder, signature, values):
        count = n // 2
        at = count * (2 if accumulate else 1)
        transpose = f"{int(not a_panel)}, {int(not b_panel)}"
        lines = ["{ .reg .b32 low; .reg .b64 a, b; wgmma.fence.sync.aligned;"]
        for step in range(steps):
            a_at = _descriptor("a", at, _step_offset(a_panel, step))
            b_at = _descriptor("b", at + 1, _step_offset(b_panel, step))
            add = int(accumulate or step > 0)
            lines.append(a_at + b_at)
            lines.append(_mma(n, bfloat16, registers(0, count), "a", "b", add, transpose))
        lines.append("wgmma.commit_group.sync.aligned; }")
        updated = pointers(context, builder, acc, values[0], count)
        _on_registers(builder, "\n".join(lines), updated, values[1:3], not accumulate)
        return context.get_dummy_value()

    more = (N, STEPS, A_PANEL, B_PANEL, ACCUMULATE, BFLOAT16)
    return types.void(acc, types.uint32, types.uint32, *more), codegen


def _times_rows(N, STEPS, BFLOAT16, acc, a, high, rows_16, add=()):
    """Of `wgmma_registers`, by the high word of B's descriptor, and how far 16 of its rows go; it
    begins with `acc` unless `add`, if it is given, is 0.
    """
    given = literals(N, STEPS, BFLOAT16)
    if given is None:
        return None
    n, steps, bfloat16 = given

    def codegen(context, builder, signature, values):
        count = n // 2
        at = 2 * count  # results, and the inputs tied to them, come first
        lines = ["{ .reg .b32 low; .reg .b64 b; .reg .pred add;"]
        if add:
            lines.append(f"setp.ne.b32 add, ${at + 4 * steps + 1}, 0;")
        lines.append("wgmma.fence.sync.aligned;")
        for step in range(steps):
            a_at = f"{{{registers(at + 4 * step, 4)}}}"
            lines.append(_descriptor("b", at + 4 * steps, rows_16 * step, high))
            accumulate = "add" if add and step == 0 else 1
            lines.append(_mma(n, bfloat16, registers(0, count), a_at, "b", accumulate, "1"))
        lines.append("wgmma.commit_group.sync.aligned; }")
        updated = pointers(context, builder, acc, values[0], count)
        fragments = pointers(context, builder, a, values[1], 4 * steps)
        read = [builder.load(pointer) for pointer in fragments]
        _on_registers(builder, "\n".join(lines), updated, [*read, *values[2 : 3 + len(add)]])
        return context.get_dummy_value()

    return types.void(acc, a, types.uint32, *add, N, STEPS, BFLOAT16), codegen


def _narrow(N, STEPS, BFLOAT16, acc, a, b, add=()):
    """Of products of narrow panels, which begin with `acc` unless `add`, if it is given, is 0."""
    given = literals(N, STEPS, BFLOAT16)
    if given is None:
        return None
    n, steps, bfloat16 = given

    def codegen(context, builder, signature, values):
        count = n // 2
        lines = (
            ["{ .reg .b32 low; .reg .b64 a, b; .reg .pred add;"]
            if add
            else ["{ .reg .b32 low; .reg .b64 a, b;"]
        )
        if add:
            lines.append(f"setp.ne.b32 add, ${2 * count + 2}, 0;")
        lines.append("wgmma.fence.sync.aligned;")
        first = "add" if add else 0
        for step in range(steps):
            lines.append(_descriptor("a", 2 * count, 2 * step, NARROW_HIGH))
            lines.append(_descriptor("b", 2 * count + 1, 2 * step, NARROW_HIGH))
            lines.append(
                _mma(n, bfloat16, registers(0, count), "a", "b", 1 if step else first, "0, 0")
            )
        lines.append("wgmma.commit_group.sync.aligned; }")
        updated = pointers(context, builder, acc, values[0], count)
        _on_registers(builder, "\n".join(lines), updated, values[1 : 3 + len(add)])
        return context.get_dummy_value()

    return types.void(acc, a, b, *add, N, STEPS, BFLOAT16), codegen


@intrinsic
def wgmma_add_narrow(context, acc, a, b, add, N, STEPS, BFLOAT16):
    """``acc += A B^T``, or ``acc = A B^T`` if `add` is 0, committed as one group: A is 64 x 16
    STEPS, B is N x 16 STEPS, in narrow panels: one or two steps.
    """
    word = types.uint32
    return _narrow(N, STEPS, BFLOAT16, acc, word, word, (word,))


@intrinsic
def wgmma_shared_narrow(context, acc, a, b, N, STEPS, BFLOAT16):
    """``acc = A B^T`` likewise. The registers stay those that `acc` had."""
    return _narrow(N, STEPS, BFLOAT16, acc, types.uint32, types.uint32)


@intrinsic
def wgmma_registers(context, acc, a, b, N, STEPS, BFLOAT16):
    """``acc += A B``, committed as one group: A is 64 x 16 STEPS in registers, B is 16 STEPS x N in
    shared memory.
    """
    return _times_rows(N, STEPS, BFLOAT16, acc, a, DESCRIPTOR_HIGH, ROWS_16)


@intrinsic
def wgmma_add_registers(context, acc, a, b, add, N, STEPS, BFLOAT16):
    """``acc += A B``, or ``acc = A B`` if `add` is 0, likewise."""
    add = (types.uint32,)
    return _times_rows(N, STEPS, BFLOAT16, acc, a, DESCRIPTOR_HIGH, ROWS_16, add)


@intrinsic
def wgmma_registers_narrow(context, acc, a, b, N, STEPS, BFLOAT16):
    """The same where B is in narrow panels."""
    return _times_rows(N, STEPS, BFLOAT16, acc, a, NARROW_HIGH, NARROW_ROWS_16)


@intrinsic
def wgmma_planes_shared(
    context, high, low, a, b, N, STEPS, PLANES, A_PANEL, B_PANEL, A_PLANE, B_PLANE
):
    """``high = A B^T`` of the high planes of two matrices of float16, and of two PLANES ``low = A
    Bl^T + Al B^T`` with their low ones, committed as one group: A is 64 x 16 STEPS, B is N x 16
    STEPS. Of every 64 columns `high` has a sum of its own, one after the other.

    Panels are those of `wgmma_shared`; a low plane lies an A_PLANE or B_PLANE behind its high one,
    in units of 16 bytes.
    """
    given = literals(N, STEPS, PLANES, A_PANEL, B_PANEL, A_PLANE, B_PLANE)
    if given is None:
        return None
    n, steps, planes, a_panel, b_panel, a_plane, b_plane = given
    transpose = ", ".join(str(int(panel == 0)) for panel in (a_panel, b_panel))

    def codegen(context, builder, signature, values):
        count, sums = n // 2, n // 2 * -(-steps // OF_PANEL)
        at = sums + (planes - 1) * count
        lines = ["{ .reg .b32 low; .reg .b64 a, b; wgmma.fence.sync.aligned;"]
        for first, a_first, b_first, add in _planes_terms(planes, sums, a_plane, b_plane):
            for step in range(steps):
                a_at = a_first + _step_offset(a_panel, step)
                b_at = b_first + _step_offset(b_panel, step)
                lines += [_descriptor("a", at, a_at), _descriptor("b", at + 1, b_at)]
                of_chain = step // OF_PANEL * count if first == 0 else 0
                fresh = not add and (step % OF_PANEL == 0 if first == 0 else step == 0)
                acc = registers(first + of_chain, count)
                lines.append(_mma(n, False, acc, "a", "b", int(not fresh), transpose))
        lines.append("wgmma.commit_group.sync.aligned; }")
        updated = pointers(context, builder, high, values[0], sums)
        updated += pointers(context, builder, low, values[1], at - sums)
        _on_registers(builder, "\n".join(lines), updated, values[2:4], True)
        return context.get_dummy_value()

    more = (N, STEPS, PLANES, A_PANEL, B_PANEL, A_PLANE, B_PLANE)
    return types.void(high, low, types.uint32, types.uint32, *more), codegen


@intrinsic
def wgmma_planes_registers(context, high, low, a, b, N, STEPS, PLANES, B_PLANE):
    """``high = A B`` and ``low = A Bl + Al B`` likewise: A is 64 x 16 STEPS in registers, the high
    plane's first, B is 16 STEPS x N in shared memory.
    """
    given = literals(N, STEPS, PLANES, B_PLANE)
    if given is None:
        return None
    n, steps, planes, b_plane = given

    def codegen(context, builder, signature, values):
        count, words = n // 2, 4 * steps
        at = planes * count
        lines = ["{ .reg .b64 b; .reg .b32 low; wgmma.fence.sync.aligned;"]
        for first, a_first, b_first, add in _planes_terms(planes, count, words, b_plane):
            for step in range(steps):
                a_at = f"{{{registers(at + a_first + 4 * step, 4)}}}"
                lines.append(_descriptor("b", at + planes * words, b_first + ROWS_16 * step))
                acc, fresh = registers(first, count), not add and step == 0
                lines.append(_mma(n, False, acc, a_at, "b", int(not fresh), "1"))
        lines.append("wgmma.commit_group.sync.aligned; }")
        updated = pointers(context, builder, high, values[0], count)
        updated += pointers(context, builder, low, values[1], at - count)
        fragments = pointers(context, builder, a, values[2], planes * words)
        read = [builder.load(pointer) for pointer in fragments]
        _on_registers(builder, "\n".join(lines), updated, [*read, values[3]], True)
        return context.get_dummy_value()

    return types.void(high, low, a, types.uint32, N, STEPS, PLANES, B_PLANE), codegen


def _planes_terms(planes, count, a_plane, b_plane):
    """Of a product of planes: the first register of its sum, which planes are multiplied, and
    whether the sum has begun. Low ones have a sum of their own.
    """
    high, low = (0, 0, 0, False), ((count, 0, b_plane, False), (count, a_plane, 0, True))
    return (high, *low) if planes > 1 else (high,)


@intrinsic
def wgmma_wait(context, acc, other, PENDING, COUNT, COUNT_OTHER):
    """Wait until at most PENDING groups run; `acc` and `other`, COUNT and COUNT_OTHER registers,
    stay on their side of the wait.
    """
    given = literals(PENDING, COUNT, COUNT_OTHER)
    if given is None:
        return None
    pending, count, count_other = given

    def codegen(context, builder, signature, values):
        updated = pointers(context, builder, acc, values[0], count)
        updated += pointers(context, builder, other, values[1], count_other)
        _on_registers(builder, f"wgmma.wait_group.sync.aligned {pending};", updated, [])
        return context.get_dummy_value()

    return types.void(acc, other, PENDING, COUNT, COUNT_OTHER), codegen
