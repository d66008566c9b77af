"""Texts written by hand: each thread gets words in registers ``%x0``, ``%x1`` ..., and hands back those in ``%y0``, ``%y1`` ...."""

import re

import numpy as np

from ptx_machine.machine.machine import Machine

REGISTERS = """.reg .pred %p<9>; .reg .b16 %h<99>; .reg .b32 %r<99>; .reg .b64 %rd<99>; .reg .f32 %f<99>; .reg .f64 %fd<99>;
.reg .b64 %in; .reg .b64 %out; .reg .b32 %thread; .reg .b32 %lane; .reg .b64 %here;"""


def executed(body: str, words: np.ndarray, results: int | None = None, kind=np.uint32, seed: int = 0) -> np.ndarray:
    """What threads hand back, (threads, results) of that kind, from words (threads, n) that they get.

    The body may also use ``%lane``, ``%thread``, ``%in`` and ``%out``, addresses of the words and of the results, and 4096 bytes of
    shared memory called ``room``.
    """
    words = np.ascontiguousarray(words if words.ndim == 2 else words[:, None])
    threads, count = words.shape
    results = len(set(re.findall(r"%y\d+", body))) if results is None else results
    size, out_size = words.itemsize, np.dtype(kind).itemsize
    load = "".join(f"ld.global.u{8 * size} %x{i}, [%here+{size * i}];" for i in range(count))
    store = "".join(f"st.global.u{8 * out_size} [%here+{out_size * i}], %y{i};" for i in range(results))
    text = f""".version 8.0
    .target sm_90a
    .address_size 64
    .shared .align 16 .b8 room[4096];
    .visible .entry kernel(.param .u64 from, .param .u64 to)
    {{
    {REGISTERS} .reg .b{8 * size} %x<{count + 1}>; .reg .b{8 * out_size} %y<{results + 1}>;
    ld.param.u64 %in, [from]; ld.param.u64 %out, [to]; mov.u32 %thread, %tid.x; and.b32 %lane, %thread, 31;
    mul.wide.u32 %here, %thread, {size * count}; add.s64 %here, %here, %in; {load}
    {body}
    mul.wide.u32 %here, %thread, {out_size * results}; add.s64 %here, %here, %out; {store} ret; }}"""
    machine, out = Machine(text, seed), np.zeros((threads, results), kind)
    machine.launch([machine.memory.place("in", words), machine.memory.place("out", out)], 1, threads)
    return out
