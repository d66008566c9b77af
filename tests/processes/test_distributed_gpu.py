"""`numba_flash.distributed` on CuPy arrays: what waits for what, and which memory is kept, on streams that execute as late as they may.

GPUs themselves are at the end.
"""

import re
import threading
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from support import SIMULATED, named, same_bits

if SIMULATED:
    pytest.skip("parts are computed as anywhere", allow_module_level=True)

from support import late_gpu
from support.late_gpu import Nccl4py, NCCLBackend, NcclCommunicator
from support.mpi_group import PROCESSES, mpi
from support.thread_group import together

import numba_flash
import numba_flash.distributed as nd
from numba_flash.distributed import streams
from numba_flash.distributed.carriers import Ring

ORDERS = [(None, 0), (None, 1), ("transfers", 2), ("kernels", 3)]
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (9, 3)},
    "dropout": {"dropout": 0.3, "rng": (1, 2), "causal": True},
    "lengths": {"kv_lengths": np.array([25, 40])},
}
NATIVE = {"cupy": NcclCommunicator, "cupyx": NCCLBackend, "nccl4py": Nccl4py}
COMMUNICATORS = {
    "host": lambda comm: comm,
    **{name: lambda comm, make=make: make(comm.size, comm.rank) for name, make in NATIVE.items()},
    "cupy, agreement by the host": lambda comm: nd.Nccl(NcclCommunicator(comm.size, comm.rank), host=comm),
}


def inputs(dtype="float64", n=40):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(dtype)
    return draw(2, 4, n, 8), draw(2, 4, n, 8), draw(2, 2, n, 8), draw(2, 2, n, 8)


def passes(comm, own, **given):
    """o, lse, dq, dk, dv of one process, and all of o."""
    do, q, k, v = own
    o, lse = nd.forward(q, k, v, comm=comm, return_lse=True, **given)
    gradients = nd.backward(do, q, k, v, o, lse, comm=comm, **given)
    return o, lse, *gradients, nd.unshard(o, comm=comm, layout=given["layout"])


def spread(size, make, arrays, device, **given):
    """The results of all processes, as NumPy arrays."""

    def run(member):
        comm = make(member)
        own = [nd.shard(device(x), comm=comm, layout=given["layout"]) for x in arrays]
        return [x if isinstance(x, np.ndarray) else x.get() for x in passes(comm, own, **given)]

    results = together(size, run)
    failed = [x for x in results if isinstance(x, Exception)]
    if failed:
        raise ExceptionGroup("of processes", failed)
    return [x for of_process in results for x in of_process]


def both(monkeypatch, size=3, make=COMMUNICATORS["host"], arrays=None, order=ORDERS[0], **given):
    """Results of NumPy arrays, and those of CuPy arrays."""
    arrays = inputs() if arrays is None else arrays
    expected = spread(size, COMMUNICATORS["host"], arrays, lambda x: x, **given)
    log = late_gpu.install(monkeypatch, order[1], order[0])
    return expected, spread(size, make, arrays, late_gpu.asarray, **given), log


def equal(expected, results) -> bool:
    return all(x.dtype == y.dtype and same_bits(x, y) for x, y in zip(expected, results, strict=True))


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("make", COMMUNICATORS.values(), ids=COMMUNICATORS)
@pytest.mark.parametrize("algorithm", ["ring", "gather"])
def test_bits_are_those_of_numpy_arrays(make, algorithm, order, monkeypatch):
    expected, results, _ = both(monkeypatch, make=make, order=order, layout="zigzag", algorithm=algorithm, causal=True)
    assert equal(expected, results)


@pytest.mark.parametrize("options", named(OPTIONS, ("window", "dropout")))
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("make", ["host", "cupy"])
def test_all_options(make, layout, options, monkeypatch):
    expected, results, _ = both(monkeypatch, 4, COMMUNICATORS[make], layout=layout, algorithm="ring", **OPTIONS[options])
    assert equal(expected, results)


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_bytes_are_sent_whatever_they_are(dtype, monkeypatch):
    """cupyx.distributed knows no bfloat16."""
    expected, results, _ = both(monkeypatch, 2, COMMUNICATORS["cupyx"], inputs(dtype), layout="contiguous", algorithm="ring")
    assert equal(expected, results)


