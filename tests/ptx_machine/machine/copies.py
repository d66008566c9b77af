"""Copies by the copy engine of Hopper: tensor copies (PTX ISA 9.7.9.27) and bulk copies (9.7.9.25)."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ptx_machine.machine.barriers import Mbarrier, mbarrier_of
from ptx_machine.machine.memory import Fault
from ptx_machine.machine.operands import LANES, one, readers


class TensorMap(NamedTuple):
    """What a descriptor says: an array of five dimensions, rows and columns of its boxes."""

    array: np.ndarray
    rows: int
    columns: int = 64

    def box(self, column, row, *leading):
        """Its elements at a place, as far as they exist, and where in the box they lie."""
        at = tuple(reversed(leading))
        n, d = self.array.shape[3:]
        rows = slice(max(row, 0), max(min(row + self.rows, n), max(row, 0)))
        columns = slice(max(column, 0), max(min(column + self.columns, d), max(column, 0)))
        inside = all(0 <= i < size for i, size in zip(at, self.array.shape[:3], strict=True))
        if not inside:
            rows = slice(0, 0)
        return (*at, rows, columns) if inside else (0, 0, 0, rows, columns), (rows.start - row, columns.start - column)


def _swizzled(base: int, rows: np.ndarray, columns: np.ndarray, width: int = 64) -> np.ndarray:
    """Locations of 16-bit elements of a panel of rows of that many, 128 or 64 bytes, whose chunks of 16 bytes are swizzled."""
    linear = base + 2 * width * rows + 2 * columns
    return (linear ^ ((linear >> 7 & width // 8 - 1) << 4)) // 2


def _tensor_operand(text: str):
    """(map, coordinates) of ``[map, {...}]``."""
    tensor_map, coordinates = re.fullmatch(r"\[(\S+?),\s*\{(.*)\}\]", text).groups()
    return tensor_map, [x.strip() for x in coordinates.split(",")]


# ---- to shared memory: counted on an mbarrier


def _fetch(warp, mbarrier: Mbarrier, granules: np.ndarray, words) -> None:
    """Have the copy engine write ``words()`` to these locations, at any time, and tell the mbarrier."""
    if not mbarrier.known_to_copies:
        raise Fault(f"copies may not know yet that the mbarrier at {mbarrier.address} has been initialised: a fence is missing")
    block, access = warp.block, warp.block.order.by_async(warp, mbarrier.agent, mbarrier.phase + 1)
    block.order.write(granules, access, np.zeros(granules.shape, bool))

    def do():
        block.shared.words[granules] = words()
        mbarrier.receive(2 * granules.size)

    mbarrier.fetched = mbarrier.phase + 1
    block.machine.later(do, 2 * granules.size, mbarrier.address)


def _tensor_load(machine, each):
    to, (tensor_map, place), ready = each.operands[0], _tensor_operand(each.operands[1]), each.operands[2]
    get_to, get_ready = readers(machine, [to, ready])
    (get_map,) = readers(machine, [tensor_map], np.uint64)
    get_place = readers(machine, place, np.int32)

    def run(warp):
        described, at = machine.maps[one(warp, get_map)], [one(warp, g) for g in get_place]
        rows, columns = np.indices((described.rows, described.columns))
        base = one(warp, get_to)
        if base % 128:
            raise Fault(f"tensor copies go to multiples of 128 bytes, not to {base}")
        inside(warp, base, 2 * described.columns * described.rows)

        def words():
            where, (row, column) = described.box(*at)
            tile = np.zeros((described.rows, described.columns), np.uint16)
            found = described.array[where]
            tile[row : row + found.shape[0], column : column + found.shape[1]] = found
            return tile

        where = _swizzled(base, rows, columns, described.columns)
        _fetch(warp, mbarrier_of(warp, one(warp, get_ready)), where, words)

    return run


def _bulk_load(machine, each):
    get_to, get_bytes, get_ready = readers(machine, [each.operands[0], each.operands[2], each.operands[3]])
    (get_from,) = readers(machine, each.operands[1:2], np.uint64)

    def run(warp):
        to, count, source = one(warp, get_to), one(warp, get_bytes), one(warp, get_from)
        region, first = _bulk(warp, source, to, count)
        machine.streams.by_threads(region, np.array([first]), count, warp, False)
        granules = to // 2 + np.arange(count // 2)
        _fetch(warp, mbarrier_of(warp, one(warp, get_ready)), granules, lambda: region.data[first : first + count].view(np.uint16))

    return run


# ---- from shared memory: in groups of the thread


@dataclass
class Stores:
    """Of one thread.

    Attributes
    ----------
    agent, stream : int
        Who reads shared memory, who writes global memory.
    committed, last : int
        How many groups there are, the next one is open; and the last one that has a store.
    unread, unwritten : list of int
        The groups of the stores that have yet to read, and to write.
    """

    agent: int
    stream: int
    committed: int = 0
    last: int = 0
    unread: list = field(default_factory=list)
    unwritten: list = field(default_factory=list)


def stores_of(warp) -> Stores:
    """Those of the only lane that runs."""
    (lane,) = np.flatnonzero(warp.lanes)
    if lane not in warp.stores:
        thread, block = int(32 * warp.number + lane), warp.block
        agent = block.order.agent(f"a bulk store of thread {thread}")
        warp.stores[lane] = Stores(agent, block.machine.streams.number(block.number, thread))
    return warp.stores[lane]


def _store(warp, granules: np.ndarray, write) -> Stores:
    """Have the copy engine read these locations, and later ``write(words)``."""
    stores, block = stores_of(warp), warp.block
    group = stores.committed + 1
    access = block.order.by_async(warp, stores.agent, group)
    block.shared.read(granules, access)
    stores.unread.append(group)
    stores.unwritten.append(group)

    def read():
        words = block.shared.words[granules].copy()
        stores.unread.remove(group)
        block.machine.events += 1

        def then():
            write(words)
            stores.unwritten.remove(group)
            block.machine.events += 1

        block.machine.later(then)

    stores.last = group
    block.machine.later(read, 2 * granules.size)
    return stores


def _tensor_store(machine, each):
    tensor_map, place = _tensor_operand(each.operands[0])
    (get_from,) = readers(machine, each.operands[1:])
    (get_map,) = readers(machine, [tensor_map], np.uint64)
    get_place = readers(machine, place, np.int32)

    def run(warp):
        base, described = one(warp, get_from), machine.maps[one(warp, get_map)]
        inside(warp, base, 2 * described.columns * described.rows)
        where, (row, column) = described.box(*[one(warp, g) for g in get_place])
        found = described.array[where]
        rows, columns = np.indices(found.shape)

        def write(words):
            found[...] = words

        _store(warp, _swizzled(base, rows + row, columns + column, described.columns), write)

    return run


def _bulk_store(machine, each):
    (get_to,) = readers(machine, each.operands[:1], np.uint64)
    get_from, get_bytes = readers(machine, each.operands[1:])
    adds = "reduce" in each.opcode

    def run(warp):
        to, source, count = one(warp, get_to), one(warp, get_from), one(warp, get_bytes)
        region, first = _bulk(warp, to, source, count)

        def write(words):
            data = words.view(np.uint8)
            if adds:
                data = (region.data[first : first + count].view(np.float32) + words.view(np.float32)).view(np.uint8)
            region.data[first : first + count] = data

        stores = _store(warp, source // 2 + np.arange(count // 2), write)
        machine.streams.by_bulk(region, first, count, warp, stores.stream, stores.committed + 1, adds)

    return run


# ---- what lines of the L2 cache are, which changes no result

POLICIES = {"L2::evict_first": 1, "L2::evict_last": 2}  # any numbers


def _create_policy(machine, each):
    _, _, policy, kind = each.opcode.split(".")
    to, share = each.operands
    if kind != "b64" or float(share) != 1:
        raise ValueError(f"{each.opcode} of {share}")
    made = np.full(LANES, POLICIES[policy], np.uint64)

    def run(warp):
        warp.write(to, made)

    return run


def _by_policy(build):
    """The same copy, also with a cache policy as its last operand, which has to be one."""

    def build_either(machine, each):
        if ".L2::cache_hint" not in each.opcode:
            return build(machine, each)
        *operands, policy = each.operands
        act = build(machine, each._replace(opcode=each.opcode.replace(".L2::cache_hint", ""), operands=tuple(operands)))
        (get_policy,) = readers(machine, [policy], np.uint64)

        def run(warp):
            if one(warp, get_policy) not in POLICIES.values():
                raise Fault(f"line {each.line}: {policy} is no cache policy")
            act(warp)

        return run

    return build_either


def _bulk(warp, address: int, shared: int, count: int):
    """Region, and offset in it, of a bulk copy's part of global memory."""
    if any(x % 16 for x in (address, shared, count)):
        raise Fault(f"bulk copies take multiples of 16; got {address:#x}, {shared}, {count} bytes")
    inside(warp, shared, count)
    region = warp.block.machine.memory.find(address)
    first = address - region.base
    if first + count > region.data.size:
        raise Fault(f"{count} bytes at {first} of {region.name}, which has {region.data.size}")
    return region, first


