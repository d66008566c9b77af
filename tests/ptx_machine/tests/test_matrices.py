"""Fragments and products of warps, each element at the place that the PTX ISA names for it."""

import ml_dtypes
import numpy as np
import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from ptx_machine.machine.by_hand import executed
from ptx_machine.machine.memory import Fault

BFLOAT16 = ml_dtypes.bfloat16
LANES = np.arange(32)
TILES = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)  # four matrices in which no element is there twice

# ---- from shared memory and back ---------------------------------------------------------------------------------------------------------

ROWS = np.arange(32).reshape(8, 4).T  # [matrix, row]: which 16 bytes of room, not one matrix after the other
FILL = """mov.u32 %r1, room; shl.b32 %r2, %lane, 4; add.s32 %r3, %r1, %r2; st.shared.v4.b32 [%r3], {%x0, %x1, %x2, %x3}; bar.warp.sync -1;
add.s32 %r4, %r1, %x4;"""  # where the lane's row is


def laid_out(rows=ROWS) -> np.ndarray:
    """Words of each lane: 16 bytes of room, and the address of the row that it names."""
    room = np.empty((32, 8), np.uint16)
    room[ROWS] = TILES
    return np.concatenate([room.view(np.uint32), 16 * rows.reshape(32, 1).astype(np.uint32)], axis=1)


