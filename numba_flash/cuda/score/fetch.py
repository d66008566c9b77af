"""Bias and mask of a lane's scores, straight from memory into registers: a run of neighbouring keys
(`numba_flash.cuda.score.fragment.Runs`) with one load, if they lie so that this can be.
"""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.number import index
from numba_flash.cuda.runtime.lang import i32, i64, inline, once, u32, u64
from numba_flash.cuda.score.fragment import build_row
from numba_flash.cuda.score.score import build_elements

WORD = 4  # bytes
BYTES = {"float32": 4, "float64": 8}  # of an element; others have 2
EVERYTHING = ("bias", "mask")
TRUE = 0x01010101


class BiasWords(NamedTuple):
    """How a run's bias and mask are kept in words of 32 bits, from `fetch` to `modify`.

    Attributes
    ----------
    bias, mask : int
        Words of a run; 0 if there is none.
    words : int
        Of all runs.
    """

    bias: int
    mask: int
    words: int


def held(options, runs) -> BiasWords:
    """What one lane keeps."""
    size = BYTES.get(options.bias, 2) if options.bias else 0
    bias = -(-runs.width * size // WORD)
    seen = -(-runs.width // WORD) if options.mask else 0
    return BiasWords(bias, seen, runs.count * (bias + seen))


class Source(NamedTuple):
    """What a lane reads of an array that goes with scores.

    Attributes
    ----------
    registers : array
        Where it goes to.
    base : uint64
        Address of the head's first element.
    head, row, col : int64
        Bytes from one head, one query, and one key to the next.
    query, key : int
        The lane's first ones.
    rows, cols : int
        How many there are.
    """

    registers: Any
    base: int
    head: int
    row: int
    col: int
    query: int
    key: int
    rows: int
    cols: int


class Inside(NamedTuple):
    """Of a lane whose queries and keys are all there.

    Attributes
    ----------
    registers : array
        Where it goes to.
    first, row : uint64
        Address of its first element, and bytes from one query to the next.
    """

    registers: Any
    first: int
    row: int


@once
def build_read(runs, first, words, size, vectors, blocks=None):
    """``read(source)``: all runs of a lane, elements of `size` bytes, to `words` registers each,
    from `first` on.

    vectors : a run's elements are neighbours at a multiple of their size, and there are whole runs.
    blocks : size of those that have an element each; None if pairs have.
    """
    COUNT, WIDTH, FIRST, WORDS = runs.count, runs.width, first, words
    LAST_QUERY, LAST_KEY = runs.last_query, runs.last_key
    SIZE, BITS, PER_WORD, AT_ONCE = size, 8 * size, max(1, WORD // size), min(words, 4)
    query_of, key_of = runs.query, runs.key
    fetch, fetch_word = ptx.fetch(AT_ONCE), ptx.fetch(max(1, size // WORD))
    OF_ONE = max(1, size // WORD)  # words of an element
    fetch_small = ptx.fetch_byte if size == 1 else ptx.fetch_half
    HALF, PACKED = runs.width * size == 2, runs.group > 1
    query_of_row, head_of_row, _ = build_row(runs.group)
    (row_of, column_of), WITHIN = (
        build_elements(blocks, inline),
        blocks and blocks.keys % WIDTH == 0,
    )

    @inline
    def address(x, i, j):
        i, j = row_of(i), column_of(j)
        if PACKED:
            row = u64(i64(head_of_row(i)) * x.head + i64(query_of_row(i)) * x.row)
            return u64(x.base + row + u64(i64(j) * x.col))
        return u64(x.base + u64(i64(i) * x.row + i64(j) * x.col))

    @inline
    def read_run(number, x):
        n, w = number // (WORDS // AT_ONCE), number % (WORDS // AT_ONCE) * AT_ONCE
        i, j = i32(x.query + query_of(n)), i32(x.key + key_of(n))
        there = u32(1) if i < x.rows and j < x.cols else u32(0)
        at = address(x, i, i32(j + w // OF_ONE * PER_WORD))
        if HALF:
            x.registers[FIRST + n * WORDS] = ptx.fetch_half(at, there)
        else:
            fetch(x.registers, i32(FIRST + n * WORDS + w), at, there)

    @inline
    def read_element(number, x):
        n, place = number // WIDTH, number % WIDTH
        i, j = i32(x.query + query_of(n)), i32(x.key + key_of(n) + place)
        there = u32(1) if i < x.rows and j < x.cols else u32(0)
        e = i32(FIRST + n * WORDS + place // PER_WORD * OF_ONE)
        if SIZE >= WORD:
            fetch_word(x.registers, e, address(x, i, j), there)
        else:
            value = u32(fetch_small(address(x, i, j), there) << u32(place % PER_WORD * BITS))
            x.registers[e] = value if place % PER_WORD == 0 else u32(x.registers[e] | value)

    @inline
    def read_block(n, x):
        """Of a run whose keys lie in one block."""
        row, key = i32(x.query + query_of(n)), i32(x.key + key_of(n))
        there = u32(1) if row < x.rows and key < x.cols else u32(0)
        seen = u32(TRUE) if fetch_small(address(x, row, key), there) != u32(0) else u32(0)
        for w in range(WORDS):
            x.registers[FIRST + n * WORDS + w] = seen

    @inline
    def read_run_inside(number, inside):
        n, w = number // (WORDS // AT_ONCE), number % (WORDS // AT_ONCE) * AT_ONCE
        ahead = u64(SIZE * (key_of(n) + w // OF_ONE * PER_WORD))
        at = u64(inside.first + u64(query_of(n)) * inside.row + ahead)
        if HALF:
            inside.registers[FIRST + n * WORDS] = ptx.fetch_half(at, u32(1))
        else:
            fetch(inside.registers, i32(FIRST + n * WORDS + w), at, u32(1))

    read_runs = ptx.repeated(COUNT * (WORDS // AT_ONCE), read_run)
    read_runs_inside = ptx.repeated(COUNT * (WORDS // AT_ONCE), read_run_inside)

    @inline
    def read(x):
        """Most tiles have all their queries and keys: then addresses take few instructions."""
        there = i32(x.query + LAST_QUERY) < i32(x.rows) and i32(x.key + LAST_KEY) < i32(x.cols)
        if there and not PACKED:
            read_runs_inside(Inside(x.registers, address(x, x.query, x.key), u64(x.row)))
        else:
            read_runs(x)

    if WITHIN:
        return ptx.repeated(COUNT, read_block)
    return read if vectors else ptx.repeated(COUNT * WIDTH, read_element)


@once
def build_fetch(options, runs, vectors, wanted=EVERYTHING):
    """``fetch(registers, query, key, region, at, whole, extras)``: bias and mask of a lane's scores
    into as many registers (uint32) as `held` says; zeros beyond the last query or key. Of a tile
    that is visible as a `whole`, nothing of the mask is read.

    vectors : which of them are read by runs, `numba_flash.cuda.arguments.Vectors`.
    wanted : names of those that are read at this time.
    """
    BIASED, MASKED = "bias" in wanted and bool(options.bias), "mask" in wanted and options.mask
    kept, size = held(options, runs), BYTES.get(options.bias, 2)
    read_bias = build_read(runs, 0, kept.bias, size, vectors.bias) if BIASED else None
    first, stop = runs.count * kept.bias, kept.words
    of_mask = runs, first, kept.mask, 1, vectors.mask, options.blocks
    read_mask = build_read(*of_mask) if MASKED else None

    @inline
    def source(registers, x, query, key, region, at):
        head = x[index(at.b0), index(at.b1), index(at.head)]
        base, row, col = ptx.global_address(head), head.strides[0], head.strides[1]
        between = x.strides[2]
        return Source(registers, base, between, row, col, query, key, region.rows, region.cols)

    @inline
    def fetch(registers, query, key, region, at, whole, extras):
        if BIASED:
            read_bias(source(registers, extras.bias, query, key, region, at))
        if MASKED:
            if whole:
                for e in range(first, stop):
                    registers[e] = u32(TRUE)
            else:
                read_mask(source(registers, extras.mask, query, key, region, at))

    return fetch
