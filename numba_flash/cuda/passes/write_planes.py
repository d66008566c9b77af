"""Float32 for tensor cores: each number of a head is ``c + 2^-e (high + low / LOW)``, with two of
float16, which have 22 bits together, and the products high high + high low + low high lose nothing
that float32 would have kept (Ootomo and Yokota, arXiv:2203.03341).

The power 2^e, one for each head of k and what belongs to it, is exact, and brings the largest
number near the end of float16; low ones are LOW times larger, so that numbers down to 2^-27 of the
largest have their 22 bits. The centre c, of a column of K and of V, takes out what all keys share,
as kelvin or coordinates far from the origin do: scores change by one number per row, which the
softmax does not notice, and O by the centre itself; dS does not change, since its rows sum to 0.

    q . k = q . (k - c) + q . c      softmax(S + a 1^T) = softmax(S)      P (V - 1 c^T) = P V - c

A head whose numbers are not finite, or lie too far from each other, is `flagged`: others compute
it, by IEEE arithmetic.
"""

from typing import NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import extras_type
from numba_flash.cuda.number import array, index
from numba_flash.cuda.passes.write_planes_rows import (
    GRADIENTS,
    KEYS,
    LANES,
    QUERIES,
    SIDE,
    STEP,
    VALUES,
    build_part,
    build_read,
)
from numba_flash.cuda.runtime.lang import cuda, device, f32, f64, i32, i64, inline, types, u32, u64
from numba_flash.cuda.score.fragment import ALL_LANES

WARPS, WARP = 8, 32
THREADS = WARPS * WARP
SAMPLES = 32  # rows that a centre is made of
ROWS = 128  # that a block of `split` writes
TOP = 13  # the largest number of a head is at least 2^13, and below 2^15 with its centre taken out
# Exponents of the largest number of a head, so far that what undoes two powers is a float32 still,
# 2^(-2 (TOP + FARTHEST)); and how far below it that of a row may be.
FARTHEST, WIDEST = 50, 24
INFINITE, SIGN = 0x7F800000, 0x80000000


class Summary(NamedTuple):
    """Of some parts: the exponent e of their power, and whether they are flagged (1, else 0)."""

    exponent: int
    flagged: int


@device
def warp_maximum(x):
    """Over the lanes of a warp."""
    for fold in range(5):
        x = max(x, cuda.shfl_xor_sync(ALL_LANES, x, 1 << fold))
    return x


@device
def warp_minimum(x):
    """Likewise."""
    for fold in range(5):
        x = min(x, cuda.shfl_xor_sync(ALL_LANES, x, 1 << fold))
    return x


@device
def centre_of(samples, column):
    """The median of a column's samples, if all are on one side of 0, else 0: of numbers around 0
    the centre is not worth its rounding.
    """
    below, above, median = 0, 0, f32(0)
    for s in range(SAMPLES):
        x = samples[index(s), index(column)]
        below += 1 if x < f32(0) else 0
        above += 1 if x > f32(0) else 0
    if below == SAMPLES or above == SAMPLES:
        for s in range(SAMPLES):
            x, rank = samples[index(s), index(column)], 0
            for t in range(SAMPLES):
                y = samples[index(t), index(column)]
                rank += 1 if y < x or (y == x and t < s) else 0
            if rank == SAMPLES // 2:
                median = x
    return median


