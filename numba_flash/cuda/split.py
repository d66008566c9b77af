"""Float32 for tensor cores: each number of a head is ``c + 2^-e (high + low / LOW)``, with two of
float16, which have 22 bits together, and the products high high + high low + low high lose nothing
that float32 would have kept (Ootomo and Yokota, arXiv:2203.03341).

The power 2^e, one for each head, is exact, and brings the largest number near the end of float16;
low ones are LOW times larger, so that numbers down to 2^-27 of the largest have their 22 bits. The
centre c, of a column of K and of V, takes out what all keys share, as kelvin or coordinates far
from the origin do: scores change by one number per row, which the softmax does not notice, and O by
the centre itself.

    q . k = q . (k - c) + q . c      softmax(S + a 1^T) = softmax(S)      P (V - 1 c^T) = P V - c

A head whose numbers are not finite, or lie too far from each other, is `flagged`: others compute
it, by IEEE arithmetic.
"""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import extras_type
from numba_flash.cuda.fragment import ALL_LANES
from numba_flash.cuda.lang import cuda, device, f32, f64, i32, i64, once, types, u32, u64
from numba_flash.cuda.number import array, index

WARPS, LANES = 8, 32
THREADS = WARPS * LANES
SAMPLES = 32  # rows that a centre is made of
ROWS = 64  # that a block of `split` writes
TOP = 13  # the largest number of a head is at least 2^13, and below 2^15 with its centre taken out
# Exponents of the largest number of a head, so far that what undoes two powers is a float32 still,
# 2^(-2 (TOP + FARTHEST)); and how far below it that of a row may be.
FARTHEST, WIDEST = 50, 24
INFINITE, SIGN = 0x7F800000, 0x80000000
QUERIES, KEYS, VALUES = range(3)


class Part(NamedTuple):
    """Of q, k or v: one head.

    Attributes
    ----------
    x : array
        (n, columns).
    kind : int
        QUERIES, KEYS or VALUES.
    b0, b1, head, columns : int
        Where it is, and how long its rows are.
    first, stop : int
        Its rows that count: others are not read.
    """

    x: Any
    kind: int
    b0: int
    b1: int
    head: int
    columns: int
    first: int
    stop: int


class Summary(NamedTuple):
    """Of a head: the exponent e of its power, and whether it is flagged (1, else 0)."""

    exponent: int
    flagged: int


@once
def build_part(options, head_dim, head_dim_v):
    """``part_of(number, q, k, v, extras)``: the `Part` of that number; all heads of q come first,
    then those of k, then those of v.
    """
    D, DV, PACKED = head_dim, head_dim_v, options.packed
    HAS_Q, HAS_KV = options.q_lengths is not None, options.kv_lengths is not None

    @device
    def part_of(number, q, k, v, extras):
        heads_q = q.shape[0] * q.shape[1] * q.shape[2]
        heads_k = k.shape[0] * k.shape[1] * k.shape[2]
        x, kind, columns = q, i64(QUERIES), i64(D)
        if number >= heads_q:
            x, kind, number = k, i64(KEYS), number - heads_q
            if number >= heads_k:
                x, kind, number, columns = v, i64(VALUES), number - heads_k, i64(DV)
        head, number = number % x.shape[2], number // x.shape[2]
        b0, b1 = number // x.shape[1], number % x.shape[1]
        first, stop = i64(0), i64(x.shape[3])
        if PACKED:
            last = extras.q_lengths.shape[0] - 1
            first, stop = i64(extras.kv_lengths[0]), i64(extras.kv_lengths[index(last)])
            if kind == QUERIES:
                first, stop = i64(extras.q_lengths[0]), i64(extras.q_lengths[index(last)])
        else:
            if HAS_Q and kind == QUERIES:
                stop = i64(extras.q_lengths[index(b0), index(b1)])
            if HAS_KV and kind != QUERIES:
                stop = i64(extras.kv_lengths[index(b0), index(b1)])
        first, stop = max(first, i64(0)), min(stop, i64(x.shape[3]))
        return Part(x[b0, b1, head], kind, b0, b1, head, columns, first, stop)

    return part_of


@device
def warp_maximum(x):
    """Over the lanes of a warp."""
    for fold in range(5):
        x = max(x, cuda.shfl_xor_sync(ALL_LANES, x, 1 << fold))
    return x


@device
def centre_of(samples, column):
    """The median of a column's samples, if all are on one side of 0, else 0: of numbers around 0
    the centre is not worth its rounding.
    """
    below, above, median = 0, 0, f32(0)
    for s in range(SAMPLES):
        x, rank = samples[index(s), index(column)], 0
        below += 1 if x < f32(0) else 0
        above += 1 if x > f32(0) else 0
        for t in range(SAMPLES):
            y = samples[index(t), index(column)]
            rank += 1 if y < x or (y == x and t < s) else 0
        if rank == SAMPLES // 2:
            median = x
    return median if below == SAMPLES or above == SAMPLES else f32(0)


