"""What every kernel of specialised warps begins and ends with: barriers, registers, and which warps
have which role. The first warp group moves data; every other one, a consumer, computes.

A loop says what is its own in values: rings, roles and arguments. A role is a function of
``(smem, me, x)``: the base of shared memory, a number among the warps or warp groups that have the
role, and the kernel's arguments, by name.
"""

from collections import namedtuple
from functools import cache
from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime import early
from numba_flash.cuda.runtime.lang import cuda, i32, inline, types, u64
from numba_flash.cuda.score.swizzle import ALIGNMENT
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.pipeline import WARP
from numba_flash.cuda.sm90.rings import Ring
from numba_flash.cuda.sm90.tiles import WARP_GROUP

WARPS = WARP_GROUP // WARP


class Arrivals(NamedTuple):
    """Rings, and how many arrivals make a slot of them ready, `fills`, and free, `releases`.

    Several are initialised in a loop. Written out one by one, those of the backward pass change
    what the assembler spills in its consumers.
    """

    rings: tuple[Ring, ...]
    fills: int
    releases: int


class Producer(NamedTuple):
    """A role in the first warp group: that of one thread, unless it has more warps or is `whole`.

    Attributes
    ----------
    act : function
        ``act(smem, me, x)``.
    warp, warps : int
        The first of its warps, and how many there are.
    whole : bool
        All threads of these have the role, not the first of each alone.
    """

    act: Any
    warp: int
    warps: int = 1
    whole: bool = False


class Roles(NamedTuple):
    """Who does what.

    Attributes
    ----------
    tile
        Tells how many consumers there are, and how many registers a thread of either kind has.
    producers : tuple of Producer
        Threads of the first warp group that none of them names leave at once.
    consume : function
        ``consume(smem, me, x)``: the role of every other warp group.
    ping_pong : bool
        Consumers take turns at starting products; the first one begins.
    senders : int
        One in so many threads has had results copied from shared memory, and waits until they have
        been read there; 0 if none has, or if consumers wait themselves.
    """

    tile: Any
    producers: tuple
    consume: Any
    ping_pong: bool = False
    senders: int = 0


@inline
def nothing(smem, at, x):
    """Behind the last role."""


def build_initialise(arrivals):
    """``initialise(smem)``: the mbarriers of all rings, by one thread."""
    (RINGS, FILLS, RELEASES), *others = arrivals
    ONE, RING = len(RINGS) == 1, RINGS[0]
    initialise_others = build_initialise(others) if others else None
    MORE = bool(others)

    @inline
    def initialise(smem):
        if ONE:
            pipeline.initialise(smem, RING, FILLS, RELEASES)
        else:
            for ring in RINGS:
                pipeline.initialise(smem, ring, FILLS, RELEASES)
        if MORE:
            initialise_others(smem)

    return initialise


def build_act(roles, otherwise, threads, left=0):
    """``act(smem, at, x)``: the role of one that stands `at` this place, of so many `threads` each,
    in the first warp group; `otherwise` if it has none of these `roles`. A role that has all warps
    that are `left` needs no test.
    """
    if not roles:
        return otherwise
    role, *others = roles
    act, PER_WARP, WARP_0 = inline(role.act), WARP // threads, role.warp
    FIRST, END = role.warp * PER_WARP, (role.warp + role.warps) * PER_WARP
    ALONE = role.warps == 1 and not (role.whole and threads == 1)
    TO_LAST, ALL_LEFT = role.warp + role.warps == WARPS, role.warps == left
    act_otherwise = build_act(others, otherwise, threads, left - role.warps)

    @inline
    def is_mine(at):
        if ALL_LEFT:
            return True
        return at == FIRST if ALONE else at >= FIRST and (TO_LAST or at < END)

    @inline
    def act_as(smem, at, x):
        if is_mine(at):
            act(smem, i32(at // PER_WARP - WARP_0), x)
        else:
            act_otherwise(smem, at, x)

    return act_as


def build_produce(producers):
    """``produce(smem, x)``: what the first warp group does. Where one role is that of the first
    thread of several warps, these threads are told from others once.
    """
    leaders = [role for role in producers if not role.whole]
    whole = [role for role in producers if role.whole]
    BY_WARP = any(role.warps > 1 for role in leaders)
    lead = build_act(leaders, nothing, WARP, WARPS - sum(role.warps for role in whole))

    @inline
    def lead_alone(smem, warp, x):
        if cuda.threadIdx.x % WARP == 0:
            lead(smem, warp, x)

    act_by_warp, act = build_act(whole, lead_alone, WARP), build_act(producers, nothing, 1)

    @inline
    def produce(smem, x):
        if BY_WARP:
            act_by_warp(smem, cuda.threadIdx.x // WARP, x)
        else:
            act(smem, cuda.threadIdx.x, x)

    return produce


@cache
def arguments_class(names):
    """Named tuple of a kernel's arguments."""
    return namedtuple("Arguments", names)


def hopper_kernel(rings, roles, *, begins_early=False, maps, **arguments):
    """A kernel, its signature and compile options.

    Parameters
    ----------
    rings : tuple of Arrivals
    roles : Roles
    begins_early : bool
        It may be launched while those before it still run (`numba_flash.cuda.runtime.early`).
    maps : int
        How many tensor maps it takes: the first argument, a tuple.
    **arguments : types of Numba
        Of the other arguments, in order.
    """
    initialise, consume = build_initialise(rings), inline(roles.consume)
    produce = build_produce(roles.producers)
    CONSUMERS, (FEWEST, REGISTERS) = roles.tile.consumers, roles.tile.registers
    EARLY, PING_PONG, SENDERS, ON, OFF = begins_early, roles.ping_pong, roles.senders, 1, 0

    def kernel(x):
        smem = pipeline.shared_base(ALIGNMENT)
        group = pipeline.uniform(i32(cuda.threadIdx.x) // WARP_GROUP)
        if cuda.threadIdx.x == 0:
            initialise(smem)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()  # everyone sees the barriers initialised
        if EARLY:
            early.begin()
        if group == 0:
            ptx.setmaxnreg(FEWEST, OFF)
            produce(smem, x)
        else:
            ptx.setmaxnreg(REGISTERS, ON)
            me = group - 1
            if PING_PONG and me == CONSUMERS - 1:
                pipeline.pass_ping_pong(0)
            consume(smem, me, x)
            if PING_PONG and me == 0:
                pipeline.await_ping_pong(0)  # the turn that nobody takes
            if SENDERS and cuda.threadIdx.x % SENDERS == 0:
                ptx.bulk_wait_read()  # shared memory may go

    arguments = {"maps": types.UniTuple(u64, maps)} | arguments
    kind = types.NamedTuple(tuple(arguments.values()), arguments_class(tuple(arguments)))
    more = {"launch_bounds": (roles.tile.threads, 1)}
    return kernel, types.void(kind), more | {"tensor_maps": tuple(f"x.0.{i}" for i in range(maps))}
