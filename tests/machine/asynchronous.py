"""Barriers, copies by the copy engine, and products of tensor cores: what is begun by one instruction and waited for by another."""

import re
from typing import NamedTuple

import numpy as np
from memory import Fault

LANES = 32


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


def _readers(machine, texts, kind=np.uint32):
    from instructions import reader

    return [reader(machine, text.strip("[]"), kind) for text in texts]


def _one(warp, get) -> int:
    """The value in the only lane that runs."""
    lanes = np.flatnonzero(warp.lanes)
    if lanes.size != 1:
        raise Fault(f"{lanes.size} threads where one is meant to be")
    return int(np.broadcast_to(get(warp), LANES)[lanes[0]])


# ---- mbarriers


class Mbarrier:
    """Arrivals and bytes that a phase waits for."""

    def __init__(self, count: int):
        self.count = self.pending = count
        self.bytes, self.phase = 0, 0

    def arrive(self, machine, arrivals: int) -> None:
        """Some threads have arrived."""
        if arrivals > self.pending:
            raise Fault(f"{arrivals} arrivals at an mbarrier that waits for {self.pending}")
        self.pending -= arrivals
        self.advance(machine)

    def advance(self, machine) -> None:
        """The next phase, if this one is complete."""
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase + 1
            machine.events += 1


def _mbarrier_init(machine, each):
    at, count = _readers(machine, each.operands)

    def run(warp):
        warp.block.mbarriers[_one(warp, at)] = Mbarrier(_one(warp, count))
        warp.block.machine.events += 1

    return run


def _mbarrier_of(warp, address: int) -> Mbarrier:
    try:
        return warp.block.mbarriers[address]
    except KeyError:
        raise Fault(f"there is no mbarrier at {address}; there are {sorted(warp.block.mbarriers)}") from None


def _mbarrier_arrive(machine, each):
    (at,) = _readers(machine, each.operands[1:2])

    def run(warp):
        addresses = np.broadcast_to(at(warp), LANES)[warp.lanes]
        for address, arrivals in zip(*np.unique(addresses, return_counts=True), strict=True):
            _mbarrier_of(warp, int(address)).arrive(machine, int(arrivals))

    return run


def _mbarrier_expect(machine, each):
    at, more = _readers(machine, each.operands[1:])

    def run(warp):
        barrier = _mbarrier_of(warp, _one(warp, at))
        barrier.bytes += _one(warp, more)
        barrier.arrive(machine, 1)

    return run


def _mbarrier_try_wait(machine, each):
    destination, *_ = each.operands
    at, parity = _readers(machine, each.operands[1:])

    def run(warp):
        done = np.zeros(LANES, bool)
        for lane in np.flatnonzero(warp.lanes):
            address = int(np.broadcast_to(at(warp), LANES)[lane])
            done[lane] = _mbarrier_of(warp, address).phase % 2 != int(np.broadcast_to(parity(warp), LANES)[lane])
        warp.write(destination, done)
        if not done.any():
            warp.asks(each, f"at {address}", False)

    return run


# ---- named barriers


def _barrier(machine, each):
    number, threads = _readers(machine, each.operands if len(each.operands) > 1 else [each.operands[0], "0"])
    waits = ".sync" in each.opcode

    def run(warp):
        if not warp.gathers():
            return
        block = warp.block
        lane = int(np.flatnonzero(warp.lanes)[0])
        key = int(np.broadcast_to(number(warp), LANES)[lane])
        expected = int(np.broadcast_to(threads(warp), LANES)[lane]) or block.machine.threads
        state = block.barriers.setdefault(key, {"arrived": 0, "phase": 0})
        state["arrived"] += LANES
        phase = state["phase"]
        if state["arrived"] > expected:
            raise Fault(f"{state['arrived']} threads at barrier {key}, which waits for {expected}")
        if state["arrived"] == expected:
            state["arrived"], state["phase"] = 0, phase + 1
            block.machine.events += 1
        elif waits:
            warp.waits = (f"barrier {key}, line {each.line}", lambda: state["phase"] != phase)

    return run


# ---- copies