@pytest.mark.parametrize("make", ["host", "cupy"])
@pytest.mark.parametrize(("size", "n"), [(1, 12), (3, 8)])
def test_parts_may_be_empty_or_alone(size, n, make, monkeypatch):
    expected, results, _ = both(monkeypatch, size, COMMUNICATORS[make], inputs(n=n), layout="contiguous", algorithm="ring")
    assert equal(expected, results)


def test_lengths_may_be_on_the_gpu(monkeypatch):
    late_gpu.install(monkeypatch)
    lengths, (_, q, k, v) = np.array([25, 40]), inputs()

    def run(member, device):
        own = [late_gpu.asarray(x) for x in (nd.shard(y, comm=member) for y in (q, k, v))]
        return nd.forward(*own, comm=member, kv_lengths=device(lengths)).get()

    on_host, on_gpu = (together(2, lambda member, device=device: run(member, device)) for device in (np.asarray, late_gpu.asarray))
    assert equal(on_host, on_gpu)


# ---- what a mistake would do -------------------------------------------------------------------------------------------------------------


def one_room(patch):
    """What comes next overwrites what is being read."""
    make = Ring._room
    patch.setattr(Ring, "_room", lambda self, here: self.__dict__.setdefault("only", make(self, here)))


def all_forgotten(patch):
    """Pinned memory, too, which is the host's alone: CuPy gives it away at once."""
    wait = lambda self: late_gpu.current().wait_event(self.event)
    patch.setattr(streams.Mark, "precede", lambda self: (wait(self), self._used.clear()))


MISTAKES = {
    "one room": one_room,
    "transfers begin at once": lambda m: m.setattr(streams.Lane, "follow", lambda self, event: None),
    "kernels wait for no transfer": lambda m: m.setattr(streams.Mark, "precede", lambda self: None),
    "nothing is kept": lambda m: m.setattr(streams.Mark, "__init__", lambda self, event, used: self.__dict__.update(event=event, _used=[])),
    "all is forgotten at once": all_forgotten,
}
POSSIBLE = [(mistake, make) for mistake in MISTAKES for make in ("host", "cupy") if (mistake, make) != ("all is forgotten at once", "cupy")]


@pytest.mark.parametrize(("mistake", "make"), POSSIBLE)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_mistake_is_found(mistake, make, monkeypatch):
    """By some order of what may happen at the same time."""
    found = []
    for order in ORDERS:
        with monkeypatch.context() as patch:
            MISTAKES[mistake](patch)
            expected, results, _ = both(patch, 3, COMMUNICATORS[make], order=order, layout="zigzag", algorithm="ring", causal=True)
            found.append(not equal(expected, results))
    assert any(found)


# ---- what happens at the same time -------------------------------------------------------------------------------------------------------


OF_K, OF_GRADIENTS = 1024, 2048  # bytes of a part


def sequences(monkeypatch, order, make) -> dict[str, str]:
    """What was done in each process, and in which order: k, v or g for K, V or gradients that have come, c for what was computed."""
    log, everybody = late_gpu.install(monkeypatch, order[1], order[0]), threading.Barrier(4)
    names = {"kernel": "c", f"transfer of {OF_K}": "v", f"transfer of {OF_GRADIENTS}": "g"}
    names |= {f"copy of {OF_K // 2}": "k", f"copy of {OF_K}": "v", f"copy of {OF_GRADIENTS}": "g"}

    def run(member):
        comm = COMMUNICATORS[make](member)
        do, q, k, v, o, lse = (late_gpu.asarray(nd.shard(x, comm=member, axis=2)) for x in arguments)
        everybody.wait()
        result = nd.backward(do, q, k, v, o, lse, comm=comm, algorithm="ring")
        everybody.wait()
        return [x.get() for x in result]

    do, q, k, v = inputs("float16", 64)
    arguments = do, q, k, v, *numba_flash.forward(q, k, v, return_lse=True)
    results = together(4, run)
    assert not [x for x in results if isinstance(x, Exception)], results
    of = lambda rank: "".join(names.get(name, "") for thread, name in log.log if thread == f"process {rank}")
    return {rank: of(rank) for rank in range(4)}


