"""What kernels get besides their arrays: the optional arrays, `extras`, and the numbers of the
options, `parameters`; with Numba's types.

Plain attention has neither, and its kernels nothing more than if there were no options.
"""

from collections import namedtuple
from functools import cache, partial
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from numba_flash.arguments.options import AS_NUMBERS, dropout_threshold

VECTOR_BYTES = 16  # the most that one load brings
EXTRAS = ("bias", "mask", "q_lengths", "kv_lengths")
MOST_LENGTHS = 64  # that are numbers among the arguments of a kernel
FP16X2 = (
    "factors",
    "shifts",
    "centres",
)  # of `numba_flash.cuda.passes.write_planes`, where float32 is split
FACTORS = FP16X2[:1]
OF_DLSE = ("factors", "centres", "rows", "dlse")  # for what a gradient of the lse adds to dq
OF_DBIAS = ("factors", "flags")  # for the gradient of a bias, which leaves flagged heads out
# In which base kernels of a backward pass get the lse, and whether their P of float16 is raised.
BASE_E, BASE_2, RAISED_BASE_2 = "base e", "base 2", "base 2, raised"
FLAGS = ("flags",)  # of it, where a kernel computes the heads alone that are flagged


class Parameters(NamedTuple):
    """Numbers of the options.

    Attributes
    ----------
    scale, softcap : float
        Of the score; no cap is 0.
    keep_scale : float
        ``1 / (1 - dropout)``.
    seed, offset, threshold : uint64
        State of the dropout's generator, and the random bits below which it drops.
    first_query, first_key : uint64
        Of the matrix whose random bits these are, in the place of query 0 and key 0.
    first_batch : uint64
        Number of the first batch element of a part of a problem.
    """

    scale: float
    softcap: float
    keep_scale: float
    seed: int
    offset: int
    threshold: int
    first_query: int
    first_key: int
    first_batch: int


class Extent(NamedTuple):
    """How large a problem is, for what goes through all of its scores; and the band.

    Attributes
    ----------
    b0, b1, heads, kv_heads, queries, keys : int
        Sizes of the arrays.
    low, high : int
        The band, of key - query.
    """

    b0: int
    b1: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    low: int
    high: int


class UnitSizes(NamedTuple):
    """Of a problem whose bias kernels keep, `numba_flash.cuda.work.units`.

    Attributes
    ----------
    units : int
        How many there are.
    b1, heads, blocks : int
        Batch elements that share a bias; heads; blocks of queries of one.
    group : int
        Query heads of a key head.
    queries, keys : int
        Of a head.
    """

    units: int
    b1: int
    heads: int
    blocks: int
    group: int
    queries: int
    keys: int


class ResidentScales(NamedTuple):
    """The scale, its inverse, and what leads from raw products to base 2."""

    scale: float
    inverse: float
    scale_log2: float


def planes_of(problem) -> int:
    """Float16 numbers for each of a problem's arrays that the kernels read; 0 if these are not
    float32. One has 11 bits, as TF32 has.
    """
    if problem.dtype != "float32":
        return 0
    return 1 if problem.precision == "tf32" else 2


class Centred(NamedTuple):
    """Which operands of split float32 have their centre taken out."""

    keys: bool
    values: bool

    @classmethod
    def of(cls, options) -> "Centred":
        """What a constant in all scores of a row, or in all values, does not change: no function of
        a score, and no dropped weights.
        """
        return cls(not options.bends, not options.dropout)


class Words(NamedTuple):
    """Words of a row of a plane of q and k, and of v; a word has two columns."""

    k: int
    v: int


class Vectors(NamedTuple):
    """Which arrays that go with scores can be read by so many neighbouring keys at once: these lie
    at multiples of their size, and there are whole groups of them.

    Attributes
    ----------
    bias, mask : bool
        False where there is none.
    """

    bias: bool = False
    mask: bool = False


ONE_BY_ONE = Vectors()


def vectors_of(problem, inputs, width: int) -> Vectors:
    """Of the inputs of a call, or their layouts."""
    mask = inputs.mask if problem.options.mask and problem.options.blocks is None else None
    return Vectors(*(in_vectors(problem, x, width) for x in (inputs.bias, mask)))


def in_vectors(problem, x, width: int) -> bool:
    """True if so many neighbouring keys of an array that goes with scores can be read, or written,
    at once.
    """
    if x is None or tuple(x.shape[-1:]) != (problem.nk,) or problem.nk % width:
        return False
    size = min(width * x.dtype.itemsize, VECTOR_BYTES)
    *strides, last = (s if n > 1 else 0 for s, n in zip(x.strides, x.shape, strict=True))
    return last == x.dtype.itemsize and not x.offset % size and not any(s % size for s in strides)


