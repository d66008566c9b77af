"""Fragments of a warp: matrices that its lanes load and store together."""

import numpy as np
from operands import LANES, readers, spread


def _stmatrix(machine, each):
    (get_at,) = readers(machine, each.operands[:1])
    get = readers(machine, each.operands[1])

    def run(warp):
        addresses = spread(get_at(warp)).astype(np.int64)
        lane, block = np.arange(LANES), warp.block
        for matrix, g in enumerate(get):
            at = addresses[8 * matrix + lane // 4] + 4 * (lane % 4)
            words = np.ascontiguousarray(spread(g(warp)))
            block.shared.write(block.shared.granules(at, 4), block.order.by_warp(warp), words.view(np.uint16).reshape(LANES, 2))

    return run


MATRICES = {"stmatrix": _stmatrix}
