"""One wrapper per PTX instruction that Numba lacks, named like it; no algorithm. Sections are those
of NVIDIA's "PTX ISA". The text of an instruction, its result and its operands are data; `emit` is
the one place that makes code of them.
"""

from numba_flash.cuda.ptx.barrier import (
    barrier_any as barrier_any,
)
from numba_flash.cuda.ptx.barrier import (
    barrier_arrive as barrier_arrive,
)
from numba_flash.cuda.ptx.barrier import (
    barrier_sync as barrier_sync,
)
from numba_flash.cuda.ptx.barrier import (
    fence_mbarrier_init as fence_mbarrier_init,
)
from numba_flash.cuda.ptx.barrier import (
    fence_proxy_async as fence_proxy_async,
)
from numba_flash.cuda.ptx.barrier import (
    griddepcontrol_launch_dependents as griddepcontrol_launch_dependents,
)
from numba_flash.cuda.ptx.barrier import (
    griddepcontrol_wait as griddepcontrol_wait,
)
from numba_flash.cuda.ptx.barrier import (
    mbarrier_arrive as mbarrier_arrive,
)
from numba_flash.cuda.ptx.barrier import (
    mbarrier_expect as mbarrier_expect,
)
from numba_flash.cuda.ptx.barrier import (
    mbarrier_init as mbarrier_init,
)
from numba_flash.cuda.ptx.barrier import (
    mbarrier_test_wait as mbarrier_test_wait,
)
from numba_flash.cuda.ptx.barrier import (
    mbarrier_try_wait as mbarrier_try_wait,
)
from numba_flash.cuda.ptx.barrier import (
    nap as nap,
)
from numba_flash.cuda.ptx.barrier import (
    setmaxnreg as setmaxnreg,
)
from numba_flash.cuda.ptx.copy import (
    AGAIN as AGAIN,
)
from numba_flash.cuda.ptx.copy import (
    ONCE as ONCE,
)
from numba_flash.cuda.ptx.copy import (
    bulk_add_of as bulk_add_of,
)
from numba_flash.cuda.ptx.copy import (
    bulk_commit as bulk_commit,
)
from numba_flash.cuda.ptx.copy import (
    bulk_load as bulk_load,
)
from numba_flash.cuda.ptx.copy import (
    bulk_store as bulk_store,
)
from numba_flash.cuda.ptx.copy import (
    bulk_store_of as bulk_store_of,
)
from numba_flash.cuda.ptx.copy import (
    bulk_wait as bulk_wait,
)
from numba_flash.cuda.ptx.copy import (
    bulk_wait_read as bulk_wait_read,
)
from numba_flash.cuda.ptx.copy import (
    bulk_wait_read_but as bulk_wait_read_but,
)
from numba_flash.cuda.ptx.copy import (
    copy4 as copy4,
)
from numba_flash.cuda.ptx.copy import (
    copy8 as copy8,
)
from numba_flash.cuda.ptx.copy import (
    copy16 as copy16,
)
from numba_flash.cuda.ptx.copy import (
    copy16_far as copy16_far,
)
from numba_flash.cuda.ptx.copy import (
    copy_commit as copy_commit,
)
from numba_flash.cuda.ptx.copy import (
    copy_wait as copy_wait,
)
from numba_flash.cuda.ptx.copy import (
    copy_wait_but as copy_wait_but,
)
from numba_flash.cuda.ptx.copy import (
    tensor_load as tensor_load,
)
from numba_flash.cuda.ptx.copy import (
    tensor_load_of as tensor_load_of,
)
from numba_flash.cuda.ptx.copy import (
    tensor_store as tensor_store,
)
from numba_flash.cuda.ptx.copy import (
    tensor_store_of as tensor_store_of,
)
from numba_flash.cuda.ptx.emit import (
    repeated as repeated,
)
from numba_flash.cuda.ptx.memory import (
    add_flag as add_flag,
)
from numba_flash.cuda.ptx.memory import (
    add_float64 as add_float64,
)
from numba_flash.cuda.ptx.memory import (
    add_four as add_four,
)
from numba_flash.cuda.ptx.memory import (
    add_one as add_one,
)
from numba_flash.cuda.ptx.memory import (
    count_arrival as count_arrival,
)
from numba_flash.cuda.ptx.memory import (
    fetch as fetch,
)
from numba_flash.cuda.ptx.memory import (
    fetch_byte as fetch_byte,
)
from numba_flash.cuda.ptx.memory import (
    fetch_half as fetch_half,
)
from numba_flash.cuda.ptx.memory import (
    fetch_word as fetch_word,
)
from numba_flash.cuda.ptx.memory import (
    global_address as global_address,
)
from numba_flash.cuda.ptx.memory import (
    load_flag as load_flag,
)
from numba_flash.cuda.ptx.memory import (
    load_global_float64 as load_global_float64,
)
from numba_flash.cuda.ptx.memory import (
    load_global_four as load_global_four,
)
from numba_flash.cuda.ptx.memory import (
    load_global_one as load_global_one,
)
from numba_flash.cuda.ptx.memory import (
    load_global_words as load_global_words,
)
from numba_flash.cuda.ptx.memory import (
    load_shared as load_shared,
)
from numba_flash.cuda.ptx.memory import (
    load_shared_float as load_shared_float,
)
from numba_flash.cuda.ptx.memory import (
    load_shared_float64 as load_shared_float64,
)
from numba_flash.cuda.ptx.memory import (
    load_shared_float64s as load_shared_float64s,
)
from numba_flash.cuda.ptx.memory import (
    load_shared_four as load_shared_four,
)
from numba_flash.cuda.ptx.memory import (
    load_shared_half as load_shared_half,
)
from numba_flash.cuda.ptx.memory import (
    load_shared_pair as load_shared_pair,
)
from numba_flash.cuda.ptx.memory import (
    load_shared_words as load_shared_words,
)
from numba_flash.cuda.ptx.memory import (
    next_number as next_number,
)
from numba_flash.cuda.ptx.memory import (
    peek_flag as peek_flag,
)
from numba_flash.cuda.ptx.memory import (
    shared_address as shared_address,
)
from numba_flash.cuda.ptx.memory import (
    stmatrix as stmatrix,
)
from numba_flash.cuda.ptx.memory import (
    store_global as store_global,
)
from numba_flash.cuda.ptx.memory import (
    store_global_float64 as store_global_float64,
)
from numba_flash.cuda.ptx.memory import (
    store_global_float64s as store_global_float64s,
)
from numba_flash.cuda.ptx.memory import (
    store_shared as store_shared,
)
from numba_flash.cuda.ptx.memory import (
    store_shared_float64 as store_shared_float64,
)
from numba_flash.cuda.ptx.memory import (
    store_shared_float64s as store_shared_float64s,
)
from numba_flash.cuda.ptx.memory import (
    store_shared_vector as store_shared_vector,
)
from numba_flash.cuda.ptx.memory import (
    store_shared_zero16 as store_shared_zero16,
)
from numba_flash.cuda.ptx.mma import (
    LOW as LOW,
)
from numba_flash.cuda.ptx.mma import (
    Matrices as Matrices,
)
from numba_flash.cuda.ptx.mma import (
    Planes as Planes,
)
from numba_flash.cuda.ptx.mma import (
    begun_product as begun_product,
)
from numba_flash.cuda.ptx.mma import (
    joined_product as joined_product,
)
from numba_flash.cuda.ptx.mma import (
    load_matrices as load_matrices,
)
from numba_flash.cuda.ptx.mma import (
    product as product,
)
from numba_flash.cuda.ptx.mma import (
    split_product as split_product,
)
from numba_flash.cuda.ptx.mma_float64 import (
    Rows as Rows,
)
from numba_flash.cuda.ptx.mma_float64 import (
    product_float64 as product_float64,
)
from numba_flash.cuda.ptx.mma_float64 import (
    product_swizzled as product_swizzled,
)
from numba_flash.cuda.ptx.scalar import (
    add_lower as add_lower,
)
from numba_flash.cuda.ptx.scalar import (
    add_product as add_product,
)
from numba_flash.cuda.ptx.scalar import (
    add_upper as add_upper,
)
from numba_flash.cuda.ptx.scalar import (
    as_float32 as as_float32,
)
from numba_flash.cuda.ptx.scalar import (
    as_float64 as as_float64,
)
from numba_flash.cuda.ptx.scalar import (
    as_uint32 as as_uint32,
)
from numba_flash.cuda.ptx.scalar import (
    bounded_thread_here as bounded_thread_here,
)
from numba_flash.cuda.ptx.scalar import (
    ex2 as ex2,
)
from numba_flash.cuda.ptx.scalar import (
    lg2 as lg2,
)
from numba_flash.cuda.ptx.scalar import (
    maximum as maximum,
)
from numba_flash.cuda.ptx.scalar import (
    maximum_or_nan as maximum_or_nan,
)
from numba_flash.cuda.ptx.scalar import (
    minima_bfloat16 as minima_bfloat16,
)
from numba_flash.cuda.ptx.scalar import (
    minima_float16 as minima_float16,
)
from numba_flash.cuda.ptx.scalar import (
    minimum as minimum,
)
from numba_flash.cuda.ptx.scalar import (
    mul_wide as mul_wide,
)
from numba_flash.cuda.ptx.scalar import (
    pack_bfloat16 as pack_bfloat16,
)
from numba_flash.cuda.ptx.scalar import (
    pack_float16 as pack_float16,
)
from numba_flash.cuda.ptx.scalar import (
    pack_float16_on_turing as pack_float16_on_turing,
)
from numba_flash.cuda.ptx.scalar import (
    pack_positive_bfloat16 as pack_positive_bfloat16,
)
from numba_flash.cuda.ptx.scalar import (
    pack_positive_float16 as pack_positive_float16,
)
from numba_flash.cuda.ptx.scalar import (
    pack_positive_float16_on_turing as pack_positive_float16_on_turing,
)
from numba_flash.cuda.ptx.scalar import (
    rcp as rcp,
)
from numba_flash.cuda.ptx.scalar import (
    tanh as tanh,
)
from numba_flash.cuda.ptx.scalar import (
    thread_here as thread_here,
)
from numba_flash.cuda.ptx.scalar import (
    unknown as unknown,
)
from numba_flash.cuda.ptx.scalar import (
    unpack_bfloat16 as unpack_bfloat16,
)
from numba_flash.cuda.ptx.scalar import (
    unpack_float16 as unpack_float16,
)
from numba_flash.cuda.ptx.scalar import (
    unpack_float16_high as unpack_float16_high,
)
from numba_flash.cuda.ptx.wgmma import (
    wgmma_add_narrow as wgmma_add_narrow,
)
from numba_flash.cuda.ptx.wgmma import (
    wgmma_add_registers as wgmma_add_registers,
)
from numba_flash.cuda.ptx.wgmma import (
    wgmma_registers as wgmma_registers,
)
from numba_flash.cuda.ptx.wgmma import (
    wgmma_registers_narrow as wgmma_registers_narrow,
)
from numba_flash.cuda.ptx.wgmma import (
    wgmma_shared as wgmma_shared,
)
from numba_flash.cuda.ptx.wgmma import (
    wgmma_shared_narrow as wgmma_shared_narrow,
)
from numba_flash.cuda.ptx.wgmma import (
    wgmma_split_registers as wgmma_split_registers,
)
from numba_flash.cuda.ptx.wgmma import (
    wgmma_split_shared as wgmma_split_shared,
)
from numba_flash.cuda.ptx.wgmma import (
    wgmma_wait as wgmma_wait,
)
