"""Gradients over a submesh's own data axis are reduced once a step, not once a microbatch."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import CLUSTER, Case, trace_model
from execution import (
    gathered_state,
    job_of,
    keep_gradients,
    one_device_gradients,
    one_device_training,
    running,
    summed_late,
    train,
)
from jax.sharding import PartitionSpec as P
from small_models import Model, make_batch

from hetjax import Trainer
from hetjax.mesh import SubMesh
from hetjax.pipeline import trace
from hetjax.pipeline.schedule_search.named_schedules import make_schedule
from hetjax.pipeline.schedules.warm_up import gpipe
from hetjax.pipeline.timeline.times import StepTimes
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan
from hetjax.runtime.instructions.buffers import Parameter
from hetjax.runtime.local.local_executor import LocalExecutor

MODEL = Model(("dense", "attention"), tied=True, counted=True, half_parameters=False)


def case_of(sharding: str, schedule: str, mesh_shape: tuple[int, int]) -> Case:
    """Two stages on four devices each, four microbatches of four examples."""
    program = trace_model(MODEL, 4)
    middle = program.num_positions // 2
    stages = tuple(
        StagePlan.on((i, i + 1), SubMesh(name, 0, (1, 4)), mesh_shape, sharding)
        for i, name in enumerate(("first", "second"))
    )
    order = make_schedule(
        schedule, 2, 4, StepTimes([1.0] * 2, [2.0] * 2, [0.1], [0.1], (), [1.0] * 2, [1.0] * 2)
    )
    layers = (0, middle, program.num_positions)
    plan = Plan(program.fingerprint, layers, CLUSTER, (PipelinePlan(stages, 4, 4, order),))
    return Case(MODEL, program, plan)


def reductions(executor: LocalExecutor, stage: int) -> dict[str, int]:
    """How many gradients each compiled program of a stage reduces."""
    found = {}
    for name, program in executor.workers[stage].compiled.programs.items():
        text = getattr(program, "_program", program).as_text()
        results = re.findall(r"= (\(?.*?\)?) (?:all-reduce|reduce-scatter)(?:-start)?\(", text)
        # Scalars are the loss and the count.
        found[name] = sum(len(re.findall(r"\w+\[\d[\d,]*\]", result)) for result in results)
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "h_1f1b_split"])
@pytest.mark.parametrize("sharding", ["data", "state_sharded"])
def test_gradients_are_reduced_once_a_step(sharding: str, schedule: str):
    case, batch = case_of(sharding, schedule, (4, 1)), make_batch(16)
    loss, norm, expected = one_device_gradients(MODEL, batch)
    with running(job_of(case, keep_gradients())) as executor:
        for stage in range(2):
            counts = reductions(executor, stage)
            held = len(executor.workers[stage].pipelines.stages[stage].parameters)
            groups = [name for name in counts if name.startswith("reduce_gradients")]
            assert sum(counts.pop(name) for name in groups) == held
            assert (len(groups) == 1) == (sharding == "data")
            assert set(counts.values()) == {0}, counts
            if sharding == "state_sharded":
                state = executor.workers[stage].compiled.state
                assert {s.spec for s in state if s.spec} <= {
                    P("data"),
                    P("data", None),
                    P(None, "data"),
                }
                assert any(s.spec for s in state)
        for _ in range(2):
            [reported] = train(executor, [batch])
            np.testing.assert_allclose(reported, (loss, norm), rtol=1e-5)
        for ours, theirs in zip(gathered_state(executor), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.max(np.abs(theirs)))


def test_what_devices_share_is_reduced_as_it_is_made():
    """Whole sums of parameters that are divided over the data axis would need more memory."""
    with running(job_of(case_of("fully_sharded", "1f1b", (4, 1)), keep_gradients())) as executor:
        specs = executor.workers[0].placement.leaves(0, Parameter).specs
        assert summed_late(executor) == [spec == P() for spec in specs]
    with running(job_of(case_of("data", "1f1b", (1, 4)), keep_gradients())) as executor:
        assert not any(summed_late(executor))
        assert "reduce_gradients_0" not in executor.workers[0].compiled.programs


RATE, FEATURES, TOKENS = 0.5, 6, 13


def scaled_rows_loss(parameters: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
    """The mean loss under a table whose rows have a scale each."""
    table = parameters["table"] * parameters["scale"]
    first = tokens[:, :1].astype(jnp.float32) * parameters["first"]
    logits = jax.nn.log_softmax(jnp.tanh(first) @ table.T)
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:], axis=1))


@pytest.mark.parametrize("sharding", ["data", "fully_sharded"])
def test_sums_over_the_tensor_axis_meet_those_over_the_data_axis(sharding: str):
    """A scale of rows has one feature, and its gradient is summed over the table's divided ones."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, TOKENS, (8, 2), dtype=np.int32)
    shapes = {"table": (TOKENS, FEATURES), "scale": (TOKENS, 1), "first": (FEATURES,)}
    parameters = {name: draw.normal(size=s).astype(np.float32) for name, s in shapes.items()}
    loss, gradients = jax.jit(jax.value_and_grad(scaled_rows_loss))(parameters, tokens)

    program = trace(scaled_rows_loss, parameters, tokens[:4])
    stage = StagePlan.on((0, 1), SubMesh("first", 0, (1, 4)), (2, 2), sharding)
    pipeline = PipelinePlan((stage,), 2, 4, gpipe(1, 2))
    plan = Plan(program.fingerprint, (0, program.num_positions), CLUSTER, (pipeline,))
    with Trainer(plan, scaled_rows_loss, parameters, optax.sgd(RATE), tokens) as trainer:
        np.testing.assert_allclose(trainer.train_step(tokens).loss, loss, rtol=1e-6)
        after = trainer.parameters()
    for name, gradient in gradients.items():
        found = (parameters[name] - after[name]) / RATE
        np.testing.assert_allclose(found, gradient, rtol=1e-4, atol=1e-6)


