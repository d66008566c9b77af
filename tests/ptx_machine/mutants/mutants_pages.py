"""Mistakes that one could make where keys and values lie in pages, as those of `mutants`."""

from ptx_machine.mutants.anchors import Mutant

MUTANTS_PAGES = (
    # ---- where a key is
    Mutant("the first page for all keys", "look_up", "i64(place_of(i).entry) * x.table.strides[0]", "i64(0)", "pages"),
    Mutant("entries of the table as of 32 bits", "look_up", "x.table.strides[0]", "i64(4)", "pages"),
    Mutant("the first word for all that are there", "sm80 copy", "copy_chunk(x, words[w], ...)", "copy_chunk(x, words[0], ...)", "pages"),
    Mutant("rows in a page counted from the first key", "cuda place", "u32(key) - u32(entry * u32(SIZE))", "key", "pages"),
    Mutant("the first rows of a page again", "sm80 copy", "row + u32(n * STEP)", "row", "pages, longer"),
    Mutant("the table of the first sequence for all", "sm80 block_of", "extras.page_table[b0, b1]", "extras.page_table[b0, 0]", "pages"),
    Mutant("values of the first head for all", "sm80 block_of", "v[0, :, kv_head]", "v[0, :, 0]", "pages"),
    Mutant(
        "a page of each row for several",
        "sm80 of",
        "shared // step if shared % step == 0 else 1",
        "shared // step if shared % step == 0 else 2",
        "pages of 7",
    ),
    # ---- what is not read
    Mutant("keys behind the last", "sm80 copy", "i32(i0 + (step + n) * STEP) < stop", "True", "pages"),
    Mutant(
        "keys behind the last, one chunk at a time",
        "copy_each",
        "copy_chunk(..., chunk, at, i < stop)",
        "copy_chunk(..., chunk, at, True)",
        "pages, any size",
    ),
    Mutant("entries behind the last", "look_up", "u32(1) if i < stop else u32(0)", "u32(1)", "pages of 7"),
    # ---- pages that do not exist
    Mutant("a page that does not exist is read", "copy_chunk", "there and page < u32(x.pages.shape[0])", "there", "pages, one missing"),
    Mutant(
        "threads keep it to themselves", "forward_decode finish", "cuda.syncthreads_or(missed) != 0", "missed != 0", "pages, one missing"
    ),
    Mutant(
        "the first share for all parts",
        "missing",
        "cuda.threadIdx.x * kv_splits + part",
        "cuda.threadIdx.x * kv_splits",
        "pages, one missing",
    ),
    Mutant("the last page is not looked at", "missing", "used + (SIZE - 1)", "used", "pages, one missing"),
    Mutant("one page more", "missing", "page >= pages", "page > pages", "pages, one missing"),
)
