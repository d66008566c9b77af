"""What kernels of the `sm90` tier are compiled for: the argument of their ``build``, whose repr is
part of the key of the compiled code. Numba is not imported here.
"""

from dataclasses import dataclass
from typing import Any

from numba_flash.arguments.options import Options
from numba_flash.cuda.arguments import ONE_BY_ONE, Vectors
from numba_flash.cuda.config import PLAIN

# What happens to scores in the loop of the gradient of a bias.
NOTED, RESIDENT_QUERIES = "options, by notes of steps", "a bias alone, beside resident queries"


@dataclass(frozen=True)
class ForwardConfig:
    """Of a loop of the forward pass.

    Attributes
    ----------
    dtype : str
        Of q, k and v.
    d, dv : int
        Head dimension of q and k, and of v.
    write_lse : bool
        Whether lse is wanted.
    band : str
        "none" if every query sees every key, "above" if only keys above a diagonal are hidden,
        "both" if some below one are, too.
    store : str
        How o is stored: "map" through a tensor map, "words" of two elements of 16 bits, "floats"
        of float32, "kv_splits" the same over parts of the keys.
    options : Options
        Which there are, `Options.structure`.
    tile
        Shape of a block's work.
    vectors : Vectors
        Which arrays of pairs are read by two keys at a time; none where there are none.
    stage : str
        What happens to scores, of `numba_flash.cuda.config`.
    """

    dtype: str
    d: int
    dv: int
    write_lse: bool
    band: str
    store: str
    options: Options
    tile: Any
    vectors: Vectors = ONE_BY_ONE
    stage: str = PLAIN


@dataclass(frozen=True)
class BackwardConfig:
    """Of a loop that makes dK and dV.

    Attributes
    ----------
    dtype, d, dv, options, tile, vectors, stage
        As those of `ForwardConfig`.
    banded : bool
        Some query does not see every key; it makes no difference to a kernel that is `ordered`.
    to_map : bool
        dK and dV are stored through tensor maps.
    ordered : bool
        Blocks of keys add to dQ in turns.
    """

    dtype: str
    d: int
    dv: int
    banded: bool
    to_map: bool
    ordered: bool
    options: Options
    tile: Any
    vectors: Vectors = ONE_BY_ONE
    stage: str = PLAIN


@dataclass(frozen=True)
class DqConfig:
    """Of the loop that makes dQ of dS; attributes as those of `BackwardConfig`, with dQ stored
    through a map or not.
    """

    dtype: str
    d: int
    banded: bool
    to_map: bool
    options: Options
    tile: Any


@dataclass(frozen=True)
class BiasGradientConfig:
    """Of a loop that makes the gradient of a bias.

    Attributes
    ----------
    dtype, d, dv, banded, options, tile, vectors, stage
        As those of `BackwardConfig`; a stage may be one of those above.
    out : str
        Name of the dtype of what is written.
    summed : tuple of bool
        Along which of five axes the gradient is a sum.
    wide : bool
        Pairs of keys are written at once.
    dlse : bool
        There is a gradient of lse.
    """

    dtype: str
    d: int
    dv: int
    banded: bool
    options: Options
    tile: Any
    out: str
    summed: tuple[bool, ...]
    wide: bool = False
    vectors: Vectors = ONE_BY_ONE
    dlse: bool = False
    stage: str = NOTED
