"""Optimizers that widen their state in the first update train as in plain JAX.

Of parameters of several dtypes some begin with a state in that of one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import CLUSTER
from execution import one_device_training

from hetjax import InputError, Trainer
from hetjax.mesh import SubMesh
from hetjax.pipeline import trace
from hetjax.pipeline.schedules.warm_up import gpipe
from hetjax.pipeline.update.traced_update import trace_update
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan
from hetjax.planner.problem.problem import optimizer_bytes

STEPS = 3
HALF = {"mid", "shift"}
SHAPES = {"in": (6, 8), "mid": (8, 8), "out": (8, 4), "shift": (1, 8)}
OPTIMIZERS = {
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(1e-2),
    "prodigy": optax.contrib.prodigy(),
    "dadapt_adamw": optax.contrib.dadapt_adamw(),
    "dog": optax.contrib.dog(1.0),
    "momo": optax.contrib.momo(0.1),
}


@pytest.fixture(autouse=True)
def standard_promotion() -> Iterator[None]:
    """Optax mixes dtypes where parameters are of several."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def parameters() -> dict[str, jax.Array]:
    draw = np.random.default_rng(0)
    return {
        name: jnp.asarray(draw.normal(size=shape), jnp.bfloat16 if name in HALF else jnp.float32)
        for name, shape in SHAPES.items()
    }


def batch() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(1)
    sizes = {"x": (4, 6), "y": (4, 4)}
    return {name: draw.normal(size=size).astype(np.float32) for name, size in sizes.items()}


def loss(weights: Any, batch: Any) -> jax.Array:
    wide = {name: leaf.astype(jnp.float32) for name, leaf in weights.items()}
    x = jnp.tanh(batch["x"] @ wide["in"])
    x = jnp.tanh(x @ wide["mid"] + wide["shift"])
    return jnp.mean((x @ wide["out"] - batch["y"]) ** 2)


def plan_of(num_stages: int, sharding: str, mesh_shape: tuple[int, int]) -> Plan:
    """One microbatch: the sum of several in float32 is more exact than one gradient in bfloat16."""
    program = trace(loss, parameters(), batch())
    devices = mesh_shape[0] * mesh_shape[1]
    stages = tuple(
        StagePlan.on((i, i + 1), SubMesh(name, 0, (1, devices)), mesh_shape, sharding)
        for i, name in enumerate(("first", "second")[:num_stages])
    )
    layers = tuple(program.num_positions * i // num_stages for i in range(num_stages + 1))
    pipeline = PipelinePlan(stages, 1, 4, gpipe(num_stages, 1))
    return Plan(program.fingerprint, layers, CLUSTER, (pipeline,))


# DoG's first state is made of all parameters: one stage has to have them.
@pytest.mark.parametrize(
    ("name", "num_stages"),
    [*((name, 1) for name in OPTIMIZERS), ("inject_hyperparams", 2), ("prodigy", 2)],
)
def test_states_that_widen_train_as_on_one_device(name: str, num_stages: int):
    optimizer = OPTIMIZERS[name]
    expected, weights, state = one_device_training(loss, parameters(), optimizer, [batch()] * STEPS)
    first = jax.eval_shape(optimizer.init, parameters())
    assert [x.dtype for x in jax.tree.leaves(first)] != [x.dtype for x in jax.tree.leaves(state)]
    plan = plan_of(num_stages, "data", (1, 1))
    with Trainer(plan, loss, parameters(), optimizer, batch()) as trainer:
        found = [trainer.train_step(batch()).loss for _ in range(STEPS)]
        ours = trainer.parameters()
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for leaf, wanted in weights.items():
        one, other = (np.asarray(each, np.float32) for each in (ours[leaf], wanted))
        np.testing.assert_allclose(one, other, rtol=1e-2 if leaf in HALF else 1e-4, atol=1e-5)


def test_a_widened_state_is_saved_and_resumed(tmp_path: Path):
    optimizer = OPTIMIZERS["inject_hyperparams"]
    given = (loss, parameters(), optimizer, batch())
    plan = plan_of(1, "state_sharded", (2, 1))
    with Trainer(plan, *given, workdir=tmp_path) as trainer:
        for _ in range(2):
            trainer.train_step(batch())
        trainer.save()
        expected = trainer.train_step(batch()).loss
    with Trainer(plan, *given, workdir=tmp_path) as trainer:
        trainer.resume()
        assert trainer.train_step(batch()).loss == expected


def test_a_widened_state_has_the_bytes_that_it_comes_to():
    optimizer = optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9)
    assert optimizer_bytes(optimizer, parameters()) == 4.0


def with_state(first: Any, after: Any) -> optax.GradientTransformation:
    return optax.GradientTransformation(
        lambda params: {"seen": first}, lambda updates, state, params=None: (updates, after)
    )


@pytest.mark.parametrize(
    ("first", "after", "message"),
    [
        (jnp.zeros(()), {"seen": jnp.zeros(2)}, r"'seen' of its state float32\[2\], which was f"),
        (jnp.zeros(()), {"seen": jnp.int32(0)}, r"state int32\[\], which was float32\[\]; allowed"),
        (jnp.zeros(()), {"seen": jnp.bfloat16(0)}, "allowed: the same shape, and the same dtype"),
        (jnp.zeros(()), {"told": jnp.zeros(())}, "state of the leaves 'told' for one of 'seen'"),
    ],
)
def test_states_that_do_not_settle_are_refused(first: Any, after: Any, message: str):
    shapes = [jax.ShapeDtypeStruct((2,), jnp.float32)]
    with pytest.raises(InputError, match=message):
        trace_update(with_state(first, after), shapes, list)
