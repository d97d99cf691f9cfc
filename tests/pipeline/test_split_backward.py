"""Split backward passes: the same bits as the whole one, and half of its work put off."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from backward_passes import recomputed, split_backward, whole_backward
from one_pipeline import one_pipeline
from small_models import Model, make_batch

from hetjax.models import (
    GPTConfig,
    LlamaConfig,
    ResNetConfig,
    VGGConfig,
    image_model,
    language_model,
)
from hetjax.pipeline.build import PipelinePrograms
from hetjax.pipeline.program.loss import accumulator_dtype
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.stages.backward import StagePrograms

SIZES: dict[str, Any] = {"vocabulary": 32, "blocks": 4, "width": 32, "heads": 4, "sequence": 16}
LANGUAGE_MODELS = {
    "gpt": language_model(GPTConfig(**SIZES, tied_embeddings=False)),
    "gpt, scanned": language_model(GPTConfig(**SIZES, tied_embeddings=False, scan_blocks=True)),
    "llama": language_model(LlamaConfig(**SIZES, key_value_heads=2, ffn_width=64)),
    "llama, scanned": language_model(
        LlamaConfig(**SIZES, key_value_heads=2, ffn_width=64, scan_blocks=True)
    ),
}
NETWORKS_OF_CONVOLUTIONS = {
    "vgg": image_model(VGGConfig(classes=5, image_size=8, groups=(2, 2), width=4, dense_width=16)),
    "resnet": image_model(ResNetConfig(classes=5, image_size=8, groups=(2, 1), width=4)),
}
MODELS = {**LANGUAGE_MODELS, **NETWORKS_OF_CONVOLUTIONS}


def cut_evenly(
    loss: Callable[..., Any], parameters: Any, batch: Any, stages: int, recompute: bool
) -> PipelinePrograms:
    program = trace(loss, parameters, batch)
    boundaries = [i * program.num_positions // stages for i in range(stages + 1)]
    return one_pipeline(
        program,
        parameters,
        optax.identity(),
        boundaries=boundaries,
        recompute=[recompute] * stages,
    )


def drawn(shapes: Sequence[jax.ShapeDtypeStruct], seed: int) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [
        jnp.asarray(
            rng.normal(size=s.shape) if s.dtype.kind == "f" else rng.integers(0, 8, s.shape)
        ).astype(s.dtype)
        for s in shapes
    ]


def both_ways(programs: StagePrograms) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returned cotangents and gradient sums of the whole and of the split backward pass."""
    parameters, batch, received = (
        drawn(shapes, seed)
        for seed, shapes in enumerate((programs.parameters, programs.batch, programs.received))
    )
    sums = [jnp.ones(a.shape, accumulator_dtype(a.dtype)) for a in parameters]
    cotangents = drawn([programs.sent[i] for i in programs.cotangents_in], 3)
    _, residuals = jax.jit(programs.forward)(parameters, batch, received)
    if programs.recompute is not None:
        residuals = jax.jit(partial(recomputed, programs))(parameters, batch, received)
    groups = (batch, received, residuals, cotangents)
    whole = jax.jit(partial(whole_backward, programs))(parameters, groups, sums)
    split = split_backward(programs, parameters, groups, sums, jit=jax.jit)
    return [*whole[0], *whole[1]], [*split[0], *split[1]]


def pipeline_of(name: str, recompute: bool) -> PipelinePrograms:
    model = MODELS[name]
    parameters = jax.eval_shape(model.init, jax.random.key(0))
    return cut_evenly(model.loss, parameters, model.batch_shapes(2), 3, recompute)


@pytest.mark.parametrize(
    ("name", "recompute"),
    [*itertools.product(LANGUAGE_MODELS, (False, True)), ("resnet", False)],
)
def test_the_halves_give_the_bits_of_the_whole(name: str, recompute: bool):
    for programs in pipeline_of(name, recompute).programs:
        for whole, split in zip(*both_ways(programs), strict=True):
            np.testing.assert_array_equal(whole, split)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_half_of_the_products_wait(name: str, recompute: bool):
    """Each product has two in the backward pass; attention's two have no weights."""
    middle = pipeline_of(name, recompute).programs[1]
    whole = middle.backward_cost.matmul_flops
    first = middle.split.input_gradient_cost.matmul_flops
    second = middle.split.weight_gradient_cost.matmul_flops
    assert first + second == whole
    assert 0.4 * whole <= second <= 0.5 * whole


@pytest.mark.parametrize(
    "block", ["scan", "reverse_scan", "checkpointed", "checkpointed_scan", "dropout_scan", "loops"]
)
def test_loops_and_checkpoints_are_divided(block: str):
    model = Model((block, block))
    pipeline = cut_evenly(model.loss, model.init(), make_batch(2), 3, recompute=False)
    middle = pipeline.programs[1]
    split = middle.split
    assert split.weight_gradient_cost.matmul_flops == split.input_gradient_cost.matmul_flops > 0
    assert split.heavy
    for whole, halves in zip(*both_ways(middle), strict=True):
        np.testing.assert_allclose(whole, halves, rtol=1e-5, atol=1e-6)


def test_what_is_kept_between_the_halves_has_no_weights():
    """All of it grows with the examples."""
    sizes = []
    for examples in (1, 3):
        model = Model(("dense", "attention"), tied=False)
        parameters = model.init()
        pipeline = cut_evenly(model.loss, parameters, make_batch(examples), 2, recompute=False)
        sizes.append([programs.split.deferred_bytes for programs in pipeline.programs])
    assert sizes[1] == [3 * size for size in sizes[0]]


def test_gradients_without_products_stay_in_the_first_half():
    def loss(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ w["matrix"] + w["bias"]) * w["scale"])

    shapes = {"matrix": (4, 4), "bias": (4,), "scale": (4,)}
    parameters = {name: jnp.ones(shape) for name, shape in shapes.items()}
    pipeline = cut_evenly(loss, parameters, jnp.ones((2, 4)), 1, recompute=False)
    split = pipeline.programs[0].split
    names = [pipeline.program.parameter_names[i] for i in split.light]
    assert sorted(names) == ["bias", "scale"]
