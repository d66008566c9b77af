"""A stand-in for CuPy, its streams and NCCL, as strict as one may be: nothing is executed before somebody waits for it, and then in any
order that streams and events allow. Memory that nobody holds any more, or that is on its way, is NaN.
"""  # fmt: skip

import ctypes
import random
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np

import numba_flash
from numba_flash.merge import merge_into

TIMEOUT = 30
GARBAGE = 0xFF  # NaN in every dtype


class Streams:
    """All streams of all processes. What may run next is chosen at random, after what is `preferred`: "transfers", "kernels" or nothing."""

    def __init__(self, seed: int, preferred: str | None, shared: bool = False):
        self._random, self._preferred = random.Random(seed), preferred
        self._changed = threading.Condition(threading.RLock())
        self.streams: list[Stream] = []
        self.null = Stream(self, False, null=True) if shared else None  # the default stream of all threads
        self.channels = defaultdict(lambda: {"send": deque(), "receive": deque()})
        self.log: list[tuple[str, str]] = []  # thread and what was done
        self.memory: list[np.ndarray] = []  # kept, so that an address stays one

    def put(self, stream: "Stream", operation) -> None:
        with self._changed:
            stream.queue.append(operation)
            self._changed.notify_all()

    def wait_for(self, done) -> None:
        """Execute until something is done."""
        end = time.monotonic() + TIMEOUT
        with self._changed:
            while not done():
                if not self._step():
                    assert time.monotonic() < end, "streams wait for each other"
                    self._changed.wait(0.01)

    def some(self) -> None:
        """Execute a little, as time passes."""
        with self._changed:
            for _ in range(3):
                self._step()

    def _step(self) -> bool:
        ready = [stream for stream in self.streams if stream.queue and stream.queue[0].ready()]
        first = [stream for stream in ready if stream.non_blocking == (self._preferred == "transfers")]
        if not ready:
            return False
        stream = self._random.choice(first if first and self._preferred else ready)
        if stream.queue[0].run():
            stream.queue.popleft()
        self._changed.notify_all()
        return True


class Work:
    """What is computed or copied."""

    def __init__(self, streams: Streams, run, name: str = ""):
        self._streams, self._run, self._name, self._thread = streams, run, name, threading.current_thread().name

    def ready(self) -> bool:
        return True

    def run(self) -> bool:
        self._run()
        if self._name:
            self._streams.log.append((self._thread, self._name))
        return True


class Reach:
    """A stream has come to an event."""

    def __init__(self, event: "Event"):
        self._event, self._number = event, event.recorded

    def ready(self) -> bool:
        return True

    def run(self) -> bool:
        self._event.reached = max(self._event.reached, self._number)
        return True


class Await:
    """A stream waits for an event, as it was last recorded."""

    def __init__(self, event: "Event"):
        self._event, self._number = event, event.recorded

    def ready(self) -> bool:
        return self._event.reached >= self._number

    def run(self) -> bool:
        return True


class Group:
    """Messages of NCCL, which are on their way when a stream has come to them; done when all peers have."""

    def __init__(self, streams: Streams, messages: list):
        self._streams, self._messages, self._open, self._begun = streams, messages, len(messages), False
        self._name = f"transfer of {max(array.size for _, array, _ in messages)}"
        self._thread = threading.current_thread().name

    def ready(self) -> bool:
        return not self._begun or not self._open or any(self._pairs())

    def _pairs(self):
        return (channel for *_, channel in self._messages if channel["send"] and channel["receive"])

    def run(self) -> bool:
        if not self._begun:
            self._begun = True
            for kind, array, channel in self._messages:
                if kind == "receive":
                    array[...] = GARBAGE
                channel[kind].append((array, self))
        for channel in self._pairs():
            (sent, sender), (array, receiver) = channel["send"].popleft(), channel["receive"].popleft()
            assert sent.size == array.size, "messages of one size"
            array[...] = sent
            sender._open -= 1
            receiver._open -= 1
        if not self._open:
            self._streams.log.append((self._thread, self._name))
        return not self._open


class Stream:
    """`cupy.cuda.Stream`."""

    def __init__(self, streams: Streams, non_blocking: bool, null: bool = False):
        self._streams, self.non_blocking, self.queue = streams, non_blocking, deque()
        streams.streams.append(self)
        self.ptr = 0 if null else len(streams.streams)

    def synchronize(self) -> None:
        event = Event(self._streams)
        event.record(self)
        event.synchronize()

    def wait_event(self, event: "Event") -> None:
        self._streams.put(self, Await(event))

    def __enter__(self):
        _current().append(self)
        return self

    def __exit__(self, *error):
        _current().pop()


