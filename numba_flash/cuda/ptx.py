"""One wrapper per PTX instruction that Numba lacks, named like it; no algorithm, and the only assembler in the package.

Sections are those of NVIDIA's "PTX ISA". Arguments in capitals are literals: integers that a kernel captures. A register array is a
`cuda.local.array`; the instruction gets its elements as operands, so that every use of one is ordered after the instruction.
"""

from inspect import Parameter, Signature

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

_LLVM = {
    types.float32: ir.FloatType(), types.uint32: ir.IntType(32), types.int32: ir.IntType(32), types.uint64: ir.IntType(64),
    types.void: ir.VoidType(),
}  # fmt: skip
_F32, _I32 = ir.FloatType(), ir.IntType(32)
_MEMORY = "~{memory}"
DESCRIPTOR_HIGH = 1 << 30 | 64  # of a shared tile (9.7.15.5.1): rows of 128 bytes, swizzled, in groups of 8 that lie 64 x 16 bytes apart


def _instruction(name: str, text: str, constraints: str, result, *arguments, effects: bool = True):
    """Intrinsic of scalar operands: `text` with ``$0, $1, ...`` for the result, if any, and the arguments."""

    def typing(context, *given):
        def codegen(context, builder, signature, values):
            kind = ir.FunctionType(_LLVM[result], [_LLVM[argument] for argument in arguments])
            value = builder.call(ir.InlineAsm(kind, text, constraints, side_effect=effects), list(values))
            return context.get_dummy_value() if result is types.void else value

        return result(*arguments), codegen

    typing.__name__ = name
    parameters = ["context", *(f"argument{i}" for i in range(len(arguments)))]  # Numba wants to count them
    typing.__signature__ = Signature([Parameter(each, Parameter.POSITIONAL_OR_KEYWORD) for each in parameters])
    return intrinsic(typing)


_u32, _u64, _f32, _void = types.uint32, types.uint64, types.float32, types.void

# ---- scalar arithmetic (9.7.3) and conversion (9.7.9.21)
ex2 = _instruction("ex2", "ex2.approx.ftz.f32 $0, $1;", "=f,f", _f32, _f32, effects=False)
lg2 = _instruction("lg2", "lg2.approx.f32 $0, $1;", "=f,f", _f32, _f32, effects=False)
rcp = _instruction("rcp", "rcp.approx.ftz.f32 $0, $1;", "=f,f", _f32, _f32, effects=False)
maximum = _instruction("maximum", "max.f32 $0, $1, $2;", "=f,f,f", _f32, _f32, _f32, effects=False)
pack_float16 = _instruction("pack_float16", "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", _u32, _f32, _f32, effects=False)
pack_bfloat16 = _instruction("pack_bfloat16", "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", _u32, _f32, _f32, effects=False)

unpack_float16 = _instruction(  # the lower half
    "unpack_float16", "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l; }", "=f,r", _f32, _u32, effects=False
)
unpack_bfloat16 = _instruction("unpack_bfloat16", "shl.b32 $0, $1, 16;", "=f,r", _f32, _u32, effects=False)

# ---- shared memory by address (9.7.9)
load_shared = _instruction("load_shared", "ld.shared.b32 $0, [$1];", "=r,r," + _MEMORY, types.int32, _u32)
store_shared = _instruction("store_shared", "st.shared.b32 [$0], $1;", "r,r," + _MEMORY, _void, _u32, types.int32)
store_shared_zero16 = _instruction(
    "store_shared_zero16", "{ .reg .b32 z; mov.b32 z, 0; st.shared.v4.b32 [$0], {z, z, z, z}; }", "r," + _MEMORY, _void, _u32
)

# ---- mbarrier (9.7.13.15): an arrival count, a byte count, and the parity of the phase
mbarrier_init = _instruction("mbarrier_init", "mbarrier.init.shared::cta.b64 [$0], $1;", "r,r," + _MEMORY, _void, _u32, _u32)
mbarrier_arrive = _instruction("mbarrier_arrive", "mbarrier.arrive.shared::cta.b64 _, [$0];", "r," + _MEMORY, _void, _u32)
mbarrier_expect = _instruction(
    "mbarrier_expect", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "r,r," + _MEMORY, _void, _u32, _u32
)
mbarrier_try_wait = _instruction(
    "mbarrier_try_wait",
    "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; selp.u32 $0, 1, 0, p; }",
    "=r,r,r," + _MEMORY, _u32, _u32, _u32,
)  # fmt: skip
fence_mbarrier_init = _instruction("fence_mbarrier_init", "fence.mbarrier_init.release.cluster;", _MEMORY, _void)

