"""Members of several devices that share the context: they divide what they have of it once more."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from baselines import one_device_losses

import hetjax
from hetjax.errors import DoesNotFitError
from hetjax.mesh import Cluster, Link, Subcluster
from hetjax.mesh.kinds import DeviceKind
from hetjax.models import GPTConfig, LanguageModel, LlamaConfig, language_model
from hetjax.planner import HexiSeqPlanner, Plan, PlanningProblem, PlanOptions, make_problem
from hetjax.planner.costs.context_cost import context_programs
from hetjax.planner.hexiseq.context_choice import ContextChoice, context_models
from hetjax.planner.hexiseq.context_pipelines import context_pipelines
from hetjax.planner.hexiseq.even_contexts import even_contexts
from hetjax.planner.hexiseq.planned_pipelines import planned
from hetjax.planner.hexiseq.predicted_choice import one_stage_plan
from hetjax.planner.hexiseq.scheduler import best_schedules, schedule_context
from hetjax.planner.hexiseq.stage_splits import StageSplits
from hetjax.planner.plan.plan import validate, validate_for
from hetjax.planner.predictions.plan_sharding import divide_members
from hetjax.planner.predictions.predict import predict

LENGTH = 64
OPTIMIZER = optax.adam(1e-3)
BATCH = {"tokens": np.random.default_rng(0).integers(0, 64, (1, LENGTH + 1), np.int32)}
GPT = language_model(GPTConfig(64, 2, 128, 4, LENGTH))
LLAMA = language_model(
    LlamaConfig(
        blocks=2, width=128, heads=8, key_value_heads=4, ffn_width=256, vocabulary=64,
        sequence=LENGTH,
    )
)  # fmt: skip
MEMORY = 4_500_000
"""For half of the parameters, their gradients and state, but not for all."""


def islands(
    memory: int = MEMORY, each: int = 2, widest: int | None = None, far: float = 1e9
) -> Cluster:
    """Two islands, one twice as fast as the other."""
    near, between = Link(1e10, 1e-6), Link(far, 1e-5)
    parts = tuple(
        Subcluster(
            f"speed-{speed}",
            DeviceKind(f"speed-{speed}", {"float32": speed * 1e9}, memory, speed * 1e9, "made up"),
            1,
            each,
            near,
            near,
            max_tensor_parallelism=widest,
        )
        for speed in (2, 1)
    )
    return Cluster("two islands", parts, ((parts[0].name, parts[1].name, between),))


def problem_on(cluster: Cluster, model: LanguageModel = GPT) -> PlanningProblem:
    return make_problem(
        model.loss,
        lambda: model.init(jax.random.key(0)),
        BATCH,
        cluster=cluster,
        optimizer=OPTIMIZER,
        num_microbatches=1,
        divides_sequences=True,
    )


@functools.cache
def found_plan(model: str) -> tuple[PlanningProblem, Plan]:
    problem = problem_on(islands(), {"gpt": GPT, "llama": LLAMA}[model])
    return problem, HexiSeqPlanner().plan(problem)


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_a_sequence_is_shared_by_members_that_divide_parameters_where_whole_ones_do_not_fit(
    model: str,
):
    problem, plan = found_plan(model)
    validate(plan)
    validate_for(plan, problem.program)
    (stage,) = plan.stages
    assert plan.predicted.fits
    assert [member.mesh_shape for member in stage.members] == [(1, 2), (1, 2)]
    assert stage.parameters["blocks/0/mlp/up/kernel"] == (None, "tensor")
    assert stage.parameters["blocks/0/mlp/down/kernel"] == ("tensor", None)
    assert stage.shares.context is not None
    fast, slow = stage.shares.context.tokens
    assert fast > slow


def test_without_a_tensor_axis_nothing_fits():
    with pytest.raises(DoesNotFitError, match="parameters, gradients and optimizer state"):
        HexiSeqPlanner().plan(problem_on(islands(widest=1)))


def check_losses(language: LanguageModel, plan: Plan, batch: Any = BATCH) -> None:
    parameters = language.init(jax.random.key(0))

    def loss(parameters: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        total, count, *_ = language.loss(parameters, batch)
        return total, jnp.float32(count)

    with jax.numpy_dtype_promotion("standard"):
        expected = one_device_losses(
            loss, OPTIMIZER, parameters, [batch] * 3, plan.pipelines[0].num_microbatches
        )
    devices = jax.devices("cpu")[: plan.cluster.num_devices]
    runtime = hetjax.LocalOptions(devices)
    with hetjax.Trainer(
        plan, language.loss, parameters, OPTIMIZER, batch, runtime=runtime
    ) as trainer:
        found = [trainer.train_step(batch).loss for _ in range(3)]
    np.testing.assert_allclose(found, expected, rtol=2e-5)


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_they_train_as_one_device_does(model: str):
    check_losses({"gpt": GPT, "llama": LLAMA}[model], found_plan(model)[1])


def test_members_of_unlike_lengths_with_unlike_memory_train_as_one_device_does():
    """The larger one updates most of each parameter, in parts that the other's axis divides."""
    near = Link(1e10, 1e-6)
    kinds = [
        DeviceKind(f"memory-{memory}", {"float32": 1e9}, memory, 1e9, "made up")
        for memory in (MEMORY, 10**8)
    ]
    parts = tuple(
        Subcluster(kind.name, kind, 1, count, near, near)
        for kind, count in zip(kinds, (2, 1), strict=True)
    )
    cluster = Cluster("unlike", parts, ((parts[0].name, parts[1].name, near),))
    plan = HexiSeqPlanner().plan(problem_on(cluster))
    assert [member.mesh_shape for member in plan.stages[0].members] == [(1, 2), (1, 1)]
    check_losses(GPT, plan)


