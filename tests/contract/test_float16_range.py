"""float16 near both of its ends: small weights are not lost, and a mean is no larger than what it is of."""

import pytest
from float16_range import MEANS, SCORES, SMALL_WEIGHTS, check_mean, check_small_weights, check_small_weights_in_gradients


@pytest.mark.parametrize("name", SMALL_WEIGHTS)
def test_small_weights_are_not_lost(backend, name):
    check_small_weights(backend, name)


@pytest.mark.parametrize("name", SMALL_WEIGHTS)
def test_small_weights_are_not_lost_in_gradients(backend, name):
    check_small_weights_in_gradients(backend, name)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_of_the_largest_number_is_that(backend, name, scores):
    check_mean(backend, name, scores)
