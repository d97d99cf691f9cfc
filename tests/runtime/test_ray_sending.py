"""What the driver sends arrives as it was."""

import functools

import jax
import pytest

from hetjax.runtime.ray.ray_sending import as_sent


def test_a_function_with_a_derivative_of_its_own_is_sent():
    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def power(x: jax.Array, n: int) -> jax.Array:
        return x**n

    # The rule calls the function, so that each of them is a part of the other's pickle.
    power.defvjp(lambda x, n: (power(x, n), x), lambda n, x, given: (7 * given,))

    function, again = as_sent((lambda x: power(x, 3), power))
    assert again is not power
    assert jax.value_and_grad(function)(2.0) == pytest.approx((8, 7))
    assert jax.value_and_grad(again)(2.0, 3) == pytest.approx((8, 7))
