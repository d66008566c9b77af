"""The kernel of the study of doubt: a product whose sums stay in tensor cores for a stretch, by each instruction and kind of number.

It multiplies by the wrappers that attention multiplies by. They know no TF32; within `reading_tf32` the same instructions take the same
bytes as numbers of 32 bits.
"""

import hashlib
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from numba_flash.arguments.arrays import Layout
from numba_flash.cuda import ptx
from numba_flash.cuda.number import array
from numba_flash.cuda.ptx import Matrices
from numba_flash.cuda.ptx import mma as mma_wrappers
from numba_flash.cuda.ptx import wgmma as wgmma_wrappers
from numba_flash.cuda.ptx.emit import F32, emit
from numba_flash.cuda.runtime.lang import cuda, f32, i32, i64, inline, types, u32, u64
from numba_flash.cuda.runtime.launch import Launch
from numba_flash.cuda.sm80.operands.products import build_lane
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.wgmma import descriptor

PANEL_BYTES, PANEL_WORDS, CHUNK, ALIGNMENT = 128, 32, 16, 1024  # of a row of a tile
INSTRUCTIONS, KINDS = ("wgmma", "mma.sync"), ("float16", "bfloat16", "tf32")
DIGEST = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]  # cubins on disk are of this text
sys.modules["numba_flash.cuda.doubt_kernels"] = sys.modules[__name__]  # where launches look for what builds kernels


class Shape(NamedTuple):
    """Of what a block computes.

    Attributes
    ----------
    products : int
        1, or 3: high by low, low by high, high by high of two planes each; sums of products with low ones have registers of their own.
    loads : bool
        Each panel is read from memory; else the first one again and again, to find how fast products are.
    columns : int
        Of the block.
    m_tiles : int
        Of 16 rows of a warp, of mma.sync.
    groups : int
        Of four warps.
    """

    products: int
    loads: bool
    columns: int
    m_tiles: int
    groups: int

    @property
    def rows(self) -> int:
        """Of the block."""
        return 64 * self.m_tiles * self.groups


TO_CHECK = Shape(1, True, 64, 1, 1)
TO_TIME = {"wgmma": Shape(1, False, 128, 1, 2), "mma.sync": Shape(1, False, 64, 1, 2)}


def columns_of_panel(kind: str) -> int:
    """Numbers in a row of a panel."""
    return PANEL_BYTES // (4 if kind == "tf32" else 2)


def pitch_of(instruction: str) -> int:
    """Bytes from row to row in shared memory: swizzled, or padded."""
    return PANEL_BYTES + (0 if instruction == "wgmma" else CHUNK)


@contextmanager
def reading_tf32():
    """Kernels that are compiled meanwhile multiply TF32."""

    def of_group(n, bfloat16, acc, a, b, accumulate, transpose):
        return f"wgmma.mma_async.sync.aligned.m64n{n}k8.f32.tf32.tf32 {{{acc}}}, {a}, {b}, {accumulate}, 1, 1;"

    def of_warp(builder, kind, steps, c, a, b):
        lists = ["{" + ", ".join(f"${i}" for i in part) + "}" for part in (range(4), range(4, 8), range(8, 10), range(10, 14))]
        text = f"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {', '.join(lists)};"
        return emit(builder, text, [*a, *b, *c], [F32] * 4, memory=False)

    with mock.patch.object(wgmma_wrappers, "_mma", of_group), mock.patch.object(mma_wrappers, "_mma", of_warp):
        yield


def build_load(rows: int, threads: int, pitch: int):
    """``load(tile, source, words, panel)``: a panel of so many rows, of `words` each, from memory."""
    CHUNKS, THREADS, PITCH, SWIZZLED = rows * PANEL_BYTES // CHUNK, threads, pitch, pitch == PANEL_BYTES

    @inline
    def load(tile, source, words, panel):
        for chunk in range(i32(cuda.threadIdx.x), CHUNKS, THREADS):
            row, place = chunk // 8, chunk % 8
            at = u64(source + u64((i64(row) * words + panel * PANEL_WORDS) * 4 + place * CHUNK))
            if SWIZZLED:
                place = place ^ row % 8
            ptx.store_shared_vector(u32(tile + u32(row * PITCH + place * CHUNK)), ptx.load_global_words(at))

    return load


