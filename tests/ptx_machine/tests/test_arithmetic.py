"""Instructions on numbers and bits, against what Python says of single numbers."""

import math

import ml_dtypes
import numpy as np
import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from ptx_machine.machine.by_hand import executed
from ptx_machine.machine.memory import Fault

BFLOAT16 = ml_dtypes.bfloat16
LANES = np.arange(32)
RNG = np.random.default_rng(0)
WORDS = RNG.integers(0, 2**32, (32, 3), dtype=np.uint32)
WORDS[:4] = [[0, 0, 0], [2**32 - 1, 1, 2**31], [1, 2**32 - 1, 7], [2**31, 2**31, 2**31]]
SHIFTS = np.array([0, 1, 5, 31, 32, 33, 40, 63, 64, 255, 256, 300] * 3, np.uint32)[:32]


def one_by_one(body: str, function, words: np.ndarray = WORDS) -> None:
    """Each lane's result is what the function makes of its words."""
    np.testing.assert_array_equal(executed(body, words)[:, 0], [function(*map(int, row)) % 2**32 for row in words])


def floats(body: str, values, out=np.float32, x=np.float32) -> np.ndarray:
    """What the body makes of numbers (lanes, n), read as numbers."""
    words = np.ascontiguousarray(np.broadcast_to(np.asarray(values, x), (32, np.shape(values)[-1])))
    size = np.dtype(x).itemsize
    words = words.view(np.uint64) if size == 8 else words.view(np.uint32) if size == 4 else words.view(np.uint16).astype(np.uint32)
    return executed(body, words, kind=np.uint64 if np.dtype(out).itemsize == 8 else np.uint32).view(out)


# ---- bits --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [0xC0, 0x96, 0xE8, 0xCA, 0x1D])
def test_lop3(table):
    def bit_by_bit(a, b, c):
        return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32))

    one_by_one(f"lop3.b32 %y0, %x0, %x1, %x2, {table};", bit_by_bit)


@pytest.mark.parametrize("selector", [0x3210, 0x7654, 0x5410, 0x0123, 0x9BA8, 0xF0F7])
def test_prmt(selector):
    def permuted(a, b, _):
        data, result = a.to_bytes(4, "little") + b.to_bytes(4, "little"), []
        for i in range(4):
            chosen = selector >> 4 * i & 15
            byte = data[chosen & 7]
            result.append((255 if byte & 128 else 0) if chosen & 8 else byte)
        return int.from_bytes(result, "little")

    one_by_one(f"prmt.b32 %y0, %x0, %x1, {selector};", permuted)


@pytest.mark.parametrize("limit", ["wrap", "clamp"])
def test_shf(limit):
    count = lambda n: n % 32 if limit == "wrap" else min(n, 32)
    words = np.column_stack([WORDS[:, :2], SHIFTS])
    one_by_one(f"shf.l.{limit}.b32 %y0, %x0, %x1, %x2;", lambda a, b, n: (b << 32 | a) << count(n) >> 32, words)
    one_by_one(f"shf.r.{limit}.b32 %y0, %x0, %x1, %x2;", lambda a, b, n: (b << 32 | a) >> count(n), words)


def test_bit_fields():
    def field(a, place, length):
        return a >> (place & 255) & (1 << (length & 255)) - 1

    def signed(a, place, length):
        """As the ISA writes it: bit by bit, with the sign of the last."""
        place, length = place & 255, length & 255
        sign = 0 if length == 0 else a >> min(place + length - 1, 31) & 1
        return sum((a >> place + i & 1 if i < length and place + i <= 31 else sign) << i for i in range(32))

    for length in (0, 1, 7, 31, 32, 40):
        words = np.column_stack([WORDS[:, 0], SHIFTS, np.full(32, length, np.uint32)])
        one_by_one("bfe.u32 %y0, %x0, %x1, %x2;", field, words)
        one_by_one("bfe.s32 %y0, %x0, %x1, %x2;", signed, words)

        def inserted(a, b, place, length=length):
            place &= 255
            mask = ((1 << length) - 1) << place
            return b & ~mask | a << place & mask

        one_by_one(f"bfi.b32 %y0, %x0, %x1, %x2, {length};", inserted, np.column_stack([WORDS[:, :2], SHIFTS]))


