"""Barriers of Hopper: mbarriers (PTX ISA 9.7.13.15), named barriers (9.7.13.1), the proxy fence
(9.7.13.4), registers (9.7.19.5), and those between kernels (9.7.13.13).
"""

from numba_flash.cuda.ptx.emit import emit, instruction, literals
from numba_flash.cuda.runtime.lang import intrinsic, types, u32

_void = types.void

# An mbarrier has an arrival count, a byte count, and the parity of its phase.
mbarrier_init = instruction(
    "mbarrier_init", "mbarrier.init.shared::cta.b64 [$0], $1;", _void, u32, u32
)
mbarrier_arrive = instruction(
    "mbarrier_arrive", "mbarrier.arrive.shared::cta.b64 _, [$0];", _void, u32
)
mbarrier_expect = instruction(
    "mbarrier_expect", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", _void, u32, u32
)
mbarrier_try_wait = instruction(
    "mbarrier_try_wait",
    "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2;"
    " selp.u32 $0, 1, 0, p; }",
    u32, u32, u32,
)  # fmt: skip
# Whether a phase is over, without waiting for it.
mbarrier_test_wait = instruction(
    "mbarrier_test_wait",
    "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [$1], $2;"
    " selp.u32 $0, 1, 0, p; }",
    u32, u32, u32,
)  # fmt: skip
fence_mbarrier_init = instruction(
    "fence_mbarrier_init", "fence.mbarrier_init.release.cluster;", _void
)

# Until all kernels before have ended, and what they wrote can be read by this one.
griddepcontrol_wait = instruction("griddepcontrol_wait", "griddepcontrol.wait;", _void)
# The kernel after may begin when all blocks have said so, or ended.
griddepcontrol_launch_dependents = instruction(
    "griddepcontrol_launch_dependents", "griddepcontrol.launch_dependents;", _void
)

barrier_sync = instruction("barrier_sync", "bar.sync $0, $1;", _void, u32, u32)
# Whether the last argument is not 0 for a thread of those that wait.
barrier_any = instruction(
    "barrier_any",
    "{ .reg .pred p; setp.ne.b32 p, $3, 0; bar.red.or.pred p, $1, $2, p; selp.u32 $0, 1, 0, p; }",
    u32, u32, u32, u32,
)  # fmt: skip
barrier_arrive = instruction("barrier_arrive", "bar.arrive $0, $1;", _void, u32, u32)
fence_proxy_async = instruction("fence_proxy_async", "fence.proxy.async.shared::cta;", _void)


# So many nanoseconds, about.
nap = instruction("nap", "nanosleep.u32 $0;", _void, u32)


@intrinsic
def setmaxnreg(context, COUNT, INCREASE):
    """``setmaxnreg.inc`` or ``.dec`` to COUNT registers per thread; by all warps of a group."""
    values = literals(COUNT, INCREASE)
    if values is None:
        return None
    count, increase = values

    def codegen(context, builder, signature, values):
        emit(builder, f"setmaxnreg.{'inc' if increase else 'dec'}.sync.aligned.u32 {count};")
        return context.get_dummy_value()

    return types.void(COUNT, INCREASE), codegen
