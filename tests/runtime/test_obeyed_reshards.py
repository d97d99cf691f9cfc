"""Reshards in a loss are obeyed by the trainer, or refused with their line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from ray_jobs import make_cluster

import hetjax
from hetjax import HSharding, Subgroup, Trainer, reshard
from hetjax.errors import InputError
from hetjax.mesh import SubMesh
from hetjax.pipeline.program.reshards import is_constrained
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner import Member, PipelinePlan, Plan, Share, Shares, StagePlan
from hetjax.planner.plan.obeyed_reshards import obey_reshards
from hetjax.runtime.workers.job import Job, build

EXAMPLES, WIDTH, HIDDEN = 4, 6, 12
WEIGHTS = {
    "in": np.linspace(-1, 1, WIDTH * HIDDEN, dtype=np.float32).reshape(WIDTH, HIDDEN),
    "out": np.linspace(1, -1, HIDDEN * WIDTH, dtype=np.float32).reshape(HIDDEN, WIDTH),
}
X = np.sin(np.arange(2 * EXAMPLES * WIDTH, dtype=np.float32)).reshape(2 * EXAMPLES, WIDTH)
OPTIMIZER = optax.sgd(0.1)

PAIR = Subgroup((0, 1), (("mine", 2),), P())
THIRD = Subgroup((2,), (), P())
EVERYWHERE = HSharding((PAIR, THIRD))

TOGETHER = (
    Member(SubMesh("first", 0, (1, 2)), (1, 2)),
    Member(SubMesh("second", 0, (1, 1)), (1, 1)),
)


def loss_with(annotation: HSharding, where: str = "hidden") -> Callable[..., Any]:
    def loss(weights, x):
        hidden = jnp.tanh(x @ weights["in"])
        if where == "hidden":
            hidden = reshard(hidden, annotation)
        y = hidden @ weights["out"]
        return jnp.mean((reshard(y, annotation) if where == "y" else y) ** 2)

    return loss


def scanned(annotation: HSharding, *, checkpointed: bool = False) -> Callable[..., Any]:
    def loss(weights, x):
        def body(x, _):
            y = jnp.tanh(x @ weights["in"]) @ weights["out"]
            return reshard(y, annotation), None

        body = jax.checkpoint(body) if checkpointed else body
        return jnp.mean(jax.lax.scan(body, x, None, length=2)[0] ** 2)

    return loss


def plan_on(loss: Callable[..., Any], *stages: StagePlan) -> Plan:
    """One pipeline; two stages meet where the reshard stands."""
    program = trace(loss, WEIGHTS, X[:EXAMPLES])
    names = [step.name for step in program.steps]
    middle = (names.index("hetjax_reshard"),) if len(stages) > 1 else ()
    pipeline = PipelinePlan(stages, 2, EXAMPLES, one_f_one_b(len(stages), 2))
    layers = (0, *middle, program.num_positions)
    return Plan(program.fingerprint, layers, make_cluster(1), (pipeline,))


def check_trains(loss: Callable[..., Any], plan: Plan) -> None:
    def mean(weights):
        """Over microbatches, of which annotations with sizes are."""
        return (loss(weights, X[:EXAMPLES]) + loss(weights, X[EXAMPLES:])) / 2

    weights, expected = jax.tree.map(jnp.asarray, WEIGHTS), []
    for _ in range(3):
        value, gradients = jax.jit(jax.value_and_grad(mean))(weights)
        weights = jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)
        expected.append(float(value))
    with Trainer(plan, loss, WEIGHTS, OPTIMIZER, X) as trainer:
        found = [trainer.train_step(X).loss for _ in range(3)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


SHARES = Shares(parameters={"in": Share(1, (8, 4)), "out": Share(0, (8, 4))})


@pytest.mark.parametrize(
    ("annotation", "where"),
    [
        (EVERYWHERE, "hidden"),
        (EVERYWHERE, "y"),
        (HSharding((PAIR, THIRD), 0, (3, 1)), "y"),
        (HSharding((PAIR.with_spec(P(None, "mine")), THIRD), 1, (10, 2)), "hidden"),
        (HSharding((PAIR, THIRD), 0, ("n - n//4", "n//4")), "y"),
    ],
)
def test_members_of_other_axes_are_found_by_their_devices(annotation: HSharding, where: str):
    loss = loss_with(annotation, where)
    specs = {"in": (None, "tensor"), "out": ("tensor",)}
    stage = StagePlan((0, 1), TOGETHER, parameters=specs, shares=SHARES)
    check_trains(loss, plan_on(loss, stage))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_reshard_in_a_scan_is_obeyed(checkpointed: bool):
    loss = scanned(EVERYWHERE, checkpointed=checkpointed)
    stage = StagePlan((0, 1), TOGETHER, parameters={"in": (), "out": ()}, shares=SHARES)
    check_trains(loss, plan_on(loss, stage))
    alone = StagePlan.on((0, 1), SubMesh("first", 0, (1, 2)), (2, 1))
    loss = scanned(HSharding((PAIR.with_spec(P("mine")),)), checkpointed=checkpointed)
    plan = plan_on(loss, alone)
    program = obey_reshards(plan, plan.pipeline, trace(loss, WEIGHTS, X[:EXAMPLES]))
    assert is_constrained(program.steps)
    check_trains(loss, plan)


@pytest.mark.parametrize("mesh_shape", [(2, 1), (1, 2)])
def test_a_stage_of_one_member_lays_values_out_as_it_is_told(mesh_shape: tuple[int, int]):
    columns = HSharding((PAIR.with_spec(P(None, "mine")),))
    loss = loss_with(columns)
    plan = plan_on(loss, StagePlan.on((0, 1), SubMesh("first", 0, (1, 2)), mesh_shape))
    placement = build(Job(loss, WEIGHTS, jax.eval_shape(lambda: jnp.asarray(X)), OPTIMIZER, plan))
    equations = [step.equation for step in placement.pipelines.stages[0].steps]
    (told,) = [e for e in equations if e is not None and e.primitive.name == "hetjax_constraint"]
    axis = "data" if mesh_shape[0] == 2 else "tensor"
    assert told.params["sharding"].spec == P(None, axis)
    check_trains(loss, plan)


def test_a_value_moves_to_the_next_stage_where_a_reshard_says_so():
    loss = loss_with(HSharding((THIRD,)))
    first = StagePlan.on((0, 1), SubMesh("first", 0, (1, 2)), (2, 1))
    second = StagePlan.on((1, 2), SubMesh("second", 0, (1, 1)), (1, 1))
    check_trains(loss, plan_on(loss, first, second))


def refusal(loss: Callable[..., Any], *stages: StagePlan) -> str:
    with pytest.raises(InputError) as error:
        Trainer(plan_on(loss, *stages), loss, WEIGHTS, OPTIMIZER, X)
    return str(error.value)


def test_what_a_stage_cannot_do_is_refused_with_its_line():
    alone = StagePlan.on((0, 1), SubMesh("first", 0, (1, 2)), (1, 2))
    found = refusal(loss_with(EVERYWHERE), alone)
    assert "test_obeyed_reshards.py:" in found
    assert "devices [0, 1, 2], and its stage is on [0, 1]; allowed: an annotation on" in found
    sums = HSharding((PAIR.with_spec(P(unreduced=frozenset({"mine"}))),))
    assert "a partial sum inside" in refusal(loss_with(sums, "y"), alone)
    crossed = HSharding((THIRD, PAIR), 0, (1, 3))
    union = StagePlan((0, 1), TOGETHER)
    assert "cannot be said over the members" in refusal(loss_with(crossed, "y"), union)


@pytest.mark.parametrize("num_microbatches", [None, 2])
def test_a_plan_that_was_searched_for_obeys_reshards_or_is_refused(num_microbatches: int | None):
    cluster, loss = make_cluster(1), loss_with(HSharding((Subgroup((7,), (), P()),)))
    message = r"test_obeyed_reshards.py:\d+.*: the value is annotated on devices \[7\], and its"
    with pytest.raises(InputError, match=message):
        hetjax.plan(
            loss,
            WEIGHTS,
            X,
            cluster=cluster,
            optimizer=OPTIMIZER,
            num_microbatches=num_microbatches,
        )


def test_a_reshard_beside_a_derivative_of_its_own_is_refused():
    @jax.custom_vjp
    def doubled(x):
        return 2 * reshard(x, EVERYWHERE)

    doubled.defvjp(lambda x: (doubled(x), ()), lambda _, g: (2 * g,))

    def loss(weights, x):
        return jnp.mean((doubled(jnp.tanh(x @ weights["in"])) @ weights["out"]) ** 2)

    assert "with a derivative of its own" in refusal(loss, StagePlan((0, 1), TOGETHER))
