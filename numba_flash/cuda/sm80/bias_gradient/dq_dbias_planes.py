"""dQ and the gradient of an additive bias at once, of float32 on tensor cores, where all keys of a
head fit into shared memory: as `numba_flash.cuda.sm80.bias_gradient.dq_dbias`, from planes of
float16 (`numba_flash.cuda.passes.write_planes`).

K and V come in chunks of 64 keys through a ring in shared memory, the next ones while the products
of these are made, also from one head to the next; two warps share 16 rows, and have half of each
chunk. The bias lies in shared memory beside it. Q and dO of a head are in registers.
"""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import OF_DBIAS, extras_type
from numba_flash.cuda.number import array
from numba_flash.cuda.passes.store_dbias import Fragments, build_store
from numba_flash.cuda.runtime.lang import cuda, f32, i32, inline, once, types, u32, u64
from numba_flash.cuda.score import fragment, softmax
from numba_flash.cuda.score.score import LOG2E
from numba_flash.cuda.sm80.backward.store_dq import build_add_dq
from numba_flash.cuda.sm80.bias_gradient.dbias import synchronise
from numba_flash.cuda.sm80.bias_gradient.load_dq_dbias import head_address
from numba_flash.cuda.sm80.config import BiasGradientConfig
from numba_flash.cuda.sm80.operands import products, products_planes
from numba_flash.cuda.sm80.short_heads.head_planes import build_pack, inverse_power
from numba_flash.cuda.sm80.short_heads.load_short_head import (
    FLOAT,
    VECTOR,
    WAYS,
    Tensors,
    build_loads,
    build_resident_bias,
    head_number,
)
from numba_flash.cuda.sm80.tiles import KEYS, padded, pitch
from numba_flash.cuda.work.broadcast import Walk, build_coordinates
from numba_flash.cuda.work.walk_dbias import Space, build_places, build_share, extent_of

DBIAS = 16  # registers of dbias of a warp's keys of a chunk


class Registers(NamedTuple):
    """Of each thread."""

    s: Any
    dp: Any
    ds: Any
    acc: Any
    dq_acc: Any
    q: Any
    do: Any
    lse: Any
    delta: Any
    up: Any
    down: Any
    factors: Any
    here: Any


class PlanesWalk(NamedTuple):
    """A block's way over the heads that its part of the bias is shared by: number and coordinates
    of the first, all of them, and what it reads and writes.
    """

    number: int
    walk: Walk
    space: Space
    row0: int
    smem: int
    bias: int
    tensors: Tensors
    dq: Any
    extras: Any
    scale: float


class HeadStep(NamedTuple):
    """A block's work on a head: the slot of its first chunk, the numbers of the head and of the
    next one, whether there is one, and where dQ of the one before goes, 0 if there was none, with
    its factor.
    """

    way: PlanesWalk
    work: Registers
    slot: int
    here: int
    next: int
    more: bool
    before: int
    before_factor: float


