"""Products in the form that CPUs do well are the same products."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import examples
from hypothesis import given
from hypothesis import strategies as st

from hetjax.pipeline.program.products import with_narrow_operand_first
from hetjax.pipeline.program.traced_program import Step, flatten_jaxpr


def products(function: Any, *operands: Any) -> list[Step]:
    steps = flatten_jaxpr(jax.make_jaxpr(function)(*operands)).steps
    return [step for step in steps if step.name == "dot_general"]


@examples(usual=30)
@given(
    leading=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    first=st.lists(st.integers(1, 5), max_size=2),
    second=st.lists(st.integers(1, 5), max_size=2),
)
def test_the_gradient_of_a_weight_is_the_same(
    leading: list[int], first: list[int], second: list[int]
):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=(*leading, *own))) for own in (first, second))
    axes = tuple(range(len(leading)))
    (step,) = products(lambda a, b: jax.lax.dot_general(a, b, ((axes, axes), ((), ()))), a, b)
    changed = with_narrow_operand_first(step)
    assert changed is not step
    (found,) = changed.evaluate(a, b)
    np.testing.assert_allclose(found, np.tensordot(a, b, (axes, axes)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("equation", ["bsd,df->bsf", "bqhd,bkhd->bhqk", "bd,bd->b", "bsd,fd->bsf"])
def test_other_products_are_left_alone(equation: str):
    shapes = {"b": 2, "s": 3, "d": 4, "f": 5, "q": 3, "k": 3, "h": 2}
    inputs = equation.split("->")[0].split(",")
    a, b = (jnp.ones([shapes[axis] for axis in axes]) for axes in inputs)
    found = products(lambda a, b: jnp.einsum(equation, a, b), a, b)
    assert found
    assert all(with_narrow_operand_first(step) is step for step in found)


def test_two_transposes_are_none():
    """Of a weight's gradient as JAX writes it, in the form that is compiled."""
    x, w, dy = jnp.ones((2, 8, 4)), jnp.ones((4, 4)), jnp.ones((2, 8, 4))

    def gradient(x: Any, w: Any, dy: Any) -> Any:
        return jax.vjp(lambda w: x @ w, w)[1](dy)

    flat = flatten_jaxpr(jax.make_jaxpr(gradient)(x, w, dy))
    assert [step.name for step in flat.steps] == ["dot_general", "transpose"]
    product = with_narrow_operand_first(flat.steps[0])

    def run(first: Any, second: Any) -> Any:
        return flat.steps[1].evaluate(*product.evaluate(first, second))

    text = jax.jit(run).lower(dy, x).compile().as_text()
    assert text is not None
    assert text.count(" transpose(") == 1
