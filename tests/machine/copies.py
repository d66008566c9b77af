"""Copies by the copy engine of Hopper: tensor copies (PTX ISA 9.7.9.27) and bulk copies (9.7.9.25)."""

import re
from typing import NamedTuple

import numpy as np
from barriers import mbarrier_of
from memory import Fault
from operands import one, readers


class TensorMap(NamedTuple):
    """What a descriptor says: an array of five dimensions, the rows of its boxes."""

    array: np.ndarray
    rows: int

    def box(self, column, row, *leading):
        """Its elements at a place, as far as they exist, and where in the box they lie."""
        at = tuple(reversed(leading))
        n, d = self.array.shape[3:]
        rows = slice(max(row, 0), max(min(row + self.rows, n), max(row, 0)))
        columns = slice(max(column, 0), max(min(column + 64, d), max(column, 0)))
        inside = all(0 <= i < size for i, size in zip(at, self.array.shape[:3], strict=True))
        if not inside:
            rows = slice(0, 0)
        return (*at, rows, columns) if inside else (0, 0, 0, rows, columns), (rows.start - row, columns.start - column)


def _swizzled(base: int, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Addresses of 16-bit elements of a panel of rows of 128 bytes, whose chunks of 16 bytes are swizzled."""
    linear = base + 128 * rows + 2 * columns
    return linear ^ ((linear >> 7 & 7) << 4)


def _tensor_load(machine, each):
    to, (tensor_map, place), ready = each.operands[0], _tensor_operand(each.operands[1]), each.operands[2]
    get_to, get_ready = readers(machine, [to, ready])
    (get_map,) = readers(machine, [tensor_map], np.uint64)
    get_place = readers(machine, place, np.int32)

    def run(warp):
        block, shared = warp.block, warp.block.shared
        base, barrier = one(warp, get_to), mbarrier_of(warp, one(warp, get_ready))
        described = machine.maps[one(warp, get_map)]
        at = [one(warp, g) for g in get_place]

        def copy():
            where, (row, column) = described.box(*at)
            tile = np.zeros((described.rows, 64), np.uint16)
            found = described.array[where]
            tile[row : row + found.shape[0], column : column + found.shape[1]] = found
            rows, columns = np.indices(tile.shape)
            shared.store(_swizzled(base, rows, columns).reshape(-1), tile.reshape(-1, 1).view(np.uint8))
            barrier.bytes -= tile.nbytes
            barrier.advance(block.machine)

        machine.engine.append(copy)

    return run


def _tensor_operand(text: str):
    """(map, coordinates) of ``[map, {...}]``."""
    tensor_map, coordinates = re.fullmatch(r"\[(\S+?),\s*\{(.*)\}\]", text).groups()
    return tensor_map, [x.strip() for x in coordinates.split(",")]


def _begin(warp, copy) -> None:
    """A copy that its thread may wait for; the copy engine does it at any time."""
    (lane,) = np.flatnonzero(warp.lanes)
    pending = warp.bulk[lane]
    pending.append(copy)

    def later():
        copy()
        pending.remove(copy)
        warp.block.machine.events += 1

    warp.block.machine.engine.append(later)


def _tensor_store(machine, each):
    tensor_map, place = _tensor_operand(each.operands[0])
    (get_from,) = readers(machine, each.operands[1:])
    (get_map,) = readers(machine, [tensor_map], np.uint64)
    get_place = readers(machine, place, np.int32)

    def run(warp):
        base, described = one(warp, get_from), machine.maps[one(warp, get_map)]
        at, shared = [one(warp, g) for g in get_place], warp.block.shared

        def copy():
            rows, columns = np.indices((described.rows, 64))
            tile = shared.load(_swizzled(base, rows, columns).reshape(-1), 2).view(np.uint16).reshape(described.rows, 64)
            where, (row, column) = described.box(*at)
            found = described.array[where]
            found[...] = tile[row : row + found.shape[0], column : column + found.shape[1]]

        _begin(warp, copy)

    return run


def _bulk_load(machine, each):
    get_to, get_bytes, get_ready = readers(machine, [each.operands[0], each.operands[2], each.operands[3]])
    (get_from,) = readers(machine, each.operands[1:2], np.uint64)

    def run(warp):
        block, to, count = warp.block, one(warp, get_to), one(warp, get_bytes)
        source, barrier = one(warp, get_from), mbarrier_of(warp, one(warp, get_ready))
        _aligned(source, to, count)

        def copy():
            block.shared.store(_each16(to, count), machine.memory.find(source).load(_each16(source, count), 16))
            barrier.bytes -= count
            barrier.advance(machine)

        machine.engine.append(copy)

    return run


def _each16(address: int, count: int) -> np.ndarray:
    return address + 16 * np.arange(count // 16)


def _aligned(*numbers: int) -> None:
    if any(x % 16 for x in numbers):
        raise Fault(f"bulk copies take multiples of 16; got {numbers}")


def _bulk_store(machine, each):
    (get_to,) = readers(machine, each.operands[:1], np.uint64)
    get_from, get_bytes = readers(machine, each.operands[1:])
    adds = "reduce" in each.opcode

    def run(warp):
        to, source, count = one(warp, get_to), one(warp, get_from), one(warp, get_bytes)
        shared = warp.block.shared
        _aligned(to, source, count)

        def copy():
            data = shared.load(_each16(source, count), 16)
            region = machine.memory.find(to)
            if adds:
                data = (region.load(_each16(to, count), 16).view(np.float32) + data.view(np.float32)).view(np.uint8)
            region.store(_each16(to, count), data)

        _begin(warp, copy)

    return run


def _bulk_wait(machine, each):
    def run(warp):
        pending = [warp.bulk[lane] for lane in np.flatnonzero(warp.lanes)]
        if any(pending):
            warp.waits = (f"its own stores, line {each.line}", lambda: not any(pending))

    return run


def _nothing(machine, each):
    return lambda warp: None


COPIES = {
    "cp.async.bulk.tensor.5d.shared": _tensor_load,
    "cp.async.bulk.tensor.5d.global": _tensor_store,
    "cp.async.bulk.shared": _bulk_load,
    "cp.async.bulk.global": _bulk_store,
    "cp.reduce.async.bulk": _bulk_store,
    "cp.async.bulk.wait_group": _bulk_wait,
    "cp.async.bulk.commit_group": _nothing,
}
