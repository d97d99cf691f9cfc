"""`hetjax.linear_cross_entropy`: the losses of dense logits, under every transformation."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import examples
from deducing import check, drawn, random_annotation, random_union, run
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from one_device import float64

import hetjax
from hetjax import InputError
from hetjax.sharding import PARTIAL, HSharding, Subgroup
from hetjax.sharding.attention.tile_views import accumulator

WIDTH, VOCABULARY, CHUNK = 16, 36, 8
Losses = Callable[[Any, Any, Any], jax.Array]


def dense(hidden: Any, weights: Any, labels: Any) -> jax.Array:
    wide = accumulator(hidden.dtype)
    narrow = weights.astype(hidden.dtype)
    logits = jnp.einsum("...td,vd->...tv", hidden, narrow, preferred_element_type=wide)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def chunked(hidden: Any, weights: Any, labels: Any, chunk: int = CHUNK) -> jax.Array:
    return hetjax.linear_cross_entropy(hidden, weights, labels, chunk=chunk)


def with_gradients(function: Losses) -> Callable[..., Any]:
    def both(hidden: Any, weights: Any, labels: Any, d_losses: Any) -> Any:
        losses, back = jax.vjp(lambda h, w: function(h, w, labels), hidden, weights)
        return (losses, *back(d_losses))

    return both


def inputs(tokens: int, dtype: Any = jnp.float32, batch: tuple[int, ...] = (2,)) -> list[Any]:
    rng = np.random.default_rng(tokens)
    arrays = [
        jnp.asarray(rng.normal(size=shape), dtype)
        for shape in ((*batch, tokens, WIDTH), (VOCABULARY, WIDTH))
    ]
    wide = accumulator(dtype)
    labels = jnp.asarray(rng.integers(0, VOCABULARY, (*batch, tokens)), jnp.int32)
    return [*arrays, labels, jnp.asarray(rng.normal(size=(*batch, tokens)), wide)]


def errors(found: Any, exact: Any) -> list[float]:
    """The largest error of each array, in parts of the largest number."""
    return [
        float(np.max(np.abs(np.asarray(a, np.float64) - b)) / max(1.0, np.max(np.abs(b))))
        for a, b in zip(found, (np.asarray(x, np.float64) for x in exact), strict=True)
    ]


@pytest.mark.parametrize("tokens", [1, 8, 21])
def test_in_float64_it_is_the_dense_loss_to_twelve_digits(tokens: int):
    with float64():
        arrays = inputs(tokens, jnp.float64)
        found = jax.jit(with_gradients(chunked))(*arrays)
        assert max(errors(found, with_gradients(dense)(*arrays))) < 1e-12


def exact_of(arrays: list[Any]) -> Any:
    """What arrays of less precision should give."""
    hidden, weights, labels, d_losses = arrays
    with float64():
        wide = (jnp.asarray(np.asarray(x, np.float64)) for x in (hidden, weights, d_losses))
        hidden, weights, d_losses = wide
        return [np.asarray(x) for x in with_gradients(dense)(hidden, weights, labels, d_losses)]


def test_in_float32_it_is_the_dense_loss():
    arrays = inputs(21)
    assert max(errors(jax.jit(with_gradients(chunked))(*arrays), exact_of(arrays))) < 2e-5


@pytest.mark.parametrize("chunk", [CHUNK, 64])
@pytest.mark.parametrize("weights", [jnp.bfloat16, jnp.float32])
def test_bfloat16_errs_no_more_than_twice_as_much_as_dense_logits(weights: Any, chunk: int):
    hidden, table, *others = inputs(60, jnp.bfloat16)
    arrays = [hidden, table.astype(weights), *others]
    exact = exact_of(arrays)
    found = jax.jit(with_gradients(partial(chunked, chunk=chunk)))(*arrays)
    assert [each.dtype for each in found] == [jnp.float32, jnp.bfloat16, weights]
    with jax.numpy_dtype_promotion("standard"):
        plain = errors(jax.jit(with_gradients(dense))(*arrays), exact)
    for ours, theirs in zip(errors(found, exact), plain, strict=True):
        assert ours <= 2 * theirs + 1e-6


def test_every_transformation_gives_what_it_gives_of_dense_logits():
    arrays = inputs(11, batch=(2, 3))
    hidden, weights, labels, d_losses = arrays
    several = jnp.stack([weights, 2 * weights, 3 * weights])

    def of(function: Losses) -> list[Any]:
        both = with_gradients(function)
        of_examples = jax.vmap(both, in_axes=(0, None, 0, 0))
        of_weights = jax.vmap(of_examples, in_axes=(1, 0, 1, 1))
        return [
            *jax.checkpoint(both)(*arrays),
            *of_weights(hidden, several, labels, d_losses),
            *jax.jvp(lambda h, w: function(h, w, labels), (hidden, weights), (hidden, weights)),
        ]

    found, expected = (jax.jit(of, static_argnums=0)(each) for each in (chunked, dense))
    assert max(errors(found, expected)) < 2e-5


def test_no_more_logits_than_a_chunks_are_in_memory():
    hidden, weights, labels, _ = inputs(400)

    def temporary(tokens: int) -> int:
        def mean(hidden: Any, weights: Any) -> jax.Array:
            return jnp.mean(chunked(hidden, weights, labels[:, :tokens]))

        gradient = jax.jit(jax.grad(mean, argnums=(0, 1)))
        compiled: Any = gradient.lower(hidden[:, :tokens], weights).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits = 2 * 400 * VOCABULARY * 4
    assert temporary(400) - temporary(8) < logits / 2


def test_a_token_without_a_label_takes_no_part_where_it_has_no_weight():
    hidden, weights, labels, d_losses = inputs(9)
    labels, d_losses = labels.at[:, 3].set(-1), d_losses.at[:, 3].set(0.0)
    losses, d_hidden, _ = with_gradients(chunked)(hidden, weights, labels, d_losses)
    assert np.isfinite(losses).all()
    assert not d_hidden[:, 3].any()


def test_the_compiler_divides_examples_and_the_vocabulary():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    specs = [P("data"), P("tensor"), P("data"), P("data")]
    arrays = inputs(21)
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]
    compiled: Any = jax.jit(with_gradients(chunked)).lower(*placed).compile()
    assert max(errors(compiled(*placed), jax.jit(with_gradients(dense))(*arrays))) < 2e-5
    # Each device has the logits of one example of two, and of half of the vocabulary.
    shapes = set(re.findall(r"f32\[([\d,]+)\]", compiled.as_text()))
    assert f"1,{CHUNK},{VOCABULARY // 2}" in shapes or f"{CHUNK},{VOCABULARY // 2}" in shapes
    assert not any(str(VOCABULARY) in shape.split(",") for shape in shapes)


TWO = Subgroup((0, 1), (("data", 2),), P())
ONE = Subgroup((2,), (), P())
WHOLE = HSharding((TWO, ONE))
INPUTS = [*drawn((4, 21, WIDTH), (VOCABULARY, WIDTH)), inputs(21, batch=(4,))[2], *drawn((4, 21))]


def test_among_submeshes_tokens_are_divided_and_gradients_of_weights_are_summands():
    shared = HSharding((TWO, ONE), 1, (13, 8))
    given = [shared, WHOLE, shared, shared]
    found, specialized = run(with_gradients(chunked), INPUTS, given, sums_stay=True)
    check(found, jax.jit(with_gradients(dense))(*INPUTS))
    assert not list(specialized.program.moves)
    assert [each.annotation.hdim for each in found] == [1, 1, PARTIAL]


@examples(usual=2)
@given(st.integers(0, 2**32 - 1))
def test_any_annotations_give_the_same(number: int):
    rng = Random(number)
    union = random_union(rng)
    annotations = [random_annotation(rng, union, each.shape) for each in INPUTS]
    found, _ = run(
        with_gradients(chunked), INPUTS, annotations, mend=True, sums_stay=rng.random() < 0.5
    )
    check(found, jax.jit(with_gradients(dense))(*INPUTS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": jnp.zeros((2, 5, 4), jnp.int32)}, "hidden: int32 (2, 5, 4) is not allowed"),
        ({"weights": jnp.zeros((3, 5))}, "weights: shape (3, 5) is not allowed: [vocabulary, 4]"),
        ({"labels": jnp.zeros((2, 4), jnp.int32)}, "labels: int32 (2, 4) is not allowed"),
        ({"labels": jnp.zeros((2, 5))}, "labels: float32 (2, 5) is not allowed: integers (2, 5)"),
        ({"chunk": 0}, "chunk: 0 is not allowed: a number of tokens from 1"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str):
    fitting = {
        "hidden": jnp.zeros((2, 5, 4)),
        "weights": jnp.zeros((3, 4)),
        "labels": jnp.zeros((2, 5), jnp.int32),
    }
    with pytest.raises(InputError, match=re.escape(message)):
        hetjax.linear_cross_entropy(**{**fitting, **change})
