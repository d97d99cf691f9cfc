"""Annotated functions: one for inputs of any size, compiled once for each."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import counted_compilations
from deducing import check, drawn
from jax.sharding import PartitionSpec as P

from hetjax import HArray, InputError, reshard
from hetjax.runtime import AnnotatedFunction
from hetjax.sharding import PARTIAL, HSharding, Subgroup

TWO = Subgroup((0, 1), (("tensor", 2),), P())
ONE = Subgroup((2,), (), P())
WHOLE = HSharding((TWO, ONE))
COLUMNS = HSharding((TWO.with_spec(P(None, "tensor")), ONE))
ROWS = HSharding((TWO.with_spec(P("tensor")), ONE))
EXAMPLES = HSharding((TWO, ONE), 0, ("batch - batch//3", "batch//3"))


def loss(weights, x):
    hidden = jnp.tanh(reshard(x, EXAMPLES) @ weights["in"])
    return jnp.sum(reshard(hidden @ weights["out"], EXAMPLES) ** 2)


def weights_and_batch(batch):
    first, second, x = drawn((4, 8), (8, 2), (batch, 4))
    return {"in": first, "out": second}, x


def test_one_function_serves_several_totals_and_is_compiled_once_for_each():
    function = AnnotatedFunction(jax.value_and_grad(loss), [{"in": COLUMNS, "out": ROWS}, EXAMPLES])
    for batch in (6, 9, 10):
        weights, x = weights_and_batch(batch)
        value, gradients = function(weights, x)
        check([value], jax.jit(loss)(weights, x))
        expected = jax.jit(jax.grad(loss))(weights, x)
        assert gradients.keys() == expected.keys()
        check([gradients["in"], gradients["out"]], [expected["in"], expected["out"]])
        assert gradients["in"].annotation.hdim == PARTIAL
    assert function.num_compiled == 3
    weights, x = weights_and_batch(9)
    with counted_compilations() as counted:
        function(weights, x)
    assert not counted.seen
    assert function.num_compiled == 3


def test_values_that_lie_otherwise_are_brought():
    function = AnnotatedFunction(jnp.tanh, [EXAMPLES])
    (x,) = drawn((9, 4))
    found = function(HArray.of(x, WHOLE))
    check([found], jnp.tanh(x))
    assert found.annotation == HSharding((TWO, ONE), 0, (6, 3))


def test_symbols_that_do_not_follow_are_asked_for():
    sizes = HSharding((TWO, ONE), 0, ("a", "b"))
    function = AnnotatedFunction(jnp.tanh, [sizes])
    (x,) = drawn((9, 4))
    with pytest.raises(InputError, match=r"symbols: \['a', 'b'\] do not follow"):
        function(x)
    check([function(x, symbols={"a": 4})], jnp.tanh(x))
    check([function(x, symbols={"a": 4, "b": 5})], jnp.tanh(x))
    with pytest.raises(InputError, match="no number of 'b' of 1 or more makes a, b add up to 9"):
        function(x, symbols={"a": 9})


def test_arguments_are_checked():
    function = AnnotatedFunction(loss, [{"in": COLUMNS, "out": ROWS}, EXAMPLES])
    weights, x = weights_and_batch(9)
    with pytest.raises(InputError, match="arguments: 1 are given, and 2 are annotated"):
        function(weights)
    with pytest.raises(InputError, match=r"annotations\[0\]: it has 2 leaves, .* has 1"):
        function({"in": weights["in"]}, x)
    with pytest.raises(InputError, match="is no array of numbers"):
        function(weights, cast(Any, "x"))


def test_numbers_in_lists_are_arrays():
    check([AnnotatedFunction(lambda x: 2 * x, [WHOLE])(np.float32(3.0))], np.float32(6.0))
    array = reshard([1.0, 2.0, 3.0], HSharding((TWO, ONE), 0, (2, 1)))
    assert array.shape == (3,)
    with pytest.raises(InputError, match="is no array"):
        reshard([[1.0], [2.0, 3.0]], WHOLE)
    with pytest.raises(InputError, match="annotations: 'r' is not allowed: an HSharding"):
        reshard([1.0], cast(Any, "rows"))
    with pytest.raises(InputError, match="annotations: None is not allowed"):
        reshard([1.0], cast(Any, None))
    with pytest.raises(InputError, match="annotation: 3 is not allowed"):
        HArray.of([1.0], cast(Any, 3))
