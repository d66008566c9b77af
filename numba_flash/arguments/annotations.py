"""What type checkers and editors know of the public functions: which arrays go in, which come out, which options there are."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypedDict, TypeVar

import numpy as np

from numba_flash.arguments.axes import Order
from numba_flash.arguments.block_mask import BlockMask
from numba_flash.arguments.precisions import Precision
from numba_flash.plan import Backend


class DLPackArray(Protocol):
    """What NumPy's, CuPy's, PyTorch's and JAX's arrays have in common."""

    def __dlpack__(self, *args: Any, **options: Any) -> Any:
        """The array as a DLPack capsule."""

    def __dlpack_device__(self) -> Any:
        """Where it lives."""


class CudaArray(Protocol):
    """An array on a GPU that only says where it lies."""

    @property
    def __cuda_array_interface__(self) -> Any:
        """Address, shape, strides and dtype."""


Array: TypeAlias = DLPackArray | CudaArray
"""NumPy or CuPy array, or an object with ``__dlpack__`` or ``__cuda_array_interface__``."""

Integers: TypeAlias = Array | Sequence[int] | Sequence[Sequence[int]]
"""Numbers of queries or keys, offsets, or pages: an array, or lists of integers."""

Window: TypeAlias = tuple[int, int] | list[int]
"""How many keys a query sees to the left and right of its position; -1 is no limit."""

State: TypeAlias = tuple[int, int] | tuple[int, int, int, int] | list[int]
"""Of the dropout's generator: seed, offset, and the first query and key of a part of the matrix."""

T = TypeVar("T", bound=np.generic)
"""Element of q, and so of the results, where it is a NumPy array. For CuPy and foreign arrays, results are `Any`."""


class PackedOptions(TypedDict, total=False):
    """Options of every function that computes attention or its gradients."""

    scale: float | None
    causal: bool
    window: Window | None
    q_start: int | None
    softcap: float | None
    dropout: float
    rng: State | None
    score_mod: Callable[..., Any] | None
    score_mod_grad: Callable[..., Any] | None
    deterministic: bool
    precision: Precision | None
    backend: Backend | None


class Options(PackedOptions, total=False):
    """Those, and the ones of arrays with a batch axis."""

    bias: Array | None
    mask: Array | BlockMask | None
    q_lengths: Integers | None
    kv_lengths: Integers | None
    axes: Order


class PagedOptions(TypedDict, total=False):
    """With `return_lse` and `out`, all of `forward_paged`, whose lengths of keys are no option."""

    scale: float | None
    causal: bool
    window: Window | None
    q_start: int | None
    bias: Array | None
    mask: Array | None
    q_lengths: Integers | None
    softcap: float | None
    score_mod: Callable[..., Any] | None
    precision: Precision | None
    backend: Backend | None


class VjpOptions(Options, total=False):
    """All of `vjp` but `return_lse` and `bias_grad`, on which depends what it returns."""

    dlse: None


class ForwardOptions(VjpOptions, total=False):
    """All of `forward` but `return_lse` and `out`, on which depends what it returns."""

    bias_grad: bool


class BackwardOptions(Options, total=False):
    """All of `backward` but `bias_grad` and `out`, on which depends what it returns."""

    dlse: Array | None
    return_lse: bool


class PackedForwardOptions(PackedOptions, total=False):
    """All of `forward_packed` but `return_lse` and `out`."""

    dlse: None


class PackedBackwardOptions(PackedOptions, total=False):
    """All of `backward_packed` but `out`."""

    dlse: Array | None
    return_lse: bool
