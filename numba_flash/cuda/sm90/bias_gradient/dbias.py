"""Gradient of an additive bias on Hopper: dbias = dS, summed over the axes that it is broadcast to.

A block has threads that move data, and consumers, each with 64 queries. Blocks are persistent: each
sums one tile of the gradient after the other, in registers, and walks over the tiles of scores that
were made of it, with S and dP once more: every sum has one owner and one order. A consumer goes
through a tile in parts of its keys, for registers; K and V come in such parts, too. Of a stage that
is ahead it starts S of the next part, be it of the next tile, before it waits for dP of this one,
so that tensor cores do not wait for exponentials. The other one needs those registers for what the
options know of a score.

Which tiles come after each other, what moves them, what happens to scores and where sums go is said
by a `DbiasStage`: `numba_flash.cuda.sm90.bias_gradient.noted_dbias` and
`numba_flash.cuda.sm90.bias_gradient.resident_dbias`.
"""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import cuda, f32, i32, inline, u32
from numba_flash.cuda.score import softmax
from numba_flash.cuda.score.swizzle import ROW_BYTES, panel_bytes
from numba_flash.cuda.sm90 import pipeline, wgmma
from numba_flash.cuda.sm90.arguments import one_type
from numba_flash.cuda.sm90.bias_gradient import noted_dbias, resident_dbias
from numba_flash.cuda.sm90.bias_gradient.dbias_stage import ROWS, build_differentiate, first_row
from numba_flash.cuda.sm90.config import NOTED, BiasGradientConfig
from numba_flash.cuda.sm90.hopper_kernel import Arrivals, Roles, hopper_kernel
from numba_flash.cuda.sm90.tiles import WARP_GROUP
from numba_flash.cuda.sm90.wgmma import UNIT


class ConsumerWork(NamedTuple):
    """What all steps of a consumer have in common."""

    s: Any  # float32 fragments: of S of a part of the keys
    p: Any  # of P
    dp: Any  # of dP
    acc: Any  # of dbias, of all parts
    bias: Any  # of a tile, as the stage keeps it
    lse: Any  # of the two queries of this thread
    delta: Any
    smem: int
    me: int
    q_tiles: int  # descriptors of the first tile of Q or dO, and of that of K or V
    k_tiles: int
    given: Any  # the kernel's arguments