# ---- named barriers (9.7.13.1) and the proxy fence (9.7.13.4)
barrier_sync = _instruction("barrier_sync", "bar.sync $0, $1;", "r,r," + _MEMORY, _void, _u32, _u32)
barrier_arrive = _instruction("barrier_arrive", "bar.arrive $0, $1;", "r,r," + _MEMORY, _void, _u32, _u32)
fence_proxy_async = _instruction("fence_proxy_async", "fence.proxy.async.shared::cta;", _MEMORY, _void)

# ---- tensor copies (9.7.9.27): a box of a 5-D tensor map to shared memory, counted on an mbarrier, or back, in bulk groups of a thread
tensor_load = _instruction(
    "tensor_load",
    "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1, {$2, $3, $4, $5, $6}], [$7];",
    "r,l,r,r,r,r,r,r," + _MEMORY, _void, _u32, _u64, *(types.int32,) * 5, _u32,
)  # fmt: skip
tensor_store = _instruction(
    "tensor_store",
    "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [$1, {$2, $3, $4, $5, $6}], [$0];",
    "r,l,r,r,r,r,r," + _MEMORY, _void, _u32, _u64, *(types.int32,) * 5,
)  # fmt: skip
bulk_commit = _instruction("bulk_commit", "cp.async.bulk.commit_group;", _MEMORY, _void)
bulk_wait_read = _instruction("bulk_wait_read", "cp.async.bulk.wait_group.read 0;", _MEMORY, _void)
bulk_wait = _instruction("bulk_wait", "cp.async.bulk.wait_group 0;", _MEMORY, _void)

# ---- bulk copies (9.7.9.25): neighbouring bytes, a multiple of 16, to shared memory, counted on an mbarrier; or float32 added to memory
bulk_load = _instruction(
    "bulk_load",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
    "r,l,r,r," + _MEMORY, _void, _u32, _u64, _u32, _u32,
)  # fmt: skip
bulk_store = _instruction(
    "bulk_store", "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;", "l,r,r," + _MEMORY, _void, _u64, _u32, _u32
)
bulk_add = _instruction(
    "bulk_add", "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;", "l,r,r," + _MEMORY, _void, _u64, _u32, _u32
)

# ---- flags in global memory (9.7.9.8, 9.7.13.6), between blocks of the grid. To add releases: without that, the completion of a bulk copy
# tells its own thread alone, and another block's bulk addition was seen to come before it. And numbers that are handed out one by one.
load_flag = _instruction("load_flag", "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l," + _MEMORY, types.int32, _u64)
add_flag = _instruction("add_flag", "red.release.gpu.global.add.s32 [$0], $1;", "l,r," + _MEMORY, _void, _u64, types.int32)
next_number = _instruction("next_number", "atom.relaxed.gpu.global.add.s32 $0, [$1], 1;", "=r,l," + _MEMORY, types.int32, _u64)

# ---- matrix stores (9.7.14.5.16): four 8 x 8 matrices of 16-bit elements, lane l gives the address of row l % 8 of matrix l // 8
stmatrix = _instruction(
    "stmatrix", "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};", "r,r,r,r,r," + _MEMORY, _void, *(_u32,) * 5
)


@intrinsic
def setmaxnreg(context, COUNT, INCREASE):
    """``setmaxnreg.inc`` or ``.dec`` to COUNT registers per thread (9.7.19.5); by all warps of a warp group."""
    if not all(isinstance(x, types.IntegerLiteral) for x in (COUNT, INCREASE)):
        return None
    direction = "inc" if INCREASE.literal_value else "dec"

    def codegen(context, builder, signature, values):
        text = f"setmaxnreg.{direction}.sync.aligned.u32 {COUNT.literal_value};"
        builder.call(ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), text, _MEMORY, side_effect=True), [])
        return context.get_dummy_value()

    return types.void(COUNT, INCREASE), codegen


@intrinsic
def shared_address(context, array):
    """Address of a shared array within the shared window, as the instructions above want it."""

    def codegen(context, builder, signature, values):
        data = context.make_array(array)(context, builder, values[0]).data
        return builder.ptrtoint(builder.addrspacecast(data, ir.PointerType(data.type.pointee, 3)), _I32)

    return types.uint32(array), codegen


