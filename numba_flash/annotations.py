"""What type checkers and editors know of the public functions: which arrays go in, which come out, which options there are."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypedDict, TypeVar

import numpy as np

from numba_flash.axes import Order
from numba_flash.block_mask import BlockMask
from numba_flash.plan import Backend
from numba_flash.precisions import Precision


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

State: TypeAlias = tuple[int, int] | tuple[int, int, int, int]
"""Of the dropout's generator: seed, offset, and the first query and key of a part of the matrix."""

T = TypeVar("T", bound=np.generic)
"""Element of q, and so of the results, where it is a NumPy array. For CuPy and foreign arrays, results are `Any`."""


class PackedOptions(TypedDict, total=False):
    """Options of every function that computes attention; with `return_lse` and `out`, all of `forward_packed`."""

    scale: float | None
    causal: bool
    window: tuple[int, int] | None
    q_start: int | None
    softcap: float | None
    dropout: float
    rng: State | None
    score_mod: Callable[..., Any] | None
    score_mod_grad: Callable[..., Any] | None
    precision: Precision | None
    backend: Backend | None


class Options(PackedOptions, total=False):
    """Those, and the ones of arrays with a batch axis; with `return_lse` and `out`, all of `forward`."""

    bias: Array | None
    mask: Array | BlockMask | None
    q_lengths: Array | None
    kv_lengths: Array | None
    axes: Order


class PagedOptions(TypedDict, total=False):
    """With `return_lse` and `out`, all of `forward_paged`, whose lengths of keys are no option."""

    scale: float | None
    causal: bool
    window: tuple[int, int] | None
    q_start: int | None
    bias: Array | None
    mask: Array | None
    q_lengths: Array | None
    softcap: float | None
    score_mod: Callable[..., Any] | None
    precision: Precision | None
    backend: Backend | None


class GradientOptions(TypedDict, total=False):
    """What the functions that compute gradients take besides."""

    dlse: Array | None
    deterministic: bool


class BackwardOptions(Options, GradientOptions, total=False):
    """All of `backward` but `bias_grad` and `out`, on which depends what it returns."""


class PackedBackwardOptions(PackedOptions, GradientOptions, total=False):
    """All of `backward_packed` but `out`."""
