"""Fragments of a warp: matrices that its lanes load and store together (PTX ISA 9.7.14.5.15 and 16)."""

import numpy as np

from ptx_machine.machine.memory import Fault
from ptx_machine.machine.operands import LANES, address, reader, spread

LANE = np.arange(LANES)


def together(warp) -> None:
    """Instructions of a whole warp are undefined where some of its lanes are elsewhere, or have ended."""
    if not warp.lanes.all():
        raise Fault(f"{int(warp.lanes.sum())} lanes are here, where the whole warp has to be")


def rows_of(warp, get_at, count: int) -> np.ndarray:
    """(count, 8) addresses of the rows of that many matrices: lanes 0 to 7 give those of the first, and so on."""
    at = get_at(warp)[: 8 * count].astype(np.int64)
    if (at % 16).any():
        raise Fault(f"a row of a matrix at {int(at[at % 16 != 0][0])}, which is not a multiple of 16")
    return at.reshape(count, 8)


def _matrices(machine, each):
    """(destination or source registers, address, whether they are transposed) of an instruction."""
    if ".m8n8." not in each.opcode or not each.opcode.endswith(".b16") or ".shared" not in each.opcode:
        raise ValueError("only matrices of 8 x 8 elements of 16 bits in shared memory")
    where, names = each.operands if each.opcode.startswith("st") else each.operands[::-1]
    names = names if isinstance(names, tuple) else (names,)
    if f".x{len(names)}." not in each.opcode or len(names) not in (1, 2, 4):
        raise ValueError(f"{len(names)} registers")
    return names, address(machine, where), ".trans" in each.opcode


def _ldmatrix(machine, each):
    names, get_at, transposed = _matrices(machine, each)

    def run(warp):
        together(warp)
        rows, block = rows_of(warp, get_at, len(names)).reshape(-1), warp.block
        matrices = block.shared.read(block.shared.granules(rows, 16), block.order.by_warp(warp)).reshape(-1, 8, 8)
        words = np.ascontiguousarray(matrices.swapaxes(1, 2) if transposed else matrices).view(np.uint32).reshape(-1, LANES)
        for name, word in zip(names, words, strict=True):
            warp.write(name, word)

    return run


def _stmatrix(machine, each):
    names, get_at, transposed = _matrices(machine, each)
    get = [reader(machine, name, np.uint32) for name in names]

    def run(warp):
        together(warp)
        rows, block = rows_of(warp, get_at, len(names)), warp.block
        matrices = np.stack([spread(g(warp)) for g in get]).view(np.uint16).reshape(-1, 8, 8)
        words = np.ascontiguousarray(matrices.swapaxes(1, 2) if transposed else matrices).reshape(-1, 2)
        at = (rows[:, LANE // 4] + 4 * (LANE % 4)).reshape(-1)
        block.shared.write(block.shared.granules(at, 4), block.order.by_warp(warp), words)

    return run


def _movmatrix(machine, each):
    destination, source = each.operands
    get = reader(machine, source, np.uint32)

    def run(warp):
        together(warp)
        matrix = np.array(spread(get(warp))).view(np.uint16).reshape(8, 8)
        warp.write(destination, np.ascontiguousarray(matrix.T).view(np.uint32).reshape(LANES))

    return run


MATRICES = {
    "ldmatrix.sync.aligned": _ldmatrix,
    "stmatrix.sync.aligned": _stmatrix,
    "movmatrix.sync.aligned.m8n8.trans.b16": _movmatrix,
}