def rotating_loss(parameters: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """The mean loss of a model that turns its features by a complex matrix."""
    x = jnp.tanh(batch["x"] @ parameters["in"])
    turned = jnp.abs(x.astype(jnp.complex64) @ parameters["turn"])
    x = x + jnp.tanh(turned) @ parameters["mid"]
    scaled = jnp.abs(x.astype(jnp.complex64) * parameters["scale"])
    return jnp.mean((scaled @ parameters["out"] - batch["y"]) ** 2)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("sharding", ["data", "state_sharded", "fully_sharded"])
def test_complex_gradients_are_summed_late_too(sharding: str, num_stages: int):
    """XLA ends the process where it is to split zeros of complex numbers in partial sums."""
    draw = np.random.default_rng(0)
    shapes = {"in": (6, 8), "mid": (8, 8), "out": (8, 4), "scale": (1, 8), "turn": (8, 8)}
    parameters: dict[str, np.ndarray] = {
        name: draw.normal(size=s).astype(np.float32) for name, s in shapes.items()
    }
    for name in ("turn", "scale"):
        turned = parameters[name] * np.exp(1j * draw.normal(size=shapes[name]))
        parameters[name] = turned.astype(np.complex64)
    batch = {
        "x": draw.normal(size=(8, 6)).astype(np.float32),
        "y": draw.normal(size=(8, 4)).astype(np.float32),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))

    program = trace(rotating_loss, parameters, jax.tree.map(lambda leaf: leaf[:4], batch))
    stages = tuple(
        StagePlan.on((i, i + 1), SubMesh(name, 0, (1, 2)), (2, 1), sharding)
        for i, name in enumerate(("first", "second")[:num_stages])
    )
    layers = tuple(program.num_positions * i // num_stages for i in range(num_stages + 1))
    pipeline = PipelinePlan(stages, 2, 4, gpipe(num_stages, 2))
    plan = Plan(program.fingerprint, layers, CLUSTER, (pipeline,))
    with Trainer(plan, rotating_loss, parameters, optimizer, batch) as trainer:
        losses = [trainer.train_step(batch).loss for _ in range(2)]
        after = trainer.parameters()

    arrays = jax.tree.map(jnp.asarray, parameters)
    wanted, expected, _ = one_device_training(rotating_loss, arrays, optimizer, [batch] * 2)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    for name, leaf in expected.items():
        np.testing.assert_allclose(after[name], leaf, rtol=1e-4, atol=1e-5)
