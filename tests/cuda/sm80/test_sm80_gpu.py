"""The variants of `sm80` that are made for other GPUs than the one at hand, run on that: assembled for it, with the tiles, products and
copies of the other, so that nothing ships that never ran.
"""

import numpy as np
import pytest
from support import Backend, random_inputs
from support.naive import check

import numba_flash
from numba_flash import call
from numba_flash.cuda.sm80 import recipes, tier
from numba_flash.cuda.sm80.backward import prepare_backward
from numba_flash.cuda.sm80.bias_gradient import prepare_dq_dbias
from numba_flash.cuda.sm80.decode import prepare_backward_decode, prepare_decode
from numba_flash.cuda.sm80.forward import prepare_forward
from numba_flash.cuda.sm80.tiles import hardware

pytestmark = pytest.mark.gpu

CHOOSERS = (prepare_backward, prepare_backward_decode, prepare_dq_dbias, prepare_decode, prepare_forward, recipes, tier)
NQ, NK = 150, 200
DRAWN = np.random.default_rng(19)
BIAS = {"bias": DRAWN.standard_normal((4, NQ, NK)).astype(np.float16), "bias_grad": True}
ALIBI = numba_flash.alibi(np.linspace(0.1, 0.9, 4))
MASK, DROPOUT = {"mask": DRAWN.random((NQ, NK)) < 0.5}, {"dropout": 0.3, "rng": (7, 11)}
PROBLEMS = {
    **{f"causal {d}": (d, NQ, {"causal": True}) for d in (32, 64, 128, 192, 256)},
    **{f"bias, mask, dropout, softcap {d}": (d, NQ, BIAS | MASK | DROPOUT | {"softcap": 2.0}) for d in (64, 128, 256)},
    "bias of all in a batch": (32, NQ, BIAS),
    "lengths": (64, NQ, {"kv_lengths": np.array([60, NK]), "q_lengths": np.array([NQ, 70])}),
    "few queries": (128, 3, {}),
    "alibi": (64, NQ, {"score_mod": ALIBI, "score_mod_grad": ALIBI.score_mod_grad}),
}


def pretend(monkeypatch, capability: tuple[int, int]) -> None:
    """Let `sm80` choose as for another GPU; what is prepared meanwhile runs here alone."""
    for module in CHOOSERS:
        monkeypatch.setattr(module, "hardware", lambda _: hardware(capability))
    monkeypatch.setattr(call, "find", lambda *arguments: (None, None))


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6)], ids=lambda capability: "{}.{}".format(*capability))
@pytest.mark.parametrize("name", PROBLEMS)
def test_variants_for_other_gpus(monkeypatch, name, capability):
    """Products of 8 and no copies that go on, as Turing has them; tiles for 64, 163 and 99 KB of shared memory."""
    pretend(monkeypatch, capability)
    d, nq, options = PROBLEMS[name]
    inputs = random_inputs(batch=(2,), hq=4, hk=2, nq=nq, nk=NK, d=d, dtype="float16")
    check(Backend("sm80", "cupy"), *inputs, **options)