def test_a_pipeline_of_such_stages_is_found_and_trains_as_one_device_does():
    """Islands far apart are stages; in each of them members of two devices share sequences."""
    batch = {"tokens": np.random.default_rng(1).integers(0, 64, (4, LENGTH + 1), np.int32)}
    problem = make_problem(
        GPT.loss,
        lambda: GPT.init(jax.random.key(0)),
        batch,
        cluster=islands(2_600_000, each=4, far=2e6),
        optimizer=OPTIMIZER,
        num_microbatches=4,
        options=PlanOptions(max_pipelines=1),
        divides_sequences=True,
    )
    plans = (planned(problem, each) for each in context_pipelines(problem, 4))
    fitting = [plan for plan in plans if plan.predicted.fits]
    plan = min(fitting, key=lambda plan: plan.predicted.step_time)
    shapes = [[member.mesh_shape for member in stage.members] for stage in plan.stages]
    assert shapes == [[(1, 2), (1, 2)]] * 2
    check_losses(GPT, plan, batch)


def tensor_plan(problem: PlanningProblem, devices: int) -> Plan:
    """The best split of members with a tensor axis of some length."""
    for model in context_models(problem):
        if max(model.devices.sizes) == devices and not model.work.is_recomputed:
            choice = ContextChoice(schedule_context(model), model)
            plan = one_stage_plan(problem, choice)
            return predict(divide_members(plan, problem), problem)
    raise AssertionError("there is no such tensor axis")


def test_products_and_attention_are_divided_among_a_members_devices():
    problem = problem_on(islands(10**9))
    plan = tensor_plan(problem, 2)
    found = context_programs(plan, plan.pipelines[0], 0, problem, None)
    for inside in found.inside:
        assert inside is not None
        assert inside.devices == 2
        steps = [step for step in found.trace.blocks if inside.of_step(step).products != 0.5]
        assert not steps
        products = [
            (step, found.trace.amounts(step).flops.sum())
            for step in inside.computed
            if step.name == "dot_general"
        ]
        divided = sum(flops for step, flops in products if inside.of_step(step).products == 0.5)
        # But for the gradient of the output matrix, for which logits come together.
        assert divided > 0.99 * sum(flops for _, flops in products)
        # Sums of what two products make, forward and backward, of two blocks; and logits.
        assert sum(inside.exchanged.values()) >= 8 * LENGTH * 128 * 4