@pytest.mark.parametrize("space", [".shared", ".shared::cta"])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count, transposed, space):
    """Lane l gets elements 2 (l % 4) and the next of row l // 4, of matrix m in register m."""
    names = ", ".join(f"%y{i}" for i in range(count))
    trans = ".trans" if transposed else ""
    got = executed(FILL + f"ldmatrix.sync.aligned.m8n8.x{count}{trans}{space}.b16 {{{names}}}, [%r4];", laid_out())
    got = got.view(np.uint16).reshape(32, count, 2)
    for m in range(count):
        for part in range(2):
            at = (LANES // 4, 2 * (LANES % 4) + part)
            np.testing.assert_array_equal(got[:, m, part], TILES[m][at[::-1] if transposed else at])


@pytest.mark.parametrize("transposed", [False, True], ids=["", "trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix(count, transposed):
    """The opposite: what is not stored stays."""
    names, trans = ", ".join(f"%x{i}" for i in range(count)), ".trans" if transposed else ""
    words = laid_out()
    body = f"""mov.u32 %r1, room; shl.b32 %r2, %lane, 4; add.s32 %r3, %r1, %r2; add.s32 %r4, %r1, %x4; mov.u32 %r5, 0;
    st.shared.v4.b32 [%r3], {{%r5, %r5, %r5, %r5}}; bar.warp.sync -1;
    stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r4], {{{names}}}; bar.warp.sync -1;
    ld.shared.v4.b32 {{%y0, %y1, %y2, %y3}}, [%r3];"""
    room = executed(body, words, 4).view(np.uint16)[ROWS]
    given = words[:, :4].copy().view(np.uint16).reshape(32, 4, 2)
    for m in range(4):
        matrix = given[:, m].reshape(8, 8) if m < count else np.zeros((8, 8))
        np.testing.assert_array_equal(room[m], matrix.T if transposed else matrix)


def test_movmatrix():
    words = TILES[0].view(np.uint32).reshape(32)
    got = executed("movmatrix.sync.aligned.m8n8.trans.b16 %y0, %x0;", words)
    np.testing.assert_array_equal(got.view(np.uint16).reshape(8, 8), TILES[0].T)


@pytest.mark.parametrize("instruction", ["ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5, %r6, %r7, %r8}, [%r4];",
                                         "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r4], {%x0, %x1, %x2, %x3};"])  # fmt: skip
def test_rows_are_aligned_and_the_warp_is_whole(instruction):
    with pytest.raises(Fault, match=r"a row of a matrix at 8, which is not a multiple of 16"):
        executed(FILL + "add.s32 %r4, %r4, 8;" + instruction, laid_out())
    with pytest.raises(Fault, match=r"16 bytes at 4096|4 bytes at 4096"):
        executed(FILL + "add.s32 %r4, %r4, 4096;" + instruction, laid_out())
    with pytest.raises(Fault, match=r"31 lanes are here"):
        executed(FILL + "setp.ne.u32 %p1, %lane, 3; @%p1 " + instruction, laid_out())


# ---- products ----------------------------------------------------------------------------------------------------------------------------


def element_of_a(kind: str, rows: int, k: int, i: int):
    """(row, column) of element i of A in every lane, as the ISA writes it down shape by shape."""
    group, thread = LANES // 4, LANES % 4
    match kind, rows, k:
        case "16", 16, 16:
            return group + (0 if i in (0, 1, 4, 5) else 8), 2 * thread + i % 2 + (0 if i < 4 else 8)
        case "16", 16, 8:
            return group + (0 if i < 2 else 8), 2 * thread + i % 2
        case "32", 16, 4:
            return group + 8 * i, thread
        case "32", 16, 8:
            return group + (0 if i in (0, 2) else 8), thread + (0 if i < 2 else 4)
        case "64", 8, 4:
            return group, thread
        case "64", 16, 4:
            return group + 8 * i, thread
        case "64", 16, 8:
            return group + (0 if i in (0, 2) else 8), thread + (0 if i < 2 else 4)
        case "64", 16, 16:
            return group + (0 if i % 2 == 0 else 8), thread + [0, 0, 4, 4, 8, 8, 12, 12][i]


def element_of_b(kind: str, k: int, i: int):
    """(row, column) of element i of B."""
    group, thread = LANES // 4, LANES % 4
    if kind == "16":
        return 2 * thread + i % 2 + (0 if i < 2 else 8), group
    return thread + 4 * i, group


def element_of_c(i: int):
    return LANES // 4 + (0 if i < 2 else 8), 2 * (LANES % 4) + i % 2


def scattered(matrix, places) -> np.ndarray:
    """(lanes, words) of a matrix."""
    values = np.stack([matrix[at] for at in places], axis=1)
    return np.ascontiguousarray(values).view(np.uint64 if matrix.dtype == np.float64 else np.uint32)


TALL = [(16, 16), (16, 8)]
PRODUCTS = [
    *[(shape, "f32.f16.f16.f32", np.float16, np.float32) for shape in TALL],
    *[(shape, "f32.bf16.bf16.f32", BFLOAT16, np.float32) for shape in TALL],
    *[(shape, "f16.f16.f16.f16", np.float16, np.float16) for shape in TALL],
    *[(shape, "f32.tf32.tf32.f32", np.float32, np.float32) for shape in ((16, 4), (16, 8))],
    *[(shape, "f64.f64.f64.f64", np.float64, np.float64) for shape in ((8, 4), (16, 4), (16, 8), (16, 16))],
]


@pytest.mark.parametrize(("shape", "kinds", "dtype", "result"), PRODUCTS)
def test_mma(shape, kinds, dtype, result):
    """Whole numbers, all exact, and different ones in all places of A and of C."""
    (rows, k), size = shape, np.dtype(dtype).itemsize
    kind = str(8 * size)
    n_a, n_b, n_c = rows * k // 32, k * 8 // 32, rows * 8 // 32
    rng = np.random.default_rng(rows + k)
    a = rng.permutation(256)[: rows * k].reshape(rows, k) - 128.0
    b = rng.integers(-3, 4, (k, 8)) + 0.0
    b[:, 0], b[0, :] = 0, 1
    c = rng.permutation(rows * 8).reshape(rows, 8) + 0.0
    if result == np.float16:
        a = np.floor(a / 8)  # sums below 2048
    words = [
        scattered(a.astype(dtype), [element_of_a(kind, rows, k, i) for i in range(n_a)]),
        scattered(b.astype(dtype), [element_of_b(kind, k, i) for i in range(n_b)]),
        scattered(c.astype(result), [element_of_c(i) for i in range(n_c)]),
    ]
    names, first = [], 0
    for part in words:
        names.append(", ".join(f"%x{first + i}" for i in range(part.shape[1])))
        first += part.shape[1]
    d = ", ".join(f"%y{i}" for i in range(words[2].shape[1]))
    body = f"mma.sync.aligned.m{rows}n8k{k}.row.col.{kinds} {{{d}}}, {{{names[0]}}}, {{{names[1]}}}, {{{names[2]}}};"
    got = executed(body, np.concatenate(words, axis=1), kind=words[0].dtype).view(result)
    wanted = a @ b + c
    for i in range(n_c):
        np.testing.assert_array_equal(got[:, i].astype(np.float64), wanted[element_of_c(i)])


def test_products_one_after_the_other():
    """Each is added to the one before, in the same registers or in others; one register is overwritten before anyone reads it."""
    rng = np.random.default_rng(1)
    a, b = rng.integers(-3, 4, (16, 8)) + 0.0, rng.integers(-3, 4, (8, 8)) + 0.0
    words = [
        scattered(a.astype(np.float16), [element_of_a("16", 16, 8, i) for i in range(4)]),
        scattered(b.astype(np.float16), [element_of_b("16", 8, i) for i in range(2)]),
    ]
    product = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {{{}}}, {{%x0, %x1}}, {{%x2}}, {{{}}};"
    first, second, mixed = ("%f0, %f1, %f2, %f3", "%f4, %f5, %f6, %f7", "%f0, %f1, %f2, %f7")
    body = "".join(
        [
            *[f"mov.f32 %f{i}, 0f00000000;" for i in range(4)],
            product.format(first, first),  # 1 a b
            product.format(first, first),  # 2
            product.format(second, first),  # 3
            "mov.f32 %f3, 0f42C80000;",  # 100
            product.format(second, mixed),  # 3, and in the last register 4
            product.format(first, first),  # 3, and in the last register 101
            *[f"mov.b32 %y{i}, %f{i};" for i in range(8)],
        ]
    )
    got = executed(body, np.concatenate(words, axis=1)).view(np.float32)
    for i, (times, more) in enumerate([(3, 0)] * 3 + [(1, 100)] + [(3, 0)] * 3 + [(4, 0)]):
        np.testing.assert_array_equal(got[:, i], (times * (a @ b) + more)[element_of_c(i % 4)])


def test_what_is_no_product_and_what_is_no_warp():
    body = "mma.sync.aligned.m16n8k8.row.col.f32.{}.{}.f32 {{%f0, %f1, %f2, %f3}}, {{%x0, %x1}}, {{%x2}}, {{%f4, %f5, %f6, %f7}};"
    zero = "".join(f"mov.f32 %f{i}, 0f00000000;" for i in range(4, 8))
    words = np.zeros((32, 3), np.uint32)
    with pytest.raises(NotImplementedError, match="no such product"):
        executed(body.format("f16", "bf16"), words, 0)
    with pytest.raises(NotImplementedError, match="2 registers for"):
        executed(body.format("tf32", "tf32"), words, 0)
    with pytest.raises(Fault, match="%f4 is read before it is written"):
        executed(body.format("f16", "f16"), words, 0)
    with pytest.raises(Fault, match="24 lanes are here"):
        executed(zero + "setp.lt.u32 %p1, %lane, 24; @%p1 " + body.format("f16", "f16"), words, 0)
