"""Kernels that may be launched while those before them are still running.

Blocks of such a kernel begin as soon as there is room for them and every block of the kernel before
has let the next one begin, or ended ("Programmatic Dependent Launch and Synchronization" of the
CUDA C++ Programming Guide). What they do before `begin` is done meanwhile: anything but accesses of
global memory. Where a kernel is launched in the usual way (`Launch.early` is False), its wait is
over at once; the leave that it gives counts if the next one is launched early.
"""

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import inline


@inline
def begin():
    """Wait until all kernels before have ended and their results can be read, then let the next one
    come.

    In this order each kernel that is launched early comes after all before it, not only after the
    last one: that has waited for the others before it let this one begin.
    """
    ptx.griddepcontrol_wait()
    ptx.griddepcontrol_launch_dependents()
