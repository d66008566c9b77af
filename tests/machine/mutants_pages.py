"""Mistakes that one could make where keys and values lie in pages, as those of `mutants`."""

from mutants import Mutant

LOAD, PAGES, FORWARD, BLOCK = "cuda/sm80/load_pages.py", "cuda/pages.py", "cuda/sm80/forward_few.py", "cuda/sm80/block.py"

MUTANTS_PAGES = (
    # ---- where a key is
    Mutant("the first page for all keys", LOAD, "i64(place_of(i).entry) * x.table.strides[0]", "i64(0)", "pages"),
    Mutant("entries of the table as of 32 bits", LOAD, "* x.table.strides[0]", "* i64(4)", "pages"),
    Mutant("the first word for all that are there", LOAD, "copy_chunk(x, words[w],", "copy_chunk(x, words[0],", "pages"),
    Mutant("rows in a page counted from the first key", PAGES, "u32(u32(key) - u32(entry * u32(SIZE)))", "u32(key)", "pages"),
    Mutant("the first rows of a page again", LOAD, "u32(row + u32(n * STEP))", "u32(row)", "pages, longer"),
    Mutant(
        "the table of the first sequence for all",
        BLOCK,
        "table = extras.page_table[b0, b1]",
        "table = extras.page_table[b0, 0]",
        "pages",
    ),
    Mutant("values of the first head for all", BLOCK, "v[0, :, kv_head]", "v[0, :, 0]", "pages"),
    Mutant("a page of each row for several", LOAD, "if shared % step == 0 else 1", "if shared % step == 0 else 2", "pages of 7"),
    # ---- what is not read
    Mutant("keys behind the last", LOAD, "there = i32(i0 + (step + n) * STEP) < stop", "there = True", "pages"),
    Mutant("keys behind the last, one chunk at a time", LOAD, "chunk, at, i < stop)", "chunk, at, True)", "pages, any size"),
    Mutant("entries behind the last", LOAD, "u32(1) if i < stop else u32(0)", "u32(1)", "pages"),
    # ---- pages that do not exist
    Mutant("a page that does not exist is read", LOAD, "there and page < u32(x.pages.shape[0])", "there", "pages, one missing"),
    Mutant("threads keep it to themselves", FORWARD, "cuda.syncthreads_or(missed) != 0", "missed != 0", "pages, one missing"),
    Mutant("the first share for all parts", PAGES, "threadIdx.x * parts + part,", "threadIdx.x * parts,", "pages, one missing"),
    Mutant("the last page is not looked at", PAGES, "(used + (SIZE - 1)) // SIZE", "used // SIZE", "pages, one missing"),
    Mutant("one page more", PAGES, "page < 0 or page >= pages", "page < 0 or page > pages", "pages, one missing"),
)
