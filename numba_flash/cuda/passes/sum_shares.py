"""The gradient of a bias from shares of its sum."""

from numba_flash.cuda.number import ACCUMULATOR, array, build_convert, index
from numba_flash.cuda.runtime.lang import cuda, types, u32


def build(dtype, out_dtype, threads):
    """Kernel ``sum_shares(shares, dbias, extras)``: one thread adds the shares of one element, in
    their order. Fewer than 2^31 elements are ever split into shares.

    shares : (shares, b0, b1, heads, n, n), what sums of `dtype` are kept in.
    dbias : the same without the first axis, `out_dtype`.
    """
    ACC, THREADS = ACCUMULATOR[dtype], threads
    _, store = build_convert(out_dtype)

    def sum_shares(shares, dbias, extras):
        number = u32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        if number < dbias.size:
            j, number = number % u32(dbias.shape[4]), number // u32(dbias.shape[4])
            i, number = number % u32(dbias.shape[3]), number // u32(dbias.shape[3])
            h, number = number % u32(dbias.shape[2]), number // u32(dbias.shape[2])
            b0, b1 = number // u32(dbias.shape[1]), number % u32(dbias.shape[1])
            total = ACC(0)
            for share in range(shares.shape[0]):
                x = shares[index(share), index(b0), index(b1), index(h), index(i), index(j)]
                total += x
            dbias[index(b0), index(b1), index(h), index(i), index(j)] = store(total)

    signature = types.void(array(ACC, 6), array(out_dtype, 5), types.Tuple(()))
    return sum_shares, signature, {"launch_bounds": (threads, 1)}