def build_statistics(options, head_dim, head_dim_v, centred, wide):
    """Kernel ``statistics(q, k, v, do, extremes, centres, extras)``: a block of threads for each of
    `chunks` pieces of the rows of each `Part`.

    q, k, v, do : float32 (b0, b1, heads, n, columns); do without elements if there is none; `wide`
        as in `build_read`.
    extremes : int32 (parts, chunks, 2), the bits of the largest number of a piece, and of that row
        whose largest is least, but not 0.
    centres : float32 (2, b0, b1, heads, columns), of k and of v.
    centred : `Centred`, which of them are not 0.
    """
    COLUMNS, OF_KEYS, OF_VALUES = max(head_dim, head_dim_v), centred.keys, centred.values
    STEPS = -(-COLUMNS // STEP)
    HELD = 4 * STEPS
    part_of, read = build_part(options, head_dim, head_dim_v), build_read(STEPS, wide)

    def statistics(q, k, v, do, extremes, centres, extras):
        samples_smem = cuda.shared.array((SAMPLES, COLUMNS), f32)  # evenly spaced rows of k or v
        extremes_smem = cuda.shared.array((2, WARPS), i32)  # of each warp's rows
        held = cuda.local.array(HELD, u32)  # of a row
        thread = i32(cuda.threadIdx.x)
        lane, warp = i32(thread % WARP), i32(thread // WARP)
        number = i32(u32(cuda.blockIdx.x) // u32(extremes.shape[1]))
        chunks, chunk = i32(extremes.shape[1]), i32(cuda.blockIdx.x - number * extremes.shape[1])
        part = part_of(number, q, k, v, do, extras)
        count = max(i32(part.stop - part.first), i32(0))
        size = i32(u32(count + chunks - 1) // u32(chunks))
        begin = i32(part.first + chunk * size)
        end = min(i32(begin + size), part.stop)
        most, least = i32(0), i32(INFINITE)
        for i0 in range(i32(begin + warp * SIDE), end, i32(WARPS * SIDE)):
            i, largest = i32(i0 + lane // LANES), i32(0)
            read(held, part.x, i, part.columns, i < end)
            for e in range(HELD):
                largest = max(largest, i32(held[e] & u32(SIGN - 1)))
            for fold in range(2):
                largest = max(largest, cuda.shfl_xor_sync(ALL_LANES, largest, 1 << fold))
            most = max(most, largest)
            least = min(least, largest) if largest > 0 else least
        most, least = warp_maximum(most), warp_minimum(least)
        if lane == 0:
            extremes_smem[0, index(warp)] = most
            extremes_smem[1, index(warp)] = least
        cuda.syncthreads()  # all warps have seen their rows
        if thread == 0:
            for w in range(WARPS):
                most = max(most, extremes_smem[0, index(w)])
                least = min(least, extremes_smem[1, index(w)])
            extremes[index(number), index(chunk), 0] = most
            extremes[index(number), index(chunk), 1] = least
        of_keys = part.kind == KEYS or part.kind == VALUES
        if chunk == 0 and of_keys and thread < part.columns:
            centre = f32(0)
            wanted = OF_KEYS if part.kind == KEYS else OF_VALUES
            if wanted and count > 0:
                for s in range(SAMPLES):
                    i = part.first + i64(s) * count // SAMPLES
                    samples_smem[index(s), index(thread)] = part.x[index(i), index(thread)]
                centre = centre_of(samples_smem, thread)
            kind = index(part.kind - KEYS)
            head = centres[kind, index(part.b0), index(part.b1), index(part.head)]
            head[index(thread)] = centre

    signature = types.void(
        *[array(f32, 5)] * 4, array(i32, 3), array(f32, 5), extras_type(options.arrays)
    )
    return statistics, signature, {"launch_bounds": (THREADS, 4)}


@device
def summary_of(most, least):
    """The `Summary` of numbers whose extremes have these bits."""
    exponent, range_ = i32((most >> 23) - 127), i32((most >> 23) - (least >> 23))
    if most == 0:
        return Summary(i32(0), i32(0))
    if most >= INFINITE or range_ > WIDEST or exponent > FARTHEST or exponent < -FARTHEST:
        return Summary(i32(0), i32(1))
    return Summary(i32(TOP - exponent), i32(0))


@device
def summarise(extremes, first, count):
    """The `Summary` of `count` parts from the `first` on, for each lane of a warp."""
    lane = i32(cuda.threadIdx.x % WARP)
    most, least = i32(0), i32(INFINITE)
    if lane < extremes.shape[1]:
        for number in range(first, first + count):
            most = max(most, extremes[index(number), index(lane), 0])
            least = min(least, extremes[index(number), index(lane), 1])
    most, least = warp_maximum(most), warp_minimum(least)
    return summary_of(most, least)


@device
def power_of_two(exponent):
    """As float32, from -126 to 127."""
    return ptx.as_float32(u32(u32(127 + exponent) << u32(23)))


def build(options, head_dim, head_dim_v, words, planes, centred, wide):
    """Kernel ``split(q, k, v, do, extremes, centres, q_planes, k_planes, v_planes, do_planes,
    factors, shifts, flags, extras, scale)``: a block of threads for each ROWS rows of each `Part`.

    q, k, v, do, extremes, centres : as in `build_statistics`.
    q_planes, and so on : uint32 (b0, b1, heads, n, planes * words), pairs of float16, in each row
        all high ones, then, of two planes, all low ones; `words` of q and k, and of v and do, as a
        `Words`.
    factors : float32 (b0, b1, heads of k, 4), 2^-e of q, k, v and do, of all heads of q together.
    shifts : float32 (b0, b1, heads of q, nq), ``scale q . c``, by which the lse is too small; 0 if
        keys are not `centred`.
    flags : int32 (b0, b1, heads of q), 1 where one of the parts of its head of k is flagged.
    """
    WORDS_K, WORDS_V, CENTRED_KEYS, LOW = words.k, words.v, centred.keys, ptx.LOW
    TWO, CENTRED, STEP_WORDS = planes > 1, any(centred), STEP // 2
    STEPS = -(-max(words) // STEP_WORDS)
    HELD, TILE = 4 * STEPS, STEP * STEPS
    part_of, read = build_part(options, head_dim, head_dim_v), build_read(STEPS, wide)

    @device
    def write_head(part, k, do, extremes, factors, flags):
        """What others want to know of a head of k."""
        group = i32(u32(flags.shape[2]) // u32(k.shape[2]))
        heads_k = i32(k.shape[0] * k.shape[1] * k.shape[2])
        number = i32((part.b0 * k.shape[1] + part.b1) * k.shape[2] + part.kv_head)
        heads_q = i32(heads_k * group)
        at_q, at_k, at_v = number * group, heads_q + number, heads_q + heads_k + number
        queries, keys = summarise(extremes, at_q, group), summarise(extremes, at_k, i32(1))
        values, flagged = summarise(extremes, at_v, i32(1)), i32(0)
        gradients = Summary(i32(0), i32(0))
        if do.shape[2] > 0:
            gradients = summarise(extremes, heads_q + 2 * heads_k + number * group, group)
        flagged = queries.flagged | keys.flagged | values.flagged | gradients.flagged
        if cuda.threadIdx.x % WARP == 0:
            own = factors[part.b0, part.b1, part.kv_head]
            own[0], own[1] = power_of_two(i32(-queries.exponent)), power_of_two(i32(-keys.exponent))
            own[2], own[3] = (
                power_of_two(i32(-values.exponent)),
                power_of_two(i32(-gradients.exponent)),
            )
            for h in range(part.kv_head * group, (part.kv_head + 1) * group):
                flags[index(part.b0), index(part.b1), index(h)] = flagged

    @inline
    def centre_to_shared(centre_smem, centre, columns):
        """Whether it is not 0."""
        moved = i32(0)
        for d in range(i32(cuda.threadIdx.x), TILE, THREADS):
            c = centre[index(d)] if d < columns else f32(0)
            centre_smem[index(d)] = c
            moved |= i32(1) if c != f32(0) else i32(0)
        return cuda.syncthreads_or(moved) != 0

    def split(
        q, k, v, do, extremes, centres, q_planes, k_planes, v_planes, do_planes, factors, shifts,
        flags, extras, scale,
    ):  # fmt: skip
        centre_smem = cuda.shared.array(TILE, f32)
        held = cuda.local.array(HELD, u32)  # of a row
        lane, warp = i32(cuda.threadIdx.x % WARP), i32(cuda.threadIdx.x // WARP)
        blocks = u32(u32(max(q.shape[3], k.shape[3]) + ROWS - 1) // u32(ROWS))
        number = i32(u32(cuda.blockIdx.x) // blocks)
        block = i32(u32(cuda.blockIdx.x) - u32(number) * blocks)
        part = part_of(number, q, k, v, do, extras)
        own = summarise(extremes, part.of_head, part.count)
        b0, b1, head, kv_head = part.b0, part.b1, part.head, part.kv_head
        if part.kind == KEYS and block == 0 and warp == 0:
            write_head(part, k, do, extremes, factors, flags)
        words, planes, centre = i32(WORDS_K), q_planes, centres[0, b0, b1, kv_head]
        if part.kind == VALUES or part.kind == GRADIENTS:
            words, planes, centre = i32(WORDS_V), do_planes, centres[1, b0, b1, kv_head]
        if part.kind == KEYS:
            planes = k_planes
        if part.kind == VALUES:
            planes = v_planes
        planes_head, power, moved = planes[b0, b1, head], power_of_two(own.exponent), False
        if CENTRED and part.kind != GRADIENTS:
            moved = centre_to_shared(centre_smem, centre, part.columns)
        shifted, taken = moved and part.kind == QUERIES, moved and part.kind != QUERIES
        stop = min(i32(part.first + (block + 1) * ROWS), part.stop)
        first = i32(part.first + block * ROWS + warp * SIDE)
        for i0 in range(first, stop, i32(WARPS * SIDE)):
            i = i32(i0 + lane // LANES)
            read(held, part.x, i, part.columns, i < stop)
            word = i32(lane % LANES * 2)
            row = u64(ptx.global_address(planes_head) + u64(i64(i) * planes_head.strides[0]))
            shift = f64(0)  # of all scores of the row: no average makes its error smaller
            for s in range(STEPS):
                for pair in range(2):
                    e = 4 * s + 2 * pair
                    x, y = ptx.as_float32(held[e]), ptx.as_float32(held[e + 1])
                    if shifted or taken:
                        d = index(s * STEP + 2 * (word + pair))
                        c_x, c_y = centre_smem[d], centre_smem[d + 1]
                        if shifted:
                            shift += f64(x) * f64(c_x) + f64(y) * f64(c_y)
                        else:
                            x, y = x - c_x, y - c_y
                    x, y = x * power, y * power
                    high = ptx.pack_float16(x, y)
                    held[e] = high
                    if TWO:
                        x = (x - ptx.unpack_float16(high)) * f32(LOW)
                        y = (y - ptx.unpack_float16_high(high)) * f32(LOW)
                        held[e + 1] = ptx.pack_float16(x, y)
                at = u64(row + u64(4 * (word + s * STEP_WORDS)))
                if i < stop and s * STEP_WORDS < words:
                    ptx.store_global(at, (held[4 * s], held[4 * s + 2]))
                    if TWO:
                        low = u64(at + u64(4 * words))
                        ptx.store_global(low, (held[4 * s + 1], held[4 * s + 3]))
            if part.kind == QUERIES:
                for fold in range(2):
                    shift += cuda.shfl_xor_sync(ALL_LANES, shift, 1 << fold)
                if lane % LANES == 0 and i < stop:
                    own_shift = f32(f64(scale) * shift) if CENTRED_KEYS else f32(0)
                    shifts[index(b0), index(b1), index(head), index(i)] = own_shift

    signature = types.void(
        *[array(f32, 5)] * 4,
        array(i32, 3),
        array(f32, 5),
        *[array(u32, 5)] * 4,
        array(f32, 4),
        array(f32, 4),
        array(i32, 3),
        extras_type(options.arrays),
        f32,
    )
    return split, signature, {"launch_bounds": (THREADS, 3 if wide and STEPS <= 8 else 2)}