def build_multiply(instruction: str, kind: str, shape: Shape):
    """``multiply(acc, a, b)``: acc += A B^T of a panel, for a group's or warp's rows of A; and ``wait(acc, low)`` for products."""
    COLUMNS, BFLOAT16, STEPS, ONE, NONE = shape.columns, int(kind == "bfloat16"), 4, 1, 0
    COUNT = shape.m_tiles * shape.columns // 2
    COUNT_LOW = COUNT if shape.products > 1 else 0
    if instruction == "wgmma":

        @inline
        def multiply(acc, a, b):
            mine = u32(a + u32(i32(cuda.threadIdx.x) // 128 * 64 * PANEL_BYTES))
            at, other = descriptor(mine, u32(0)), descriptor(b, u32(0))
            ptx.wgmma_shared(acc, at, other, COLUMNS, STEPS, ONE, ONE, ONE, BFLOAT16)

        @inline
        def wait(acc, low):
            ptx.wgmma_wait(acc, low, NONE, COUNT, COUNT_LOW)

        return multiply, wait
    pitch = pitch_of(instruction)
    tiles = Matrices(CHUNK * pitch, 32, False)
    product = ptx.product(shape.m_tiles, shape.columns // 16, STEPS, tiles, tiles, bool(BFLOAT16), False)
    beside, below = build_lane(pitch)
    BYTES = 16 * shape.m_tiles * pitch

    @inline
    def multiply(acc, a, b):
        product(acc, beside(u32(a + u32(i32(cuda.threadIdx.x) // 32 * BYTES))), below(b))

    @inline
    def wait(acc, low):
        pass

    return multiply, wait


def build(instruction, kind, shape, digest):
    """Kernel ``chain(maps, a, b, out, count, every)``: out = A B^T over `count` panels, emptied after `every` so many into float32.

    a, b : (planes, rows, words), (planes, columns, words); out : (rows, columns). maps : a tensor map of nothing that is read, by which
        the linker takes the kernel as a whole program.
    """
    THREADS, PITCH, LOADS, PRODUCTS = 128 * shape.groups, pitch_of(instruction), shape.loads, shape.products
    ROWS, COLUMNS, M_TILES, COUNT = shape.rows, shape.columns, shape.m_tiles, shape.m_tiles * shape.columns // 2
    A_BYTES, B_BYTES, LOWERED = ROWS * PITCH, COLUMNS * PITCH, 1 / ptx.LOW
    PLANES = 1 if PRODUCTS == 1 else 2
    load_a, load_b = build_load(ROWS, THREADS, PITCH), build_load(COLUMNS, THREADS, PITCH)
    multiply, wait = build_multiply(instruction, kind, shape)
    COUNT_LOW, STORED = COUNT if PLANES > 1 else 1, COUNT if LOADS else 1

    @inline
    def bring(smem, a, b, panel):
        cuda.syncthreads()
        words = i64(a.shape[2])
        for plane in range(PLANES):
            first = ptx.global_address(a) + u64((plane * a.shape[1] + i64(cuda.blockIdx.x) * ROWS) * words * 4)
            load_a(u32(smem + u32(plane * A_BYTES)), u64(first), words, panel)
            first = ptx.global_address(b) + u64(plane * b.shape[1] * words * 4)
            load_b(u32(smem + u32(PLANES * A_BYTES + plane * B_BYTES)), u64(first), words, panel)
        ptx.fence_proxy_async()
        cuda.syncthreads()

    @inline
    def multiply_all(acc, low, smem):
        b = u32(smem + u32(PLANES * A_BYTES))
        if PRODUCTS == 3:
            multiply(low, smem, u32(b + u32(B_BYTES)))
            multiply(low, u32(smem + u32(A_BYTES)), b)
        multiply(acc, smem, b)
        wait(acc, low)

    @inline
    def store(out, total):
        lane, warp = i32(cuda.threadIdx.x) % 32, i32(cuda.threadIdx.x) // 32
        first = i32(cuda.blockIdx.x) * ROWS + warp * 16 * M_TILES + lane // 4
        if not LOADS:  # one number, so that all are needed
            for e in range(1, COUNT):
                total[0] += total[e]
        for e in range(STORED):
            row = first + e // (COLUMNS // 2) * 16 + e % 4 // 2 * 8
            out[u64(row), u64(e % (COLUMNS // 2) // 4 * 8 + lane % 4 * 2 + e % 2)] = total[e]

    def chain(maps, a, b, out, count, every):
        smem = pipeline.shared_base(ALIGNMENT)
        total, acc = cuda.local.array(COUNT, f32), cuda.local.array(COUNT, f32)
        low = cuda.local.array(COUNT_LOW, f32)
        for e in range(COUNT):
            total[e] = f32(0)
        for first in range(0, count, every):
            for e in range(COUNT):
                acc[e] = f32(0)
            for e in range(COUNT_LOW):
                low[e] = f32(0)
            for panel in range(first, min(first + every, count)):
                if LOADS or panel == 0:
                    bring(smem, a, b, panel)
                multiply_all(acc, low, smem)
            for e in range(COUNT):
                total[e] += acc[e]
            if PRODUCTS == 3:
                for e in range(COUNT):
                    total[e] += low[e] * f32(LOWERED)
        store(out, total)

    signature = types.void(types.UniTuple(u64, 1), array(u32, 3), array(u32, 3), array(f32, 2), i64, i64)
    return chain, signature, {"launch_bounds": (THREADS, 1), "tensor_maps": ("maps.0",)}


def launch_of(instruction: str, kind: str, shape: Shape, a, b, out, gpu, numbers: tuple[int, int]) -> Launch:
    """The kernel on arrays like these, with the panels there are and those of a stretch. Its first operand is `a` as 16-bit numbers."""
    halves = Layout.of(a.view("float16"))
    planes = 1 if shape.products == 1 else 2
    pitch = pitch_of(instruction)
    return Launch(
        "doubt_kernels.build",
        (instruction, kind, shape, DIGEST),
        gpu,
        grid=a.shape[1] // shape.rows,
        threads=128 * shape.groups,
        operands=((Layout.of(a), 3), (Layout.of(b), 3), (Layout.of(out), 2)),
        numbers=numbers,
        maps=((halves, 64),),
        shared_bytes=planes * (shape.rows + shape.columns) * pitch + ALIGNMENT,
    )
