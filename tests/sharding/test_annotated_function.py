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
    with pytest.raises(InputError, match=r"symbols\['a'\] is '6'; it must be a whole number"):
        function(x, symbols={"a": cast(Any, "6")})
    with pytest.raises(InputError, match="symbols: unknown symbol 'c'"):
        function(x, symbols={"a": 4, "c": 5})


def test_symbols_of_reshards_are_known():
    halves = HSharding((TWO, ONE), 0, ("half", "rest - half"))
    function = AnnotatedFunction(jax.jit(lambda x: reshard(jnp.tanh(x), halves)), [WHOLE])
    (x,) = drawn((9, 4))
    check([function(x, symbols={"half": 2, "rest": 9})], jnp.tanh(x))


def test_arguments_are_checked():
    function = AnnotatedFunction(loss, [{"in": COLUMNS, "out": ROWS}, EXAMPLES])
    weights, x = weights_and_batch(9)
    with pytest.raises(InputError, match="arguments: 1 are given, and 2 are annotated"):
        function(weights)
    with pytest.raises(InputError, match=r"annotations\[0\]: it has 2 leaves, .* has 1"):
        function({"in": weights["in"]}, x)
    with pytest.raises(InputError, match="is no array of numbers"):
        function(weights, cast(Any, "x"))
    with pytest.raises(InputError, match="array: object is not allowed: an array of numbers"):
        function(weights, np.array([object()] * 9))


@pytest.mark.parametrize(
    ("annotations", "options", "said"),
    [
        (None, {}, "annotations: None is not allowed"),
        (["a"], {}, r"annotations\[0\]: 'a' is not allowed: an HSharding or None"),
        ([{"in": WHOLE, "out": 3}], {}, r"annotations\[0\]: 3 is not allowed"),
        ([WHOLE], {"strategy": "a"}, "strategy: 'a' is not allowed: a number from 0"),
        ([WHOLE], {"strategy": -1}, "strategy: -1 is not allowed"),
    ],
)
def test_what_is_annotated_is_checked(annotations, options, said: str):
    with pytest.raises(InputError, match=said):
        AnnotatedFunction(jnp.tanh, annotations, **options)


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [
        (2.0, jnp.bfloat16),
        (2, jnp.bfloat16),
        (np.float32(2.0), jnp.float32),
        (np.full(4, 2.0), jnp.float32),
        (jnp.asarray(2.0, jnp.bfloat16), jnp.bfloat16),
    ],
    ids=["float", "int", "float32", "float64", "bfloat16"],
)
@pytest.mark.parametrize("lies", [None, WHOLE], ids=["everywhere", "annotated"])
def test_numbers_of_python_and_numpy_are_taken_as_jit_takes_them(scale, dtype, lies):
    x = jnp.ones((6, 4), jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        found = AnnotatedFunction(lambda x, scale: x * scale, [EXAMPLES, lies])(x, scale)
    assert found.dtype == dtype
    assert (found.numpy() == 2.0).all()


@pytest.mark.parametrize("lies", [None, WHOLE, EXAMPLES], ids=["known", "whole", "examples"])
def test_random_keys_are_arrays_too(lies):
    def noisy(x, keys):
        return x + jax.vmap(lambda key: jax.random.normal(key, (4,)))(keys)

    (x,) = drawn((6, 4))
    keys = jax.random.split(jax.random.key(3), 6)
    check([AnnotatedFunction(noisy, [EXAMPLES, lies], mend=True)(x, keys)], noisy(x, keys))


def test_what_random_keys_are_not_is_said():
    keys = jax.random.split(jax.random.key(3), 6)
    with pytest.raises(InputError, match="annotation: it has partial sums, and random keys"):
        HArray.of(keys, HSharding((TWO, ONE), PARTIAL))
    with pytest.raises(InputError, match="array: NumPy has no key<fry>"):
        HArray.of(keys, WHOLE).numpy()


def test_constants_that_are_returned_are_arrays():
    constant, result = AnnotatedFunction(lambda x: (1.0, x), [WHOLE])(drawn((3,))[0])
    assert isinstance(constant, jax.Array)
    assert (float(constant), constant.dtype) == (1.0, jnp.float32)
    assert isinstance(result, HArray)


def test_numbers_in_lists_are_arrays():
    check([AnnotatedFunction(lambda x: 2 * x, [WHOLE])(np.float32(3.0))], np.float32(6.0))
    array = reshard([1.0, 2.0, 3.0], HSharding((TWO, ONE), 0, (2, 1)))
    assert array.shape == (3,)
    with pytest.raises(InputError, match="has numbers beyond those of int32"):
        reshard([2**40], WHOLE)
    with pytest.raises(InputError, match="is no array"):
        reshard([[1.0], [2.0, 3.0]], WHOLE)
    with pytest.raises(InputError, match="annotations: 'r' is not allowed: an HSharding"):
        reshard([1.0], cast(Any, "rows"))
    with pytest.raises(InputError, match="annotations: None is not allowed"):
        reshard([1.0], cast(Any, None))
    with pytest.raises(InputError, match="annotation: 3 is not allowed"):
        HArray.of([1.0], cast(Any, 3))