def test_counts():
    one_by_one("popc.b32 %y0, %x0;", lambda a, b, c: a.bit_count())
    one_by_one("clz.b32 %y0, %x0;", lambda a, b, c: 32 - a.bit_length())
    one_by_one("brev.b32 %y0, %x0;", lambda a, b, c: int(f"{a:032b}"[::-1], 2))
    wide = "mov.b64 %rd1, {%x0, %x1};"
    one_by_one(wide + "popc.b64 %y0, %rd1;", lambda a, b, c: (b << 32 | a).bit_count())
    one_by_one(wide + "clz.b64 %y0, %rd1;", lambda a, b, c: 64 - (b << 32 | a).bit_length())


def test_products_of_integers():
    one_by_one("mad.hi.u32 %y0, %x0, %x1, %x2;", lambda a, b, c: (a * b >> 32) + c)
    one_by_one("mul.hi.u32 %y0, %x0, %x1;", lambda a, b, c: a * b >> 32)
    signed = lambda x: x - 2**32 * (x >> 31)
    one_by_one("mul.hi.s32 %y0, %x0, %x1;", lambda a, b, c: signed(a) * signed(b) >> 32)
    for half, byte in (("lo", 0), ("hi", 16)):
        products = lambda a, b, byte=byte: (a & 0xFFFF) * (b >> byte & 255) + (a >> 16) * (b >> byte + 8 & 255)
        one_by_one(f"dp2a.{half}.u32.u32 %y0, %x0, %x1, %x2;", lambda a, b, c, products=products: products(a, b) + c)


# ---- between lanes -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "by", "ends", "lane", "inside"),
    [
        ("idx", 5, 0x1F, np.full(32, 5), np.ones(32)),
        ("idx", 5, 0x181F, LANES // 8 * 8 + 5, np.ones(32)),
        ("bfly", 3, 0x1F, LANES ^ 3, np.ones(32)),
        ("bfly", 16, 0x100F, LANES ^ 16, (LANES ^ 16) <= LANES // 16 * 16 + 15),
        ("down", 3, 0x1F, LANES + 3, LANES + 3 <= 31),
        ("down", 3, 0x1807, LANES + 3, LANES % 8 + 3 <= 7),
        ("up", 3, 0, LANES - 3, LANES - 3 >= 0),
        ("up", 3, 0x1800, LANES - 3, LANES % 8 - 3 >= 0),
    ],
)
def test_shuffles(mode, by, ends, lane, inside):
    """Who asks for a lane outside of the segment keeps its own value, and is told so."""
    got = executed(f"shfl.sync.{mode}.b32 %y0|%p1, %x0, {by}, {ends}, -1; selp.u32 %y1, 1, 0, %p1;", WORDS)
    np.testing.assert_array_equal(got[:, 1], inside)
    np.testing.assert_array_equal(got[:, 0], WORDS[np.where(inside, lane, LANES), 0])


def test_votes():
    body = "setp.lt.u32 %p1, %lane, %x0; vote.sync.{} %p2, {}%p1, -1; selp.u32 %y0, 1, 0, %p2;"
    for limit, any_, all_, uni in ((0, 0, 0, 1), (1, 1, 0, 0), (31, 1, 0, 0), (32, 1, 1, 1)):
        words = np.full(32, limit, np.uint32)
        for name, said in (("any.pred", any_), ("all.pred", all_), ("uni.pred", uni)):
            assert (executed(body.format(name, ""), words) == said).all()
        assert (executed(body.format("any.pred", "!"), words) == 1 - all_).all()
        ballot = executed("setp.lt.u32 %p1, %lane, %x0; vote.sync.ballot.b32 %y0, %p1, -1;", words)
        assert (ballot == 2**limit - 1).all()


def test_parts_of_a_warp():
    """Lanes that are apart vote, shuffle and wait among themselves, if their mask says so."""
    body = """mov.u32 %y0, 0; mov.u32 %y1, 0; setp.lt.u32 %p1, %lane, 8; @!%p1 bra $rest;
    activemask.b32 %y0; shfl.sync.idx.b32 %y1, %x0, 3, 31, {}; bar.warp.sync 255; $rest:"""
    got = executed(body.format(255), WORDS)
    assert (got[:8] == (255, WORDS[3, 0])).all()
    assert (got[8:] == 0).all()
    with pytest.raises(Fault, match="lanes of the mask are not here: 0xffffffff, and 8 lanes are"):
        executed(body.format(-1), WORDS)
    with pytest.raises(Fault, match="a value of a lane that the mask does not name"):
        executed(body.format(255).replace(" 3, 31", " 9, 31"), WORDS)


def test_lanes_that_are_apart_meet_at_a_barrier_of_the_warp():
    body = """mov.u32 %r1, room; shl.b32 %r2, %lane, 2; add.s32 %r3, %r1, %r2; xor.b32 %r4, %r2, 124; add.s32 %r5, %r1, %r4;
    setp.lt.u32 %p1, %lane, 8; @%p1 bra $store; bra $store; $store: st.shared.u32 [%r3], %lane; bar.warp.sync -1;
    ld.shared.u32 %y0, [%r5];"""
    np.testing.assert_array_equal(executed(body, WORDS)[:, 0], 31 - LANES)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("name", "told"), [("popc.u32", 40), ("or.pred", 1), ("and.pred", 0)])
