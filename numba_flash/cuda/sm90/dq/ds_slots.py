"""Where dS of listed tiles lies in memory, until `numba_flash.cuda.sm90.dq.dq` makes dQ of it: a
slot for each tile that a list (`numba_flash.cuda.work.tile_lists`) names.

Tiles are numbered in the order of work items, blocks of keys of a head of k, then of the heads of
its group, then as in the list. The first so many work items whose tiles fit are a section, the next
ones another; memory holds one section at a time. How many there are only the device knows: all that
there could be are launched, and those that are not there end at once.
"""

from typing import NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.number import array, index
from numba_flash.cuda.runtime.lang import cuda, i32, i64, inline, types, u32, u64
from numba_flash.cuda.work import tile_lists

WARP = 32


class Numbers(NamedTuple):
    """What the kernel that numbers tiles gets.

    Attributes
    ----------
    kv_heads, group : int
        Heads of k, and of q for each.
    whole, room : int
        Tiles after which a section ends, and how many it has at most: a work item is not divided.
    counters : int
        How many there are of work items that have been taken.
    """

    kv_heads: int
    group: int
    whole: int
    room: int
    counters: int


def build(threads):
    """Kernel ``ds_slots(tiles, queue, places, ranks, extras, numbers)``: the first block of
    threads makes `places`, in each of the others a warp makes `ranks` of a list, and puts it into
    the `queue` (`numba_flash.cuda.work.tile_lists.build_queue`).

    tiles : lists of tiles of queries for each block of keys; axes that the mask broadcasts may have
        the size 1.
    places : int32 (b0, b1, heads, 1, blocks of keys + 1 + counters): the section of a list times
        the room of one, and the slot there of its first tile. After those of the first head how
        many sections there are, and counters, which become 0.
    ranks : int32 (as tiles, blocks of queries, blocks of keys): a tile's place in its list.
    """
    THREADS = threads

    @inline
    def length_of(tiles, b0, b1, head, block):
        b0 = b0 if tiles.shape[0] > 1 else u32(0)
        b1 = b1 if tiles.shape[1] > 1 else u32(0)
        head = head if tiles.shape[2] > 1 else u32(0)
        return i32(tiles[index(b0), index(b1), index(head), index(block), 0])

    @inline
    def item_of(number, tiles, places, numbers):
        """The `Which` of a work item's first list."""
        block, number = u32(number % u32(tiles.shape[3])), u32(number // u32(tiles.shape[3]))
        heads, b1s = u32(numbers.kv_heads), u32(places.shape[1])
        head, number = u32(number % heads), u32(number // heads)
        first = u32(head * u32(numbers.group))
        return tile_lists.Which(u32(number // b1s), u32(number % b1s), first, block)

    @inline
    def together(number, tiles, places, numbers):
        """How many tiles a work item has."""
        which, total = item_of(number, tiles, places, numbers), i32(0)
        for g in range(i32(numbers.group)):
            head = u32(which.head + u32(g))
            total = i32(total + length_of(tiles, which.b0, which.b1, head, which.block))
        return total

    @inline
    def place(number, before, tiles, places, numbers):
        """Write down where a work item's tiles are; returns how many sections that makes."""
        which, whole = item_of(number, tiles, places, numbers), i32(numbers.whole)
        section = i32(before // whole)
        slot = i32(section * i32(numbers.room) + before % whole)
        for g in range(i32(numbers.group)):
            head = u32(which.head + u32(g))
            own = places[index(which.b0), index(which.b1), index(head), 0]
            own[index(which.block)] = slot
            slot = i32(slot + length_of(tiles, which.b0, which.b1, head, which.block))
        return i32(section + 1)

    def ds_slots(tiles, queue, places, ranks, extras, numbers):
        sums = cuda.shared.array(THREADS, i32)
        thread = i32(cuda.threadIdx.x)
        if cuda.blockIdx.x == 0:
            blocks = i32(tiles.shape[3])
            items = i32(places.shape[0] * places.shape[1] * numbers.kv_heads * blocks)
            each = i32((items + THREADS - 1) // THREADS)
            first, end = i32(thread * each), min(items, i32((thread + 1) * each))
            total = i32(0)
            for number in range(first, end):
                total = i32(total + together(u32(number), tiles, places, numbers))
            sums[thread] = total
            cuda.syncthreads()  # all sums are there
            distance = i32(1)
            while distance < THREADS:
                other = sums[thread - distance] if thread >= distance else i32(0)
                cuda.syncthreads()  # everyone has read
                sums[thread] = i32(sums[thread] + other)
                cuda.syncthreads()  # everyone has written
                distance = i32(2 * distance)
            before, sections = i32(sums[thread] - total), i32(0)
            for number in range(first, end):
                sections = place(u32(number), before, tiles, places, numbers)
                before = i32(before + together(u32(number), tiles, places, numbers))
            if first < end and end == items:
                places[0, 0, 0, 0, index(blocks)] = sections
            for counter in range(thread, i32(numbers.counters), THREADS):
                places[0, 0, 0, 0, index(blocks + 1 + counter)] = i32(0)
        else:
            number = u32(i32(cuda.blockIdx.x - 1) * (THREADS // WARP) + thread // WARP)
            tile_lists.put_in_queue(tiles, queue, number)
            which = tile_lists.which_list(number, tiles.shape)
            if which.b0 < u32(tiles.shape[0]):
                b0, b1, head = index(which.b0), index(which.b1), index(which.head)
                own = tiles[b0, b1, head, index(which.block)]
                for rank in range(thread % WARP, own[0], WARP):
                    at = i32(own[index(1 + rank)] // 2)
                    ranks[b0, b1, head, index(at), index(which.block)] = i32(rank)

    lists = array(types.int32, 5)
    numbers = types.NamedUniTuple(types.int64, len(Numbers._fields), Numbers)
    signature = types.void(lists, lists, lists, lists, types.Tuple(()), numbers)
    return ds_slots, signature, {"launch_bounds": (threads, 1)}


@inline
def after_first(places, sizes):
    """Address of how many sections there are; counters are behind that."""
    words = places.shape[4] - 1 - 2 * sizes.kv_splits
    return u64(ptx.global_address(places) + u64(4 * words))


@inline
def sections(places, sizes):
    """How many there are."""
    return i32(ptx.fetch_word(after_first(places, sizes)))


@inline
def items(places, sizes):
    """How many work items there are to look at in this section."""
    return i64(sizes.items) if sections(places, sizes) > i32(sizes.first_block) else i64(0)


@inline
def claim(places, sizes, kind):
    """The number of the next work item of this section, of the main kernel (0) or that of dQ
    (1).
    """
    counter = i32(1 + kind * i32(sizes.kv_splits) + i32(sizes.first_block))
    return ptx.next_number(u64(after_first(places, sizes) + u64(4 * counter)))


@inline
def in_section(item, places, sizes, block_n):
    """Whether dS of a work item of the main kernel is made now."""
    head, block = i32(item.head * i32(sizes.group)), i32(item.row0 // block_n)
    place = places[index(item.b0), index(item.b1), index(head), 0, index(block)]
    return u32(place) // u32(sizes.blocks) == u32(sizes.first_block)
