"""How long a call takes: the named workloads on each backend, alone and in turns with a peer."""

from statistics import median

import numpy as np

from numba_flash.bench import timing
from numba_flash.bench.options import OPTIONS

from . import workloads


class _Workload:
    """`workload` on each backend. `setup` measures, so that what cannot run here is skipped, with the library's own reason."""

    version = "1"
    timeout = 600
    param_names = ("backend", "mask")
    params = (workloads.BACKENDS, ("full", "causal"))
    beside_peer = False

    def setup(self, backend, mask="full"):
        self.cell, (self.ours, *self.peer) = workloads.timed(self.workload, backend, mask, self.beside_peer)


class _Alone(_Workload):
    def track_milliseconds(self, *parameters):
        return median(self.ours.ms)

    track_milliseconds.unit = "ms"


class _WithSpeed(_Alone):
    def track_tflops(self, *parameters):
        return self.ours.tflops(self.cell)

    track_tflops.unit = "TFLOP/s"


class _BesidePeer(_Workload):
    beside_peer = True

    def track_time_over_peer(self, *parameters):
        return 1 / timing.ratio(self.ours, *self.peer)

    track_time_over_peer.unit = "our time / the peer's"


class Forward(_WithSpeed):
    """Forward pass."""

    workload = "forward"


class ForwardBesidePeer(_BesidePeer):
    """Forward pass, over PyTorch's time: cuDNN for `sm90`, FlashAttention-2 for `sm80`, the memory-efficient kernel for `simt`."""

    workload = "forward"


class Backward(_WithSpeed):
    """Backward pass alone."""

    workload = "backward"


class BackwardBesidePeer(_BesidePeer):
    """Backward pass alone, over PyTorch's time."""

    workload = "backward"


class Long(_Alone):
    """Forward pass of few heads over many keys."""

    workload = "long"
    param_names = ("backend",)
    params = (workloads.BACKENDS,)


class LongBesidePeer(_BesidePeer):
    """Forward pass of few heads over many keys, over PyTorch's time."""

    workload = "long"
    param_names = ("backend",)
    params = (workloads.BACKENDS,)


class Decode(_Alone):
    """One query per head against many keys."""

    workload = "decode"
    param_names = ("backend",)
    params = (workloads.BACKENDS,)

    def track_gigabytes_per_second(self, backend):
        """Keys and values over the time."""
        cell = self.cell
        numbers = 2 * cell.batch * cell.heads_kv * cell.length * cell.head_dim
        return numbers * np.dtype(cell.dtype).itemsize / median(self.ours.ms) / 1e6

    track_gigabytes_per_second.unit = "GB/s"


class DecodeBesidePeer(_BesidePeer):
    """One query per head against many keys, over PyTorch's time."""

    workload = "decode"
    param_names = ("backend",)
    params = (workloads.BACKENDS,)


class Options:
    """A pass with what changes scores: a softcap, ALiBi, or a table of relative positions; and over our own time without."""

    version = "1"
    timeout = 600
    param_names = ("backend", "option", "direction")
    params = (workloads.BACKENDS, OPTIONS[1:], ("forward", "backward"))

    def setup(self, backend, option, direction):
        self.ours, self.plain = workloads.beside_plain(backend, option, direction)

    def track_milliseconds(self, backend, option, direction):
        return median(self.ours.ms)

    track_milliseconds.unit = "ms"

    def track_time_over_plain(self, backend, option, direction):
        return 1 / timing.ratio(self.ours, self.plain)

    track_time_over_plain.unit = "our time / our plain time"


class Small:
    """The GPU's time for a forward call of a small problem, in a CUDA graph of many; on the CPU a call's time."""

    version = "1"
    timeout = 600
    param_names = ("backend", "problem")
    params = (workloads.BACKENDS, workloads.SMALL)

    def setup(self, backend, problem):
        self.microseconds = workloads.gpu_microseconds(backend, problem)

    def track_microseconds(self, backend, problem):
        return self.microseconds

    track_microseconds.unit = "us"


class _Overhead:
    version = "1"
    timeout = 600
    param_names = ("backend",)
    params = (workloads.BACKENDS,)
    beside_peer = False

    def setup(self, backend):
        self.microseconds = workloads.host_microseconds(backend, self.beside_peer)


class Overhead(_Overhead):
    """The host's time per forward call at a small shape that is repeated."""

    def track_microseconds(self, backend):
        return self.microseconds[0]

    track_microseconds.unit = "us"


class OverheadBesidePeer(_Overhead):
    """The host's time per forward call at a small shape that is repeated, over PyTorch's."""

    beside_peer = True

    def track_time_over_peer(self, backend):
        ours, peer = self.microseconds
        return ours / peer

    track_time_over_peer.unit = "our time / the peer's"
