"""What kernels that several tiers launch are compiled for: the argument of their ``build``, whose
repr is part of the key of the compiled code. Numba is not imported here.
"""

from dataclasses import dataclass

from numba_flash.arguments.options import Options

# What happens to scores.
PLAIN, RELATIVE, OPTIONS, RESIDENT = "plain", "relative", "options", "resident bias"


@dataclass(frozen=True)
class PreprocessConfig:
    """Of what comes before a backward pass, `numba_flash.cuda.passes.preprocess`.

    Attributes
    ----------
    dtype : str
        Of do and o.
    dv : int
        Their columns.
    dlse : bool
        There is a gradient of lse.
    block_m : int
        Queries of a row block.
    sum_bytes : int
        Of sums of dQ of a row block; 0 if nothing is added up in memory.
    ordered : bool
        Blocks of keys add to dQ in turns.
    chunked : bool
        Rows are whole chunks of 16 bytes.
    lse_in : str
        In which base lse is written, and whether for a larger P, `numba_flash.cuda.arguments`.
    options : Options
        Those that come with arrays.
    threads : int
        Of a block.
    copies : bool
        There is a flag for each copy of the sums.
    early : bool
        It may be launched early (`numba_flash.cuda.runtime.early`); needs compute capability 9.0.
    """

    dtype: str
    dv: int
    dlse: bool
    block_m: int
    sum_bytes: int
    ordered: bool
    chunked: bool
    lse_in: str
    options: Options
    threads: int
    copies: bool = False
    early: bool = False
