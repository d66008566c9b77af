"""Small weights of float16 are not lost."""

import pytest
from small_weights import SMALL_WEIGHTS, check_small_weights, check_small_weights_in_gradients


@pytest.mark.parametrize("name", SMALL_WEIGHTS)
def test_small_weights_are_not_lost(backend, name):
    check_small_weights(backend, name)


@pytest.mark.parametrize("name", SMALL_WEIGHTS)
def test_small_weights_are_not_lost_in_gradients(backend, name):
    check_small_weights_in_gradients(backend, name)
