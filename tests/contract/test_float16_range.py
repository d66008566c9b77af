"""float16 near both of its ends: small weights are not lost, and a mean is no larger than what it is of."""

import pytest
from float16_range import MEANS, SCORES, SMALL_WEIGHTS, check_mean, check_small_weights, check_small_weights_in_gradients

full_on_cpu = pytest.mark.full_on_cpu  # which computes in float32
named = lambda cases: [x if x == "plain" else pytest.param(x, marks=full_on_cpu) for x in cases]


@pytest.mark.parametrize("name", named(SMALL_WEIGHTS))
def test_small_weights_are_not_lost(backend, name):
    check_small_weights(backend, name)


@pytest.mark.parametrize("name", named(SMALL_WEIGHTS))
def test_small_weights_are_not_lost_in_gradients(backend, name):
    check_small_weights_in_gradients(backend, name)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("name", named(MEANS))
def test_a_mean_of_the_largest_number_is_that(backend, name, scores):
    check_mean(backend, name, scores)