def test_half_of_a_member_computes_half_as_long_and_holds_half():
    problem = problem_on(islands(10**9))
    plan = tensor_plan(problem, 2)
    (stage,) = plan.stages
    alone = tuple(
        replace(
            member,
            submesh=replace(member.submesh, shape=(1, 1)),
            mesh_shape=(1, 1),
        )
        for member in stage.members
    )
    whole = replace(stage, members=alone, parameters={}, values={})
    (pipeline,) = plan.pipelines
    other = replace(plan, pipelines=(replace(pipeline, stages=(whole,)),), prediction=None)
    one, two = predict(other, problem).predicted.stages[0], plan.predicted.stages[0]
    for before, after in zip(one.members, two.members, strict=True):
        assert 0.5 < after.forward_seconds / before.forward_seconds < 0.8
        assert 0.5 < after.state_bytes / before.state_bytes < 0.52
        assert after.memory_bytes < before.memory_bytes


@pytest.mark.parametrize(("each", "widest", "sizes"), [(4, None, (1, 2, 4)), (4, 2, (1, 2))])
def test_tensor_axes_go_as_far_as_nodes_heads_and_the_cluster_let_them(
    each: int, widest: int | None, sizes: tuple[int, ...]
):
    models = context_models(problem_on(islands(each=each, widest=widest)))
    found = dict.fromkeys(max(model.devices.sizes.tolist()) for model in models)
    assert tuple(found) == sizes
    for model in models:
        size = max(model.devices.sizes)
        assert model.work.heads_together == size
        assert model.devices.num_devices == 2 * each // size
        assert model.devices.flops[0] > model.devices.flops[-1]


def test_heads_of_keys_that_a_tensor_axis_does_not_divide_have_none():
    models = context_models(problem_on(islands(each=8), LLAMA))
    assert {max(model.devices.sizes.tolist()) for model in models} == {1, 2, 4}
    assert {model.work.heads_together for model in models} == {1, 4, 8}


def test_heads_that_belong_together_are_never_divided():
    problem = problem_on(islands(10**9, each=4), LLAMA)
    for model in context_models(problem):
        together = model.work.heads_together
        members = [tuple(model.devices.usable.tolist())]
        evens = [e.heads(model.work.query_heads) for e in
                 even_contexts(model.devices, model.work, members)]  # fmt: skip
        found = [h for s in best_schedules(model, 4) for g in s.split.groups for h in g.head_counts]
        assert all(count % together == 0 for count in (*found, *np.concatenate(evens).tolist()))


def test_a_member_of_which_a_device_is_lost_is_not_used():
    problem = replace(problem_on(islands(10**9, each=4)), lost=frozenset([1]))
    usable = {
        max(model.devices.sizes.tolist()): model.devices.usable.tolist()
        for model in context_models(problem)
    }
    assert usable == {1: [0, 2, 3, 4, 5, 6, 7], 2: [1, 2, 3], 4: [1]}
    devices = context_models(problem)[2].devices
    assert [devices.name(each) for each in (1, 2)] == ["speed-2[2:4]", "speed-1[0:2]"]
    assert devices.of((2, 3, 4, 5)) == (1, 2)
    assert devices.of((3, 4, 5)) is None


def test_of_alike_parts_that_members_divide_unlike_each_has_its_own_split():
    """Two nodes of six, of which devices are lost: in one part pairs begin at even numbers."""
    near = Link(1e10, 1e-6)
    kind = DeviceKind("one", {"float32": 1e9}, MEMORY // 2, 1e9, "made up")
    cluster = Cluster("nodes", (Subcluster("one", kind, 2, 6, near, near),))
    problem = replace(problem_on(cluster), lost=frozenset([4, 5, 6, 11]))
    splits, found = StageSplits(context_models(problem)), []
    for part in ((0, 1, 2, 3), (7, 8, 9, 10)):
        choice = splits.best(part, 1, is_last=True)
        if choice is not None:
            stage = choice.stage(problem, (0, problem.num_layers))
            used = {d for each in stage.submeshes for d in cluster.device_ids(each)}
            assert used <= set(part)
        found.append(choice is not None)
    assert found == [True, False]
