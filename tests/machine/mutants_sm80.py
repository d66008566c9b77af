"""Mistakes that one could make in the kernels for tensor cores since Turing, as those for Hopper in `mutants`."""

from mutants import Mutant

FORWARD, BACKWARD, SHARED = "cuda/sm80/forward.py", "cuda/sm80/backward.py", "cuda/sm80/backward_shared.py"
SHARE = "cuda/sm80/share.py"
LOAD, LOAD_BACKWARD, SUM = "cuda/sm80/load.py", "cuda/sm80/load_backward.py", "cuda/sm80/sum_dq.py"
DMMA = "cuda/ptx/mma_float64.py"
DOUBLE_FORWARD, DOUBLE_BACKWARD = "cuda/sm80/forward_float64.py", "cuda/sm80/backward_float64.py"
DOUBLE_SOFTMAX, DOUBLE_SUM = "cuda/sm80/softmax_backward_float64.py", "cuda/sm80/sum_dq_float64.py"
DOUBLE_DBIAS = "cuda/sm80/dbias_float64.py"
PRODUCTS, TILES, MMA = "cuda/sm80/products.py", "cuda/sm80/tiles.py", "cuda/ptx/mma.py"
SOFTMAX, MODIFY, FETCH = "cuda/softmax.py", "cuda/modify.py", "cuda/fetch.py"
DBIAS, STORE_DBIAS = "cuda/sm80/dbias.py", "cuda/store_dbias.py"
WALK_DBIAS, SIMT_DBIAS = "cuda/walk_dbias.py", "cuda/simt/dbias.py"
LISTS, BLOCK = "cuda/tile_lists.py", "cuda/sm80/block.py"
BACKWARD_SPLIT, BEFORE = "cuda/sm80/backward_split.py", "cuda/preprocess.py"
SOFTMAX_BACKWARD = "cuda/sm80/softmax_backward.py"
SPLIT, FRAGMENT, ARGUMENTS = "cuda/split.py", "cuda/fragment.py", "cuda/arguments.py"

