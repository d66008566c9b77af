"""A `ScoreMod` for the CPU: compiled alone, row by row, so that one kernel serves all of them. Kernels call it by its address
(`scores.call_row_function`), and know nothing of how it is made.
"""

from typing import Any, NamedTuple

from numba import njit, types

from numba_flash.cpu.cache import cached
from numba_flash.files import notice
from numba_flash.scoremod.functions import UNWRAPPED


class RowFunction(NamedTuple):
    """A compiled row function, which its dispatcher keeps in memory, and where it lies."""

    dispatcher: Any
    address: int


def row_function_address(score_mod, number) -> int:
    """Where the code of a `ScoreMod` lies: one kernel serves all of them. It stays there as long as somebody holds the `ScoreMod`."""
    if number not in score_mod.rows:
        row = types.Array(number, 1, "C")
        signature = types.void(row, row, *[types.int64] * 4)
        dispatcher = _row_function(score_mod)
        with notice.if_compiled(dispatcher, f"{score_mod.function.__name__} {score_mod.fingerprint}"):
            dispatcher.compile(signature)
        compiled = dispatcher.overloads[signature.args]
        address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
        score_mod.rows.setdefault(number, RowFunction(dispatcher, address))  # that of the first of threads that come here together
    return score_mod.rows[number].address


def _row_function(score_mod):
    """``score_mod_row(row, slope, b, h, i, j0)``: changes a row of scores and multiplies their derivatives into slope; kept on disk."""
    function, gradient = score_mod.compiled
    differentiable = gradient is not None

    def score_mod_row(row, slope, b, h, i, j0):
        for c in range(row.size):
            if differentiable:
                slope[c] *= gradient(row[c], b, h, i, j0 + c)
            row[c] = function(row[c], b, h, i, j0 + c)

    return cached(njit(**UNWRAPPED)(score_mod_row), score_mod.fingerprint)
