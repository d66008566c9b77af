"""Kernels that may be launched while those before them are still running.

Blocks of such a kernel begin as soon as there is room for them and every block of the kernel before
has let the next one begin, or ended ("Programmatic Dependent Launch and Synchronization" of the
CUDA C++ Programming Guide). What they do before `begin` is done meanwhile, and is touched by nobody
else: it may be anything but an access of global memory. Where a kernel is launched without leave to
begin early (`Launch.early`), both instructions do nothing.
"""

from numba_flash.cuda import ptx
from numba_flash.cuda.lang import inline


@inline
def begin():
    """Wait until all kernels before have ended and their results can be read, then let the next one
    come.

    In this order each kernel that is launched early comes after all before it, not only after the
    last one: that has waited for the others before it let this one begin.
    """
    ptx.griddepcontrol_wait()
    ptx.griddepcontrol_launch_dependents()
