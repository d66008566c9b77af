"""`dropout_mask`: the random bits that dropout uses, to look at."""

from __future__ import annotations

import math
from typing import Never

import numpy as np
from numpy.typing import NDArray

from numba_flash.arguments import arrays, checks, option_checks
from numba_flash.arguments.annotations import State
from numba_flash.arguments.signatures import refuse, shown


@shown
def dropout_mask(shape: tuple[int, ...] | list[int], *, dropout: float, rng: State, **unknown: Never) -> NDArray[np.bool_]:
    """Which probabilities `forward` and `backward` keep: the same bits on every backend, tile size and device.

    The bit of query i, key j in head h of batch element b is a pure function of ``(seed, offset; b * Hq + h, i, j)``: Philox4x32-7
    (Salmon et al., SC'11), see `numba_flash.rng.bits`.

    Parameters
    ----------
    shape : tuple or list of ints
        (..., Hq, Nq, Nk): that of the matrix of scores. Leading dimensions are counted together as b, in C order.
    dropout : float
        Probability to be dropped, in [0, 1), rounded as `forward` does.
    rng : (int, int) or (int, int, int, int)
        Seed in [0, 2**64) and offset in [0, 2**32); and which query and which key are the first, below 2**30, the key a multiple of 8:
        ``dropout_mask((h, m, n), rng=(s, o, i, j))`` is ``dropout_mask((h, i + m, j + n), rng=(s, o))[:, i:, j:]``.

    Returns
    -------
    keep : numpy.ndarray of bool
        True where ``P / (1 - dropout)`` is used, False where 0 is. It takes one byte per score: keep the shape small.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong kind or value.
    MemoryError
        There is no room for `keep`, or for the random words behind it, 4 bytes per score.
    """
    if unknown:
        refuse(dropout_mask, unknown)
    if not isinstance(shape, tuple | list):
        raise TypeError(f"shape must be a tuple (..., Hq, Nq, Nk); got {shape!r}")
    if len(shape) < 2:
        raise ValueError(f"shape must be a tuple (..., Hq, Nq, Nk) of at least two sizes; got {shape!r}")
    sizes = tuple(checks.integer(f"shape[{axis}]", n) for axis, n in enumerate(shape))
    if min(sizes) < 0:
        raise ValueError(f"shape must hold sizes >= 0; got {shape!r}")
    probability, state = option_checks.bind_dropout(dropout, rng)
    arrays.check_size("keep", None, sizes, "bool")
    with arrays.named("keep", sizes, "bool"):
        if probability == 0:
            return np.ones(sizes, bool)
        from numba_flash import rng as generator

        heads = np.arange(math.prod(sizes[:-2])).reshape(sizes[:-2])
        return generator.keep_all(state, probability, heads, *sizes[-2:])
