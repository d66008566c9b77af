"""What the options do to scores and weights in the registers of a tensor-core product: functions of
the user are inlined, and each word of the dropout's generator is computed once.

A lane works on `fragment.Runs`; its part of bias and mask is in registers already (`fetch`).
"""

import math
from typing import Any, NamedTuple

from numba_flash.arguments.options import SHARING
from numba_flash.cuda import ptx
from numba_flash.cuda.number import ACCUMULATOR
from numba_flash.cuda.runtime.lang import cuda, f32, i32, i64, inline, once, u32, u64
from numba_flash.cuda.score import score
from numba_flash.cuda.score.fetch import BYTES, held
from numba_flash.cuda.score.fragment import ALL_LANES, build_row, build_unpack
from numba_flash.cuda.score.philox import philox4x32
from numba_flash.cuda.score.score import Head
from numba_flash.cuda.score.softcap import build_cap, cap_any

NEG_INF = -math.inf
NO_SIGNS = 0x7FFF7FFF  # of two numbers of 16 bits
FAR = 2**20  # further than a tile is long
SIGN = 0x80000000


@inline
def head_at(at, number):
    """The `Head` that comes so many after `at`."""
    return Head(at.b0, at.b1, at.batch, i32(at.head + number), at.heads)


@inline
def near(x):
    """The same as int32, if it is not far beyond a tile."""
    return i32(min(max(x, i64(-FAR)), i64(FAR)))


class Scores(NamedTuple):
    """A lane's registers, and what they belong to; see `build_modify`. Its first key is `ahead` of
    its first query, but the compiler does not know.
    """

    s: Any
    slope: Any
    registers: Any
    query: int
    key: int
    ahead: int
    region: Any
    at: Any
    parameters: Any


class Bounds(NamedTuple):
    """What is visible of a lane's scores; all int32, counted from its first query and key.

    Attributes
    ----------
    s, slope : arrays
        Its registers.
    first : int
        That query, not counted from itself.
    rows, cols : int
        Queries and keys that there are.
    low, high : int
        First key that query 0 sees, and the one after its last.
    """

    s: Any
    slope: Any
    first: int
    rows: int
    cols: int
    low: int
    high: int


