"""Whatever the model: planned, cut, sharded, trained; the losses are those of one device.

One device that accumulates gradients over the same microbatches: batch normalisation takes the
statistics of each, also where a stage divides it over its devices.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import pytest
from baselines import one_device_losses
from cases import CLUSTER
from check_models import CLUSTER as UNLIKE
from check_models import on_unlike_submeshes

import hetjax
from hetjax.mesh import Cluster
from hetjax.models import (
    GPTConfig,
    ImageModel,
    LanguageModel,
    LlamaConfig,
    ResNetConfig,
    VGGConfig,
    ViTConfig,
    image_model,
    language_model,
)

Model = LanguageModel | ImageModel

GPT = GPTConfig(vocabulary=13, blocks=2, width=16, heads=4, sequence=8)
LLAMA = LlamaConfig(
    vocabulary=13, blocks=2, width=16, heads=4, key_value_heads=2, ffn_width=24, sequence=8
)
LANGUAGE_MODELS = {
    "gpt": language_model(GPT),
    "llama": language_model(LLAMA),
    "mixture of experts": language_model(dataclasses.replace(GPT, experts=4)),
}
IMAGE_MODELS = {
    "vit": image_model(
        ViTConfig(classes=5, image_size=8, patch_size=4, blocks=1, width=16, heads=4, ffn_width=32)
    ),
    "vgg": image_model(VGGConfig(classes=5, image_size=8, groups=(2, 2), width=4, dense_width=16)),
    "resnet": image_model(ResNetConfig(classes=5, image_size=16, groups=(2, 1), width=4)),
}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
STEPS, BATCH, MICROBATCHES = 5, 16, 4


def batches(model: Model) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    highest = {"tokens": 13, "images": 256, "labels": 5}
    return [
        {
            name: rng.integers(0, highest[name], shape.shape).astype(shape.dtype)
            for name, shape in model.batch_shapes(BATCH).items()
        }
        for _ in range(STEPS)
    ]


def planned(model: Model, cluster: Cluster, **options: Any) -> hetjax.Plan:
    return hetjax.plan(
        model.loss,
        jax.eval_shape(model.init, jax.random.key(0)),
        model.batch_shapes(BATCH),
        cluster=cluster,
        optimizer=OPTIMIZER,
        num_microbatches=MICROBATCHES,
        options=hetjax.PlanOptions(min_stages=2, max_pipelines=1, max_stages=2, **options),
    )


def check_losses(model: Model, plan: hetjax.Plan) -> None:
    """Five steps by a plan have the losses of one device."""
    parameters = jax.jit(model.init)(jax.random.key(0))
    examples = batches(model)
    with hetjax.Trainer(plan, model.loss, parameters, OPTIMIZER, examples[0]) as trainer:
        losses = [trainer.train_step(batch).loss for batch in examples]
    with jax.numpy_dtype_promotion("standard"):  # Optax needs it.
        expected = one_device_losses(model.loss, OPTIMIZER, parameters, examples, MICROBATCHES)
    assert len(set(expected)) == STEPS
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_five_steps_have_the_losses_of_one_device(name: str):
    model = LANGUAGE_MODELS[name]
    plan = planned(model, CLUSTER)
    assert {stage.mesh_shape for stage in plan.stages} == {(4, 1)}
    check_losses(model, plan)


@pytest.mark.parametrize(
    ("name", "schedule"), [("vit", "h_1f1b"), ("vgg", "h_1f1b"), ("resnet", "zb_h1")]
)
def test_five_steps_of_an_image_model_on_unlike_submeshes(name: str, schedule: str):
    model = IMAGE_MODELS[name]
    plan = on_unlike_submeshes(planned(model, UNLIKE, schedule=schedule))
    check_losses(model, plan)
