"""What kernels of the `sm80` tier are compiled for: the argument of the ``build`` of main loops,
whose repr is part of the key of the compiled code. Numba is not imported here.
"""

from dataclasses import dataclass
from typing import Any

from numba_flash.arguments.options import Options
from numba_flash.cuda.sm80.arguments import Shape


@dataclass(frozen=True)
class ForwardConfig:
    """Of a loop of the forward pass.

    Attributes
    ----------
    dtype : str
        Of q, k and v.
    shape : Shape
        Head dimensions, and how arrays are read and written.
    write_lse : bool
        Whether lse is wanted.
    band : str
        "none" if every query sees every key, "above" if only keys above a diagonal are hidden,
        "both" if some below one are, too.
    kv_splits : bool
        o is float32, over parts of the keys if there are several.
    options : Options
        Which there are, `Options.structure`.
    tile
        Shape of a block's work.
    out : str
        Of few queries, name of the dtype of o over all keys.
    joined : int
        How many parts the last block makes one, of few queries; 0 if none does.
    """

    dtype: str
    shape: Shape
    write_lse: bool
    band: str
    kv_splits: bool
    options: Options
    tile: Any
    out: str = ""
    joined: int = 0


@dataclass(frozen=True)
class BackwardConfig:
    """Of a loop that makes dK and dV.

    Attributes
    ----------
    dtype, shape, options, tile
        As those of `ForwardConfig`.
    ordered : bool
        Blocks of keys add to dQ in turns.
    dlse : bool
        Of few queries, whether there is a gradient of lse.
    kv_splits : bool
        Of few queries, whether dq is float32 over parts of the keys.
    """

    dtype: str
    shape: Shape
    options: Options
    tile: Any
    ordered: bool = False
    dlse: bool = False
    kv_splits: bool = False


@dataclass(frozen=True)
class BiasGradientConfig:
    """Of a loop that makes the gradient of a bias.

    Attributes
    ----------
    dtype, shape, options, tile
        As those of `ForwardConfig`.
    out : str
        Name of the dtype of what is written.
    summed : tuple of bool
        Along which of five axes the gradient is a sum.
    banded : bool
        Some query does not see every key.
    dlse : bool
        There is a gradient of lse.
    """

    dtype: str
    shape: Shape
    options: Options
    tile: Any
    out: str
    summed: tuple[bool, ...]
    banded: bool = False
    dlse: bool = False