@intrinsic
def global_address(context, array):
    """Address of an array's first element."""

    def codegen(context, builder, signature, values):
        return builder.ptrtoint(context.make_array(array)(context, builder, values[0]).data, ir.IntType(64))

    return types.uint64(array), codegen


def _vector_load(name, space, address, element, count):
    """Intrinsic ``name(address)``: a tuple of `count` neighbours; the address is a multiple of their size."""

    def typing(context, at):
        def codegen(context, builder, signature, values):
            kind = ir.LiteralStructType([_LLVM[element]] * count)
            text = f"ld.{space}.v{count}.b32 {{{_registers(0, count)}}}, [${count}];"
            letter = "f" if element is types.float32 else "r"
            constraints = ",".join([*([f"={letter}"] * count), "l" if address is types.uint64 else "r", _MEMORY])
            result = builder.call(ir.InlineAsm(ir.FunctionType(kind, [_LLVM[address]]), text, constraints, side_effect=True), values)
            return context.make_tuple(builder, signature.return_type, [builder.extract_value(result, i) for i in range(count)])

        return types.UniTuple(element, count)(address), codegen

    typing.__name__ = name
    return intrinsic(typing)


def _vector_store(name, space, address):
    """Intrinsic ``name(address, values)``: store a tuple of one, two or four uint32 or float32 at a multiple of their size."""

    def typing(context, at, values):
        count, kind = values.count, _LLVM[values.dtype]

        def codegen(context, builder, signature, arguments):
            registers = [builder.extract_value(arguments[1], i) for i in range(count)]
            vector, listed = (f".v{count}" if count > 1 else ""), _registers(1, count)
            text = f"st.{space}{vector}.b32 [$0], {f'{{{listed}}}' if count > 1 else listed};"
            letters = ["l" if address is types.uint64 else "r", *(["f" if kind == _F32 else "r"] * count), _MEMORY]
            function = ir.FunctionType(ir.VoidType(), [_LLVM[address], *([kind] * count)])
            builder.call(ir.InlineAsm(function, text, ",".join(letters), side_effect=True), [arguments[0], *registers])
            return context.get_dummy_value()

        return types.void(address, values), codegen

    typing.__name__ = name
    return intrinsic(typing)


load_shared_pair = _vector_load("load_shared_pair", "shared", types.uint32, types.float32, 2)
load_global_four = _vector_load("load_global_four", "global", types.uint64, types.float32, 4)
load_shared_words = _vector_load("load_shared_words", "shared", types.uint32, types.uint32, 4)
load_global_words = _vector_load("load_global_words", "global", types.uint64, types.uint32, 4)
store_shared_vector = _vector_store("store_shared_vector", "shared", types.uint32)
store_global = _vector_store("store_global", "global", types.uint64)


# ---- wgmma (9.7.15): 64 x N tiles of a warp group; accumulators in registers, A in registers or shared memory, B in shared memory


def _pointers(context, builder, array, value, count):
    data = context.make_array(array)(context, builder, value).data
    return [builder.gep(data, [ir.Constant(_I32, i)]) for i in range(count)]


def _asm_on_registers(builder, text, updated, read, results_only=False):
    """Call `text` with the values behind the pointers `updated` as results ``$0 ...``, tied inputs too, and then the values `read`.

    With `results_only` what was in `updated` before does not matter.
    """
    inputs = [] if results_only else [builder.load(pointer) for pointer in updated]
    kinds = {_F32: "f", _I32: "r", ir.IntType(64): "l"}
    constraints = ["=f"] * len(updated) + [str(i) for i in range(len(inputs))] + [kinds[value.type] for value in read] + [_MEMORY]
    operands = [*inputs, *read]
    kind = ir.FunctionType(ir.LiteralStructType([_F32] * len(updated)), [value.type for value in operands])
    assert len(constraints) == len(updated) + len(operands) + 1
    result = builder.call(ir.InlineAsm(kind, text, ",".join(constraints), side_effect=True), operands)
    for i, pointer in enumerate(updated):
        builder.store(builder.extract_value(result, i), pointer)


def _mma(n, bfloat16, acc, a, b, accumulate, transpose):
    kind = "bf16" if bfloat16 else "f16"
    return f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{acc}}}, {a}, {b}, {accumulate}, 1, 1, {transpose};"


def _descriptor(name, operand, offset):
    return f"add.u32 low, ${operand}, {offset}; mov.b64 {name}, {{low, {DESCRIPTOR_HIGH}}};"


