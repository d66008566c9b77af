"""Arithmetic (PTX ISA 9.7.3) and conversion (9.7.9.21)."""

from numba_flash.cuda.lang import f32, u32
from numba_flash.cuda.ptx.emit import instruction

ex2 = instruction("ex2", "ex2.approx.ftz.f32 $0, $1;", f32, f32, memory=False)
lg2 = instruction("lg2", "lg2.approx.f32 $0, $1;", f32, f32, memory=False)
rcp = instruction("rcp", "rcp.approx.ftz.f32 $0, $1;", f32, f32, memory=False)
maximum = instruction("maximum", "max.f32 $0, $1, $2;", f32, f32, f32, memory=False)

pack_float16 = instruction(
    "pack_float16", "cvt.rn.f16x2.f32 $0, $2, $1;", u32, f32, f32, memory=False
)
pack_float16_on_turing = instruction(  # which converts one at a time
    "pack_float16_on_turing",
    "{ .reg .b16 l, h; cvt.rn.f16.f32 l, $1; cvt.rn.f16.f32 h, $2; mov.b32 $0, {l, h}; }",
    u32, f32, f32, memory=False,
)  # fmt: skip
pack_bfloat16 = instruction(
    "pack_bfloat16", "cvt.rn.bf16x2.f32 $0, $2, $1;", u32, f32, f32, memory=False
)
unpack_float16 = instruction(  # the lower half
    "unpack_float16",
    "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l; }",
    f32, u32, memory=False,
)  # fmt: skip
unpack_bfloat16 = instruction("unpack_bfloat16", "shl.b32 $0, $1, 16;", f32, u32, memory=False)