MUTANTS_SM80 = (
    # ---- who may touch which shared memory when
    Mutant(
        "no barrier between tiles",
        FORWARD,
        "            cuda.syncthreads()  # this tile is there; the one before has been read\n",
        "",
        "mma",
    ),
    Mutant(
        "copies that nobody waits for",
        FORWARD,
        "                ptx.copy_wait()\n            cuda.syncthreads()  # this tile",
        "                pass\n            cuda.syncthreads()  # this tile",
        "mma",
    ),
    Mutant("the next keys in the slot of these", FORWARD, "load_keys(smem, slot ^ u32(1),", "load_keys(smem, slot,", "mma"),
    Mutant("K overwritten in the only slot", FORWARD, "            cuda.syncthreads()  # V is there; K has been read\n", "", "mma, D128"),
    Mutant("rows of O before they are there", SHARE, "        cuda.syncwarp()\n", "        pass\n", "mma"),
    # ---- tiles and their products
    Mutant(
        "values in the order of their keys",
        FORWARD,
        "BLOCK_N, COLUMNS_V, THREADS, place_of_key,",
        "BLOCK_N, COLUMNS_V, THREADS, None,",
        "mma",
    ),
    Mutant("what follows the last key", LOAD, "u32(1) if there else u32(0)", "u32(1)", "mma, lengths"),
    Mutant("columns beyond the head dimension", LOAD, "if there and column < HEAD_DIM:", "if there:", "mma, D13"),
    Mutant("the upper half of a word", LOAD, "<< u32(16 * half)", "<< u32(0)", "mma, D13"),
    Mutant(
        "rows that end within a chunk", TILES, "return 2 * (padded(head_dim) + CHUNK)", "return 2 * (padded(head_dim) + CHUNK // 2)", "mma"
    ),
    Mutant("eight columns exchanged with their neighbours", MMA, "right[2 * half :][:2]", "right[2 * (1 - half) :][:2]", "mma"),
    Mutant(
        "V that is not transposed",
        PRODUCTS,
        "b = Matrices(32, 16 * b_pitch, True, lines)",
        "b = Matrices(32, 16 * b_pitch, False, lines)",
        "mma",
    ),
    Mutant("the same eight columns twice", MMA, "a[step * 4 // steps :][: 4 // steps]", "a[: 4 // steps]", "mma, Turing"),
    # ---- softmax and the mask
    Mutant("a sum with another shift", SOFTMAX, "            l_i[r] *= alpha\n", "", "mma, steep"),
    Mutant(
        "rows of another lane",
        FORWARD,
        "                i = i32(row + (r // 2 * 16 +",
        "                i = i32(row + (r // 2 * 8 +",
        "mma, causal",
    ),
    Mutant(
        "a tile that the end cuts", "mask.py", "min(nk, i0 + high + 1) - n + 1", "min(nk, i0 + high + 1) - n + 2", "mma, one key missing"
    ),
    Mutant(
        "lengths do not move the band", BLOCK, "i32(low + sequence.shift), i32(high + sequence.shift)", "low, high", "mma, causal lengths"
    ),
    Mutant("parts that leave out a tile of keys", FORWARD, "share = (count + parts - 1) // parts", "share = count // parts", "mma, parts"),
    # ---- options
    Mutant(
        "a bias beyond its end",
        FETCH,
        "i32(x.key + key_of(n))\n        there = u32(1) if i < x.rows and",
        "i32(x.key + key_of(n))\n        there = u32(1) if",
        "mma, bias",
    ),
    Mutant("the mask of another key", MODIFY, "u32(0xFF << (x % 4 * 8))", "u32(0xFF << (x % 2 * 8))", "mma, mask and dropout"),
    Mutant("a key more under a bias", MODIFY, "j >= stop\n", "j > stop\n", "mma, bias"),
    Mutant("random words of other keys", MODIFY, "u32(j) >> u32(3)", "u32(j)", "mma, mask and dropout"),
    Mutant("the lower half for both keys", MODIFY, "ptx.add_upper(word, w.less)", "ptx.add_lower(word, w.less)", "mma, mask and dropout"),
    Mutant("words of a counter in another order", MODIFY, "words.w1, n, 2)", "words.w2, n, 2)", "mma, mask and dropout"),
    Mutant("dropped weights that count", FORWARD, "BEGIN, DROPOUT, not", "BEGIN, False, not", "mma, mask and dropout"),
    Mutant(
        "weights that do not make up for the others", FORWARD, "inverse[r] *= f32(parameters.keep_scale)", "pass", "mma, mask and dropout"
    ),
    Mutant("half of a counter's words", MODIFY, "words.w1, words.w3, AFTER_NEXT)", "words.w1, words.w3, NEXT)", "mma, gradients, dropout"),
    Mutant("words that are not exchanged", MODIFY, "return other if second else x, y if", "return x, y if", "mma, gradients, dropout"),
    Mutant("words from another lane", MODIFY, "exchange(y0, y1, NEXT)", "exchange(y0, y1, AFTER_NEXT)", "mma, gradients, dropout"),
    Mutant(
        "the counter of another query",
        MODIFY,
        "i += i32(query_of(2)) if (cuda.threadIdx.x & AFTER_NEXT)",
        "i += i32(query_of(2)) if (cuda.threadIdx.x & NEXT)",
        "mma, gradients, dropout",
    ),
    Mutant("dP of what is dropped", SOFTMAX_BACKWARD, "dp if w > f32(0) else f32(0)", "dp", "mma, gradients, dropout"),
    # ---- tiles of a mask
    Mutant("a tile that only the band leaves alone", LISTS, "if every and clear else", "if clear else", "mma, tiles of a mask"),
    Mutant(
        "the tile after the next",
        FORWARD,
        "listed(seen, i32(first + count - 1))\n                next0",
        "listed(seen, i32(first + count - 2))\n                next0",
        "mma, tiles of a mask",
    ),
    Mutant(
        "a turn that another tile of the group ends",
        SUM,
        "ends=following.begins or following.left < 0",
        "ends=following.begins",
        "mma, gradients, tiles of a mask",
    ),
    Mutant(
        "blocks that see nothing are waited for",
        LISTS,
        "i32(count + 1) if seen != u32(0) else count",
        "i32(count + 1)",
        "mma, gradients, tiles of a mask",
    ),
    Mutant(
        "the first block of a group replaces all sums",
        SUM,
        "first=tile_lists.is_first(order, at % SHARE)",
        "first=tile_lists.is_first(order, 0)",
        "mma, gradients, tiles of a mask",
    ),
    # ---- float32 as pairs of float16
    Mutant(
        "no low plane of K and V",
        MMA,
        '                        more[i] = _mma(builder, "f16", 1, more[i], high[m], b_low[0][pair])\n',
        "",
        "split",
    ),
    Mutant(
        "no low plane of Q and P",
        MMA,
        '                        more[i] = _mma(builder, "f16", 1, more[i], low[0][m], b_high[pair])\n',
        "",
        "split",
    ),
    Mutant("low planes as large as they are kept", MMA, "ir.Constant(F32, 1 / LOW)", "ir.Constant(F32, 1)", "split"),
    Mutant(
        "columns of V of the tile before",
        MMA,
        "registers[((m * n_tiles + first) * 2 + rest)",
        "registers[(m * n_tiles * 2 + rest)",
        "split, D128",
    ),
    Mutant("low numbers of P that are none", FRAGMENT, "pack((x - high_x) * f32(LOW),", "pack(f32(0),", "split"),
    Mutant("P rounded up where it is cut off", FRAGMENT, "0xFFFFE000, ptx.LOW", "0xFFFFF000, ptx.LOW", "split"),
    Mutant("powers of two that stay in the lse", FORWARD, "ptx.lg2(l * f32(LOWERED))", "ptx.lg2(l)", "split"),
    Mutant("scores with their powers", FORWARD, "if CHANGES else scale_log2 * factor", "if CHANGES else scale_log2", "split"),
    Mutant("O with the power of V", FORWARD, "inverse[r] *= extras.factors", "inverse[r] += 0 * extras.factors", "split"),
    Mutant("O without the centre of V", FORWARD, "M_TILES, DV, CENTRED.values)", "M_TILES, DV, False)", "split, offset"),
    Mutant("an lse without its shift", FORWARD, "value += shifts[", "value += 0 * shifts[", "split, offset"),
    Mutant("a shift without its scale", SPLIT, "f32(f64(scale) * shift)", "f32(shift)", "split, offset"),
    Mutant("the centre of half a word", SPLIT, "x, y = x - c_x, y - c_y", "x, y = x - c_x, y - c_x", "split, offset"),
    Mutant("scores of a softcap without their centre", ARGUMENTS, "cls(not options.bends,", "cls(True,", "split, softcap"),
    Mutant("dropped values without their centre", ARGUMENTS, "not options.dropout)", "True)", "split, dropout"),
    Mutant("a power for each head of q", "cuda/split_rows.py", "i32(number - (head - kv_head * count))", "i32(number)", "split, heads"),
    Mutant("flags of q and k alone", SPLIT, " | keys.flagged | values.flagged", " | keys.flagged", "split, a NaN"),
    Mutant("numbers of dS that are not raised", BACKWARD_SPLIT, "times(dpT, power.up)", "times(dpT, f32(1))", "split, gradients"),
    Mutant("the power of the first warp", BACKWARD_SPLIT, "4 * (part * WARPS + warp)", "4 * (part * WARPS)", "split, gradients"),
    Mutant("the powers of the first queries", SUM, "4 * (row // PART * WARPS + w)", "4 * w", "split, gradients"),
    Mutant(
        "no low numbers of dS",
        BACKWARD_SPLIT,
        "put_low = products.build_put_words(M_TILES, COLUMNS, PITCH_DS, PAIRS)",
        "put_low = put_high",
        "split, gradients",
    ),
    Mutant("no barrier before dQ", BACKWARD_SPLIT, "cuda.syncthreads()  # dS^T is there;", "#", "split, gradients"),
    Mutant("dK with the power of Q", BACKWARD_SPLIT, "f32(LOWERED) * q_factor", "f32(LOWERED)", "split, gradients"),
    Mutant("dV with the power of dO", BACKWARD_SPLIT, "keep_scale * do_factor", "keep_scale", "split, gradients"),
    Mutant("dQ with the power of K", SUM, "f32(LOWERED) * of_head[1]", "f32(LOWERED)", "split, gradients"),
    Mutant("delta without the power of dO", BEFORE, "delta /= factors[2] * factors[3]", "delta /= factors[2]", "split, gradients"),
    Mutant("delta of O with its centre", BEFORE, "(y[i] - own_centre[i])", "y[i]", "split, gradients"),
    Mutant("the lse of keys with their centre", BEFORE, "shift -= extras.shifts[", "shift -= f32(0) * extras.shifts[", "split, gradients"),
    Mutant(
        "scores of a backward pass with their powers", BACKWARD_SPLIT, "scale * q_factor * k_factor", "scale * q_factor", "split, gradients"
    ),
    Mutant(
        "gradients of heads that are not flagged",
        "cuda/simt/backward.py",
        "index(at.head)] != 0",
        "index(at.head)] == 0",
        "split, gradients, a NaN",
    ),
    # ---- warps that share rows
    Mutant("P before the other warp has put it", SHARE, "        meet()  # P of the other warp is there\n", "", "mma, D200"),
    Mutant("P over P that is read", SHARE, "            meet()  # and has been read\n", "", "mma, D200"),
    Mutant(
        "P of the other warp with values of its own", SHARE, "u32(x.v_other + u32(n * NEXT))", "u32(x.v_own + u32(n * NEXT))", "mma, D200"
    ),
    Mutant("the first keys of the other warp alone", SHARE, "u32(x.v_other + u32(n * NEXT))", "x.v_other", "mma, D200"),
    Mutant("a shift of a warp's own", SHARE, "ptx.maximum(best[r], others[r])", "best[r]", "mma, D200"),
    Mutant("a sum over half of the keys", SHARE, "total = l_i[r] + others[r]", "total = l_i[r]", "mma, D200"),
    Mutant("one barrier for all that share rows", SHARE, "FIRST_BARRIER + cuda.threadIdx.x // PAIR", "FIRST_BARRIER", "mma, D200"),
    Mutant("each warp decides whether to rescale", SHARE, "meet_any(find(", "cuda.any_sync(0xFFFFFFFF, find(", "mma, D200"),
    Mutant("O before the other warp has put its columns", SHARE, "        meet()  # all of their rows are there\n", "", "mma, D200"),
    Mutant("the same columns of O for both", SHARE, "u32(part * (2 * OWN))", "u32(0 * part)", "mma, D200"),
    # ---- backward
    Mutant(
        "no barrier between tiles of queries",
        BACKWARD,
        "cuda.syncthreads()  # this tile is there, and dS^T of the last, which has been read\n",
        "pass\n",
        "mma, gradients",
    ),
    Mutant(
        "dS before other warps have put theirs",
        BACKWARD,
        "cuda.syncthreads()  # dS^T is there; this tile has been read\n",
        "pass\n",
        "mma, gradients, little memory",
    ),
    Mutant("P and dS of other warps", SHARED, "            cuda.syncthreads()  # P^T and dS^T are there\n", "", "mma, gradients, D128"),
    Mutant("rows of keys in another order", BACKWARD, "shape.wide, key_of, D)", "shape.wide, None, D)", "mma, gradients"),
    Mutant(
        "dQ out of its turn",
        SUM,
        "load_flag(flag_address(flags, to)) != to.before",
        "load_flag(flag_address(flags, to)) > to.before",
        "mma, gradients",
    ),
    Mutant(
        "a flag before everybody has added",
        BACKWARD,
        "            if n > 1:\n                release(flags, done)",
        "            if n > 0:\n                release(flags, done)",
        "mma, gradients, long",
    ),
    Mutant("a turn that is not awaited", SUM, "begins=at == last or", "begins=at == last and", "mma, gradients, long"),
    Mutant("a sum that replaces the one before", SUM, "if ORDERED and to.first:", "if ORDERED:", "mma, gradients"),
    Mutant(
        "blocks before that add to another copy",
        SUM,
        "before=i32(blocks_before(item, i32(shared * SHARE)) >> doublings),",
        "before=i32(blocks_before(item, i32(shared * SHARE))),",
        "mma, gradients, copies",
    ),
    Mutant(
        "the first block of one copy alone",
        SUM,
        "first=i32(blocks_before(item, at) >> doublings) == 0",
        "first=blocks_before(item, at) == 0",
        "mma, gradients, copies",
    ),
    Mutant("copies from the first of all", SUM, "u64((block + n) % copies)", "u64(n)", "mma, gradients, copies"),
    Mutant(
        "all warps but one go on",
        SHARED,
        "            cuda.syncthreads()  # P^T and dS^T are there\n",
        "            cuda.syncwarp()\n",
        "mma, gradients, D128, long",
    ),
    Mutant("dQ out of its turn where one warp waits", SHARED, "if warp == LAST:", "if warp > LAST:", "mma, gradients, D128, long"),
    Mutant(
        "sums that nobody has written", SUM, "some = row0 < queries and start < stop", "some = row0 < queries", "mma, gradients, causal"
    ),
    Mutant(
        "the same columns of K for all parts of dQ",
        SUM,
        "(column + part * COLUMNS) * 2))\n            if SPLIT",
        "column * 2))\n            if SPLIT",
        "mma, gradients, Turing",
    ),
    Mutant(
        "the head of the group before",
        LOAD_BACKWARD,
        "head = i32(item.head * sizes.group)",
        "head = i32(item.head)",
        "mma, gradients, heads",
    ),
    # ---- the gradient of the bias
    Mutant(
        "no barrier between tiles of the gradient",
        DBIAS,
        "cuda.syncthreads()  # this tile is there; the one before has been read\n",
        "pass\n",
        "mma, bias gradient",
    ),
    Mutant(
        "sums over the tile that is read",
        STORE_DBIAS,
        "meet()  # what was there has been read\n",
        "pass\n",
        "mma, bias gradient",
    ),
    Mutant(
        "sums before all warps' are there",
        STORE_DBIAS,
        "meet()  # all parts of all sums are there\n",
        "pass\n",
        "mma, bias gradient",
    ),
    Mutant("scores with their powers, and their bias", DBIAS, "s[e] *= factor\n", "s[e] *= f32(1)\n", "split, bias gradient"),
    Mutant("dS with its powers", DBIAS, "slope *= factor", "slope *= f32(1)", "split, bias gradient"),
    Mutant("the power of one of two", DBIAS, "of_head[first] * of_head[first + 1]", "of_head[first]", "split, bias gradient"),
    Mutant("the powers of the block's own head", DBIAS, "index(at.b1), index(kv_head)]", "index(at.b1), 0]", "split, bias gradient"),
    Mutant(
        "flagged heads are summed, too",
        WALK_DBIAS,
        "index(at.head)] != 0",
        "index(at.head)] > 1",
        "split, bias gradient, a row far below",
    ),
    Mutant(
        "flagged heads in the place of the others",
        SIMT_DBIAS,
        "x += load(out[index(i), index(j)])",
        "pass",
        "split, bias gradient, a row far below",
    ),
    Mutant(
        "heads that are not flagged a second time",
        SIMT_DBIAS,
        "index(h)] == 0:\n                continue",
        "index(h)] != 0:\n                continue",
        "split, bias gradient, a row far below",
    ),
    Mutant("a sum over half of the rows", STORE_DBIAS, "            x += cuda.shfl_xor_sync(ALL_LANES, x, 16)\n", "", "mma, bias gradient"),
    # ---- float64
    Mutant(
        "terms of the other half", "cuda/simt/tiles.py", "a_smem[index(a0 + tx + 4 * k)", "a_smem[index(a0 + tx + 4 - 4 * k)", "float64"
    ),
    Mutant("the columns of the first lanes", "cuda/simt/tiles.py", "index(8 * j + ty % 8)", "index(8 * j)", "float64, gradients"),
    Mutant("rows of the other half", DMMA, "[a[2 * k + row]], [right]", "[a[2 * k + 1 - row]], [right]", "float64, Ampere"),
    Mutant("terms of the first half twice", "cuda/simt/tiles.py", "b_smem[index(b0 + tx + 4 * k)", "b_smem[index(b0 + tx)", "float64"),
    # ---- float64 of this tier
    Mutant("P as if its rows were its columns", DMMA, "[x[0], x[2], x[1], x[3]]", "[x[0], x[1], x[2], x[3]]", "double"),
    Mutant("copies without their swizzle", "cuda/sm80/load_float64.py", "column // 2 ^ swizzle(row)", "column // 2", "double"),
    Mutant("keys where others are still read", DOUBLE_FORWARD, "cuda.syncthreads()  # V is there; K has been read\n", "pass\n", "double"),
    Mutant("P before it is there", DOUBLE_BACKWARD, "cuda.syncthreads()  # P^T and dS^T are there\n", "pass\n", "double, gradients"),
    Mutant(
        "nobody waits for a turn", DOUBLE_BACKWARD, "                wait(flags, this)  #", "                pass  #", "double, gradients"
    ),
    Mutant("dropped weights of float64 count", DOUBLE_FORWARD, "f64(0) if p[e] < f64(0) else p[e]", "abs(p[e])", "double, dropout"),
    Mutant("tiles of a list as if they were all", DOUBLE_FORWARD, "next0 = i32(following * BLOCK_N)", "pass", "double, mask"),
    Mutant(
        "one word of a bias of float64",
        "cuda/modify.py",
        "registers[at], registers[at + 1])",
        "registers[at], registers[at])",
        "double, everything",
    ),
    Mutant(
        "keys of float64 in memory's order",
        DOUBLE_BACKWARD,
        "COLUMNS_K, shape.wide, key_of)",
        "COLUMNS_K, shape.wide)",
        "double, gradients, D72",
    ),
    Mutant("a derivative of float64 that is left out", DOUBLE_SOFTMAX, "p[e] *= slope[e]", "p[e] *= f64(1)", "double, gradients, D72"),
    Mutant(
        "dropped weights of float64 have gradients",
        DOUBLE_SOFTMAX,
        "dropped |= u32(1 << e) if gone",
        "dropped |= u32(0) if gone",
        "double, gradients, everything",
    ),
    Mutant(
        "sums of float64 that nobody made",
        DOUBLE_SUM,
        "some = some and not tile_lists.is_first",
        "some = some or tile_lists.is_first",
        "double, gradients, blocks",
    ),
    Mutant(
        "keys that are still read, for dbias",
        DOUBLE_DBIAS,
        "cuda.syncthreads()  # V and dO are there; Q and K have been read",
        "pass",
        "double, bias gradient, queries",
    ),
    Mutant(
        "the lse of the first row, for dbias",
        DOUBLE_DBIAS,
        "i, there = i32(row + 8 * r)",
        "i, there = i32(row)",
        "double, bias gradient, keys",
    ),
)