def places(done: str, what: str) -> list[int]:
    return [i for i, each in enumerate(done) if each == what]


@pytest.mark.parametrize("make", ["host", "cupy"])
def test_transfers_hide_behind_kernels(make, monkeypatch):
    """A step is computed when its K and V are there, and these come when the step before the last has been computed; between a step and the
    next K and V, or the last gradients, nobody waits for anybody.
    """
    hidden, late = set(), set()
    every = {(what, step) for what in ("K and V", "gradients") for step in range(3)}
    for order in [*ORDERS, *((first, seed) for seed in range(4, 40) for first in ("transfers", ORDERS[0][0]))]:
        if hidden == late == every:
            break
        with monkeypatch.context() as patch:
            for done in sequences(patch, order, make).values():
                each = 1 if make == "cupy" else 2  # K and V together, or one after the other
                computed, keys, gradients = places(done, "c"), places(done, "v")[each - 1 :: each], places(done, "g")[each - 1 :: each]
                assert (len(computed), len(keys), len(gradients)) == (4, 3, 4), done
                assert all(here > came for here, came in zip(computed[1:], keys, strict=True)), done
                assert all(came > before for before, came in zip(computed, keys[1:], strict=False)), done
                assert all(sent > before for before, sent in zip(computed, gradients, strict=True)), done
                hidden |= {("K and V", step) for step in range(3) if keys[step] < computed[step]}
                hidden |= {("gradients", step) for step in range(3) if gradients[step] < computed[step + 1]}
                late |= {("K and V", step) for step in range(3) if keys[step] > computed[step]}
                late |= {("gradients", step) for step in range(3) if gradients[step] > computed[step + 1]}
    assert hidden == every
    assert late == every


# ---- adapters ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NATIVE)
def test_who_one_is(name, monkeypatch):
    late_gpu.install(monkeypatch)
    comm = nd.Nccl(NATIVE[name](5, 3))
    assert (comm.rank, comm.size, comm.takes("cupy"), comm.takes("numpy")) == (3, 5, True, False)
    assert nd.positions(40, comm=NATIVE[name](5, 3)).tolist() == [*range(24, 32)]


def test_nccl_carries_no_arrays_of_the_host(monkeypatch):
    late_gpu.install(monkeypatch)
    for error in together(2, lambda member: nd.forward(*inputs()[1:], comm=NcclCommunicator(2, member.rank))):
        kind = NotImplementedError if "carries" in str(error) else RuntimeError
        assert isinstance(error, kind)
        assert re.search("comm carries no numpy arrays", str(error))


def test_what_is_no_communicator_of_nccl():
    with pytest.raises(TypeError, match=r"^comm must be a communicator of NCCL .*; got int$"):
        nd.Nccl(3)


def test_a_process_that_is_silent(monkeypatch):
    late_gpu.install(monkeypatch)
    own = [late_gpu.asarray(x) for x in inputs()[1:]]
    with pytest.raises(TimeoutError, match=r"^process 0 of 2 has waited 0 s for process 1 \(the call that all processes make together\)"):
        nd.forward(*own, comm=nd.Nccl(NcclCommunicator(2, 0), timeout=0.1))


def test_a_group_ends_when_something_fails(monkeypatch):
    """NCCL would take all that comes afterwards for messages of one group."""
    late_gpu.install(monkeypatch)
    comm = NcclCommunicator(2, 0)
    comm.send = lambda *x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        nd.Nccl(comm).exchange([nd.Message(1, late_gpu.empty(3, "float32"))], [], "nothing")
    late_gpu.BEGUN.start()
    late_gpu.BEGUN.end()


def test_what_is_begun_first_is_sent_first(monkeypatch):
    """Whichever is waited for first."""
    late_gpu.install(monkeypatch)
    begun = []
    waited = SimpleNamespace(wait=lambda: None)
    comm = nd.Staged(
        SimpleNamespace(rank=0, size=2, takes=lambda library: True, exchange=lambda sent, received, what: begun.append(what) or waited)
    )
    x = late_gpu.asarray(np.ones(3))
    first, second, third = (comm.exchange([nd.Message(1, y)], [], what) for y, what in ((x, "x"), (x, "y"), (np.ones(3), "on the host")))
    assert begun == ["x", "y", "on the host"]
    fourth, fifth = (comm.exchange([nd.Message(1, x)], [], what) for what in ("z", "last"))
    assert len(begun) == 3
    for transfer in (fifth, second, fourth, third, first):
        transfer.wait()
    assert begun[3:] == ["z", "last"]


