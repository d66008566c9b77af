"""Small weights of float16 are not lost."""

import pytest
from support.small_weights import SMALL_WEIGHTS, check_small_weights, check_small_weights_in_gradients

# On the CPU, which computes in float32, the others are like the first.
named = [x if x == "plain" else pytest.param(x, marks=pytest.mark.full_on_cpu) for x in SMALL_WEIGHTS]


@pytest.mark.parametrize("name", named)
def test_small_weights_are_not_lost(backend, name):
    check_small_weights(backend, name)


@pytest.mark.parametrize("name", named)
def test_small_weights_are_not_lost_in_gradients(backend, name):
    check_small_weights_in_gradients(backend, name)
