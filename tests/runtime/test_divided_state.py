"""The optimizer's state divided among pipelines: each row once, less to send, the same numbers."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from cases import CLUSTER
from execution import train
from opened_loops import iteration_starts

from hetjax import InputError, Trainer
from hetjax.mesh import SubMesh
from hetjax.pipeline import trace
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan
from hetjax.runtime.instructions.instruction import Route, RouteKind, Send
from hetjax.runtime.instructions.instruction_list import training_instructions
from hetjax.runtime.instructions.placement import Placement
from hetjax.runtime.local.local_executor import LocalExecutor
from hetjax.runtime.workers.job import Job, build

WIDTH, BLOCKS = 8, 4
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def make_parameters():
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "first": jax.random.normal(keys[0], (WIDTH, WIDTH)) / 4,
        "scale": np.float32(1.5),
        "stack": jax.random.normal(keys[2], (BLOCKS, WIDTH, WIDTH)) / 4,
    }


def block(values, weights):
    return jax.numpy.tanh(values @ weights), None


def loss(parameters, batch):
    """A penalty uses all of the stack at once, the blocks use it row by row."""
    values = batch["x"] @ parameters["first"] * parameters["scale"]
    penalty = jax.numpy.sum(parameters["stack"] ** 2)
    values, _ = jax.lax.scan(
        lambda x, w: (jax.numpy.tanh(x @ w), None), values, parameters["stack"]
    )
    return jax.numpy.mean((values - 1.0) ** 2) + 1e-3 * penalty


def make_batch(seed: int, size: int = 8):
    return {"x": np.random.default_rng(seed).normal(size=(size, WIDTH)).astype(np.float32)}


PROGRAM = trace(loss, jax.eval_shape(make_parameters), make_batch(0, 4))
END = PROGRAM.num_positions


def plan_of(*pipelines: tuple[int, ...], divided: bool = True) -> Plan:
    """Pipelines of two devices a stage, cut at some positions."""
    layers = tuple(sorted({0, END, *(cut for cuts in pipelines for cut in cuts)}))
    made, used = [], {"first": 0, "second": 0}
    for cuts in pipelines:
        stages = []
        for start, stop in zip((0, *cuts), (*cuts, END), strict=True):
            name = "first" if used["first"] < 4 else "second"
            where = SubMesh(name, used[name], (1, 2))
            used[name] += 2
            span = (layers.index(start), layers.index(stop))
            stages.append(StagePlan.on(span, where, (2, 1) if len(made) else (1, 2)))
        made.append(PipelinePlan(tuple(stages), 1, 4, one_f_one_b(len(stages), 1)))
    return Plan(PROGRAM.fingerprint, layers, CLUSTER, tuple(made), shard_optimizer_state=divided)


STARTS = iteration_starts(PROGRAM, BLOCKS)
PLANS = {
    "one stage each": plan_of((), ()),
    "cut alike": plan_of((STARTS[1],), (STARTS[1],)),
    "cut at unlike places": plan_of((STARTS[1],), (STARTS[3],)),
    "of unlike depth": plan_of((STARTS[1],), ()),
}


def job_of(plan: Plan, optimizer: optax.GradientTransformation = OPTIMIZER) -> Job:
    batch = jax.eval_shape(lambda: make_batch(0, plan.batch_size))
    return Job(loss, make_parameters(), batch, optimizer, plan, deadline=60.0)


def losses(plan: Plan) -> list[float]:
    job = job_of(plan)
    executor = LocalExecutor(job, build(job))
    try:
        executor.start()
        return [each for each, _ in train(executor, [make_batch(s) for s in range(4)])]
    finally:
        executor.close()


def one_device_losses() -> list[float]:
    parameters, found = make_parameters(), []
    # Optax mixes dtypes in its own arithmetic.
    with jax.numpy_dtype_promotion("standard"):
        state = OPTIMIZER.init(parameters)
        for seed in range(4):
            value, gradients = jax.value_and_grad(loss)(parameters, make_batch(seed))
            updates, state = OPTIMIZER.update(gradients, state, parameters)
            parameters = optax.apply_updates(parameters, updates)
            found.append(float(value))
    return found


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("divided", [False, True])
def test_losses_equal_those_of_one_device(name: str, divided: bool):
    plan = replace(PLANS[name], shard_optimizer_state=divided)
    np.testing.assert_allclose(losses(plan), one_device_losses(), rtol=1e-5)


def state_elements(placement: Placement) -> int:
    """Elements of the optimizer's state over all stages, but for its counters."""
    pipelines = placement.pipelines
    return sum(
        int(np.prod(pipelines.state_shape(part).shape))
        for update in pipelines.updates
        for part, like in zip(update.state, update.like, strict=True)
        if like is not None
    )