def _swizzled(base: int, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Addresses of 16-bit elements of a panel of rows of 128 bytes, whose chunks of 16 bytes are swizzled."""
    linear = base + 128 * rows + 2 * columns
    return linear ^ ((linear >> 7 & 7) << 4)


def _tensor_load(machine, each):
    to, (tensor_map, place), ready = each.operands[0], _tensor_operand(each.operands[1]), each.operands[2]
    get_to, get_ready = _readers(machine, [to, ready])
    (get_map,) = _readers(machine, [tensor_map], np.uint64)
    get_place = _readers(machine, place, np.int32)

    def run(warp):
        block, shared = warp.block, warp.block.shared
        base, barrier = _one(warp, get_to), _mbarrier_of(warp, _one(warp, get_ready))
        described = machine.maps[_one(warp, get_map)]
        at = [_one(warp, g) for g in get_place]

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
    (get_from,) = _readers(machine, each.operands[1:])
    (get_map,) = _readers(machine, [tensor_map], np.uint64)
    get_place = _readers(machine, place, np.int32)

    def run(warp):
        base, described = _one(warp, get_from), machine.maps[_one(warp, get_map)]
        at, shared = [_one(warp, g) for g in get_place], warp.block.shared

        def copy():
            rows, columns = np.indices((described.rows, 64))
            tile = shared.load(_swizzled(base, rows, columns).reshape(-1), 2).view(np.uint16).reshape(described.rows, 64)
            where, (row, column) = described.box(*at)
            found = described.array[where]
            found[...] = tile[row : row + found.shape[0], column : column + found.shape[1]]

        _begin(warp, copy)

    return run


def _bulk_load(machine, each):
    get_to, get_bytes, get_ready = _readers(machine, [each.operands[0], each.operands[2], each.operands[3]])
    (get_from,) = _readers(machine, each.operands[1:2], np.uint64)

    def run(warp):
        block, to, count = warp.block, _one(warp, get_to), _one(warp, get_bytes)
        source, barrier = _one(warp, get_from), _mbarrier_of(warp, _one(warp, get_ready))
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
    (get_to,) = _readers(machine, each.operands[:1], np.uint64)
    get_from, get_bytes = _readers(machine, each.operands[1:])
    adds = "reduce" in each.opcode

    def run(warp):
        to, source, count = _one(warp, get_to), _one(warp, get_from), _one(warp, get_bytes)
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


# ---- atomics, matrix stores


def _atomic(machine, each):
    returns = each.opcode.startswith("atom")
    destination, where, what = each.operands if returns else (None, *each.operands)
    (get_at,) = _readers(machine, [where], np.uint64)
    (get_value,) = _readers(machine, [what], np.int32)

    def run(warp):
        before = np.zeros(LANES, np.int32)
        for lane in np.flatnonzero(warp.lanes):
            at = np.array([int(np.broadcast_to(get_at(warp), LANES)[lane])])
            region = machine.memory.find(int(at[0]))
            old = region.load(at, 4).view(np.int32)
            before[lane] = old[0, 0]
            region.store(at, (old + np.int32(np.broadcast_to(get_value(warp), LANES)[lane])).view(np.uint8))
        machine.events += 1
        if returns:
            warp.write(destination, before)

    return run


def _stmatrix(machine, each):
    (get_at,) = _readers(machine, each.operands[:1])
    get = _readers(machine, each.operands[1])

    def run(warp):
        addresses = np.broadcast_to(get_at(warp), LANES).astype(np.int64)
        lane = np.arange(LANES)
        for matrix, g in enumerate(get):
            at = addresses[8 * matrix + lane // 4] + 4 * (lane % 4)
            words = np.ascontiguousarray(np.broadcast_to(g(warp), LANES))
            warp.block.shared.store(at, words.view(np.uint8).reshape(LANES, 4))

    return run


# ---- products


class Product(NamedTuple):
    """One wgmma: accumulators, and functions that read the operands when it is executed."""

    accumulators: tuple
    reads: tuple
    add: bool
    a: object
    b: object


def _matrix(shared, low: int, rows: int, transposed: bool, dtype, first: int = 0) -> np.ndarray:
    """(rows, 16) elements of an operand in shared memory, from row `first` on, from the low word of its descriptor."""
    base, stride = (low & 0x3FFF) << 4, (low >> 16 & 0x3FFF) << 4
    r, k = np.indices((rows, 16))
    r = r + first
    linear = base + r // 64 * stride + 128 * k + 2 * (r % 64) if transposed else base + r // 8 * 1024 + r % 8 * 128 + 2 * k
    at = linear ^ ((linear >> 7 & 7) << 4)
    return shared.load(at.reshape(-1), 2).view(dtype).reshape(rows, 16).astype(np.float32)


def _wgmma(machine, each):
    import ml_dtypes

    accumulators, a, b, *switches = each.operands
    shape, kind = re.search(r"\.m64n(\d+)k16\.f32\.(\w+)\.", each.opcode).groups()
    columns, dtype = int(shape), {"f16": np.float16, "bf16": ml_dtypes.bfloat16}[kind]
    add, in_registers = switches[0] == "1", isinstance(a, tuple)
    a_transposed, b_transposed = (False, switches[3] == "1") if in_registers else (switches[3] == "1", switches[4] == "1")
    (get_b,) = _readers(machine, [b], np.uint64)
    (get_a,) = (None,) if in_registers else _readers(machine, [a], np.uint64)

    def run(warp):
        shared, row = warp.block.shared, 16 * (warp.number % 4)
        low_b = int(np.broadcast_to(get_b(warp), LANES)[0]) & 0xFFFFFFFF
        if in_registers:
            words = np.stack([warp.registers[name] for name in a]).view(np.uint32)
            read_a = lambda: _from_fragment(words, dtype)
        else:
            low_a = int(np.broadcast_to(get_a(warp), LANES)[0]) & 0xFFFFFFFF
            read_a = lambda: _matrix(shared, low_a, 16, a_transposed, dtype, row)
        read_b = lambda: _matrix(shared, low_b, columns, b_transposed, dtype)
        product = Product(accumulators, a if in_registers else (), add, read_a, read_b)
        warp.products.append(product)

    return run


def _from_fragment(words: np.ndarray, dtype) -> np.ndarray:
    """(16, 16) elements that four words of each lane hold."""
    a, lane = np.zeros((16, 16), np.float32), np.arange(LANES)
    for word in range(4):
        pair = np.ascontiguousarray(words[word]).view(dtype).reshape(LANES, 2).astype(np.float32)
        for c in range(2):
            a[lane // 4 + 8 * (word % 2), 2 * (lane % 4) + c + 8 * (word // 2)] = pair[:, c]
    return a


def _wgmma_commit(machine, each):
    def run(warp):
        warp.groups.append(warp.products)
        warp.committed += 1
        for product in warp.products:
            warp.in_flight |= dict.fromkeys((*product.accumulators, *product.reads))
        warp.products = []

    return run


def _wgmma_wait(machine, each):
    allowed = int(each.operands[0])

    def run(warp):
        first = warp.number // 4 * 4
        group, wanted = warp.block.warps[first : first + 4], warp.committed - allowed
        if any(other.committed < wanted for other in group):  # a product is one of the whole warp group
            warp.paths[-1].at -= 1
            warp.waits = (f"its warp group, line {each.line}", lambda: all(other.committed >= wanted for other in group))
            return
        for other in group:
            while other.executed_groups < wanted:
                for product in other.groups[other.executed_groups]:
                    _execute(other, product)
                other.executed_groups += 1
        running = (product for products in warp.groups[max(wanted, 0) :] for product in products)
        warp.in_flight = dict.fromkeys(name for product in running for name in (*product.accumulators, *product.reads))

    return run


def _execute(warp, product: Product) -> None:
    lane, columns = np.arange(LANES), 2 * len(product.accumulators)
    result = product.a() @ product.b().T
    registers = np.arange(len(product.accumulators))[:, None]
    rows, cols = lane // 4 + 8 * (registers // 2 % 2), registers // 4 * 8 + 2 * (lane % 4) + registers % 2
    assert columns == result.shape[1]
    values = result[rows, cols]
    for i, name in enumerate(product.accumulators):
        before = warp.registers[name] if product.add else np.float32(0)
        warp.registers[name] = (before + values[i]).astype(np.float32)


def _nothing(machine, each):
    return lambda warp: None


ASYNCHRONOUS = {
    "mbarrier.init": _mbarrier_init,
    "mbarrier.arrive.expect_tx": _mbarrier_expect,
    "mbarrier.arrive": _mbarrier_arrive,
    "mbarrier.try_wait": _mbarrier_try_wait,
    "bar.": _barrier,
    "cp.async.bulk.tensor.5d.shared": _tensor_load,
    "cp.async.bulk.tensor.5d.global": _tensor_store,
    "cp.async.bulk.shared": _bulk_load,
    "cp.async.bulk.global": _bulk_store,
    "cp.reduce.async.bulk": _bulk_store,
    "cp.async.bulk.wait_group": _bulk_wait,
    "cp.async.bulk.commit_group": _nothing,
    "atom.": _atomic,
    "red.": _atomic,
    "stmatrix": _stmatrix,
    "wgmma.mma_async": _wgmma,
    "wgmma.commit_group": _wgmma_commit,
    "wgmma.wait_group": _wgmma_wait,
    "wgmma.fence": _nothing,
    "fence.": _nothing,
    "setmaxnreg": _nothing,
}
