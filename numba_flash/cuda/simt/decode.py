"""Forward pass of few queries with many keys, on any CUDA GPU: a block of threads has the queries
of all heads that read the same keys, and a part of these, so that each key is read once.

A thread has one key of a tile of S = Q K^T, and all its rows: K goes through shared memory, Q stays
there. Of O += P V it has some columns, and one of SHARES parts of the tile's keys, so that V is
read straight from memory, and by nobody twice.
"""

import math

from numba_flash import mask
from numba_flash.cuda.arguments import extras_type, parameters_type
from numba_flash.cuda.number import ACCUMULATOR, array, build_convert, index
from numba_flash.cuda.runtime.lang import cuda, device, i64, once, types
from numba_flash.cuda.score import score
from numba_flash.cuda.score.score import Head, Region
from numba_flash.cuda.simt import tiles
from numba_flash.cuda.work.pages import build_access, build_keys, build_missing
from numba_flash.cuda.work.sequence import build_sequence

NEG_INF = -math.inf


@once
def build_scores(dtype, tile, head_dim, options):
    """``multiply(s, q_smem, k_smem, k, col0)``: a thread's column of S, its rows of one key;
    ``weigh(p_smem, region, at, edge, scale_log2, extras, parameters)``: what the options make of
    it, in shared memory, where it lies; -inf where hidden.
    """
    ROWS, DEPTH, GROUP = tile.rows, tile.depth, tile.group
    HEAD_DIM, ROW_STEP = head_dim, tile.threads // tile.depth
    STEPS, VECTOR = tile.block_n // ROW_STEP, tiles.vector(tile.depth, dtype)
    ACC, MODIFIED = ACCUMULATOR[dtype], options.modifies
    padded = tile.padded(head_dim)
    fetch_rows = tiles.build_fetch_rows(dtype, head_dim, padded, ROW_STEP, options.paged)
    score_of = score.build_score(dtype, options)

    @device
    def multiply(s, q_smem, k_smem, k, col0):
        me, first = cuda.threadIdx.x, cuda.threadIdx.x // DEPTH
        lane = cuda.threadIdx.x % DEPTH
        regs, x = cuda.local.array(STEPS, ACC), cuda.local.array(VECTOR, ACC)
        for r in range(ROWS):
            s[r] = ACC(0)
        fetch_rows(regs, k, col0, first, lane, STEPS)
        for d0 in range(0, HEAD_DIM, DEPTH):
            cuda.syncthreads()  # everyone has read the previous chunk
            for i in range(STEPS):
                k_smem[index(first + i * ROW_STEP), index(lane)] = regs[i]
            cuda.syncthreads()  # the chunk is complete
            if d0 + DEPTH < HEAD_DIM:  # the next one is on its way while this one is multiplied
                fetch_rows(regs, k, col0, first, d0 + DEPTH + lane, STEPS)
            for d in range(0, DEPTH, VECTOR):
                for c in range(VECTOR):
                    x[c] = k_smem[index(me), index(d + c)]
                for r in range(ROWS):
                    for c in range(VECTOR):
                        s[r] += q_smem[index(r), index(d0 + d + c)] * x[c]

    @device
    def weigh(p_smem, region, at, edge, scale_log2, extras, parameters):
        me = cuda.threadIdx.x
        j = region.col0 + me
        for r in range(ROWS):
            row = region.row0 + r
            i, x = row // GROUP, ACC(NEG_INF)
            there = row < region.rows and j < region.cols
            if MODIFIED:
                if there and mask.visible(i, j, region.low, region.high):
                    raw = p_smem[index(me), index(r)]
                    head = Head(at.b0, at.b1, at.batch, at.head + row % GROUP, at.heads)
                    x, _ = score_of(raw, i, j, head, extras, parameters)
            elif not edge or (there and mask.visible(i, j, region.low, region.high)):
                x = p_smem[index(me), index(r)] * ACC(scale_log2)
            p_smem[index(me), index(r)] = x

    return multiply, weigh