def test_each_row_of_the_state_exists_once():
    plan = PLANS["one stage each"]
    whole = 2 * sum(
        int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(make_parameters()) if leaf.shape
    )
    assert state_elements(build(job_of(plan))) == whole
    duplicate = replace(plan, shard_optimizer_state=False)
    assert state_elements(build(job_of(duplicate))) == 2 * whole


def gradient_elements(placement: Placement) -> int:
    """Elements of gradients that stages send to each other in a step."""
    sent = [
        instruction.tag
        for stage in range(placement.pipelines.num_stages)
        for instruction in training_instructions(
            placement.pipelines, placement.pipeline_plan(stage).schedule, stage
        )
        if isinstance(instruction, Send) and instruction.tag.route.kind == RouteKind.GRADIENT
    ]
    assert all(isinstance(tag.route, Route) for tag in sent)
    return sum(int(np.prod(shape.shape)) for tag in sent for shape in placement.ends(tag)[0].shapes)


def test_gradients_are_scattered():
    plan = PLANS["one stage each"]
    duplicate = replace(plan, shard_optimizer_state=False)
    divided, whole = (gradient_elements(build(job_of(each))) for each in (plan, duplicate))
    assert whole == 2 * divided


def trainer_of(plan: Plan, workdir: Path) -> Trainer:
    batch = make_batch(0, plan.batch_size)
    return Trainer(plan, loss, make_parameters(), OPTIMIZER, batch, workdir=workdir)


def state_of(trainer: Trainer) -> list[np.ndarray]:
    """The leaves of the optimizer's state, whole."""
    executor, pipelines = trainer._executor, trainer._placement.pipelines
    assert isinstance(executor, LocalExecutor)
    leaves = [np.zeros(each.shape, each.dtype) for each in pipelines.state_shapes]
    for update, worker in zip(pipelines.updates, executor.workers, strict=True):
        for part, array in zip(update.state, worker.state().optimizer, strict=True):
            rows = ... if part.stop is None else slice(part.start, part.stop)
            leaves[part.leaf][rows] = np.asarray(array)
    return pipelines.state_leaves.join(leaves, np.stack)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("one stage each", True), ("one stage each", True)),
        (("one stage each", True), ("cut at unlike places", False)),
        (("cut at unlike places", True), ("of unlike depth", True)),
        (("cut alike", False), ("cut at unlike places", True)),
        (("of unlike depth", False), ("cut alike", False)),
    ],
)
def test_checkpoints_know_no_division(
    before: tuple[str, bool], after: tuple[str, bool], tmp_path: Path
):
    plans = [
        replace(PLANS[name], shard_optimizer_state=divided) for name, divided in (before, after)
    ]
    with trainer_of(plans[0], tmp_path) as trainer:
        trainer.train_step(make_batch(0))
        trainer.save(wait=True)
        saved = state_of(trainer)
    with trainer_of(plans[1], tmp_path) as trainer:
        assert trainer.resume()
        for ours, theirs in zip(state_of(trainer), saved, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-12)
        trainer.train_step(make_batch(1))


def test_an_optimizer_that_mixes_rows_is_refused():
    with pytest.raises(InputError, match="make it false"):
        build(job_of(PLANS["one stage each"], optax.adafactor(1e-2, min_dim_size_to_factor=2)))
