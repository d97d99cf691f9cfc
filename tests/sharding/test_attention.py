"""`hetjax.attention`: one equation under every transformation, in every dtype, divided or not."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_attention import dense_attention, seen_by
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import hetjax
from hetjax import InputError
from hetjax.sharding.attention.mask import Mask


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def inputs(length: int, dtype: Any = jnp.float32, heads: int = 6, groups: int = 2) -> list[Any]:
    shapes = [(2, length, n, 16) for n in (heads, groups, groups, heads)]
    return [normal(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes)]


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    def both(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        out, back = jax.vjp(function, q, k, v)
        return (out, *back(d_out))

    return both


def error_of(found: Any, exact: Any) -> float:
    """The largest error, in parts of the largest number."""
    return max(
        float(np.max(np.abs(np.asarray(a, np.float64) - b))) / max(1.0, float(np.max(np.abs(b))))
        for a, b in zip(found, exact, strict=True)
    )


MASKS: dict[str, tuple[dict[str, Any], Mask]] = {
    "full": ({}, Mask()),
    "causal": ({"causal": True}, Mask(after=0)),
    "window": ({"window": 30}, Mask(30, 30)),
    "uneven window": ({"window": (5, 40)}, Mask(5, 40)),
    "causal window": ({"causal": True, "window": 70}, Mask(70, 0)),
}


@pytest.mark.parametrize(
    ("name", "packed"),
    [*((each, False) for each in MASKS), ("full", True), ("causal window", True)],
)
def test_float32_is_dense_attention_over_several_tiles(name: str, packed: bool):
    (q, k, v, d_out), (options, mask) = inputs(300), MASKS[name]
    segments = jnp.sort(jax.random.randint(jax.random.key(9), (2, 300), 0, 4)) if packed else None
    found = jax.jit(
        with_gradients(
            lambda q, k, v: hetjax.attention(q, k, v, **options, segment_ids=segments, scale=0.5)
        )
    )(q, k, v, d_out)
    both = None if segments is None else [np.asarray(segments)] * 2
    seen = seen_by(mask, np.arange(300), np.arange(300), both)
    assert error_of(found, dense_attention(q, k, v, seen, 0.5, d_out)) < 2e-5


def test_bfloat16_errs_no_more_than_twice_as_much_as_dense_attention():
    q, k, v, d_out = inputs(300, jnp.bfloat16)
    seen = seen_by(Mask(after=0), np.arange(300), np.arange(300))
    exact = dense_attention(q, k, v, seen, 0.25, d_out)

    def plain(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    with jax.numpy_dtype_promotion("standard"):
        ours, dense = (jax.jit(with_gradients(f))(q, k, v, d_out) for f in (causal, plain))
    assert all(each.dtype == jnp.bfloat16 for each in ours)
    for a, b, c in zip(ours, dense, exact, strict=True):
        assert error_of([a], [c]) <= 2 * error_of([b], [c])


def test_cross_attention_and_queries_that_see_nothing():
    """Keys of other segments alone: zeros, and no NaN in any gradient."""
    q, k, v = normal(0, 1, 5, 2, 4), normal(1, 1, 3, 2, 4), normal(2, 1, 3, 2, 4)
    segments = jnp.array([[0, 0, 7, 1, 1]]), jnp.array([[0, 1, 1]])
    found = with_gradients(lambda q, k, v: hetjax.attention(q, k, v, segment_ids=segments))(
        q, k, v, jnp.ones_like(q)
    )
    seen = seen_by(Mask(), np.arange(5), np.arange(3), [np.asarray(each) for each in segments])
    assert error_of(found, dense_attention(q, k, v, seen, 0.5, jnp.ones_like(q))) < 1e-5
    assert not found[0][0, 2].any()


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_segments_of_64_bits_are_told_apart(dtype: str):
    q, numbers = normal(0, 1, 5, 2, 4), np.array([[0, 0, 1, 1, 1]])
    with jax.enable_x64(True):
        wide = jnp.asarray(numbers.astype(dtype) << 32)
        found = hetjax.attention(q, q, q, segment_ids=wide)
        with pytest.raises(InputError, match=f"segment_ids: {dtype} and int32 .*: one dtype"):
            hetjax.attention(q, q, q, segment_ids=(wide, wide.astype(jnp.int32)))
    expected = hetjax.attention(q, q, q, segment_ids=jnp.asarray(numbers))
    np.testing.assert_array_equal(found, expected)


def causal(q: Any, k: Any, v: Any) -> jax.Array:
    return hetjax.attention(q, k, v, causal=True)


def scanned(function: Callable[..., Any]) -> Callable[..., Any]:
    """Each example in an iteration of its own."""

    def run(q: Any, k: Any, v: Any) -> Any:
        return jax.lax.scan(lambda carry, x: (carry, function(*x)), 0, (q, k, v))[1]

    return run


TRANSFORMED: dict[str, Callable[..., Any]] = {
    "plain": causal,
    "checkpoint": jax.checkpoint(causal),
    "vmap": jax.vmap(causal),
    "scan": scanned(causal),
    "scan of checkpoint": scanned(jax.checkpoint(causal)),
    "vmap of scan": jax.vmap(scanned(causal), in_axes=1, out_axes=1),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations_compute_the_same(name: str):
    arrays, function = inputs(20), TRANSFORMED[name]
    if name == "vmap of scan":
        arrays = [each[:, None] for each in arrays]
        expected = [each[:, None] for each in jax.jit(with_gradients(causal))(*inputs(20))]
    else:
        expected = jax.jit(with_gradients(causal))(*arrays)
    found = jax.jit(with_gradients(function))(*arrays)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_forward_mode_is_dense_attentions():
    q, k, v, d_q = inputs(20)

    def plain(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    ours, dense = (jax.jvp(each, (q, k, v), (d_q, v, k))[1] for each in (causal, plain))
    np.testing.assert_allclose(ours, dense, rtol=1e-4, atol=1e-5)


def names_in(jaxpr: Any) -> list[str]:
    return [equation.primitive.name for equation in jaxpr.eqns if equation.primitive.name != "iota"]


def test_it_is_one_equation_forward_and_one_backward():
    arrays = inputs(600)
    assert names_in(jax.make_jaxpr(causal)(*arrays[:3]).jaxpr) == ["attention"]
    backward = jax.make_jaxpr(with_gradients(causal))(*arrays).jaxpr
    assert names_in(backward) == ["attention", "attention_backward"]


def test_memory_grows_with_the_tokens_not_with_their_square():
    def temporaries(length: int) -> int:
        shape = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        lowered = jax.jit(with_gradients(causal)).lower(*[shape] * 4)
        analysis = lowered.compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    short, long = temporaries(2048), temporaries(8192)
    assert long < 5 * short
    assert long < 8192 * 8192


def test_compilers_divide_it_along_examples_and_heads_without_gathering():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices()[:4])
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
    divided = NamedSharding(mesh, P("data", None, "tensor"))
    arrays = inputs(300, heads=8, groups=4)
    compiled = jax.jit(with_gradients(causal), in_shardings=(divided,) * 4).lower(*arrays).compile()
    assert not re.findall(r" (?:all-|collective-|reduce-sc)\S+\(", compiled.as_text() or "")
    assert all(each.spec == divided.spec for each in compiled.output_shardings)
    found = compiled(*(jax.device_put(each, divided) for each in arrays))
    for a, b in zip(found, jax.jit(with_gradients(causal))(*arrays), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_it_is_an_attention_function_of_flax():
    x = normal(0, 2, 7, 12)
    ours, theirs = (
        nnx.MultiHeadAttention(3, 12, decode=False, attention_fn=each, rngs=nnx.Rngs(0))
        for each in (hetjax.attention, nnx.dot_product_attention)
    )
    np.testing.assert_allclose(
        ours(x, is_causal=True), theirs(x, is_causal=True), rtol=1e-5, atol=1e-6
    )
    with pytest.raises(InputError, match="mask: an array is not allowed"):
        ours(x, mask=jnp.ones((2, 3, 7, 7), bool))
    with pytest.raises(InputError, match="sow_weights"):
        ours(x, sow_weights=True)
    ours.dropout_rate = 0.5
    with pytest.raises(InputError, match=r"dropout_rate: 0\.5 is not allowed"):
        ours(x, rngs=nnx.Rngs(1), deterministic=False)


GOOD = jnp.ones((2, 5, 4, 8))


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ([GOOD[0, 0], GOOD, GOOD], {}, r"q: shape \(4, 8\) is not allowed"),
        ([GOOD, GOOD[:1], GOOD], {}, r"k: shape \(1, 5, 4, 8\) does not go with that of q"),
        ([GOOD, GOOD, GOOD[:, :3]], {}, r"v: shape \(2, 3, 4, 8\) does not go with that of k"),
        ([GOOD, GOOD[:, :, :3], GOOD[:, :, :3]], {}, "k: 3 heads are not allowed: a divisor of"),
        ([GOOD, GOOD.astype("bfloat16"), GOOD], {}, "k: dtype bfloat16 is not allowed"),
        ([GOOD.astype("int32")] * 3, {}, "q: dtype int32 is not allowed"),
        ([GOOD] * 3, {"window": -1}, "window: -1 is not allowed: a number from 0"),
        ([GOOD] * 3, {"window": (1, 2, 3)}, "window: "),
        ([GOOD] * 3, {"window": True}, "window: True is not allowed: a number from 0"),
        ([GOOD, None, GOOD], {}, "k: None is not allowed: an array"),
        ([GOOD] * 3, {"causal": jnp.ones(5, bool)}, "causal: .* is not allowed: True or False"),
        ([GOOD] * 3, {"scale": "a"}, "scale: 'a' is not allowed: a finite number, not traced"),
        ([GOOD] * 3, {"scale": float("nan")}, "scale: nan is not allowed"),
        ([GOOD] * 3, {"segment_ids": (jnp.ones((2, 5), int),) * 3}, "segment_ids: 3 arrays"),
        ([GOOD] * 3, {"segment_ids": jnp.ones((2, 4), int)}, "segment_ids: int32"),
        ([GOOD] * 3, {"segment_ids": jnp.ones((2, 5))}, "segment_ids: float32"),
    ],
)
def test_what_does_not_fit_is_refused(arrays: Any, options: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        hetjax.attention(*arrays, **options)


def test_numbers_of_numpy_are_numbers_and_unknown_names_are_told():
    q = normal(0, 1, 7, 2, 4)
    numbers: dict[str, Any] = {
        "causal": np.bool_(True),
        "window": np.int64(2),
        "scale": np.float32(0.25),
    }
    found = hetjax.attention(q, q, q, **numbers)
    expected = hetjax.attention(q, q, q, causal=True, window=2, scale=0.25)
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(TypeError, match="attention: casual is no argument of it"):
        hetjax.attention(q, q, q, casual=True)
    with pytest.raises(InputError, match=r"scale: .* is not allowed: a finite number, not traced"):
        jax.jit(lambda scale: hetjax.attention(q, q, q, scale=scale))(0.5)


def test_no_tokens_and_one_token():
    for queries, keys in ((0, 3), (3, 0), (1, 1)):
        q, k = jnp.ones((1, queries, 2, 4)), jnp.ones((1, keys, 2, 4))
        out = with_gradients(causal)(q, k, k, q)
        assert [each.shape for each in out] == [q.shape, q.shape, k.shape, k.shape]
        assert all(bool(jnp.isfinite(each).all()) for each in out)


def test_arrays_on_a_mesh_of_explicit_axes_are_computed_tile_by_tile():
    """Nobody has set the mesh; checkpoints are read so."""
    mesh = jax.make_mesh((1,), ("device",), axis_types=(AxisType.Explicit,))
    arrays = [jax.random.normal(jax.random.key(i), (1, 300, 2, 8)) for i in range(3)]
    placed = [jax.device_put(each, NamedSharding(mesh, P())) for each in arrays]

    def total(*arrays: jax.Array) -> jax.Array:
        return jnp.sum(hetjax.attention(*arrays, causal=True) ** 2)

    for found, expected in zip(
        jax.grad(total, (0, 1, 2))(*placed), jax.grad(total, (0, 1, 2))(*arrays), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