class Event:
    """`cupy.cuda.Event`."""

    def __init__(self, streams: Streams):
        self._streams, self.recorded, self.reached = streams, 0, 0

    def record(self, stream: Stream) -> None:
        self.recorded += 1
        self._streams.put(stream, Reach(self))

    @property
    def done(self) -> bool:
        self._streams.some()
        return self.reached >= self.recorded

    def synchronize(self) -> None:
        self._streams.wait_for(lambda: self.reached >= self.recorded)


_thread = threading.local()


def _current() -> list[Stream]:
    """Current streams of this thread, the innermost last."""
    if "stack" not in _thread.__dict__:
        _thread.stack = [Array.streams.null or Stream(Array.streams, False)]
    return _thread.stack


def current() -> Stream:
    """`cupy.cuda.get_current_stream`."""
    return _current()[-1]


def at(address: int, size: int) -> np.ndarray:
    """Bytes of memory, whoever holds it."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)) if size else np.empty(0, np.uint8)


class Memory:
    """What CuPy gives to the next array of a stream as soon as nobody holds it."""

    def __init__(self, size: int):
        raw, stream, streams = np.full(size, GARBAGE, np.uint8), current(), Array.streams
        streams.memory.append(raw)
        self.raw, self.device = raw, Device()
        weakref.finalize(self, lambda: streams.put(stream, Work(streams, lambda: raw.fill(GARBAGE))))


class Array:
    """`cupy.ndarray`: what is done with it is done by the current stream, later."""

    streams: Streams

    def __new__(cls, memory: Memory | tuple[int, ...], x):  # which does all, as in CuPy
        self = super().__new__(cls)
        if isinstance(memory, tuple):  # a new one, of that shape and dtype `x`
            shape, dtype, memory = memory, x, Memory(int(np.prod(memory)) * np.dtype(x).itemsize)
            x = memory.raw.view(dtype).reshape(shape)
        self._memory, self.x = memory, x
        self.dtype, self.shape, self.strides, self.ndim, self.size, self.nbytes = x.dtype, x.shape, x.strides, x.ndim, x.size, x.nbytes
        self.flags, self.device = x.flags, memory.device
        self.data = SimpleNamespace(ptr=x.ctypes.data, device_id=memory.device.id)
        return self

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, key) -> "Array":
        return Array(self._memory, self.x[key])

    def __setitem__(self, key, value) -> None:
        target, value = self.x[key], _raw(value)
        do(lambda: target.__setitem__(..., value))

    def __iadd__(self, other) -> "Array":
        x, y = self.x, _raw(other)
        do(lambda: np.add(x, y, out=x))
        return self

    def __add__(self, other) -> "Array":
        result = empty(self.shape, self.dtype)
        x, y, z = self.x, _raw(other), result.x
        do(lambda: np.add(x, y, out=z))
        return result

    __radd__ = __add__

    def astype(self, dtype, copy: bool = True) -> "Array":
        if not copy and self.dtype == dtype:
            return self
        result = empty(self.shape, dtype)
        result[...] = self
        return result

    def reshape(self, *shape) -> "Array":
        x = self.x.reshape(*shape)
        assert np.shares_memory(x, self.x) or not x.size, "a copy, which CuPy would make"
        return Array(self._memory, x)

    def view(self, dtype) -> "Array":
        return Array(self._memory, self.x.view(dtype))

    def swapaxes(self, *axes) -> "Array":
        return Array(self._memory, self.x.swapaxes(*axes))

    def transpose(self, *axes) -> "Array":
        return Array(self._memory, self.x.transpose(*axes))

    def take(self, indices, axis) -> "Array":
        result = empty(self.x.take(indices, axis).shape, self.dtype)
        x, y = self.x, result.x
        do(lambda: x.take(indices, axis, out=y))
        return result

    def get(self, stream: Stream | None = None, order: str = "C", out: np.ndarray | None = None, blocking: bool = True) -> np.ndarray:
        stream = stream or current()
        assert self.flags.c_contiguous or blocking, "CuPy would make a copy"
        out = np.empty(self.shape, self.dtype) if out is None else out
        assert (out.shape, out.dtype) == (self.shape, self.dtype)
        x, host = self.x, at(out.ctypes.data, out.nbytes)
        host[...] = GARBAGE
        self.streams.put(stream, Work(self.streams, lambda: host.__setitem__(..., np.ravel(x).view(np.uint8))))
        if blocking:
            stream.synchronize()
        return out

    def set(self, arr: np.ndarray, stream: Stream | None = None) -> None:
        assert (arr.shape, arr.dtype) == (self.shape, self.dtype)
        x, host = self.x.reshape(-1).view(np.uint8), at(arr.ctypes.data, arr.nbytes)
        self.streams.put(stream or current(), Work(self.streams, lambda: x.__setitem__(..., host), f"copy of {host.size}"))


def _raw(x):
    return x.x if isinstance(x, Array) else x


def do(run, name: str = "") -> None:
    """On the current stream."""
    Array.streams.put(current(), Work(Array.streams, run, name))


def empty(shape, dtype) -> Array:
    return Array((shape,) if isinstance(shape, int) else tuple(shape), dtype)


def asarray(x: np.ndarray) -> Array:
    """A copy; of a host array that may be forgotten at once."""
    made, copy = empty(x.shape, x.dtype), x.copy()
    made[...] = copy
    return made


def empty_pinned(shape: int, dtype) -> np.ndarray:
    """Host memory that anybody may get as soon as nobody holds it."""
    raw = np.full(shape, GARBAGE, dtype)
    Array.streams.memory.append(raw)
    lent = np.frombuffer(memoryview(raw), dtype)[:]
    weakref.finalize(lent, raw.fill, GARBAGE)
    return lent


class Device:
    """`cupy.cuda.Device`: one that is named, or the current one of this thread."""

    def __init__(self, number: int | None = None):
        self.id = _devices()[-1] if number is None else number

    def __enter__(self):
        _devices().append(self.id)
        return self

    def __exit__(self, *error):
        _devices().pop()


def _devices() -> list[int]:
    """Current devices of this thread, the innermost last; number 0 unless something else is said."""
    return _thread.__dict__.setdefault("devices", [0])


def check_place(*arrays) -> None:
    """What kernels get lies on the current device."""
    assert {x.device.id for x in arrays if x is not None} == {Device().id}


# ---- NCCL ------------------------------------------------------------------------------------------------------------------------------


class Begun:
    """Groups of this thread: messages are handed over when the outermost ends."""

    def start(self) -> None:
        assert "messages" not in _thread.__dict__ or _thread.messages is None
        _thread.messages = []

    def end(self) -> None:
        messages, _thread.messages = _thread.messages, None
        by_stream = defaultdict(list)
        for stream, *message in messages:
            by_stream[stream].append(tuple(message))
        for stream, own in by_stream.items():
            Array.streams.put(Array.streams.streams[stream - 1], Group(Array.streams, own))

    @contextmanager
    def group(self):
        self.start()
        try:
            yield
        finally:
            self.end()

    def add(self, kind: str, address: int, size: int, channel: tuple[int, int], stream: int) -> None:
        _thread.messages.append((stream, kind, at(address, size), Array.streams.channels[channel]))


BEGUN = Begun()
UINT8 = 1


class NcclCommunicator:
    """`cupy.cuda.nccl.NcclCommunicator`, with its signatures."""

    def __init__(self, ndev: int, rank: int):
        self._size, self._rank = ndev, rank

    def rank_id(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def device_id(self) -> int:
        return 0

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._add("send", sendbuf, count, datatype, (self._rank, peer), stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._add("receive", recvbuf, count, datatype, (peer, self._rank), stream)

    def _add(self, kind, buffer, count, datatype, channel, stream) -> None:
        assert all(type(x) is int for x in (buffer, count, datatype, *channel, stream)), "numbers, as Cython takes them"
        assert datatype == UINT8
        assert count
        BEGUN.add(kind, buffer, count, channel, stream)


class NCCLBackend:
    """`cupyx.distributed.NCCLBackend`, as far as it goes here: it has one of the others."""

    def __init__(self, n_devices: int, rank: int):
        self._n_devices, self.rank, self._comm = n_devices, rank, NcclCommunicator(n_devices, rank)

    def send_recv(self, in_array, out_array, peer, stream=None):
        raise NotImplementedError("to and from one process alone")


class Nccl4py:
    """`nccl.core.Communicator`, with its signatures."""

    def __init__(self, nranks: int, rank: int):
        self._nranks, self._rank = nranks, rank

    nranks = property(lambda self: self._nranks)
    rank = property(lambda self: self._rank)
    device = property(lambda self: SimpleNamespace(device_id=0))

    def send(self, sendbuf, peer: int, *, stream=None) -> None:
        assert (sendbuf.dtype, type(stream)) == (np.uint8, int)
        BEGUN.add("send", sendbuf.data.ptr, sendbuf.size, (self._rank, peer), stream)

    def recv(self, recvbuf, peer: int, *, stream=None) -> None:
        assert (recvbuf.dtype, type(stream)) == (np.uint8, int)
        BEGUN.add("receive", recvbuf.data.ptr, recvbuf.size, (peer, self._rank), stream)


# ---- what is computed ------------------------------------------------------------------------------------------------------------------


def forward(q, k, v, *, out, return_lse, **options):
    """`numba_flash.forward`, later."""
    check_place(q, k, v, out, options.get("bias"), options.get("mask"))
    lse = empty(q.shape[:-1], "float64" if q.dtype == np.float64 else "float32")
    x, room, sums = [y.x for y in (q, k, v)], out.x, lse.x
    options = {name: _raw(y) for name, y in options.items()}

    def compute():
        o, log_sums = numba_flash.forward(*x, **options, return_lse=True, out=np.empty(room.shape, room.dtype))
        room[...], sums[...] = o, log_sums

    do(compute, "kernel")
    return out, lse


def backward(do_, q, k, v, o, lse, **options):
    """`numba_flash.backward`, later."""
    check_place(do_, q, k, v, o, lse, *(options.get(name) for name in ("dlse", "bias", "mask")))
    gradients = [empty(y.shape, y.dtype) for y in (q, k, v, *([options["bias"]] if options.get("bias_grad") else []))]
    x, rooms = [y.x for y in (do_, q, k, v, o, lse)], [y.x for y in gradients]
    options = {name: _raw(y) for name, y in options.items()}

    def compute():
        made = numba_flash.backward(*x, **options)
        for room, gradient in zip(rooms, made, strict=True):
            room[...] = gradient

    do(compute, "kernel")
    return tuple(gradients)


def merged_into(o, lse, o2, lse2) -> None:
    """`merge_into`, of either library."""
    x = [_raw(y) for y in (o, lse, o2, lse2)]
    if isinstance(o, Array):
        do(lambda: merge_into(*x))
    else:
        merge_into(*x)


def merged(o1, lse1, o2, lse2) -> tuple[Array, Array]:
    """`numba_flash.merge`, later."""
    check_place(o1, lse1, o2, lse2)
    o, lse = empty(o1.shape, o1.dtype), empty(lse1.shape, lse1.dtype)
    x, room, sums = [y.x for y in (o1, lse1, o2, lse2)], o.x, lse.x

    def compute():
        room[...], sums[...] = numba_flash.merge(*x)

    do(compute, "merge")
    return o, lse


def install(monkeypatch, seed: int = 0, preferred: str | None = None, shared: bool = False) -> Streams:
    """Put it all where the package looks for it. Each thread has a stream of its own, unless the default one is `shared` by all."""
    from numba_flash.distributed import loops, streams

    monkeypatch.setattr(Array, "streams", Streams(seed, preferred, shared), raising=False)
    for module in (streams, sys.modules[__name__]):  # what threads keep are streams, devices and groups of an earlier one
        monkeypatch.setattr(module, "_thread", threading.local())
    cuda = SimpleNamespace(
        Stream=lambda non_blocking=False: Stream(Array.streams, non_blocking),
        Event=lambda disable_timing=False: Event(Array.streams),
        Device=Device,
        get_current_stream=current,
    )
    nccl = SimpleNamespace(groupStart=BEGUN.start, groupEnd=BEGUN.end, NCCL_UINT8=UINT8)
    modules = {
        "cupy": SimpleNamespace(ndarray=Array, empty=empty, asarray=asarray, cuda=cuda),
        "cupyx": SimpleNamespace(empty_pinned=empty_pinned),
        "cupy.cuda.nccl": nccl,
        "nccl.core": SimpleNamespace(group=BEGUN.group),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    api = SimpleNamespace(forward=forward, backward=lambda **x: backward(x.pop("do"), **x))
    monkeypatch.setattr(loops, "api", api)
    monkeypatch.setattr(loops, "merge_into", merged_into)
    return Array.streams
