"""Arithmetic (PTX ISA 9.7.3) and conversion (9.7.9.21)."""

from llvmlite import ir

from numba_flash.cuda.ptx.emit import I32, emit, instruction
from numba_flash.cuda.runtime.lang import f32, f64, intrinsic, types, u32, u64

MOST_THREADS = 1024  # of a block

ex2 = instruction("ex2", "ex2.approx.ftz.f32 $0, $1;", f32, f32, memory=False)
tanh = instruction("tanh", "tanh.approx.f32 $0, $1;", f32, f32, memory=False)
lg2 = instruction("lg2", "lg2.approx.f32 $0, $1;", f32, f32, memory=False)
fma_up = instruction(  # $1 * $2 + $3, rounded up, as the next ones
    "fma_up", "fma.rp.f32 $0, $1, $2, $3;", f32, f32, f32, f32, memory=False
)
multiply_up = instruction("multiply_up", "mul.rp.f32 $0, $1, $2;", f32, f32, f32, memory=False)
add_up = instruction("add_up", "add.rp.f32 $0, $1, $2;", f32, f32, f32, memory=False)
rcp = instruction("rcp", "rcp.approx.ftz.f32 $0, $1;", f32, f32, memory=False)
maximum = instruction("maximum", "max.f32 $0, $1, $2;", f32, f32, f32, memory=False)
maximum_or_nan = instruction(  # NaN if one is, since Ampere
    "maximum_or_nan", "max.NaN.f32 $0, $1, $2;", f32, f32, f32, memory=False
)
minimum = instruction("minimum", "min.f32 $0, $1, $2;", f32, f32, f32, memory=False)
minima_float16 = instruction(  # of two pairs, since Ampere
    "minima_float16", "min.f16x2 $0, $1, $2;", u32, u32, u32, memory=False
)
minima_bfloat16 = instruction(
    "minima_bfloat16", "min.bf16x2 $0, $1, $2;", u32, u32, u32, memory=False
)

pack_float16 = instruction(
    "pack_float16", "cvt.rn.f16x2.f32 $0, $2, $1;", u32, f32, f32, memory=False
)
pack_float16_on_turing = instruction(  # which converts one at a time
    "pack_float16_on_turing",
    "{ .reg .b16 l, h; cvt.rn.f16.f32 l, $1; cvt.rn.f16.f32 h, $2; mov.b32 $0, {l, h}; }",
    u32, f32, f32, memory=False,
)  # fmt: skip
pack_positive_float16 = instruction(  # negative numbers become 0
    "pack_positive_float16", "cvt.rn.relu.f16x2.f32 $0, $2, $1;", u32, f32, f32, memory=False
)
pack_positive_float16_on_turing = instruction(  # without halves whose sign is set
    "pack_positive_float16_on_turing",
    "{ .reg .b16 l, h; .reg .b32 x, y; cvt.rn.f16.f32 l, $1; cvt.rn.f16.f32 h, $2;"
    " mov.b32 x, {l, h}; prmt.b32 y, x, x, 0xBB99; not.b32 y, y; and.b32 $0, x, y; }",
    u32, f32, f32, memory=False,
)  # fmt: skip
pack_positive_bfloat16 = instruction(
    "pack_positive_bfloat16", "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", u32, f32, f32, memory=False
)
pack_bfloat16 = instruction(
    "pack_bfloat16", "cvt.rn.bf16x2.f32 $0, $2, $1;", u32, f32, f32, memory=False
)
unpack_float16 = instruction(  # the lower half
    "unpack_float16",
    "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l; }",
    f32, u32, memory=False,
)  # fmt: skip
unpack_float16_high = instruction(
    "unpack_float16_high",
    "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, h; }",
    f32, u32, memory=False,
)  # fmt: skip
# The number of the thread, read here: what is computed from it is not kept in registers, or even in
# memory, from one turn of a loop to the next.
thread_here = instruction("thread_here", "mov.u32 $0, %tid.x;", types.int32)
# The same number, of which the compiler does not know where it comes from.
unknown = instruction("unknown", "mov.b32 $0, $1;", types.int32, types.int32, memory=False)
as_float32 = instruction("as_float32", "mov.b32 $0, $1;", f32, u32, memory=False)
as_uint32 = instruction("as_uint32", "mov.b32 $0, $1;", u32, f32, memory=False)
as_float64 = instruction(  # of the lower word and the upper one
    "as_float64", "mov.b64 $0, {$1, $2};", f64, u32, u32, memory=False
)
add_lower = instruction(  # the lower 16 bits of $1 and $2
    "add_lower", "dp2a.lo.u32.u32 $0, $1, 1, $2;", u32, u32, u32, memory=False
)
add_upper = instruction(
    "add_upper", "dp2a.lo.u32.u32 $0, $1, 256, $2;", u32, u32, u32, memory=False
)
add_product = instruction(  # $3 + $1 * $2, all bits of it
    "add_product", "mad.wide.u32 $0, $1, $2, $3;", u64, u32, u32, u64, memory=False
)
unpack_bfloat16 = instruction("unpack_bfloat16", "shl.b32 $0, $1, 16;", f32, u32, memory=False)


@intrinsic
def bounded_thread_here(context):
    """Function ``bounded_thread_here()`` of kernels: `thread_here`, of which compilers know that it
    is not negative; else a quotient takes ten instructions.
    """

    def codegen(context, builder, signature, values):
        (number,) = emit(builder, "mov.u32 $0, %tid.x;", (), [I32])
        bounds = [ir.Constant(I32, 0), ir.Constant(I32, MOST_THREADS)]
        number.set_metadata("range", builder.module.add_metadata(bounds))
        return number

    return types.int32(), codegen


@intrinsic
def mul_wide(context, x, y):
    """Function ``mul_wide(x, y)`` of kernels: the lower and the upper word of a product of u32."""
    text = "{ .reg .b64 both; mul.wide.u32 both, $2, $3; mov.b64 {$0, $1}, both; }"

    def codegen(context, builder, signature, values):
        words = emit(builder, text, values, [I32, I32], memory=False, pure=True)
        return context.make_tuple(builder, signature.return_type, words)

    return types.UniTuple(u32, 2)(u32, u32), codegen
