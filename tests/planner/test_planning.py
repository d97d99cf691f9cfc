"""From a loss function to a plan with its prediction."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax import planner
from hetjax.errors import InputError
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster, SubMesh
from hetjax.pipeline.schedules.schedule import WARM_UP_SCHEDULES
from hetjax.pipeline.schedules.warm_up import h_1f1b, one_f_one_b
from hetjax.planner.costs.cost_model import estimate
from hetjax.planner.harp.search import search
from hetjax.planner.harp.table_making import (
    execution_options,
    make_stage_table,
    memory_first_order,
    submesh_shapes,
)
from hetjax.planner.work.execution import Execution
from hetjax.planner.work.layer_runs import all_runs
from hetjax.planner.work.rates import USABLE_MEMORY
from hetjax.sharding.annotation.rules import RULES

NEAR, FAR = Link(10e9, 1e-5), Link(1e9, 1e-4)
SHARDED = ("state_sharded", "fully_sharded")


def kind(name: str, speed: float, memory_bytes: int) -> DeviceKind:
    return DeviceKind(name, {"float32": speed}, memory_bytes, 1e11, source="made up")


def cluster_of(*subclusters: Subcluster) -> Cluster:
    pairs = [(a.name, b.name) for i, a in enumerate(subclusters) for b in subclusters[i + 1 :]]
    return Cluster("test", subclusters, tuple((a, b, FAR) for a, b in pairs))


def two_kinds(fast_memory: int = 10**9, slow_memory: int = 10**9) -> Cluster:
    return cluster_of(
        Subcluster("fast", kind("quick", 1e12, fast_memory), 1, 4, NEAR, NEAR),
        Subcluster("slow", kind("lame", 5e11, slow_memory), 1, 2, NEAR, NEAR),
    )


def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


def problem_of(
    cluster: Cluster,
    *,
    width: int = 512,
    blocks: int = 8,
    num_microbatches: int = 4,
    optimizer: optax.GradientTransformation | None = None,
    **options: Any,
):
    return planner.make_problem(
        loss,
        [jax.ShapeDtypeStruct((width, width), jnp.float32)] * blocks,
        jax.ShapeDtypeStruct((64, width), jnp.float32),
        cluster=cluster,
        optimizer=optimizer or optax.adam(1e-3),
        num_microbatches=num_microbatches,
        options=planner.PlanOptions(**{"num_layers": 8, "max_pipelines": 1, **options}),
    )


def planned(problem: planner.PlanningProblem) -> planner.Plan:
    plan = planner.predict(planner.DynamicProgram().plan(problem), problem)
    planner.validate(plan)
    planner.validate_for(plan, problem.program, batch_size=64)
    return plan


@settings(max_examples=12)
@given(
    schedule=st.sampled_from(WARM_UP_SCHEDULES),
    memory=st.sampled_from([10**9, 20 * 10**6, 10**7, 7 * 10**6]),
    num_microbatches=st.sampled_from([1, 4, 16]),
    min_stages=st.sampled_from([1, 2, 3]),
)
def test_a_plan_is_valid_and_fits(schedule, memory, num_microbatches, min_stages):
    problem = problem_of(
        two_kinds(memory, memory),
        schedule=schedule,
        num_microbatches=num_microbatches,
        min_stages=min_stages,
    )
    try:
        plan = planned(problem)
    except InputError:
        assert memory < 10**9
        return
    prediction = plan.prediction
    assert prediction is not None
    assert prediction.lower_bound <= prediction.step_time * (1 + 1e-9)
    assert len(prediction.stages) == len(plan.pipeline.stages) >= min_stages
    for stage in prediction.stages:
        assert stage.memory_bytes <= USABLE_MEMORY * stage.memory_limit_bytes
        assert 0 <= stage.bubble < 1
    assert planner.simulate(plan).makespan == pytest.approx(prediction.step_time)


def test_the_warm_up_counts_are_those_of_the_schedule():
    problem = problem_of(two_kinds(), min_stages=3, num_microbatches=16)
    plan = planned(problem)
    assert plan.prediction is not None
    stages = plan.prediction.stages
    schedule = h_1f1b(
        len(stages),
        16,
        compute=[stage.forward_seconds + stage.backward_seconds for stage in stages],
        communication=[
            (a.communication_seconds + b.return_seconds) / 2 for a, b in itertools.pairwise(stages)
        ],
    )
    assert plan.pipeline.schedule == schedule


@pytest.mark.parametrize(
    ("memory", "fitting"),
    [
        (
            10**9,
            {(rule, again) for rule in RULES for again in (False, True)},
        ),
        (
            37_850_000,
            {("data", True), *((rule, again) for rule in SHARDED for again in (False, True))},
        ),
        (22_000_000, {("fully_sharded", False), ("fully_sharded", True)}),
        (15_000_000, set()),
    ],
)
def test_what_fits_into_less_memory(memory, fitting):
    problem = problem_of(two_kinds(memory, memory))
    runs, subcluster = all_runs(problem.program, problem.works), problem.cluster.subclusters[0]
    whole = runs.of((0, problem.num_layers))
    plain = set()
    for option in execution_options(problem, subcluster, (1, 4)):
        run = whole.repeating_forward() if option.recompute else whole
        # With the warm-up counts of a first stage of many.
        limit = estimate(problem, run, option).live_limit(memory * USABLE_MEMORY, 16)
        if limit >= 4 and option.mesh_shape == (4, 1):
            plain.add((option.sharding, option.recompute))
    assert plain == fitting
    table = make_stage_table(problem, runs)
    four = next(cut for cut in table.slices[0] if cut.shape == (1, 4))
    kept = four.limits_of((0, problem.num_layers)) > 0
    meshes = {
        option.mesh_shape
        for option, fits in zip(four.options, kept, strict=True)
        if fits and isinstance(option, Execution)
    }
    assert ((4, 1) in meshes) == bool(fitting)
    assert (1, 4) in meshes


@pytest.mark.parametrize("memory", [10**9, 20 * 10**6, 12 * 10**6])
def test_no_option_that_is_left_out_would_be_better(memory):
    problem = problem_of(two_kinds(memory, memory))
    runs = all_runs(problem.program, problem.works)
    for subcluster, slices in zip(
        problem.cluster.subclusters, make_stage_table(problem, runs).slices, strict=True
    ):
        for cut in slices:
            fastest = np.where(cut.live_limits >= 2, cut.seconds, np.inf).min(axis=0)
            best = fastest.take(cut.runs, mode="clip")
            for option in execution_options(problem, subcluster, cut.shape):
                if option.mesh_shape[1] > 1:
                    continue
                run = runs.repeating_forward() if option.recompute else runs
                each = estimate(problem, run, option)
                fits = each.live_limit(memory * USABLE_MEMORY, 16) >= 2
                seconds = each.forward_seconds + each.backward_seconds
                seconds = seconds + each.update_seconds / problem.num_microbatches
                upper = np.triu(np.ones_like(fits), 1) & fits
                assert (best[upper] <= seconds[upper] + 1e-9).all()


def test_the_cheapest_way_that_fits_is_taken():
    problem = problem_of(two_kinds(), max_stages=1)
    found = planned(problem)
    (roomy,) = found.pipeline.stages
    # The update, which a step has once, is divided.
    assert (roomy.sharding, roomy.recompute) == ("state_sharded", False)
    assert found.prediction is not None
    for rule in ("data", "fully_sharded"):
        pipeline = replace(found.pipeline, stages=(replace(roomy, sharding=rule),))
        other = planner.predict(replace(found, pipelines=(pipeline,), prediction=None), problem)
        assert other.prediction is not None
        assert other.prediction.step_time >= found.prediction.step_time


def test_a_tensor_axis_where_nothing_else_fits():
    cluster = cluster_of(Subcluster("only", kind("quick", 1e12, 16 * 10**6), 1, 4, NEAR, NEAR))
    batch = jax.ShapeDtypeStruct((1, 512), jnp.float32)
    problem = planner.make_problem(
        loss,
        [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 8,
        batch,
        cluster=cluster,
        optimizer=optax.adam(1e-3),
        num_microbatches=1,
        options=planner.PlanOptions(max_stages=1),
    )
    (stage,) = planner.DynamicProgram().plan(problem).pipeline.stages
    assert stage.mesh_shape == (1, 4)


def test_a_layer_that_is_too_large_is_named():
    with pytest.raises(InputError) as caught:
        planner.DynamicProgram().plan(problem_of(two_kinds(10**6, 10**6)))
    message = str(caught.value)
    assert "layer 0 of 8 is too large for any device of cluster 'test'" in message
    assert re.search(r"needs [\d.]+ MB a device on 1x4 fast, [\d.]+ times", message)
    assert "less state than 8 bytes a parameter" in message
    # By any schedule a stage holds a microbatch.
    assert "schedule" not in message


def test_only_what_could_help_a_layer_that_is_too_large_is_named():
    with pytest.raises(InputError, match="What would help: more devices, or devices with more"):
        planner.DynamicProgram().plan(problem_of(two_kinds(10**3, 10**3)))


def test_a_model_that_fits_nowhere_is_told_what_it_needs():
    problem = problem_of(two_kinds(4 * 10**6, 4 * 10**6))
    with pytest.raises(InputError) as caught:
        planner.DynamicProgram().plan(problem)
    message = str(caught.value)
    assert "does not fit on cluster 'test' by any plan" in message
    assert re.search(r"stage 0 \(layers 0-\d on 1x\d \w+\) needs [\d.]+ MB a device", message)
    assert "a device has 4 MB" in message
    assert "num_microbatches = 4" in message
    assert "less state than 8 bytes a parameter" in message


def test_a_slow_link_is_not_crossed():
    far = Link(1e4, 1.0)
    cluster = replace(two_kinds(), links=(("fast", "slow", far),))
    plan = planned(problem_of(cluster))
    assert len({stage.submesh.subcluster for stage in plan.pipeline.stages}) == 1


def test_plan_does_it_all():
    made = planner.plan(
        loss,
        [jnp.ones((64, 64))] * 4,
        jnp.ones((16, 64)),
        cluster=two_kinds(),
        optimizer=optax.sgd(1e-2),
        num_microbatches=4,
    )
    assert made.batch_size == 16
    assert made.planner == "DynamicProgram"
    assert made.prediction is not None


def test_plan_takes_any_planner():
    class OneDevice:
        def plan(self, problem: planner.PlanningProblem) -> planner.Plan:
            stage = planner.StagePlan.on(
                (0, problem.num_layers), SubMesh("fast", 0, (1, 1)), (1, 1)
            )
            pipeline = planner.PipelinePlan(
                (stage,),
                problem.num_microbatches,
                problem.microbatch_size,
                one_f_one_b(1, problem.num_microbatches),
            )
            return planner.Plan(
                problem.program.fingerprint, problem.layers, problem.cluster, (pipeline,)
            )

    made = planner.plan(
        loss,
        [jnp.ones((64, 64))] * 4,
        jnp.ones((16, 64)),
        cluster=two_kinds(),
        optimizer=optax.sgd(1e-2),
        num_microbatches=4,
        planner=OneDevice(),
    )
    assert made.prediction is not None
    assert made.prediction.step_time == pytest.approx(made.prediction.lower_bound)


def test_a_prediction_is_for_its_own_problem():
    problem = problem_of(two_kinds())
    plan = planner.DynamicProgram().plan(problem)
    with pytest.raises(InputError, match="has no prediction; make one"):
        planner.simulate(plan)
    with pytest.raises(InputError, match="microbatches of 16 examples"):
        planner.predict(plan, problem_of(two_kinds(), num_microbatches=16))
    with pytest.raises(InputError, match="made for another model"):
        planner.predict(plan, problem_of(two_kinds(), blocks=7))


def test_shapes_of_submeshes():
    assert submesh_shapes(1, 1) == ((1, 1),)
    assert submesh_shapes(3, 4) == ((1, 1), (1, 2), (1, 3), (1, 4), (2, 4), (3, 4))
    within = [devices for _, devices in submesh_shapes(1, 16)]
    assert within == [1, 2, 3, 4, 6, 8, 12, 16]


def test_many_subclusters_are_passed_by_memory_per_speed():
    subclusters = [
        Subcluster(f"s{i}", kind(f"k{i}", 1e12, memory), 1, 1, NEAR, NEAR)
        for i, memory in enumerate([2, 5, 1, 4, 3])
    ]
    cluster = cluster_of(*subclusters)
    assert memory_first_order(cluster, "float32") == (1, 3, 4, 0, 2)
    kinds = [kind(f"k{i}", 1e12, 10**9 + i) for i in range(5)]
    roomy = cluster_of(*(replace(s, kind=k) for s, k in zip(subclusters, kinds, strict=True)))
    plan = planned(problem_of(roomy, min_stages=2))
    names = [stage.submesh.subcluster for stage in plan.pipeline.stages]
    assert names == sorted(names, reverse=True)


def least_latency(cluster: Cluster) -> float:
    problem = problem_of(cluster)
    found = search(make_stage_table(problem, all_runs(problem.program, problem.works)))
    return found[0].latency if found else math.inf


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32),
    what=st.sampled_from(["a node", "a subcluster", "a faster link", "a faster network"]),
)
def test_more_never_costs_time(seed, what):
    """No device has to be used, so that more of them and faster links can only help."""
    rng = np.random.default_rng(seed)
    memory = int(rng.choice([8 * 10**6, 2 * 10**7, 10**9]))

    def part(name: str) -> Subcluster:
        near = Link(float(rng.choice([1e9, 1e10])), 1e-5)
        nodes, devices = int(rng.integers(1, 3)), int(rng.choice([1, 2, 4]))
        device = kind(f"{name} card", float(rng.choice([5e11, 1e12])), memory)
        return Subcluster(name, device, nodes, devices, near, FAR)

    a, b, c = part("a"), part("b"), part("c")
    before = least_latency(cluster_of(a, b))
    match what:
        case "a node":
            more = cluster_of(replace(a, nodes=a.nodes + 1), b)
        case "a subcluster":
            more = cluster_of(a, b, c)
        case "a faster link":
            more = Cluster("test", (a, b), (("a", "b", Link(2 * FAR.bandwidth, FAR.latency)),))
        case _:
            fast = Link(2 * a.inter_node.bandwidth, a.inter_node.latency)
            more = cluster_of(replace(a, inter_node=fast), b)
    assert least_latency(more) <= before * (1 + 1e-9)
