"""Copies that go on while threads do something else: those of threads, from Ampere on, in groups;
and the copy engine of Hopper. What that brings to shared memory is counted on an mbarrier; what
leaves it forms bulk groups of a thread.
"""

from numba_flash.cuda.ptx.emit import instruction
from numba_flash.cuda.runtime.lang import i32, types, u32, u64

_void = types.void

# Of threads (PTX ISA 9.7.9.25.3): 16, 8 or 4 bytes from memory; zeros if $2 is 0. (A count of bytes
# that is 16 or 0 would become two instructions, one for each.)
copy16 = instruction(
    "copy16",
    "{ .reg .pred ignored; setp.eq.u32 ignored, $2, 0;"
    " cp.async.cg.shared.global [$0], [$1], 16, ignored; }",
    _void, u32, u64, u32,
)  # fmt: skip
copy8 = instruction(
    "copy8",
    "{ .reg .pred ignored; setp.eq.u32 ignored, $2, 0;"
    " cp.async.ca.shared.global [$0], [$1], 8, ignored; }",
    _void, u32, u64, u32,
)  # fmt: skip
copy4 = instruction(
    "copy4",
    "{ .reg .pred ignored; setp.eq.u32 ignored, $2, 0;"
    " cp.async.ca.shared.global [$0], [$1], 4, ignored; }",
    _void, u32, u64, u32,
)  # fmt: skip
copy_wait = instruction("copy_wait", "cp.async.wait_all;", _void)
copy_commit = instruction("copy_commit", "cp.async.commit_group;", _void)


def copy16_far(size):
    """`copy16`, which lets the cache fetch so many bytes around it."""
    return instruction(
        f"copy16_far{size}",
        "{ .reg .pred ignored; setp.eq.u32 ignored, $2, 0;"
        f" cp.async.cg.shared.global.L2::{size}B [$0], [$1], 16, ignored; }}",
        _void, u32, u64, u32,
    )  # fmt: skip


def copy_wait_but(groups):
    """Function that waits for all groups of the thread's copies but its last ones, so many."""
    return instruction(f"copy_wait_but{groups}", f"cp.async.wait_group {groups};", _void)


# Lines of the L2 cache that make room first, and last: what is read or written once, and what other
# blocks will read (PTX ISA 9.7.9.18, createpolicy).
ONCE, AGAIN = "evict_first", "evict_last"
_TO_SHARED, _TO_MEMORY = ".mbarrier::complete_tx::bytes", ".bulk_group"


def _cached(name: str, text: str, uses, *arguments):
    """A copy, and what its lines of the L2 cache are: `ONCE`, `AGAIN`, or None."""
    if uses is None:
        return instruction(name, text, _void, *arguments)
    completion = _TO_SHARED if _TO_SHARED in text else _TO_MEMORY
    hinted = text.replace(completion, f"{completion}.L2::cache_hint").replace(";", ", policy;")
    return instruction(
        f"{name}_{uses}",
        "{ .reg .b64 policy;"
        f" createpolicy.fractional.L2::{uses}.b64 policy, 1.0; {hinted} }}",
        _void, *arguments,
    )  # fmt: skip


def tensor_load_of(uses=None):
    """A box of a tensor map of five dimensions to shared memory (PTX ISA 9.7.9.27)."""
    return _cached(
        "tensor_load",
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [$0], [$1, {$2, $3, $4, $5, $6}], [$7];",
        uses, u32, u64, *[i32] * 5, u32,
    )  # fmt: skip


def tensor_store_of(uses=None):
    """A box of a tensor map of five dimensions from shared memory (PTX ISA 9.7.9.27)."""
    return _cached(
        "tensor_store",
        "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [$1, {$2, $3, $4, $5, $6}], [$0];",
        uses, u32, u64, *[i32] * 5,
    )  # fmt: skip


def bulk_store_of(uses=None):
    """Neighbouring bytes, a multiple of 16, from shared memory (PTX ISA 9.7.9.25)."""
    return _cached(
        "bulk_store",
        "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;",
        uses, u64, u32, u32,
    )  # fmt: skip


def bulk_add_of(uses=None):
    """The same, neighbouring float32 added to those in memory."""
    return _cached(
        "bulk_add",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;",
        uses, u64, u32, u32,
    )  # fmt: skip


tensor_load, tensor_store, bulk_store = tensor_load_of(), tensor_store_of(), bulk_store_of()
# Neighbouring bytes, a multiple of 16, to shared memory (PTX ISA 9.7.9.25).
bulk_load = instruction(
    "bulk_load",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
    _void, u32, u64, u32, u32,
)  # fmt: skip
bulk_commit = instruction("bulk_commit", "cp.async.bulk.commit_group;", _void)
bulk_wait_read = instruction("bulk_wait_read", "cp.async.bulk.wait_group.read 0;", _void)
bulk_wait = instruction("bulk_wait", "cp.async.bulk.wait_group 0;", _void)


def bulk_wait_read_but(groups):
    """Function that waits until what all bulk groups of the thread but its last ones, so many, take
    from shared memory has been read.
    """
    text = f"cp.async.bulk.wait_group.read {groups};"
    return instruction(f"bulk_wait_read_but{groups}", text, _void)