# ---- one GPU ---------------------------------------------------------------------------------------------------------------------------

ON_GPU = OPTIONS | {"lengths": {"kv_lengths": np.array([200, 320]), "causal": True, "q_start": 0}, "softcap": {"softcap": 3.0}}
TOLERANCE = {"float16": 1e-2, "float32": 2e-4}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", ON_GPU)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("size", [2, 4])
def test_threads_that_share_a_gpu(size, layout, options, dtype):
    """Each has a stream of its own; dropout has the bits of the whole, or nothing would be near."""
    import cupy

    rng = np.random.default_rng(1)
    draw = lambda heads: rng.standard_normal((2, heads, 320, 64)).astype(dtype)
    do, q, k, v = draw(4), draw(4), draw(2), draw(2)
    on_gpu, given = [cupy.asarray(x) for x in (do, q, k, v)], ON_GPU[options]
    o, lse = numba_flash.forward(*on_gpu[1:], return_lse=True, **given)
    expected = [x.get() for x in (o, *numba_flash.backward(*on_gpu, o, lse, **given))]
    for algorithm in ("ring", "gather"):

        def run(member, algorithm=algorithm):
            with cupy.cuda.Stream(non_blocking=True):
                own = [cupy.asarray(nd.shard(x, comm=member, layout=layout)) for x in (do, q, k, v)]
                o, _, *gradients, _ = passes(member, own, layout=layout, algorithm=algorithm, **given)
                return [nd.unshard(x, comm=member, layout=layout).get() for x in (o, *gradients)]

        for of_process in together(size, run):
            assert not isinstance(of_process, Exception), of_process
            for x, y in zip(of_process, expected, strict=True):
                assert x.dtype == y.dtype
                np.testing.assert_allclose(x.astype(np.float32), y.astype(np.float32), rtol=0, atol=TOLERANCE[dtype] * np.abs(y).max())


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
def test_processes_that_share_a_gpu(size):
    done = mpi(size, PROCESSES, "gpu")
    assert done.returncode == 0, done.stderr
    assert all(f"process {rank} is right" in done.stdout for rank in range(size)), done.stdout


def real(name: str):
    """A communicator of one process, on the current GPU."""
    nccl = pytest.importorskip("cupy.cuda.nccl", reason="CuPy is not installed")
    if name == "nccl4py":
        core = pytest.importorskip("nccl.core", reason="nccl4py is not installed")
        return core.Communicator.init(1, 0, core.get_unique_id())
    if not nccl.available:
        pytest.skip("NCCL is not installed")
    if name == "cupyx":
        import cupyx.distributed

        return cupyx.distributed.init_process_group(1, 0)
    return nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NATIVE)
def test_nccl_itself(name):
    """With one process, which sends to itself what it receives."""
    import cupy

    made = real(name)
    comm = nd.Nccl(made)
    assert (comm.rank, comm.size) == (0, 1)
    sent = [cupy.arange(1000, dtype="float32"), cupy.arange(7).astype("float16"), cupy.empty((0, 3)), np.arange(5)]
    received = [cupy.zeros(1000, "float32"), cupy.zeros(7, "float16"), cupy.empty((0, 3)), np.zeros(5, np.int64)]
    for part in (slice(0, 3), slice(3, 4)):
        messages = [[nd.Message(0, x) for x in each[part]] for each in (sent, received)]
        comm.exchange(*messages, "what is sent to oneself").wait()
        for x, y in zip(sent[part], received[part], strict=True):
            assert (x == y).all()
    q, k, v = (cupy.asarray(x) for x in inputs("float32")[1:])
    assert same_bits(nd.forward(q, k, v, comm=made, causal=True).get(), numba_flash.forward(q, k, v, causal=True).get())
