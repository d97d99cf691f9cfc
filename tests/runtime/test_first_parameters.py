"""Optimizers whose state is made of parameters: it is where these are, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax import InputError
from hetjax.mesh import Link, Subcluster
from hetjax.mesh.kinds import DeviceKind
from hetjax.planner import PlanOptions

LINK = Link(1e9, 1e-6)
KIND = DeviceKind("one", {"float32": 1e6}, 10**9, 1e9, "made up")
CLUSTER = hetjax.Cluster("two", (Subcluster("two", KIND, 2, 1, LINK, LINK),))
PRODIGY = optax.contrib.prodigy(1.0, estim_lr0=1e-3, estim_lr_coef=10.0)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


PARAMETERS = {name: normal(seed, 16, 16) for seed, name in enumerate("abcd")}
BATCH = {"x": normal(4, 8, 16), "y": normal(5, 8, 16)}


def loss(parameters: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for name in "abcd":
        x = jnp.tanh(x @ parameters[name])
    return jnp.mean((x - batch["y"]) ** 2)


def trainer(
    optimizer: Any,
    workdir: Path | None = None,
    stages: int = 2,
    loss: Any = loss,
    parameters: Any = PARAMETERS,
) -> hetjax.Trainer:
    options = PlanOptions(min_stages=stages, max_stages=stages)
    plan = hetjax.plan(
        *(loss, parameters, BATCH),
        cluster=CLUSTER,
        optimizer=optimizer,
        num_microbatches=2,
        options=options,
    )
    assert len(plan.stages) == stages
    runtime = hetjax.LocalOptions(jax.devices()[:2])
    return hetjax.Trainer(
        plan, loss, parameters, optimizer, BATCH, workdir=workdir, runtime=runtime
    )


def losses_of_one_device(
    optimizer: Any, steps: int, loss: Any = loss, parameters: Any = PARAMETERS
) -> list[float]:
    state, found = optimizer.init(parameters), []
    for _ in range(steps):
        value, gradients = jax.value_and_grad(loss)(parameters, BATCH)
        updates, state = optimizer.update(gradients, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        found.append(float(value))
    return found


def scaled_loss(parameters: Any, batch: Any) -> jax.Array:
    """Of a scalar that the first stage does not have, but whose state it has."""
    x = batch["x"]
    for name in "abcd":
        x = jnp.tanh(x @ parameters[name])
    return jnp.mean((jnp.exp(parameters["scale"]) * x - batch["y"]) ** 2)


@pytest.mark.parametrize("is_made", [False, True], ids=["arrays", "made"])
def test_the_state_of_a_scalar_begins_as_the_scalar_on_all_stages(tmp_path: Path, is_made: bool):
    whole = {**PARAMETERS, "scale": np.float32(0.7)}

    def make() -> Any:
        return jax.tree.map(jnp.asarray, whole)

    given = make if is_made else whole
    with jax.numpy_dtype_promotion("standard"):
        expected = losses_of_one_device(PRODIGY, 6, scaled_loss, whole)
        with trainer(PRODIGY, tmp_path, 2, scaled_loss, given) as first:
            found = [first.train_step(BATCH).loss for _ in range(3)]
            first.save(wait=True)
        with trainer(PRODIGY, tmp_path, 2, scaled_loss, given) as second:
            second.resume()
            found += [second.train_step(BATCH).loss for _ in range(3)]
    np.testing.assert_allclose(found, expected, rtol=2e-5)


def test_the_first_parameters_are_saved_by_the_stages_that_have_them(tmp_path: Path):
    with jax.numpy_dtype_promotion("standard"):
        expected = losses_of_one_device(PRODIGY, 6)
        with trainer(PRODIGY, tmp_path) as first:
            found = [first.train_step(BATCH).loss for _ in range(3)]
            first.save(wait=True)
        with trainer(PRODIGY, tmp_path) as second:
            second.resume()
            found += [second.train_step(BATCH).loss for _ in range(3)]
    np.testing.assert_allclose(found, expected, rtol=2e-5)


def by_norm(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    return jax.tree.map(lambda gradient: -gradient / state, updates), state


def test_state_made_of_the_parameters_of_several_stages_is_refused():
    scaled = optax.GradientTransformation(lambda params: optax.tree.norm(params), by_norm)
    with pytest.raises(InputError, match="initial state is made of 'a', 'b', 'c' and 1 more"):
        trainer(scaled)
    with trainer(scaled, stages=1) as alone:
        found = [alone.train_step(BATCH).loss for _ in range(3)]
    np.testing.assert_allclose(found, losses_of_one_device(scaled, 3), rtol=2e-5)
