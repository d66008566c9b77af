"""Loads and stores by address (PTX ISA 9.7.9), flags in global memory (9.7.9.8, 9.7.13.6), and
addresses of arrays.
"""

from llvmlite import ir

from numba_flash.cuda.ptx.emit import I32, I64, LLVM, emit, instruction, registers
from numba_flash.cuda.runtime.lang import f32, f64, i32, intrinsic, types, u32, u64

_void = types.void

load_global_one = instruction("load_global_one", "ld.global.b32 $0, [$1];", f32, u64)
load_shared = instruction("load_shared", "ld.shared.b32 $0, [$1];", i32, u32)
load_shared_float = instruction("load_shared_float", "ld.shared.f32 $0, [$1];", f32, u32)
load_shared_half = instruction("load_shared_half", "ld.shared.u16 $0, [$1];", u32, u32)
store_shared = instruction("store_shared", "st.shared.b32 [$0], $1;", _void, u32, i32)
store_shared_zero16 = instruction(
    "store_shared_zero16",
    "{ .reg .b32 z; mov.b32 z, 0; st.shared.v4.b32 [$0], {z, z, z, z}; }",
    _void, u32,
)  # fmt: skip

# Flags between blocks of the grid. To add releases: without that, the completion of a bulk copy
# tells its own thread alone, and another block's bulk addition was seen to come before it.
load_flag = instruction("load_flag", "ld.acquire.gpu.global.s32 $0, [$1];", i32, u64)
add_flag = instruction("add_flag", "red.release.gpu.global.add.s32 [$0], $1;", _void, u64, i32)
# Sums in memory (9.7.13.8); four at a time from Hopper on.
add_one = instruction("add_one", "red.relaxed.gpu.global.add.f32 [$0], $1;", _void, u64, f32)
add_four = instruction(
    "add_four",
    "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};",
    _void, u64, *[f32] * 4,
)  # fmt: skip
add_float64 = instruction(
    "add_float64", "red.relaxed.gpu.global.add.f64 [$0], $1;", _void, u64, f64
)
# Those who have come to a place, which counts to the $2 of the last one and begins anew; each of
# them knows what others wrote before they came.
count_arrival = instruction(
    "count_arrival", "atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;", u32, u64, u32
)
# Numbers that are handed out one by one.
next_number = instruction("next_number", "atom.relaxed.gpu.global.add.s32 $0, [$1], 1;", i32, u64)

# Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l // 8
# (9.7.14.5.16).
stmatrix = instruction(
    "stmatrix",
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
    _void, *[u32] * 5,
)  # fmt: skip


# Of float64: one number, or two neighbours.
load_global_float64 = instruction("load_global_float64", "ld.global.f64 $0, [$1];", f64, u64)
store_global_float64 = instruction(
    "store_global_float64", "st.global.f64 [$0], $1;", _void, u64, f64
)
store_global_float64s = instruction(
    "store_global_float64s", "st.global.v2.f64 [$0], {$1, $2};", _void, u64, f64, f64
)
store_shared_float64 = instruction(
    "store_shared_float64", "st.shared.f64 [$0], $1;", _void, u32, f64
)
load_shared_float64 = instruction("load_shared_float64", "ld.shared.f64 $0, [$1];", f64, u32)
store_shared_float64s = instruction(
    "store_shared_float64s", "st.shared.v2.f64 [$0], {$1, $2};", _void, u32, f64, f64
)


def _vector_load(name, space, address, element, count):
    """Function ``name(address)``: a tuple of `count` neighbours; the address is a multiple of their
    size.
    """

    def typing(context, at):
        def codegen(context, builder, signature, values):
            kind = "f64" if element is f64 else "b32"
            text = f"ld.{space}.v{count}.{kind} {{{registers(0, count)}}}, [${count}];"
            loaded = emit(builder, text, values, [LLVM[element]] * count)
            return context.make_tuple(builder, signature.return_type, loaded)

        return types.UniTuple(element, count)(address), codegen

    typing.__name__ = name
    return intrinsic(typing)