def inside(warp, base: int, count: int) -> None:
    """Shared memory has these bytes."""
    if base + count > warp.block.shared.data.size:
        raise Fault(f"{count} bytes at {base} of shared memory, which has {warp.block.shared.data.size}")


def _bulk_commit(machine, each):
    def run(warp):
        stores_of(warp).committed += 1

    return run


def _bulk_wait(machine, each):
    allowed, only_read = int(each.operands[0]), each.opcode.endswith(".read")

    def run(warp):
        stores = stores_of(warp)
        last = stores.committed - allowed
        pending = stores.unread if only_read else stores.unwritten

        def goes_on():
            seen = warp.clocks.seen
            seen[stores.agent] = max(seen[stores.agent], last)
            if not only_read:
                warp.known_streams[stores.stream] = max(warp.known_streams[stores.stream], last)

        over = lambda: not any(group <= last for group in pending)
        if over():
            goes_on()
        else:
            warp.wait_for(f"its own stores, line {each.line}", over, goes_on)

    return run


COPIES = {
    "createpolicy.fractional": _create_policy,
    "cp.async.bulk.tensor.5d.shared": _by_policy(_tensor_load),
    "cp.async.bulk.tensor.5d.global": _by_policy(_tensor_store),
    "cp.async.bulk.shared": _bulk_load,
    "cp.async.bulk.global": _by_policy(_bulk_store),
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32": _bulk_store,
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32": _by_policy(_bulk_store),
    "cp.async.bulk.wait_group": _bulk_wait,
    "cp.async.bulk.commit_group": _bulk_commit,
}