def build_statistics(options, head_dim, head_dim_v, centred):
    """Kernel ``statistics(q, k, v, extremes, centres, extras)``: a block of threads for each of
    `chunks` pieces of the rows of each `Part`.

    q, k, v : float32 (b0, b1, heads, n, columns).
    extremes : int32 (parts, chunks, 2), the bits of the largest number of a piece, and of that row
        whose largest is least, but not 0.
    centres : float32 (2, b0, b1, heads, columns), of k and of v.
    centred : `Centred`, which of them are not 0.
    """
    COLUMNS, OF_KEYS, OF_VALUES = max(head_dim, head_dim_v), centred.keys, centred.values
    part_of = build_part(options, head_dim, head_dim_v)

    def statistics(q, k, v, extremes, centres, extras):
        samples_smem = cuda.shared.array((SAMPLES, COLUMNS), f32)  # evenly spaced rows of k or v
        extremes_smem = cuda.shared.array((2, WARPS), i32)  # of each warp's rows
        lane, warp = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        chunks = extremes.shape[1]
        number, chunk = i64(cuda.blockIdx.x // chunks), i64(cuda.blockIdx.x % chunks)
        part = part_of(number, q, k, v, extras)
        count = max(part.stop - part.first, i64(0))
        size = (count + chunks - 1) // chunks
        begin = part.first + chunk * size
        end = min(begin + size, part.stop)
        most, least = i32(0), i32(INFINITE)
        for i in range(begin + warp, end, WARPS):
            largest = i32(0)
            for d in range(lane, part.columns, LANES):
                bits = u32(ptx.as_uint32(part.x[index(i), index(d)]) & u32(SIGN - 1))
                largest = max(largest, i32(bits))
            largest = warp_maximum(largest)
            most = max(most, largest)
            least = min(least, largest) if largest > 0 else least
        if lane == 0:
            extremes_smem[0, index(warp)] = most
            extremes_smem[1, index(warp)] = least
        cuda.syncthreads()  # all warps have seen their rows
        if cuda.threadIdx.x == 0:
            for w in range(WARPS):
                most = max(most, extremes_smem[0, index(w)])
                least = min(least, extremes_smem[1, index(w)])
            extremes[index(number), index(chunk), 0] = most
            extremes[index(number), index(chunk), 1] = least
        d = i64(cuda.threadIdx.x)
        if chunk == 0 and part.kind != QUERIES and d < part.columns:
            centre = f32(0)
            wanted = OF_KEYS if part.kind == KEYS else OF_VALUES
            if wanted and count > 0:
                for s in range(SAMPLES):
                    i = part.first + s * count // SAMPLES
                    samples_smem[index(s), index(d)] = part.x[index(i), index(d)]
                centre = centre_of(samples_smem, d)
            kind = index(part.kind - KEYS)
            centres[kind, index(part.b0), index(part.b1), index(part.head), index(d)] = centre

    signature = types.void(
        *[array(f32, 5)] * 3, array(i32, 3), array(f32, 5), extras_type(options.arrays)
    )
    return statistics, signature, {"launch_bounds": (THREADS, 2)}


@device
def summarise(extremes, number):
    """The `Summary` of a part, for each lane of a warp."""
    lane = i64(cuda.threadIdx.x % LANES)
    most, least = i32(0), i32(-INFINITE)
    if lane < extremes.shape[1]:
        most = extremes[index(number), index(lane), 0]
        least = i32(-extremes[index(number), index(lane), 1])
    most, least = warp_maximum(most), i32(-warp_maximum(least))
    exponent, range_ = i32((most >> 23) - 127), i32((most >> 23) - (least >> 23))
    if most == 0:
        return Summary(i32(0), i32(0))
    if most >= INFINITE or range_ > WIDEST or exponent > FARTHEST or exponent < -FARTHEST:
        return Summary(i32(0), i32(1))
    return Summary(i32(TOP - exponent), i32(0))


@device
def power_of_two(exponent):
    """As float32, from -126 to 127."""
    return ptx.as_float32(u32(u32(127 + exponent) << u32(23)))


def build(options, head_dim, head_dim_v, words, centred):
    """Kernel ``split(q, k, v, extremes, centres, q_planes, k_planes, v_planes, factors, shifts,
    flags, extras, scale)``: a block of threads for each ROWS rows of each `Part`.

    q, k, v, extremes, centres : as in `build_statistics`.
    q_planes, k_planes, v_planes : uint32 (b0, b1, heads, n, 2 words), pairs of float16, in each row
        all high ones, then all low ones; `words` of q and k, and of v, as a `Words`.
    factors : float32 (b0, b1, heads of q, 2), what undoes the powers of q . k, and of v.
    shifts : float32 (b0, b1, heads of q, nq), ``scale q . c``, by which the lse is too small; not
        written if keys are not `centred`.
    flags : int32 (b0, b1, heads of q), 1 where one of the head's parts is flagged, else 0.
    """
    WORDS_K, WORDS_V, CENTRED_KEYS, LOW = words.k, words.v, centred.keys, ptx.LOW
    part_of = build_part(options, head_dim, head_dim_v)

    @device
    def element(x, i, d, columns):
        return x[index(i), index(d)] if d < columns else f32(0)

    @device
    def write_heads(part, heads_q, k, extremes, factors, flags, own):
        """What the main kernel wants to know of a head of q."""
        heads_k = k.shape[0] * k.shape[1] * k.shape[2]
        kv_head = part.head // (factors.shape[2] // k.shape[2])
        number = heads_q + (part.b0 * k.shape[1] + part.b1) * k.shape[2] + kv_head
        keys, values = summarise(extremes, number), summarise(extremes, number + heads_k)
        at = index(part.b0), index(part.b1), index(part.head)
        if cuda.threadIdx.x % LANES == 0:
            factors[at[0], at[1], at[2], 0] = power_of_two(i32(-own.exponent - keys.exponent))
            factors[at[0], at[1], at[2], 1] = power_of_two(i32(-values.exponent))
            flags[at[0], at[1], at[2]] = i32(own.flagged | keys.flagged | values.flagged)

    def split(
        q, k, v, extremes, centres, q_planes, k_planes, v_planes, factors, shifts, flags, extras,
        scale,
    ):  # fmt: skip
        lane, warp = i64(cuda.threadIdx.x % LANES), i64(cuda.threadIdx.x // LANES)
        blocks = (max(q.shape[3], k.shape[3]) + ROWS - 1) // ROWS
        number, block = i64(cuda.blockIdx.x // blocks), i64(cuda.blockIdx.x % blocks)
        part, own = part_of(number, q, k, v, extras), summarise(extremes, number)
        b0, b1, head = index(part.b0), index(part.b1), index(part.head)
        words = i64(WORDS_V if part.kind == VALUES else WORDS_K)
        planes = q_planes[b0, b1, head] if part.kind == QUERIES else k_planes[b0, b1, 0]
        centre = centres[0, b0, b1, 0]
        if part.kind == QUERIES:
            centre = centres[0, b0, b1, part.head // (q.shape[2] // k.shape[2])]
            if block == 0 and warp == 0:
                heads_q = q.shape[0] * q.shape[1] * q.shape[2]
                write_heads(part, heads_q, k, extremes, factors, flags, own)
        elif part.kind == KEYS:
            planes, centre = k_planes[b0, b1, head], centres[0, b0, b1, head]
        else:
            planes, centre = v_planes[b0, b1, head], centres[1, b0, b1, head]
        power, taken = power_of_two(own.exponent), f32(0 if part.kind == QUERIES else 1)
        stop = min(part.first + (block + 1) * ROWS, part.stop)
        for i in range(part.first + block * ROWS + warp, stop, WARPS):
            row = u64(ptx.global_address(planes) + u64(i * planes.strides[0]))
            shift = f64(0)  # of all scores of the row: no average makes its error smaller
            for w in range(lane, words, LANES):
                x = element(part.x, i, 2 * w, part.columns)
                y = element(part.x, i, 2 * w + 1, part.columns)
                c_x = centre[index(2 * w)] if 2 * w < part.columns else f32(0)
                c_y = centre[index(2 * w + 1)] if 2 * w + 1 < part.columns else f32(0)
                shift += f64(x) * f64(c_x) + f64(y) * f64(c_y)
                x, y = (x - taken * c_x) * power, (y - taken * c_y) * power
                high = ptx.pack_float16(x, y)
                x = (x - ptx.unpack_float16(high)) * f32(LOW)
                y = (y - ptx.unpack_float16_high(high)) * f32(LOW)
                ptx.store_global(u64(row + u64(4 * w)), (high,))
                ptx.store_global(u64(row + u64(4 * (w + words))), (ptx.pack_float16(x, y),))
            if CENTRED_KEYS and part.kind == QUERIES:
                for fold in range(5):
                    shift += cuda.shfl_xor_sync(ALL_LANES, shift, 1 << fold)
                if lane == 0:
                    shifts[b0, b1, head, index(i)] = f32(f64(scale) * shift)

    signature = types.void(
        *[array(f32, 5)] * 3,
        array(i32, 3),
        array(f32, 5),
        *[array(u32, 5)] * 3,
        array(f32, 4),
        array(f32, 4),
        array(i32, 3),
        extras_type(options.arrays),
        f32,
    )
    return split, signature, {"launch_bounds": (THREADS, 2)}