def _registers(first, count):
    return ", ".join(f"${i}" for i in range(first, first + count))


def _literals(*arguments):
    """Values of literal types, or None if one is not literal (Numba then asks again with literals)."""
    if not all(isinstance(x, types.IntegerLiteral) for x in arguments):
        return None
    return [x.literal_value for x in arguments]


@intrinsic
def wgmma_shared(context, acc, a, b, N, STEPS, A_PANEL, B_PANEL, ACCUMULATE, BFLOAT16):
    """``acc = A B^T``, or ``acc += A B^T`` with ACCUMULATE, committed as one group: A is 64 x 16 STEPS, B is N x 16 STEPS.

    `a` and `b` are the low words of descriptors of shared memory in rows of 128 bytes, with the high word DESCRIPTOR_HIGH. After every 64
    columns an operand moves on by a panel, in units of 16 bytes; an operand with a panel of 0 lies there transposed.
    """
    literals = _literals(N, STEPS, A_PANEL, B_PANEL, ACCUMULATE, BFLOAT16)
    if literals is None:
        return None
    n, steps, a_panel, b_panel, accumulate, bfloat16 = literals

    def offset(panel, step):
        return step // 4 * panel + step % 4 * 2 if panel else 128 * step  # 16 rows of 128 bytes

    def codegen(context, builder, signature, values):
        count = n // 2
        at = count * (2 if accumulate else 1)
        transpose = f"{int(not a_panel)}, {int(not b_panel)}"
        lines = ["{ .reg .b32 low; .reg .b64 a, b; wgmma.fence.sync.aligned;"]
        for step in range(steps):
            lines.append(_descriptor("a", at, offset(a_panel, step)) + _descriptor("b", at + 1, offset(b_panel, step)))
            lines.append(_mma(n, bfloat16, _registers(0, count), "a", "b", int(accumulate or step > 0), transpose))
        lines.append("wgmma.commit_group.sync.aligned; }")
        pointers = _pointers(context, builder, acc, values[0], count)
        _asm_on_registers(builder, "\n".join(lines), pointers, values[1:3], results_only=not accumulate)
        return context.get_dummy_value()

    return types.void(acc, types.uint32, types.uint32, N, STEPS, A_PANEL, B_PANEL, ACCUMULATE, BFLOAT16), codegen


@intrinsic
def wgmma_registers(context, acc, a, b, N, STEPS, BFLOAT16):
    """``acc += A B``, committed as one group: A is 64 x 16 STEPS in registers, B is 16 STEPS x N in shared memory."""
    literals = _literals(N, STEPS, BFLOAT16)
    if literals is None:
        return None
    n, steps, bfloat16 = literals

    def codegen(context, builder, signature, values):
        acc_registers = n // 2
        at = 2 * acc_registers  # results, and the inputs tied to them, come first
        lines = ["{ .reg .b32 low; .reg .b64 b; wgmma.fence.sync.aligned;"]
        for step in range(steps):
            lines.append(_descriptor("b", at + 4 * steps, 128 * step))  # 16 rows of 128 bytes
            lines.append(_mma(n, bfloat16, _registers(0, acc_registers), f"{{{_registers(at + 4 * step, 4)}}}", "b", 1, "1"))
        lines.append("wgmma.commit_group.sync.aligned; }")
        pointers = _pointers(context, builder, acc, values[0], acc_registers)
        fragments = [builder.load(pointer) for pointer in _pointers(context, builder, a, values[1], 4 * steps)]
        _asm_on_registers(builder, "\n".join(lines), pointers, [*fragments, values[2]])
        return context.get_dummy_value()

    return types.void(acc, a, types.uint32, N, STEPS, BFLOAT16), codegen


@intrinsic
def wgmma_wait(context, acc, other, PENDING, COUNT, COUNT_OTHER):
    """Wait until at most PENDING groups run; `acc` and `other`, COUNT and COUNT_OTHER registers, stay on their side of the wait."""
    literals = _literals(PENDING, COUNT, COUNT_OTHER)
    if literals is None:
        return None
    pending, count, count_other = literals

    def codegen(context, builder, signature, values):
        pointers = _pointers(context, builder, acc, values[0], count) + _pointers(context, builder, other, values[1], count_other)
        _asm_on_registers(builder, f"wgmma.wait_group.sync.aligned {pending};", pointers, [])
        return context.get_dummy_value()

    return types.void(acc, other, PENDING, COUNT, COUNT_OTHER), codegen
