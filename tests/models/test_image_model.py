"""Image models: their layers against Flax's, their loss, and what keeps them easy to cut."""

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hetjax.errors import InputError
from hetjax.models import ResNetConfig, VGGConfig, ViTConfig, image_model, vision_layers
from hetjax.models.resnet import Bottleneck

CONFIGS = {
    "vit": ViTConfig(
        classes=5, image_size=8, patch_size=4, blocks=2, width=16, heads=4, ffn_width=24
    ),
    "vgg": VGGConfig(classes=5, image_size=8, groups=(2, 1), width=4, dense_width=16),
    "resnet": ResNetConfig(classes=5, image_size=16, groups=(1, 2), width=4),
}


def batch_of(config, examples: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(examples)
    shape = (examples, config.image_size, config.image_size, 3)
    return {
        "images": jnp.asarray(rng.integers(0, 256, shape, np.uint8)),
        "labels": jnp.asarray(rng.integers(0, config.classes, examples, np.int32)),
    }


@functools.cache
def made(name: str):
    """A model's compiled loss, its parameters and a batch."""
    config = CONFIGS[name]
    model = image_model(config)
    return jax.jit(model.loss), jax.jit(model.init)(jax.random.key(0)), batch_of(config, 6)


def normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape)


@pytest.mark.parametrize(("window", "stride", "padding"), [(7, 2, 3), (4, 4, 0)])
def test_a_convolution_is_flaxs(window: int, stride: int, padding: int):
    ours = vision_layers.Convolution(
        (3, 5),
        window,
        stride=stride,
        padding=padding,
        bias=True,
        dtype="float32",
        rngs=nnx.Rngs(0),
    )
    theirs = nnx.Conv(
        3, 5, (window, window), strides=stride, padding=[(padding, padding)] * 2, rngs=nnx.Rngs(1)
    )
    theirs.kernel[...] = ours.kernel[...]
    ours.bias[...] = jnp.arange(5.0)
    assert theirs.bias is not None
    theirs.bias[...] = jnp.arange(5.0)
    x = normal(2, 12, 12, 3)
    np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


def test_batch_normalisation_is_flaxs_in_training():
    x = normal(4, 3, 3, 6) * 3.0 + 1.0
    ours = vision_layers.BatchNorm(6, rngs=nnx.Rngs(0))
    theirs = nnx.BatchNorm(6, use_running_average=False, epsilon=1e-5, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    assert ours(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_pooling_is_flaxs_and_the_rectifier_jaxs():
    x = normal(2, 8, 8, 3)
    ours = vision_layers.max_pool(x, 3, stride=2, padding=1)
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-jnp.inf)
    np.testing.assert_array_equal(ours, nnx.max_pool(padded, (3, 3), strides=(2, 2)))
    x = jnp.asarray([-1.0, 0.0, 2.0])
    np.testing.assert_array_equal(vision_layers.relu(x), jax.nn.relu(x))
    slopes = jax.grad(lambda x: jnp.sum(vision_layers.relu(x)))(x)
    np.testing.assert_array_equal(slopes, [0.0, 0.0, 1.0])


def test_a_residual_block_begins_as_the_identity():
    block = Bottleneck(16, 4, 1, "float32", rngs=nnx.Rngs(0))
    x = normal(2, 5, 5, 16)
    np.testing.assert_array_equal(block(x), vision_layers.relu(x))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_is_the_cross_entropy_of_every_image(name: str):
    loss, params, batch = made(name)
    total, count = loss(params, batch)
    assert count == 6
    # The head begins near zero, so that all classes are as likely.
    assert total / count == pytest.approx(np.log(5), rel=0.05)


def test_images_have_weights():
    config = CONFIGS["vit"]
    model, weights = image_model(config), jnp.asarray([1.0, 1.0, 1.0, 0.5, 0.5, 0.0])
    batch = {**batch_of(config, 6), "weights": weights}
    loss, params, _ = made("vit")
    total, count = jax.jit(model.loss)(params, batch)
    alone = [
        loss(params, {k: batch[k][i : i + 1] for k in ("images", "labels")})[0] for i in range(6)
    ]
    assert count == 4
    np.testing.assert_allclose(total, np.dot(weights, alone), rtol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_jaxpr_is_flat_and_holds_no_constants(name: str):
    config = CONFIGS[name]
    model = image_model(config)
    params = jax.eval_shape(model.init, jax.random.key(0))
    jaxpr = jax.make_jaxpr(model.loss)(params, model.batch_shapes(2))
    assert jaxpr.consts == []
    names = {equation.primitive.name for equation in jaxpr.eqns}
    assert not names & {"jit", "pjit", "custom_jvp_call", "custom_vjp_call", "while", "cond"}


def test_a_scanned_vision_transformer_equals_an_unrolled_one():
    scanned = image_model(dataclasses.replace(CONFIGS["vit"], scan_blocks=True))
    unrolled, params, batch = made("vit")
    # A head of zeros would hide the blocks.
    params = {**params, "head": {**params["head"], "kernel": normal(16, 5)}}
    blocks = [params["blocks"][index] for index in ("0", "1")]
    stacked = {**params, "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}
    loss = unrolled(params, batch)
    np.testing.assert_allclose(jax.jit(scanned.loss)(stacked, batch), loss, rtol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_other_types_change_the_loss_little(name: str):
    narrow = image_model(dataclasses.replace(CONFIGS[name], compute_dtype="bfloat16"))
    loss, params, batch = made(name)
    found, _ = jax.jit(narrow.loss)(params, batch)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, loss(params, batch)[0], rtol=2e-2)


def test_the_program_can_be_sent_to_another_process():
    model = pickle.loads(pickle.dumps(image_model(CONFIGS["resnet"])))
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert jax.eval_shape(model.loss, shapes, model.batch_shapes(2))[0].shape == ()


def test_other_images_are_refused():
    model = image_model(CONFIGS["vgg"])
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    batch = {"labels": np.zeros(2, np.int32)}
    with pytest.raises(InputError, match=r"is uint8\[2, 9, 9, 3\]; .* uint8 \[batch, 8, 8, 3\]"):
        jax.eval_shape(model.loss, shapes, {**batch, "images": np.zeros((2, 9, 9, 3), np.uint8)})
    with pytest.raises(InputError, match=r"is float32\[2, 8, 8, 3\]"):
        jax.eval_shape(model.loss, shapes, {**batch, "images": np.zeros((2, 8, 8, 3), np.float32)})