@once
def build_values(dtype, out_dtype, tile, head_dim_v, pages):
    """``multiply(acc, p_smem, v, col0, careful)``: O += P V, a thread's columns and its share of
    the keys, of a cache if there are `pages`; if `careful`, terms of weight -0.0 are absent, not
    zero times v.

    ``write(o, o_smem, acc, inverse, row0, rows)``: all shares are added in their order, and rows of
    O (heads, n, head_dim) stored in `out_dtype`, row r times ``inverse[r]``.
    """
    ROWS, KEYS, GROUP = tile.rows, tile.block_n, tile.group
    LANES = tile.lanes(head_dim_v)
    SHARES, COLS = tile.threads // LANES, -(-head_dim_v // LANES)
    AHEAD = tile.ahead
    HEAD_DIM_V, THREADS, LOADS = head_dim_v, tile.threads, AHEAD * COLS
    ACC = ACCUMULATOR[dtype]
    load, _ = build_convert(dtype)
    _, store = build_convert(out_dtype)
    element, length = build_access(pages)

    @device
    def absent(weight):
        return weight == ACC(0) and math.copysign(ACC(1), weight) < ACC(0)

    @device
    def add(acc, p_smem, j, x, first, careful):
        weights = cuda.local.array(ROWS, ACC)
        for r in range(ROWS):
            weights[r] = p_smem[index(j), index(r)]
        for r in range(ROWS):
            if not (careful and absent(weights[r])):
                for c in range(COLS):
                    acc[r * COLS + c] += weights[r] * x[first + c]

    @device
    def add_four(acc, p_smem, j, x, first, careful):
        add(acc, p_smem, j, x, first, careful)
        add(acc, p_smem, j + SHARES, x, first + COLS, careful)
        add(acc, p_smem, j + 2 * SHARES, x, first + 2 * COLS, careful)
        add(acc, p_smem, j + 3 * SHARES, x, first + 3 * COLS, careful)

    @device
    def add_all(acc, p_smem, j, x, careful):
        add_four(acc, p_smem, j, x, 0, careful)
        if AHEAD > 4:
            add_four(acc, p_smem, j + 4 * SHARES, x, 4 * COLS, careful)

    @device
    def multiply(acc, p_smem, v, col0, careful):
        share, lane = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        x, last = cuda.local.array(LOADS, ACC), length(v) - 1
        for j in range(share, KEYS, AHEAD * SHARES):
            for n in range(AHEAD):  # all are on their way before any is used
                for c in range(COLS):
                    d = min(lane + c * LANES, HEAD_DIM_V - 1)
                    i = min(col0 + j + n * SHARES, last)
                    x[n * COLS + c] = load(element(v, i, d))
            if careful:
                add_all(acc, p_smem, j, x, True)
            else:
                add_all(acc, p_smem, j, x, False)

    @device
    def write(o, o_smem, acc, inverse, row0, rows):
        share, lane = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        for turn in range(SHARES):
            if share == turn:
                for r in range(ROWS):
                    for c in range(COLS):
                        d = lane + c * LANES
                        if d < HEAD_DIM_V:
                            before = o_smem[index(r), index(d)] if turn > 0 else ACC(0)
                            o_smem[index(r), index(d)] = before + acc[r * COLS + c]
            cuda.syncthreads()  # this share's sums are there
        for number in range(cuda.threadIdx.x, ROWS * HEAD_DIM_V, THREADS):
            r, d = number // HEAD_DIM_V, number % HEAD_DIM_V
            row = row0 + r
            if row < rows:
                x = inverse[index(r)]  # of a row that has seen nothing 0, and whatever O is
                if x != ACC(0):
                    x *= o_smem[index(r), index(d)]
                o[index(row % GROUP), index(row // GROUP), index(d)] = store(x)

    return multiply, write


@once
def build_fold(dtype, tile):
    """``fold_maxima(x_smem, fold_smem)``, ``fold_sums``: of each row of x[key, row], over all keys,
    by threads that share a row; each of these has its part in ``fold[part, row]`` then.
    """
    ROWS, KEYS, FOLDS, ACC = tile.rows, tile.block_n, tile.folds, ACCUMULATOR[dtype]

    @device
    def fold_maxima(x_smem, fold_smem):
        row, part = cuda.threadIdx.x % ROWS, cuda.threadIdx.x // ROWS
        largest = ACC(NEG_INF)
        if part < FOLDS:
            for j in range(part, KEYS, FOLDS):
                largest = max(largest, x_smem[index(j), index(row)])
            fold_smem[index(part), index(row)] = largest

    @device
    def fold_sums(x_smem, fold_smem):
        row, part = cuda.threadIdx.x % ROWS, cuda.threadIdx.x // ROWS
        total = ACC(0)
        if part < FOLDS:
            for j in range(part, KEYS, FOLDS):
                total += x_smem[index(j), index(row)]
            fold_smem[index(part), index(row)] = total

    return fold_maxima, fold_sums


def build(dtype, out_dtype, head_dim, head_dim_v, write_lse, options, tile):
    """Kernel ``decode_simt(q, k, v, o, lse, extras, scale_log2, low, high, kv_splits, parameters)``
    with its signature and compile options.

    q, k, v, o, lse, extras, scale_log2, low, high, parameters : as in `simt.forward`, in pages too.
    kv_splits : of the keys; each has results of its own, one after the other along b0 of o and lse.

    Rows are those of all heads that share keys: row r is query ``r // group`` of head
    ``r % group``.
    """
    ROWS, KEYS, GROUP = tile.rows, tile.block_n, tile.group
    FOLDS, PADDED, THREADS = tile.folds, tile.padded(head_dim), tile.threads
    HEAD_DIM, COLUMNS = head_dim, max(PADDED, head_dim_v)
    OUTPUTS = tile.rows * -(-head_dim_v // tile.lanes(head_dim_v))
    PITCH_K, PITCH_P = tile.pitch(tile.depth, dtype), tile.pitch(ROWS, dtype)
    ALIGNMENT = tiles.ALIGNMENT
    ACC, NAN = ACCUMULATOR[dtype], math.nan
    WRITE_LSE, HIDES, SEQUENCES = write_lse, score.hides(options), options.sequences
    load, _ = build_convert(dtype)
    sequence_of = build_sequence(options)
    capacity, heads_of, keys_of = build_keys(options)
    missing, PAGED = build_missing(options), options.paged is not None
    scores, weigh = build_scores(dtype, tile, head_dim, options)
    values, write = build_values(dtype, out_dtype, tile, head_dim_v, options.paged)
    fold_maxima, fold_sums = build_fold(dtype, tile)
    power, log_sum = score.build_exponential(dtype, options)

    def decode_simt(q, k, v, o, lse, extras, scale_log2, low, high, kv_splits, parameters):
        # shared by the block
        q_smem = cuda.shared.array((ROWS, COLUMNS), ACC, ALIGNMENT)  # Q; in the end O
        k_smem = cuda.shared.array((KEYS, PITCH_K), ACC, ALIGNMENT)  # some columns of K
        p_smem = cuda.shared.array((KEYS, PITCH_P), ACC, ALIGNMENT)  # S^T, then P^T
        fold_smem = cuda.shared.array((FOLDS, ROWS), ACC)  # of maxima and sums of each row
        m_smem = cuda.shared.array(ROWS, ACC)  # m of each row
        shift_smem = cuda.shared.array(ROWS, ACC)  # the same; 0 if it has seen nothing
        alpha_smem = cuda.shared.array(ROWS, ACC)  # what O has to be multiplied by
        # registers of each thread
        s = cuda.local.array(ROWS, ACC)  # of S, its key
        acc = cuda.local.array(OUTPUTS, ACC)  # its part of O
        l_i = cuda.local.array(ROWS, ACC)  # its part of the sums

        nq, nk, heads, me = q.shape[3], capacity(extras, k), q.shape[2], cuda.threadIdx.x
        blocks, number = (nq * GROUP + ROWS - 1) // ROWS, i64(cuda.blockIdx.x)
        row0, number = number % blocks * ROWS, number // blocks
        part, number = number % kv_splits, number // kv_splits
        kv_head, number = number % k.shape[2], number // k.shape[2]
        b0, b1 = number // q.shape[1], number % q.shape[1]
        head = kv_head * GROUP
        at = Head(b0, b1, number, head, heads)
        q_heads = q[b0, b1, head : head + GROUP]
        k_head, v_head = heads_of(k, v, b0, b1, kv_head)
        rows, invalid = nq * GROUP, False
        if SEQUENCES:
            sequence = sequence_of(extras, b0, b1, nq, nk)
            nq, nk, invalid = sequence.queries, sequence.keys, sequence.invalid
            if PAGED and cuda.syncthreads_or(missing(k, extras, at, nk, 0, 1)):
                nq, nk, invalid = 0, 0, True
            k_head, v_head = keys_of(k_head, v_head, extras, at, 0, nk)
            low, high = low + sequence.shift, high + sequence.shift
        for at_smem in range(me, ROWS * PADDED, THREADS):
            r, d = at_smem // PADDED, at_smem % PADDED
            row, x = row0 + r, ACC(0)
            if row < nq * GROUP and d < HEAD_DIM:
                x = load(q_heads[index(row % GROUP), index(row // GROUP), index(d)])
            q_smem[index(r), index(d)] = x
        if me < ROWS:
            m_smem[index(me)] = ACC(NEG_INF)
        for r in range(ROWS):
            l_i[r] = ACC(0)
        for i in range(OUTPUTS):
            acc[i] = ACC(0)

        # the tiles of keys that the block's rows see, and of these its part
        query0, query1 = row0 // GROUP, (min(row0 + ROWS, nq * GROUP) + GROUP - 1) // GROUP
        start, stop = mask.kv_range(query0, query1, nk, low, high)
        first, count = start // KEYS, i64(0)
        if start < stop and query0 < query1:
            count = (stop + KEYS - 1) // KEYS - first
        share = (count + kv_splits - 1) // kv_splits
        first, last = first + min(part * share, count), first + min((part + 1) * share, count)
        for n in range(first, last):
            col0 = n * KEYS
            region = Region(row0, col0, nq * GROUP, nk, low, high)
            edge = col0 + KEYS > nk or not mask.all_visible(
                query0, query1, col0, col0 + KEYS, low, high
            )
            # (1) S = Q K^T
            scores(s, q_smem, k_smem, k_head, col0)
            for r in range(ROWS):
                p_smem[index(me), index(r)] = s[r]
            # (2) the options; in base 2 without any
            weigh(p_smem, region, at, edge, scale_log2, extras, parameters)
            cuda.syncthreads()  # all scores are there
            fold_maxima(p_smem, fold_smem)
            cuda.syncthreads()  # all parts of the maxima are there
            # (3) m_new = max(m, rowmax(S)); a row that has seen nothing is shifted by 0
            if me < ROWS:
                m_new = m_smem[index(me)]
                for t in range(FOLDS):
                    m_new = max(m_new, fold_smem[index(t), index(me)])
                shift = m_new if m_new != ACC(NEG_INF) else ACC(0)
                alpha_smem[index(me)] = power(m_smem[index(me)] - shift)
                m_smem[index(me)] = m_new
                shift_smem[index(me)] = shift
            cuda.syncthreads()  # everyone sees maxima and factors
            # (4) P = exp(S - m_new), l = alpha l + rowsum(P); each thread sums its own keys
            for r in range(ROWS):
                x = p_smem[index(me), index(r)]
                p = power(x - shift_smem[index(r)])
                l_i[r] = l_i[r] * alpha_smem[index(r)] + p
                p_smem[index(me), index(r)] = p if x != ACC(NEG_INF) else ACC(-0.0)
                for c in range(OUTPUTS // ROWS):
                    acc[r * (OUTPUTS // ROWS) + c] *= alpha_smem[index(r)]
            cuda.syncthreads()  # all of P is there
            # (5) O = alpha O + P V
            values(acc, p_smem, v_head, col0, edge or HIDES)

        cuda.syncthreads()  # P has been read
        for r in range(ROWS):
            p_smem[index(me), index(r)] = l_i[r]
        cuda.syncthreads()  # all parts of l are there
        fold_sums(p_smem, fold_smem)
        cuda.syncthreads()  # fewer are there
        # (6) O = O / l, lse = m + log l; a row that saw nothing has O = 0, lse = -inf
        if me < ROWS:
            l, row = ACC(0), row0 + me
            for t in range(FOLDS):
                l += fold_smem[index(t), index(me)]
            if row >= nq * GROUP:
                l = ACC(0)
            inverse = ACC(0) if l == ACC(0) else ACC(1) / l
            alpha_smem[index(me)] = ACC(NAN) if invalid else inverse
            if WRITE_LSE and row < rows:
                nothing = ACC(NAN) if invalid else ACC(NEG_INF)
                value = log_sum(m_smem[index(me)], l) if l != ACC(0) else nothing
                into = part * q.shape[0] + b0
                lse[index(into), index(b1), index(head + row % GROUP), index(row // GROUP)] = value
        into = part * q.shape[0] + b0
        o_heads = o[into, b1, head : head + GROUP]
        write(o_heads, q_smem, acc, alpha_smem, row0, rows)

    signature = types.void(
        *[array(dtype, 5)] * 3,
        array(out_dtype, 5),
        array(ACC, 4),
        extras_type(options),
        *(types.float64, i64, i64, i64),
        parameters_type(options),
    )
    return decode_simt, signature, {"launch_bounds": (tile.threads, tile.min_blocks)}
