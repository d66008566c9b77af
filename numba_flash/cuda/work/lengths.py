"""Lengths of sequences on their way from the host to where kernels read them: they come as numbers
among the arguments of a kernel, which the driver copies when it launches.
"""

from numba_flash.cuda.number import array, index
from numba_flash.cuda.runtime.lang import cuda, i64, types
from numba_flash.cuda.work.sequence import build_pick


def build(of_q, of_kv, most):
    """Kernel ``lengths(q_lengths, kv_lengths, extras, values)``: one thread stores one value, those
    of `q_lengths` first. An array that is absent has no elements.

    of_q, of_kv : dtypes of the arrays, (n,).
    most : how many values there are, used or not.
    """
    pick = build_pick(most)

    def lengths(q_lengths, kv_lengths, extras, values):
        i, first = cuda.threadIdx.x, q_lengths.shape[0]
        value = pick(values, i)
        if i < first:
            q_lengths[index(i)] = value
        elif i < first + kv_lengths.shape[0]:
            kv_lengths[index(i - first)] = value

    operands = array(getattr(types, of_q), 1), array(getattr(types, of_kv), 1)
    signature = types.void(*operands, types.Tuple(()), types.UniTuple(i64, most))
    return lengths, signature, {"launch_bounds": (most, 1)}