@once
def build_part(shape, tile):
    """``part(number, keys, values, turn)``: S, P, dP, dS of some of a warp's keys of a chunk, added
    to dbias, and its dS K to dQ.
    """
    PART = tile.part
    D, DV = padded(shape.head_dim), padded(shape.head_dim_v)
    PITCH_K, PITCH_V, THREADS = pitch(2 * D), pitch(2 * DV), tile.threads
    SIXTEENS = PART // 16
    planes_k, planes_v = ptx.Planes(D // 4, 2 * D), ptx.Planes(DV // 4, 2 * DV)
    # whose bits are those of the forward pass: what a large score is off, its lse is off, too
    q_kt = products_planes.build_joined_nt(1, PART, D, PITCH_K, planes_k)
    do_vt = products_planes.build_joined_nt(1, PART, DV, PITCH_V, planes_v)
    ds_k, _ = products_planes.build_joined_nn(1, D, PART, PITCH_K, ptx.Planes(PART // 4, 2 * D))
    pack = build_pack(PART // 4, 1.0)

    @inline
    def part(number, k, v, t):
        w = t.work
        # (1) S = Q K^T
        q_kt(w.s, w.q, k)
        # (4) dP = dO V^T
        do_vt(w.dp, w.do, v)
        for n in range(2 * SIXTEENS):
            r, first = n % 2, number * SIXTEENS + n // 2
            bias = ptx.load_shared_four(u32(t.way.bias + u32((first * 2 + r) * THREADS * VECTOR)))
            for x in range(4):
                own = x // 2 * 4 + 2 * r + x % 2
                e = n // 2 * 8 + own
                # (2) P = exp(S - lse)
                score = w.s[e] * w.factors[0] + bias[x]
                p = ptx.ex2((score - w.lse[r]) * f32(LOG2E))
                # (5) dbias = dbias + dS, where dS = P * (dP - delta)
                w.dp[e] = p * (w.dp[e] * w.up[r] - w.delta[r])
                w.acc[first * 8 + own] += w.dp[e] * w.down[r]
        # (7) dQ = dQ + dS K
        pack(w.ds, w.dp)
        ds_k(w.dq_acc, w.ds, k)

    return part


@once
def build_go(shape, places, tile):
    """``go(way, work)``: the whole walk, with the first chunks on their way already."""
    (place_of, following), CHUNKS, AHEAD = places, tile.chunks, tile.slots - 1
    SLOTS, SMEM = tile.slots, tile.layout(shape)
    Q, DO, ROWS, HEAD = SMEM.q, SMEM.do, SMEM.rows, SMEM.head
    K, V, DQ, SLOT = SMEM.k, SMEM.v, SMEM.dq, SMEM.slot
    D, DV = padded(shape.head_dim), padded(shape.head_dim_v)
    PITCH_K, PITCH_V, DELTA = pitch(2 * D), pitch(2 * DV), FLOAT * tile.block_m
    Q_WORDS, DO_WORDS = D // 4, DV // 4
    hold_q, hold_do = products.build_hold(1, D, PITCH_K), products.build_hold(1, DV, PITCH_V)
    part, (put_dq, add_dq) = build_part(shape, tile), build_add_dq(shape.head_dim, tile)
    load_queries, load_keys = build_loads(shape, tile)
    PART, PARTS = tile.part, KEYS // tile.part
    wait, OUTPUTS = ptx.copy_wait_but(AHEAD - 1), D // 2
    zero, _ = softmax.build_zero(OUTPUTS)

    @inline
    def hold(x, w):
        """What the head's products are multiplied by: those of q and k, and of dS and k; and
        whether it is computed here. Q, dO and the rows of this warp, with powers of two for each
        row of dS.
        """
        head = u32(x.smem + u32(HEAD))
        factors, w.here[0] = ptx.load_shared_four(head), ptx.load_shared(u32(head + u32(VECTOR)))
        w.factors[0], w.factors[1] = x.scale * factors[0] * factors[1], x.scale * factors[1]
        vdo = factors[2] * factors[3]
        warp, lane = i32(cuda.threadIdx.x // 32), i32(cuda.threadIdx.x % 32)
        row = i32(warp // WAYS * 16)
        q, do = u32(x.smem + u32(Q + row * PITCH_K)), u32(x.smem + u32(DO + row * PITCH_V))
        hold_q(w.q, q)
        hold_q(w.q[Q_WORDS:], u32(q + u32(2 * D)))
        hold_do(w.do, do)
        hold_do(w.do[DO_WORDS:], u32(do + u32(2 * DV)))
        for r in range(2):
            at = u32(x.smem + u32(ROWS + (row + lane // 4 + 8 * r) * FLOAT))
            w.lse[r] = ptx.as_float32(u32(ptx.load_shared(at)))
            delta = ptx.as_float32(u32(ptx.load_shared(u32(at + u32(DELTA)))))
            down = ptx.as_float32(u32(ptx.load_shared(u32(at + u32(2 * DELTA)))))
            w.up[r] = inverse_power(down)
            w.delta[r], w.down[r] = delta * w.up[r], down * vdo

    @inline
    def put(x, w):
        """dQ of the warp's keys, whose rows get back what the powers of their dS have changed."""
        for e in range(OUTPUTS):
            w.dq_acc[e] *= w.down[e // 2 % 2]
        put_dq(u32(x.smem + u32(DQ)), w.dq_acc)

    @inline
    def add_last(x, address, factor):
        """dQ of the last head whose dQ is in shared memory, which begins at this address."""
        queries = x.space.queries
        add_dq(u32(x.smem + u32(DQ)), address, x.dq.strides[3], x.row0, queries, factor)

    @inline
    def chunk(number, t):
        x, w = t.way, t.work
        wait()
        cuda.syncthreads()  # this chunk is there; the one before has been read
        slot = u32(t.slot + u32(number))
        slot = u32(slot - u32(SLOTS)) if slot >= u32(SLOTS) else slot
        before = u32(slot - u32(1)) if slot > u32(0) else u32(SLOTS - 1)
        if number + AHEAD < CHUNKS:
            load_keys(x.smem, before, x.tensors, t.here, i32(number + AHEAD), x.space.keys)
        elif t.more:
            ahead = i32(number + AHEAD - CHUNKS)
            load_keys(x.smem, before, x.tensors, t.next, ahead, x.space.keys)
        if number == 0:
            hold(x, w)
            if t.before != u64(0):
                add_last(x, t.before, t.before_factor)
        if number == 1 and t.more:  # all warps hold theirs
            load_queries(x.smem, x.tensors, t.next, x.row0, x.space.queries)
        ptx.copy_commit()
        if w.here[0] == 0:
            first = u32(slot * u32(SLOT))
            way = u32(cuda.threadIdx.x // 32 % WAYS * KEYS)
            k = u32(x.smem + u32(K) + first + way * u32(PITCH_K))
            v = u32(x.smem + u32(V) + first + way * u32(PITCH_V))
            for n in range(PARTS):
                more_k, more_v = u32(n * PART * PITCH_K), u32(n * PART * PITCH_V)
                part(i32(PARTS * number + n), u32(k + more_k), u32(v + more_v), t)

    all_chunks = ptx.repeated(CHUNKS, chunk)

    @inline
    def go(x, w):
        number, walk, slot = x.number, x.walk, u32(0)
        before, before_factor = u64(0), f32(0)
        while number < x.space.stop:
            here = place_of(walk, x.space, x.extras).at
            number, walk = i32(number + 1), following(walk, x.space.sizes)
            after, more = place_of(walk, x.space, x.extras).at, number < x.space.stop
            numbers = head_number(here), head_number(after)
            zero(w.dq_acc)
            all_chunks(HeadStep(x, w, slot, *numbers, more, before, before_factor))
            put(x, w)
            before, before_factor = head_address(x.dq, here, here.head), w.factors[1]
            slot = u32(u32(slot + u32(CHUNKS)) % u32(SLOTS))
        cuda.syncthreads()  # dQ of the last head is there
        if before != u64(0):
            add_last(x, before, before_factor)

    return go


def build(config: BiasGradientConfig):
    """Kernel ``dq_dbias_planes_sm80(do, q, k, v, dq, rows, out, extras, scale)`` with its signature
    and compile options.

    do, q, k, v : planes; heads that the flags among the `extras` name are left out.
    dq : float32 (b0, b1, heads, n, head_dim), rows at multiples of 8 bytes.
    rows : as `numba_flash.cuda.sm80.short_heads.write_head_planes` writes them.
    out : float32 (shares, b0, b1, heads, n, n), with sizes 1 where it is summed; the last
        two axes are not.
    """
    shape, options, tile, summed = config.shape, config.options, config.tile, config.summed
    BLOCK_M, BLOCK_N, CHUNKS = tile.block_m, tile.block_n, tile.chunks
    D, DV = padded(shape.head_dim), padded(shape.head_dim_v)
    SMEM, ALL_SCORES, AHEAD = tile.layout(shape), CHUNKS * DBIAS, tile.slots - 1
    BIAS, SCORES, WORDS, OUTPUTS = SMEM.bias, tile.part // 2, tile.part // 2, D // 2
    Q_WORDS, DO_WORDS, WARP_KEYS = D // 2, DV // 2, CHUNKS * WAYS * KEYS
    runs = fragment.runs_of_queries(1, KEYS)
    zero, _ = softmax.build_zero(ALL_SCORES)
    share_of, (_, walked, following) = build_share(summed, BLOCK_M), build_coordinates(summed)
    place_of, _, _ = build_places(options, False, summed, BLOCK_M, BLOCK_N)
    go, keep = build_go(shape, (place_of, following), tile), build_resident_bias(tile)
    load_queries, load_keys = build_loads(shape, tile)
    fragments = Fragments(
        runs, CHUNKS, WAYS * KEYS, tile.warps // WAYS, WAYS, 16, 8, 0, False, synchronise
    )
    store = build_store("float32", shape.wide, False, summed, fragments)

    def dq_dbias_planes_sm80(do, q, k, v, dq, rows, out, extras, scale):
        smem = ptx.shared_address(cuda.shared.array(0, types.uint8, 16))
        # registers of each thread
        s = cuda.local.array(SCORES, f32)  # fragment of S, of some keys
        dp = cuda.local.array(SCORES, f32)  # of dP, then of dS
        ds = cuda.local.array(WORDS, u32)  # planes of dS
        acc = cuda.local.array(ALL_SCORES, f32)  # of dbias
        dq_acc = cuda.local.array(OUTPUTS, f32)  # of dQ, of the warp's keys
        q_words = cuda.local.array(Q_WORDS, u32)  # planes of Q
        do_words = cuda.local.array(DO_WORDS, u32)  # of dO
        lse = cuda.local.array(2, f32)  # of the lane's rows
        delta = cuda.local.array(2, f32)
        up = cuda.local.array(2, f32)  # powers of two of their dS, and what undoes them
        down = cuda.local.array(2, f32)
        factors = cuda.local.array(2, f32)  # of products
        here = cuda.local.array(1, i32)

        nq, nk = i32(q.shape[3]), i32(k.shape[3])
        extent = extent_of(q, k, i32(-nq), nk)
        space, share, number = share_of(i32(cuda.blockIdx.x), extent, u32(out.shape[0]))
        own, walk = space.own, walked(number, space.sizes)
        tensors = Tensors(do, q, k, v, rows, extras.factors, extras.flags)
        row0 = i32(own.i * BLOCK_M)
        first = head_number(place_of(walk, space, extras).at)
        load_queries(smem, tensors, first, row0, nq)
        warp, lane = i32(cuda.threadIdx.x // 32), i32(cuda.threadIdx.x % 32)
        row, way = i32(row0 + warp // WAYS * 16 + lane // 4), i32(warp % WAYS)
        my_bias = u32(smem + u32(BIAS) + u32(cuda.threadIdx.x * VECTOR))
        bias = extras.bias[own.b0, own.b1, own.head]
        keep(my_bias, bias, row, i32(way * KEYS + fragment.first_key()), nq, nk)
        for n in range(AHEAD):
            load_keys(smem, u32(n), tensors, first, i32(n), nk)
            ptx.copy_commit()
        zero(acc)
        of_rows = lse, delta, up, down
        work = Registers(s, dp, ds, acc, dq_acc, q_words, do_words, *of_rows, factors, here)
        go(PlanesWalk(number, walk, space, row0, smem, my_bias, tensors, dq, extras, scale), work)
        # a warp's keys are every other 32
        col0 = i32(way * (KEYS - WARP_KEYS))
        store(out[share, own.b0, own.b1, own.head], acc, smem, row0, col0)

    signature = types.void(
        *[array(u32, 5)] * 4,
        *[array(f32, 5)] * 2,
        array(f32, 6),
        extras_type(options, more=OF_DBIAS),
        f32,
    )
    return dq_dbias_planes_sm80, signature, {"launch_bounds": (tile.threads, tile.min_blocks)}