def chunked(*layouts) -> bool:
    """True if rows of all these arrays are whole chunks of 16 bytes at multiples of that."""
    return all(_chunked(x) for x in layouts)


def _chunked(x) -> bool:
    *strides, last = (s if n > 1 else 0 for s, n in zip(x.strides, x.shape, strict=True))
    neighbours = x.shape[-1] == 1 or last == x.dtype.itemsize
    whole = x.shape[-1] * x.dtype.itemsize % 16 == 0
    return neighbours and whole and not x.offset and not any(s % 16 for s in strides)


@cache
def _extras(names: tuple[str, ...]):
    return namedtuple("Extras", names)


def extras_class(options, of_mask=(), more=()):
    """Named tuple of the optional arrays that there are; if there is a mask, with those made of it
    that a kernel wants: "tiles", "order", "queue", "bits" (`numba_flash.cuda.work.tile_lists`),
    "places", "ranks" (`numba_flash.cuda.sm90.dq.ds_slots`); with "relative"
    (`numba_flash.cuda.score.relative`) where a number for each distance is; and with `more`. Behind
    them lengths of keys that are numbers.
    """
    names = arrays_of(options) + (("relative",) if options.relative else ())
    names += (of_mask if options.tiled else ()) + more
    return _extras(names + (("kv_lengths",) if options.kv_lengths == AS_NUMBERS else ()))


def arrays_of(options) -> tuple[str, ...]:
    """Names of the optional arrays that there are among the inputs of a call."""
    names = tuple(x for x in EXTRAS if getattr(options, x) not in (None, False, AS_NUMBERS))
    return names + (("page_table",) if options.paged else ())


def build_extras(options):
    """``extras_of(inputs)``: the optional arrays that there are among the inputs of a call."""
    cls = _extras(arrays_of(options))
    if not cls._fields:
        return lambda inputs: ()
    values, named = attrgetter(*cls._fields), partial(tuple.__new__, cls)
    if len(cls._fields) == 1:
        return lambda inputs: named((values(inputs),))
    return lambda inputs: named(values(inputs))


def parameters_of(problem, rng=None) -> tuple:
    """`Parameters` of a problem, with the generator in the state `rng`, if given; an empty tuple if
    its options need no numbers.
    """
    o = problem.with_state(rng).options
    if not o.modifies:
        return ()
    seed, offset, *first = o.generator
    words = (seed, offset, dropout_threshold(o.dropout), *first, problem.first_batch)
    return Parameters(problem.scale, o.softcap, 1 / (1 - o.dropout), *map(np.uint64, words))


def extras_type(options, of_mask=(), more=()):
    """Numba's type of `extras`; `of_mask` and `more` as in `extras_class`."""
    from numba_flash.cuda.number import array
    from numba_flash.cuda.runtime.lang import types

    ndim = 1 if options.packed else 2
    of_keys = options.kv_lengths
    if of_keys == AS_NUMBERS:
        of_keys = types.UniTuple(types.int32, MOST_LENGTHS)
    elif of_keys:
        of_keys = array(getattr(types, of_keys), ndim)
    kinds = {
        "bias": options.bias and array(options.bias, 5),
        "mask": array(types.boolean, 5),
        "q_lengths": options.q_lengths and array(getattr(types, options.q_lengths), ndim),
        "kv_lengths": of_keys,
        "page_table": options.paged and array(getattr(types, options.paged.table), 3),
        "relative": array(types.float32, 2),
        "tiles": array(types.int32, 5),
        "order": array(types.int32, 5),
        "queue": array(types.int32, 5),
        "bits": array(types.uint32, 5),
        "places": array(types.int32, 5),
        "ranks": array(types.int32, 5),
        "factors": array(types.float32, 4),
        "shifts": array(types.float32, 4),
        "centres": array(types.float32, 5),
        "flags": array(types.int32, 3),
        "rows": array(types.float32, 5),
        "dlse": array(types.float32, 4),
    }
    cls = extras_class(options, of_mask, more)
    return types.NamedTuple([kinds[name] for name in cls._fields], cls)


def parameters_type(options):
    """Numba's type of `parameters`."""
    from numba_flash.cuda.runtime.lang import named, types

    if not options.modifies:
        return types.Tuple(())
    return named(Parameters, *[types.float64] * 3, *[types.uint64] * 6)