def test_a_barrier_that_counts(name, told, seed):
    """All threads of the block are told the same."""
    result = "%y0" if name == "popc.u32" else "%p2"
    body = f"setp.lt.u32 %p1, %thread, 40; bar.red.{name} {result}, 0, %p1;" + ("" if result == "%y0" else "selp.u32 %y0, 1, 0, %p2;")
    assert (executed(body, np.zeros(96, np.uint32), seed=seed) == told).all()


# ---- numbers -----------------------------------------------------------------------------------------------------------------------------

NUMBERS = np.concatenate([[0, -0.0, 1, -1, 0.5, 1.5, 2.5, -2.5, np.inf, -np.inf, np.nan, 1e-40, 3e9, -3e9, 65520, 1 + 2.0**-11],
                          RNG.standard_normal(16) * 10.0 ** RNG.integers(-6, 6, 16)]).astype(np.float32)  # fmt: skip


@pytest.mark.parametrize(("name", "function"), [("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)])
def test_numbers_to_integers_stop_at_the_ends(name, function):
    for kind in (np.int32, np.uint32):
        ends, letter = np.iinfo(kind), np.dtype(kind).kind[0].replace("i", "s")
        wanted = [0 if np.isnan(x) else int(min(max(function(np.float64(x)), ends.min), ends.max)) for x in NUMBERS]
        got = floats(f"cvt.{name}.{letter}32.f32 %y0, %x0;", NUMBERS[:, None], kind)
        np.testing.assert_array_equal(got[:, 0], np.array(wanted, kind))
    np.testing.assert_array_equal(floats(f"cvt.{name}.f32.f32 %y0, %x0;", NUMBERS[:, None])[:, 0], function(NUMBERS))


def test_integers_to_numbers_are_rounded_once():
    """2**60 + 2**36 + 1 lies just above the middle of two float32; by way of float64 it would lie in the middle, and go down."""
    body = "mov.u64 %rd1, 1152921573326323713; cvt.{}.f32.u64 %y0, %rd1;"
    assert (floats(body.format("rn"), [[1.0]]) == np.float32(2.0**60 + 2.0**37)).all()
    assert (floats(body.format("rz"), [[1.0]]) == np.float32(2.0**60)).all()
    assert (floats("mov.u32 %r1, 16777217; cvt.rp.f32.u32 %y0, %r1;", [[1.0]]) == 16777218).all()
    assert (floats("mov.u32 %r1, -5; cvt.rn.f32.s32 %y0, %r1;", [[1.0]]) == -5).all()


def test_narrow_formats():
    """To float16, bfloat16 and TF32, with ties to even, toward zero, and away from zero."""
    got = floats("cvt.rn.f16.f32 %h1, %x0; cvt.u32.u16 %y0, %h1;", NUMBERS[:, None], np.uint32)[:, 0].astype(np.uint16).view(np.float16)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got, NUMBERS.astype(np.float16))
    packed = floats("cvt.rn.bf16x2.f32 %y0, %x0, %x1;", np.column_stack([NUMBERS, -NUMBERS]), BFLOAT16)
    wanted = np.column_stack([-NUMBERS, NUMBERS]).astype(BFLOAT16)  # the first is the upper half
    np.testing.assert_array_equal(packed.astype(np.float32), wanted.astype(np.float32))
    tie = np.float32(1 + 2.0**-11)  # halfway between two TF32; 1 is the even one
    for mode, wanted in (("rna", 1 + 2.0**-10), ("rn", 1), ("rz", 1)):
        assert (floats(f"cvt.{mode}.tf32.f32 %y0, %x0;", [[tie]]) == wanted).all()
        assert (floats(f"cvt.{mode}.tf32.f32 %y0, %x0;", [[-tie]]) == -wanted).all()
    assert (floats("cvt.rz.f16x2.f32 %y0, %x0, %x0;", [[65535.0]], np.float16) == 65504).all()
    assert (floats("cvt.rn.relu.f16x2.f32 %y0, %x0, %x1;", [[-3.0, 2.0]], np.float16) == (2, 0)).all()
    upper = executed("mov.b32 {%h1, %h2}, %x0; cvt.f32.f16 %y0, %h2;", np.full(32, 0xC3003C00, np.uint32))
    assert (upper.view(np.float32) == -3.5).all()


@pytest.mark.parametrize("kind", [np.float16, BFLOAT16], ids=["f16x2", "bf16x2"])
def test_two_numbers_in_a_word(kind):
    """Both halves by themselves; sums as wide as they need to be before they are rounded."""
    values = RNG.standard_normal((32, 6)).astype(kind)
    words, name = values.view(np.uint32), {np.float16: "f16x2", BFLOAT16: "bf16x2"}[kind]
    a, b, c = (values[:, i : i + 2].astype(np.float64) for i in (0, 2, 4))
    for text, wanted in (
        (f"fma.rn.{name} %y0, %x0, %x1, %x2;", a * b + c),
        (f"add.{name} %y0, %x0, %x1;", a + b),
        (f"sub.{name} %y0, %x0, %x1;", a - b),
        (f"mul.{name} %y0, %x0, %x1;", a * b),
        (f"min.{name} %y0, %x0, %x1;", np.minimum(a, b)),
        (f"max.{name} %y0, %x0, %x1;", np.maximum(a, b)),
        (f"neg.{name} %y0, %x0;", -a),
    ):
        np.testing.assert_array_equal(executed(text, words).view(kind).astype(np.float64), wanted.astype(kind).astype(np.float64))


@pytest.mark.parametrize(
    ("name", "function"),
    [("ex2.approx", np.exp2), ("lg2.approx", np.log2), ("rcp.approx", np.reciprocal), ("rcp.rn", np.reciprocal), ("sqrt.rn", np.sqrt),
     ("sqrt.approx", np.sqrt), ("rsqrt.approx", lambda x: 1 / np.sqrt(x)), ("sin.approx", np.sin), ("cos.approx", np.cos),
     ("tanh.approx", np.tanh)],
)  # fmt: skip
def test_functions(name, function):
    """The nearest float32; with .ftz, subnormal numbers are zeros of their sign."""
    x = np.where(np.isfinite(NUMBERS), NUMBERS, 0.25).astype(np.float32)
    with np.errstate(all="ignore"):
        wanted = function(x.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(floats(f"{name}.f32 %y0, %x0;", x[:, None])[:, 0], wanted)
    if name not in ("rcp.rn", "sqrt.rn"):
        with np.errstate(all="ignore"):
            zero = function(np.float64(-0.0)).astype(np.float32)
        np.testing.assert_array_equal(floats(f"{name}.ftz.f32 %y0, %x0;", [[-1e-40]]), np.full((32, 1), zero))


def test_rounding_of_single_operations():
    """Down, up, toward zero; what is flushed and saturated; float64 whole."""
    tiny = np.float32(2.0**-40)
    for mode, wanted in (("rn", 1), ("rm", 1), ("rz", 1), ("rp", 1 + 2.0**-23)):
        assert (floats(f"add.{mode}.f32 %y0, %x0, %x1;", [[1, tiny]]) == np.float32(wanted)).all()
        assert (floats(f"fma.{mode}.f32 %y0, %x0, %x0, %x1;", [[1, tiny]]) == np.float32(wanted)).all()
    assert (floats("mul.ftz.f32 %y0, %x0, %x1;", [[1e-20, -1e-20]]).view(np.uint32) == 0x80000000).all()
    pairs = [[3.0, 1.0], [-3.0, 1.0], [np.inf, -np.inf], [0.25, 0.5]] * 8
    assert (floats("add.sat.f32 %y0, %x0, %x1;", pairs)[:4, 0] == (1, 0, 0, 0.75)).all()
    x = 1 + 2.0**-30
    assert (floats("rcp.rn.f64 %y0, %x0;", [[x]], np.float64, np.float64) == 1 / x).all()
    assert (floats("fma.rn.f64 %y0, %x0, %x0, %x1;", [[x, -1 - 2.0**-29]], np.float64, np.float64) == 2.0**-60).all()
    approximate = floats("rcp.approx.ftz.f64 %y0, %x0;", [[3.0]], np.float64, np.float64)
    assert (approximate.view(np.uint64) % 2**32 == 0).all()
    assert math.isclose(approximate[0, 0], 1 / 3, rel_tol=2.0**-19)
    for text in ("fma.rm.f64 %y0, %x0, %x0, %x0;", "sqrt.rp.f64 %y0, %x0;"):
        with pytest.raises(NotImplementedError, match="rounding r"):
            floats(text, [[1.0]], np.float64, np.float64)


def test_extremes_signs_and_questions():
    values = np.array([[0, -0.0], [-0.0, 0.0], [np.nan, 1], [1, np.nan], [-np.inf, 2], [3, 2], [1e-40, -1], [5, 5]] * 4, np.float32)
    low, high = (floats(f"{name}.f32 %y0, %x0, %x1;", values)[:8, 0] for name in ("min", "max"))
    np.testing.assert_array_equal(low, [-0.0, -0.0, 1, 1, -np.inf, 2, -1, 5])
    np.testing.assert_array_equal(np.signbit(low[:2]), True)
    np.testing.assert_array_equal(high, [0, 0, 1, 1, 2, 3, np.float32(1e-40), 5])
    np.testing.assert_array_equal(np.signbit(high[:2]), False)
    assert np.isnan(floats("max.NaN.f32 %y0, %x0, %x1;", values)[2:4]).all()
    np.testing.assert_array_equal(floats("copysign.f32 %y0, %x0, %x1;", [[-2.0, 3.0]]), np.full((32, 1), -3, np.float32))
    for name, yes in (("finite", 5), ("infinite", 4), ("number", 3), ("notanumber", 2), ("normal", 5), ("subnormal", 6)):
        said = floats(f"testp.{name}.f32 %p1, %x0; selp.u32 %y0, 1, 0, %p1;", values, np.uint32)[:8, 0]
        tests = {"finite": np.isfinite, "infinite": np.isinf, "number": lambda x: x == x, "notanumber": np.isnan,
                 "normal": lambda x: np.isfinite(x) & (abs(x) > 1e-38), "subnormal": lambda x: (x != 0) & (abs(x) < 1e-38)}  # fmt: skip
        np.testing.assert_array_equal(said, tests[name](values[:8, 0]))
        assert said[yes] == 1


def test_comparisons():
    """With a NaN, all but those that say so are false; a further predicate is combined with both answers."""
    values = np.array([[1, 2], [2, 2], [np.nan, 2], [3, 2]] * 8, np.float32)
    for name, wanted in (
        ("ne", "1001"),
        ("neu", "1011"),
        ("lt", "1000"),
        ("ltu", "1010"),
        ("equ", "0110"),
        ("num", "1101"),
        ("nan", "0010"),
    ):
        said = floats(f"setp.{name}.f32 %p1, %x0, %x1; selp.u32 %y0, 1, 0, %p1;", values, np.uint32)[:4, 0]
        assert "".join(map(str, said)) == wanted
    body = """setp.ge.u32 %p1, %lane, 2; setp.lt.and.f32 %p2|%p3, %x0, %x1, !%p1; selp.u32 %y0, 1, 0, %p2; selp.u32 %y1, 1, 0, %p3;"""
    np.testing.assert_array_equal(floats(body, values, np.uint32)[:4], [[1, 0], [0, 1], [0, 0], [0, 0]])
    np.testing.assert_array_equal(floats("set.lt.f32.f32 %y0, %x0, %x1;", values)[:4, 0], [1, 0, 0, 0])
    np.testing.assert_array_equal(floats("set.lt.u32.f32 %y0, %x0, %x1;", values, np.uint32)[:2, 0], [2**32 - 1, 0])


@pytest.mark.parametrize(
    "text", ["add.sat.s32 %y0, %x0, %x1;", "add.cc.u32 %y0, %x0, %x1;", "cvt.s32.f32 %y0, %x0;", "prmt.b32.f4e %y0, %x0, %x1, 1;"]
)
def test_modifiers_that_are_not_known_are_errors(text):
    with pytest.raises(NotImplementedError):
        executed(text, WORDS)
