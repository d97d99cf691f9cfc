import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.models import layers
from hetjax.models.pure import counted_rngs


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def test_layer_norm_is_flaxs():
    x = normal(0, 2, 5, 8)
    ours = layers.LayerNorm(8, rngs=nnx.Rngs(0))
    theirs = nnx.LayerNorm(8, epsilon=1e-5, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-5, atol=1e-6)


def test_rms_norm_is_flaxs():
    x = normal(0, 2, 5, 8)
    ours = layers.RMSNorm(8, rngs=nnx.Rngs(0))
    theirs = nnx.RMSNorm(8, epsilon=1e-5, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm", [layers.LayerNorm, layers.RMSNorm])
def test_a_norm_keeps_bfloat16(norm):
    x = normal(0, 2, 5, 8).astype(jnp.bfloat16)
    assert norm(8, rngs=nnx.Rngs(0))(x).dtype == jnp.bfloat16


def test_activations_are_jaxs():
    x = normal(0, 100)
    np.testing.assert_allclose(layers.gelu(x), jax.nn.gelu(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(layers.silu(x), jax.nn.silu(x), rtol=1e-6)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attention_is_jaxs(groups):
    query = normal(0, 2, 6, 4, 8)
    key, value = normal(1, 2, 6, groups, 8), normal(2, 2, 6, groups, 8)
    expected = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    ours = layers.causal_attention(query, key, value)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_large_scores_stay_finite():
    query = 1e4 * normal(0, 1, 6, 2, 8)

    def total(query):
        return jnp.sum(layers.causal_attention(query, query, query))

    value, gradient = jax.value_and_grad(total)(query)
    assert jnp.isfinite(value)
    assert jnp.isfinite(gradient).all()


@given(shift=st.integers(0, 20), distance=st.integers(0, 10))
@settings(max_examples=10)
def test_rotary_scores_depend_on_distance_alone(shift, distance):
    cosine, sine = layers.rotary_tables(32, 8, 10000.0)
    query, key = normal(0, 8), normal(1, 8)

    def at(x, position):
        lifted = jnp.broadcast_to(x, (1, 32, 1, 8))
        return layers.rotate(lifted, cosine, sine)[0, position, 0]

    here = at(query, distance) @ at(key, 0)
    there = at(query, distance + shift) @ at(key, shift)
    np.testing.assert_allclose(here, there, rtol=1e-4, atol=1e-5)


def test_rotation_leaves_position_zero_and_lengths():
    x = normal(0, 2, 7, 3, 8)
    turned = layers.rotate(x, *layers.rotary_tables(7, 8, 10000.0))
    np.testing.assert_allclose(turned[:, 0], x[:, 0], rtol=1e-6)
    np.testing.assert_allclose(
        jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5
    )


def test_dropout_keeps_the_mean_and_the_rate():
    keys = jax.random.bits(jax.random.key(0), (4, 2), jnp.uint32)
    dropped = layers.dropout(jnp.ones((4, 5000)), keys, 3, 0.25)
    assert abs(float(jnp.mean(dropped == 0.0)) - 0.25) < 0.02
    assert abs(float(jnp.mean(dropped)) - 1.0) < 0.03


def test_dropout_sites_and_examples_draw_apart():
    keys = jnp.array([[0, 1], [0, 2]], jnp.uint32)
    one = layers.dropout(jnp.ones((2, 64)), keys, 0, 0.5)
    other = layers.dropout(jnp.ones((2, 64)), keys, 1, 0.5)
    assert (one != other).any()
    assert (one[0] != one[1]).any()


def test_token_losses_are_cross_entropy():
    logits, targets = normal(0, 2, 5, 11), jnp.arange(10, dtype=jnp.int32).reshape(2, 5)
    expected = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    np.testing.assert_allclose(
        layers.cross_entropies(logits, targets), expected[..., 0], rtol=1e-5, atol=1e-6
    )


def test_keys_counted_in_python_are_those_that_flax_counts():
    key = jax.random.key(7)
    ours, theirs = counted_rngs(key), nnx.Rngs(key)
    for _ in range(3):
        assert jnp.array_equal(
            jax.random.key_data(ours.params()), jax.random.key_data(theirs.params())
        )
