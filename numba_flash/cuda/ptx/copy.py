"""Copies that go on while threads do something else: those of threads, from Ampere on, in groups;
and the copy engine of Hopper. What that brings to shared memory is counted on an mbarrier; what
leaves it forms bulk groups of a thread.
"""

from numba_flash.cuda.lang import i32, types, u32, u64
from numba_flash.cuda.ptx.emit import instruction

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


# Tensor copies (PTX ISA 9.7.9.27): a box of a tensor map of five dimensions.
tensor_load = instruction(
    "tensor_load",
    "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [$0], [$1, {$2, $3, $4, $5, $6}], [$7];",
    _void, u32, u64, *[i32] * 5, u32,
)  # fmt: skip
tensor_store = instruction(
    "tensor_store",
    "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [$1, {$2, $3, $4, $5, $6}], [$0];",
    _void, u32, u64, *[i32] * 5,
)  # fmt: skip

# Bulk copies (9.7.9.25): neighbouring bytes, a multiple of 16; or float32 added to memory.
bulk_load = instruction(
    "bulk_load",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
    _void, u32, u64, u32, u32,
)  # fmt: skip
bulk_store = instruction(
    "bulk_store",
    "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;",
    _void, u64, u32, u32,
)  # fmt: skip
bulk_add = instruction(
    "bulk_add",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;",
    _void, u64, u32, u32,
)  # fmt: skip

bulk_commit = instruction("bulk_commit", "cp.async.bulk.commit_group;", _void)
bulk_wait_read = instruction("bulk_wait_read", "cp.async.bulk.wait_group.read 0;", _void)
bulk_wait = instruction("bulk_wait", "cp.async.bulk.wait_group 0;", _void)