@once
def build_modify(dtype, options, runs, slopes=False, turing=False, ends_apart=False, powers=False):
    """``modify(s, slope, registers, query, key, region, at, whole, parameters)``: raw products
    become scores, -inf where hidden: by the bias, the mask, the band, or the ends.

    Scores are in base e and scaled, unless options hide alone (`Options.changes`); then they stay
    raw products. `registers` have been filled by `fetch.build_fetch`; `query` and `key` are the
    lane's first ones, rows of the `score.Region` queries; `at` is a `score.Head`; neither the mask
    nor the band nor an end hides anything of a `whole` tile.

    slopes : the derivatives go into `slope`, if they differ (`Options.sloped`); 0 where hidden.
    turing : the GPU has no minimum of pairs.
    ends_apart : of a function of the user's there is one copy for tiles that are cut off by an end,
        and one for the others, where the same number is the same to the compiler.
    powers : as of `numba_flash.cuda.score.softcap.build_cap`.
    """
    COUNT, WIDTH, LAST_QUERY, LAST_KEY = runs.count, runs.width, runs.last_query, runs.last_key
    CHANGES, BIASED, MASKED = options.changes, bool(options.bias), options.mask
    MODIFIED, SLOPES = options.score_mod is not None, slopes and options.sloped
    FLOAT32, BFLOAT16 = options.bias == "float32", options.bias == "bfloat16"
    SIZE, DOUBLE, ACC = BYTES.get(options.bias, 2), dtype == "float64", ACCUMULATOR[dtype]
    kept = held(options, runs)
    BIAS_WORDS, MASK_WORDS, FIRST_MASK = kept.bias, kept.mask, runs.count * kept.bias
    register, query_of, key_of = runs.register, runs.query, runs.key
    CAPPED, PACKED = bool(options.softcap) and not DOUBLE, runs.group > 1
    query_of_row, head_of_row, stop_of = build_row(runs.group)
    BENT = MODIFIED or (CHANGES and not CAPPED)
    minima = ptx.minima_bfloat16 if BFLOAT16 else ptx.minima_float16
    element, HIDDEN = build_unpack(BFLOAT16), 0xFF80 if BFLOAT16 else 0xFC00  # -inf in 16 bits
    # under a score_mod there are no registers for scores that are all capped before
    FIRST = CAPPED and not MODIFIED
    WITH = CAPPED and not FIRST
    OFTEN_FINITE = BIASED and not (WITH or DOUBLE) and (FLOAT32 or not turing)
    of_cap = SLOPES, dtype == "float32", turing, dtype == "bfloat16", powers
    cap_all = build_cap(runs.count * runs.width, *of_cap)
    bend = score.build_bend(dtype, options, inline, CAPPED)

    @inline
    def bias_of(registers, n, x):
        at = n * BIAS_WORDS + x * SIZE // 4
        if SIZE == 8:
            return ptx.as_float64(registers[at], registers[at + 1])
        return ACC(ptx.as_float32(registers[at])) if FLOAT32 else element(registers[at], x)

    @inline
    def plus_bias(value, bias):
        """A score that its bias hides is hidden, whatever it is."""
        return ACC(NEG_INF) if bias == ACC(NEG_INF) else value + bias

    @inline
    def add_bias(value, bias):
        return value + bias

    def build_change(biased=plus_bias, cut=True):
        """``change_all(t)`` by the function that adds a bias, of a tile that may be `cut` off."""

        @inline
        def change(number, t):
            n, x = number // WIDTH, number % WIDTH
            e = register(n, x)
            value, derivative = t.s[e], ACC(1)
            if BENT:
                i = i32(t.query + query_of(n))
                j = i32(t.key + key_of(n) + x)
                if MODIFIED and not cut:  # a difference of them is one number less
                    j = i32(t.query + i32(t.ahead + i32(key_of(n) + x)))
                if MODIFIED and cut:  # of a function of the user's nobody knows what it reads there
                    i, j = min(i, i32(t.region.rows - 1)), min(j, i32(t.region.cols - 1))
                if WITH:
                    value = cap_any(value * f32(t.parameters.scale), f32(t.parameters.softcap))
                    unit = value * (ACC(1) / f32(t.parameters.softcap))
                if PACKED:
                    at = head_at(t.at, head_of_row(i))
                    value, derivative = bend(value, query_of_row(i), j, at, t.parameters)
                else:
                    value, derivative = bend(value, i, j, t.at, t.parameters)
            if BIASED:
                value = biased(value, bias_of(t.registers, n, x))
            if MASKED:
                word = t.registers[FIRST_MASK + n * MASK_WORDS + x // 4]
                seen = u32(word & u32(0xFF << (x % 4 * 8))) != u32(0)
                value = value if seen else ACC(NEG_INF)
            t.s[e] = value
            if SLOPES and FIRST:
                derivative *= t.slope[e]
            if SLOPES and WITH:
                derivative *= ACC(1) - unit * unit
            if SLOPES:
                t.slope[e] = derivative if value != ACC(NEG_INF) else ACC(0)

        return ptx.repeated(COUNT * WIDTH, change)

    @inline
    def none_hidden(t):
        """No bias of this lane is -inf. The assembler would look before there is a score, and wait
        for the bias then, were it not to begin with what no minimum is of: a score's bits.
        """
        some = t.s[register(0, 0)]
        if FLOAT32:
            least = abs(some)
            for e in range(FIRST_MASK):
                least = ptx.minimum(least, ptx.as_float32(t.registers[e]))
            return least != ACC(NEG_INF)
        words = ptx.as_uint32(some) & u32(NO_SIGNS)
        for e in range(FIRST_MASK):
            words = minima(words, t.registers[e])
        lower, upper = u32(words << u32(16)), u32(words & u32(0xFFFF0000))
        return lower != u32(HIDDEN << 16) and upper != u32(HIDDEN << 16)

    @inline
    def hide(number, t):
        n, x = number // WIDTH, number % WIDTH
        e, row, j = register(n, x), query_of(n), i32(key_of(n) + x)
        i = row
        if PACKED:
            i = i32(query_of_row(i32(t.first + row)) - query_of_row(t.first))
        start, stop = i32(i + t.low), min(i32(i + t.high), t.cols)
        hidden = row >= t.rows or j < start or j >= stop
        t.s[e] = ACC(NEG_INF) if hidden else t.s[e]
        if SLOPES:
            t.slope[e] = ACC(0) if hidden else t.slope[e]

    change_all, change_all_finite = build_change(), build_change(add_bias)
    APART = MODIFIED and not BIASED and ends_apart
    change_all_inside = build_change(cut=False) if APART else change_all
    hide_all = ptx.repeated(COUNT * WIDTH, hide)

    @inline
    def within(query, key, region):
        """All queries and keys of this lane are there."""
        last_query, last_key = i32(query + LAST_QUERY), i32(key + LAST_KEY)
        return last_query < i32(region.rows) and last_key < i32(region.cols)

    @inline
    def modify(s, slope, registers, query, key, region, at, whole, parameters):
        ahead = ptx.unknown(i32(key - query)) if APART else i32(0)
        t = Scores(s, slope, registers, query, key, ahead, region, at, parameters)
        if FIRST:
            cap_all(s, slope, parameters)
        if OFTEN_FINITE and none_hidden(t):
            change_all_finite(t)
        elif APART and within(query, key, region):
            change_all_inside(t)
        elif BENT or BIASED or (MASKED and not whole):
            change_all(t)
        i1, j1 = i32(query + LAST_QUERY + 1), i32(key + LAST_KEY + 1)
        inside = i1 <= i32(region.rows) and j1 <= i32(region.cols)
        # as `mask.all_visible`; the band's ends are no further than the lengths
        i0, i1 = query_of_row(query), stop_of(i1)
        nearest, furthest = i32(key - i1 + 1), i32(j1 - 1 - i0)
        clear = inside and nearest >= i32(region.low) and furthest <= i32(region.high)
        if not (whole or clear):
            ahead = i64(i0) - i64(key)
            low, high = near(region.low + ahead), near(region.high + 1 + ahead)
            rows, cols = near(i64(region.rows) - query), near(i64(region.cols) - key)
            hide_all(Bounds(s, slope, query, rows, cols, low, high))

    return modify


class Weights(NamedTuple):
    """A lane's registers, and where their random bits are; see `build_drop`. Words of counter and
    key are uint32, as is what is added to the bits of a score. The first query is the lane's, or,
    where it has rows of several heads, query 0, and its rows begin at `row`.
    """

    p: Any
    row: int
    query: int
    key: int
    head: int
    offset: int
    k0: int
    k1: int
    less: int


@inline
def exchange(x, y, distance):
    """Of two lanes, a power of two from each other, the first gets both x, the second both y."""
    second = (cuda.threadIdx.x & distance) != 0
    other = u32(cuda.shfl_xor_sync(ALL_LANES, i32(x if second else y), distance))
    return other if second else x, y if second else other


@once
def build_drop(options, runs, double=False):
    """``drop(p, query, key, at, parameters)``: weights that dropout drops change their sign;
    `query` and `key` are the lane's first ones.

    A counter has the bits of eight neighbouring keys. Where a lane has fewer, two or four lanes,
    each ``runs.apart`` from the next, share counters: each computes one, and they exchange words,
    so that each has those of its own keys from all.
    """
    COUNT, WIDTH, SHARED = runs.count, runs.width, SHARING // runs.width
    NEXT, AFTER_NEXT, DOUBLE = runs.apart, 2 * runs.apart, double  # lanes
    register, query_of, key_of = runs.register, runs.query, runs.key
    PACKED, (query_of_row, head_of_row, _) = runs.group > 1, build_row(runs.group)
    assert COUNT % SHARED == 0

    @inline
    def words_of(w, n):
        """Of run n; of one of SHARED runs from n on, where so many lanes share a counter."""
        i, j, head = i32(w.query + query_of(n)), i32(w.key + key_of(n)), w.head
        if PACKED:
            row = i32(w.row + query_of(n))
            i, head = i32(w.query + query_of_row(row)), u32(w.head + u32(head_of_row(row)))
        return philox4x32(u32(j) >> u32(3), u32(i), head, w.offset, w.k0, w.k1)

    @inline
    def negate(p, e, sign):
        if DOUBLE:
            p[e] = -p[e] if sign != u32(0) else p[e]
        else:
            p[e] = ptx.as_float32(ptx.as_uint32(p[e]) ^ sign)

    @inline
    def choose(w, word, n, x):
        """Of a word, two keys of run n from x on: the sign is that of the bits less threshold."""
        negate(w.p, register(n, x), ptx.add_lower(word, w.less) & u32(SIGN))
        negate(w.p, register(n, x + 1), ptx.add_upper(word, w.less) & u32(SIGN))

    @inline
    def eight(n, w):
        words = words_of(w, n)
        choose(w, words.w0, n, 0)
        choose(w, words.w1, n, 2)
        choose(w, words.w2, n, 4)
        choose(w, words.w3, n, 6)

    @inline
    def four(number, w):
        n = 2 * number
        words = words_of(w, n)
        x0, y0 = exchange(words.w0, words.w2, NEXT)
        x1, y1 = exchange(words.w1, words.w3, NEXT)
        choose(w, x0, n, 0)
        choose(w, x1, n, 2)
        choose(w, y0, n + 1, 0)
        choose(w, y1, n + 1, 2)

    @inline
    def two(number, w):
        n = 4 * number
        words = words_of(w, n)
        x0, y0 = exchange(words.w0, words.w2, AFTER_NEXT)
        x1, y1 = exchange(words.w1, words.w3, AFTER_NEXT)
        first, other = exchange(x0, x1, NEXT)
        choose(w, first, n, 0)
        choose(w, other, n + 1, 0)
        first, other = exchange(y0, y1, NEXT)
        choose(w, first, n + 2, 0)
        choose(w, other, n + 3, 0)

    drop_all = ptx.repeated(COUNT // SHARED, {8: eight, 4: four, 2: two}[WIDTH])

    @inline
    def drop(p, query, key, at, parameters):
        head = u32((at.batch + i32(parameters.first_batch)) * at.heads + at.head)
        offset, k0 = u32(parameters.offset), u32(parameters.seed)
        k1, less = u32(parameters.seed >> u64(32)), u32(u32(0) - u32(parameters.threshold))
        i = i32((i32(0) if PACKED else query) + i32(parameters.first_query))
        j = i32(key + i32(parameters.first_key))
        if SHARED > 1:  # the run whose words this lane computes
            i += i32(query_of(1)) if (cuda.threadIdx.x & NEXT) != 0 else i32(0)
            j += i32(key_of(1)) if (cuda.threadIdx.x & NEXT) != 0 else i32(0)
        if SHARED > 2:
            i += i32(query_of(2)) if (cuda.threadIdx.x & AFTER_NEXT) != 0 else i32(0)
            j += i32(key_of(2)) if (cuda.threadIdx.x & AFTER_NEXT) != 0 else i32(0)
        drop_all(Weights(p, query, i, j, head, offset, k0, k1, less))

    return drop
