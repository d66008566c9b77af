"""Exact attention and its gradients without the N x N matrix, in pure Python: FlashAttention on NumPy and CuPy."""

from numba_flash import reference
from numba_flash.api import backward, forward
from numba_flash.arguments.block_mask import BlockMask
from numba_flash.arguments.precisions import get_precision, set_precision, use_precision
from numba_flash.diagnose import show_config
from numba_flash.dropout import dropout_mask
from numba_flash.merge import merge
from numba_flash.packed import backward_packed, forward_packed
from numba_flash.paged import forward_paged
from numba_flash.planning import plan
from numba_flash.scoremod.functions import alibi, relative_position
from numba_flash.vjp import vjp

__version__ = "0.1.0"
__all__ = [
    "BlockMask",
    "alibi",
    "backward",
    "backward_packed",
    "dropout_mask",
    "forward",
    "forward_packed",
    "forward_paged",
    "get_precision",
    "merge",
    "plan",
    "reference",
    "relative_position",
    "set_precision",
    "show_config",
    "use_precision",
    "vjp",
]


def __dir__() -> list[str]:
    """The public names, and what every module has: not the modules in which they are defined."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
