"""Exact attention and its gradients without the N x N matrix, in pure Python: FlashAttention on NumPy and CuPy."""

from numba_flash import reference
from numba_flash.api import backward, forward, plan
from numba_flash.diagnose import show_config

__version__ = "0.1.0"
__all__ = ["backward", "forward", "plan", "reference", "show_config"]
