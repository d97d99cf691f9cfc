"""Whatever the model: planned, cut, sharded, trained; the losses are those of one device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import pytest
from cases import CLUSTER

import hetjax
from hetjax.models import GPTConfig, LanguageModel, LlamaConfig, language_model

pytestmark = pytest.mark.usefixtures("quick_compilation")

GPT = GPTConfig(vocabulary=13, blocks=2, width=16, heads=4, sequence=8)
LLAMA = LlamaConfig(
    vocabulary=13, blocks=2, width=16, heads=4, key_value_heads=2, ffn_width=24, sequence=8
)
MODELS = {
    "gpt": language_model(GPT),
    "llama": language_model(LLAMA),
    "mixture of experts": language_model(dataclasses.replace(GPT, experts=4)),
}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
STEPS, BATCH = 5, 16


def batches() -> list[dict[str, jax.Array]]:
    keys = jax.random.split(jax.random.key(3), STEPS)
    return [{"tokens": jax.random.randint(key, (BATCH, 9), 0, 13, "int32")} for key in keys]


def one_device_losses(model: LanguageModel, parameters: Any) -> list[float]:
    @jax.jit
    def step(parameters, state, batch):
        def loss(parameters):
            total, count = model.loss(parameters, batch)
            return total / count

        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, state = OPTIMIZER.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    state, losses = OPTIMIZER.init(parameters), []
    for batch in batches():
        parameters, state, value = step(parameters, state, batch)
        losses.append(float(value))
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_five_steps_have_the_losses_of_one_device(name: str):
    model = MODELS[name]
    parameters = model.init(jax.random.key(0))
    plan = hetjax.plan(
        model.loss,
        parameters,
        batches()[0],
        cluster=CLUSTER,
        optimizer=OPTIMIZER,
        num_microbatches=4,
        min_stages=2,
        max_stages=2,
    )
    assert {stage.mesh_shape for stage in plan.stages} == {(4, 1)}
    with hetjax.Trainer(plan, model.loss, parameters, OPTIMIZER, batches()[0]) as trainer:
        losses = [trainer.train_step(batch).loss for batch in batches()]
    with jax.numpy_dtype_promotion("standard"):  # Optax needs it.
        expected = one_device_losses(model, parameters)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