def _vector_store(name, space):
    """Function ``name(address, values)``: store a tuple of one, two or four u32 or f32 at a
    multiple of their size.
    """

    def typing(context, at, values):
        def codegen(context, builder, signature, arguments):
            address, stored = arguments
            elements = [builder.extract_value(stored, i) for i in range(values.count)]
            one = values.count == 1
            vector = "" if one else f".v{values.count}"
            listed = registers(1, values.count) if one else f"{{{registers(1, values.count)}}}"
            emit(builder, f"st.{space}{vector}.b32 [$0], {listed};", [address, *elements])
            return context.get_dummy_value()

        return _void(u32 if space == "shared" else u64, values), codegen

    typing.__name__ = name
    return intrinsic(typing)


def fetch(words, early=False):
    """Function ``fetch(held, first, address, there)`` of kernels: one, two or four words of global
    memory that nobody writes meanwhile, or zeros unless they are `there`, to held[first] and so on.

    While a kernel that begins `early` runs, those before it may still write, until it has waited
    for them.
    """
    load = "ld.global" if early else "ld.global.nc"
    kind = f".v{words}.b32" if words > 1 else ".b32"

    @intrinsic
    def fetch_words(context, held, first, address, there):
        def codegen(context, builder, signature, values):
            zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(words))
            result = f"{{{registers(0, words)}}}" if words > 1 else "$0"
            loads = f"{load}{kind} {result}, [${words}];"
            text = f"{{ .reg .pred p; setp.ne.b32 p, ${words + 1}, 0; {zeros} @p {loads} }}"
            loaded = emit(builder, text, values[2:], [I32] * words, memory=early)
            data = context.make_array(held)(context, builder, values[0]).data
            for i, value in enumerate(loaded):
                at = builder.add(values[1], ir.Constant(I32, i))
                builder.store(value, builder.gep(data, [at]))
            return context.get_dummy_value()

        return _void(held, i32, u64, u32), codegen

    return fetch_words


def _fetch_small(name, kind):
    text = (
        "{ .reg .pred p; .reg .b16 h; setp.ne.b32 p, $2, 0; mov.b16 h, 0;"
        f" @p ld.global.nc.{kind} h, [$1]; cvt.u32.u16 $0, h; }}"
    )
    return instruction(name, text, u32, u64, u32, memory=False)


fetch_byte = _fetch_small("fetch_byte", "u8")  # fetch_byte(address, there), and so on
fetch_half = _fetch_small("fetch_half", "u16")

# of memory that nobody writes meanwhile
fetch_word = instruction("fetch_word", "ld.global.nc.b32 $0, [$1];", u32, u64, memory=False)

load_shared_pair = _vector_load("load_shared_pair", "shared", u32, f32, 2)
load_shared_four = _vector_load("load_shared_four", "shared", u32, f32, 4)
load_shared_float64s = _vector_load("load_shared_float64s", "shared", u32, f64, 2)
load_shared_words = _vector_load("load_shared_words", "shared", u32, u32, 4)
load_global_four = _vector_load("load_global_four", "global", u64, f32, 4)
load_global_words = _vector_load("load_global_words", "global", u64, u32, 4)
store_shared_vector = _vector_store("store_shared_vector", "shared")
store_global = _vector_store("store_global", "global")


@intrinsic
def shared_address(context, array):
    """Address of a shared array within the shared window, as instructions want it."""

    def codegen(context, builder, signature, values):
        data = context.make_array(array)(context, builder, values[0]).data
        pointer = builder.addrspacecast(data, ir.PointerType(data.type.pointee, 3))
        return builder.ptrtoint(pointer, I32)

    return types.uint32(array), codegen


@intrinsic
def global_address(context, array):
    """Address of an array's first element."""

    def codegen(context, builder, signature, values):
        data = context.make_array(array)(context, builder, values[0]).data
        return builder.ptrtoint(data, I64)

    return types.uint64(array), codegen