def build(config: BiasGradientConfig):
    """Kernel with its signature and compile options; its arguments are those of the stage."""
    tile, dtype = config.tile, config.dtype
    BLOCK_M, PART, PARTS, CONSUMERS = tile.block_m, tile.part, tile.parts, tile.consumers
    SMEM, BFLOAT16 = tile.layout(config.d, config.dv), dtype == "bfloat16"
    QUERIES, KEYS = one_type(SMEM.rows), one_type(SMEM.keys)
    VALUES, VALUES_BYTES, MINE = SMEM.values, 4 * BLOCK_M, ROWS * ROW_BYTES
    SCORES, ALL_SCORES, NONE, ONE = PART // 2, PARTS * PART // 2, 0, 1
    EACH, V_BEHIND_K = 2 if tile.apart else 1, panel_bytes(PART) // UNIT
    stage = (noted_dbias if config.stage == NOTED else resident_dbias).build(config)
    AHEAD, HELD, NUMBER = stage.ahead, stage.held, stage.number
    PENDING = 1 if AHEAD else 0  # products that may still run when dP is needed
    first, is_tile, has_steps = stage.walk.first, stage.walk.is_tile, stage.walk.has_steps
    look, proceed, leave = stage.walk.look, stage.walk.proceed, stage.walk.leave
    take, read, exponents, weigh = stage.take, stage.read, stage.exponents, stage.weigh
    finish, end, parameters = stage.finish, stage.end, stage.parameters
    start_scores = wgmma.build_scores(PART, config.d, BLOCK_M, BFLOAT16)
    start_dp = wgmma.build_scores(PART, config.dv, BLOCK_M, BFLOAT16)
    differentiate = build_differentiate(config.options, SCORES, BFLOAT16)
    zero, _ = softmax.build_zero(ALL_SCORES)

    @inline
    def rows_of(w, n):
        """Descriptor of a consumer's queries in the n-th tile of Q and dO."""
        return u32(w.q_tiles + n % u32(QUERIES.slots) * u32(QUERIES.slot_bytes // UNIT))

    @inline
    def keys_of(w, m):
        """Descriptor of the m-th tile of keys."""
        return u32(w.k_tiles + m % u32(KEYS.slots) * u32(KEYS.slot_bytes // UNIT))

    @inline
    def read_rows(w, n, values):
        """The lse or delta of this thread's queries."""
        row = i32(w.me * ROWS + wgmma.first_row())
        if not AHEAD:
            row = first_row(w.me)
        mine = u32(w.smem + u32(VALUES) + u32(row * 4))
        at = u32(mine + n % u32(QUERIES.slots) * u32(VALUES_BYTES))
        for r in range(2):
            values[r] = ptx.as_float32(u32(ptx.load_shared(u32(at + u32(32 * r)))))

    @inline
    def start(w, n, m):
        """(1) S = Q K^T, by the numbers of the tiles of Q, which is there, and of K."""
        pipeline.wait_ready(w.smem, KEYS, m)
        start_scores(w.s, rows_of(w, n), keys_of(w, m))

    @inline
    def start_next(part, w, step):
        """S of the part after this one; after the last of all the same again, for nobody's use."""
        if part < PARTS - 1:
            start(w, step.n, u32(step.m + u32(EACH * (part + 1))))
        else:
            if step.waits:
                pipeline.wait_ready(w.smem, QUERIES, step.next_n)
            start(w, step.next_n, step.next_m)

    @inline
    def add_part(part, t):
        """dbias += dS of a part of the keys. If AHEAD, its S has begun, and K lies before V; or
        else K and V are tiles of their own.
        """
        w, x, step = t
        smem, k_tile = w.smem, u32(step.m + u32(EACH * part))
        v_tile, v_rows = k_tile, u32(keys_of(w, k_tile) + u32(V_BEHIND_K))
        if not AHEAD:
            start(w, step.n, k_tile)
            v_tile = u32(k_tile + u32(1))
            pipeline.wait_ready(smem, KEYS, v_tile)
            v_rows = keys_of(w, v_tile)
        # (4) dP = dO V^T
        start_dp(w.dp, rows_of(w, u32(step.n + u32(1))), v_rows)
        here = read(part, w, x, step)
        if not AHEAD:
            ptx.wgmma_wait(w.s, w.s, ONE, SCORES, NONE)
            pipeline.release_group(smem, KEYS, k_tile)
        # the options, and S - lse, in the place of P
        exponents(part, w, x, step, here)
        if AHEAD:
            start_next(part, w, step)
        # (2) P = exp(S - lse), and dropout
        weigh(w, step, here)
        ptx.wgmma_wait(w.dp, w.p, PENDING, SCORES, SCORES)
        pipeline.release_group(smem, KEYS, v_tile)
        # (5) dbias = dbias + dS, where dS = P * (dP - delta)
        sums = w.acc[part * SCORES :]
        differentiate(sums, w.p, w.dp, w.delta, parameters(w.given))
        if AHEAD:
            ptx.wgmma_wait(w.s, sums, NONE, SCORES, SCORES)

    add_parts = ptx.repeated(PARTS, add_part)

    @inline
    def add_step(w, x, step):
        """dbias += dS of a tile of scores."""
        do_tile = u32(step.n + u32(1))
        if not AHEAD:
            pipeline.wait_ready(w.smem, QUERIES, step.n)
        if step.begins:
            pipeline.wait_ready(w.smem, QUERIES, do_tile)
        read_rows(w, step.n, w.lse)
        read_rows(w, do_tile, w.delta)
        add_parts((w, x, step))
        if step.ends:
            pipeline.release(w.smem, QUERIES, step.n)
            pipeline.release(w.smem, QUERIES, do_tile)

    def consume(smem, me, given):
        """All steps of this block, for 64 queries."""
        # registers of each thread
        s = cuda.local.array(SCORES, f32)  # fragment of S, of a part of the keys
        p = s  # of P, which needs registers of its own while S of the next part is made
        if AHEAD:
            p = cuda.local.array(SCORES, f32)
        dp = cuda.local.array(SCORES, f32)  # of dP
        acc = cuda.local.array(ALL_SCORES, f32)  # of dbias
        bias = cuda.local.array(HELD, NUMBER)
        lse = cuda.local.array(2, f32)
        delta = cuda.local.array(2, f32)
        q_tiles = wgmma.descriptor(u32(smem + u32(QUERIES.tiles) + u32(me * MINE)), u32(0))
        k_tiles = wgmma.descriptor(u32(smem + u32(KEYS.tiles)), u32(0))
        w = ConsumerWork(s, p, dp, acc, bias, lse, delta, smem, me, q_tiles, k_tiles, given)
        x = first(w)
        if AHEAD:  # (1) of the first part of all
            pipeline.wait_ready(smem, QUERIES, u32(0))
            start(w, u32(0), u32(0))
            ptx.wgmma_wait(s, s, NONE, SCORES, NONE)
        while is_tile(w, x):
            shows, more = take(w, x), has_steps(x)
            zero(acc)
            while more:
                step = look(w, x, shows)
                add_step(w, x, step)
                x, more = proceed(w, x, step), not step.last
            finish(w, x)
            x = leave(w, x)
        end(w, x)

    rings = (
        Arrivals((QUERIES,), 1, CONSUMERS * WARP_GROUP),
        Arrivals((KEYS,), 1, CONSUMERS),
        *stage.rings,
    )
    roles = Roles(tile, stage.producers, consume, senders=stage.senders)
    return hopper_kernel(rings, roles, **stage.arguments)
