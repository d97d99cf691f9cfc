"""What stages of several members are predicted to take: as the devices that they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import jax
import jax.numpy as jnp
import optax
import pytest
from cases import examples, random_model, trace_model
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from hetjax import planner
from hetjax.errors import InputError
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster, SubMesh
from hetjax.models import model_of, recipe
from hetjax.pipeline.layers.structural_layers import structural_layers
from hetjax.pipeline.program.traced_program import Program, Step, num_bytes
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.pipeline.stages.cutting import cut
from hetjax.pipeline.stages.told_moves import with_told_moves
from hetjax.pipeline.stages.traced_stage import TracedStage, halve, trace_stage
from hetjax.planner import Member, PipelinePlan, Plan, Shares, StagePlan
from hetjax.planner.work.member_moves import MemberMoves, member_moves
from hetjax.planner.work.rates import TASK_SECONDS
from hetjax.planner.work.run_structure import inputs_of
from hetjax.planner.work.stage_work import measure
from hetjax.sharding.annotation.annotation import DUPLICATE, HSharding
from hetjax.sharding.annotation.rules import REDUCTION_GROUPS
from hetjax.sharding.annotation.subgroup import Subgroup

EXAMPLES = 16
MEMBERS = tuple(Subgroup((place,), (), PartitionSpec()) for place in range(2))


def deduced_moves(traced: TracedStage, steps: Sequence[Step]) -> MemberMoves:
    """What the runtime would move in steps."""
    names = [step for step in steps if step.name == "hetjax_reshard"]
    size = sum(num_bytes(traced.flat.avals[step.outputs[0]]) for step in names)
    return MemberMoves(len(names), float(size))


def check_moves(program: Program, boundaries: Sequence[int]) -> MemberMoves:
    """That what is counted of each run is what deduction moves at least; returns all of it."""
    works = measure(program, boundaries)
    runs = cut(program, boundaries)
    size = program.avals[program.batch[0]].shape[0]

    def lying(shape: tuple[int, ...]) -> HSharding:
        if shape and shape[0] == size:
            return HSharding(MEMBERS, 0, (size // 2, size - size // 2))
        return HSharding(MEMBERS, DUPLICATE, ())

    total = MemberMoves()
    for place, (run, inputs) in enumerate(zip(runs, inputs_of(program, runs), strict=True)):
        is_last = run is runs[-1]
        seeds = (0,) if is_last else works[place + 1].returned
        parameters, batch, received = inputs
        sent = jax.eval_shape(run.function, *inputs)
        arrays = (*batch, *received, *(sent[i] for i in seeds))
        lies = [HSharding(MEMBERS, DUPLICATE, ())] * len(parameters)
        lies += [lying(array.shape) for array in arrays]
        told = trace_stage(run, *inputs, seeds, with_told_moves(lies))
        passes = halve(told, is_last=is_last)
        forward, backward, given = member_moves(trace_stage(run, *inputs, seeds), size)
        # The loss is a sum that all shall have in the end, which is no reshard of the trace.
        assert given.count == is_last
        for counted, moved in (
            (forward, deduced_moves(told, passes.forward)),
            (backward, deduced_moves(told, passes.backward)),
        ):
            # Deduction moves a value twice where that takes less than to compute another way.
            assert counted.count <= moved.count
            assert counted.bytes <= moved.bytes
            assert bool(counted.count) == bool(moved.count)
        assert (works[place].forward_moves, works[place].backward_moves) == (forward, backward)
        total += forward + backward
    return total


@pytest.mark.parametrize(
    ("name", "moves"), [("resnet-quickstart", 60), ("vit-quickstart", 0), ("gpt-quickstart", 0)]
)
def test_what_members_exchange_is_what_deduction_finds(name: str, moves: int):
    model = model_of(recipe(name))
    program = trace(model.loss, model.parameter_shapes(), model.batch_shapes(8))
    total = check_moves(program, structural_layers(program).positions)
    # Four of each batch normalisation: its mean, its variance, and their cotangents.
    assert total.count == moves


@examples(usual=5)
@given(number=st.integers(0, 2**32 - 1))
def test_gradients_of_any_model_wait_for_the_end_of_a_step(number: int):
    model = random_model(Random(number))
    program = trace_model(model, 4)
    check_moves(program, (0, program.num_positions))


def loss(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


NEAR, FAR = Link(2e10, 1e-5), Link(5e9, 4e-5)
FAST, SLOW = (
    DeviceKind(name, {"float32": flops}, 8 * 10**9, 1e12, source="made up")
    for name, flops in (("fast card", 3e12), ("slow card", 1e12))
)
ALIKE = Cluster("alike", (Subcluster("all", FAST, 1, 4, NEAR, NEAR),))
UNLIKE = Cluster(
    "unlike",
    (Subcluster("fast", FAST, 1, 2, NEAR, NEAR), Subcluster("slow", SLOW, 1, 2, NEAR, NEAR)),
    (("fast", "slow", FAR),),
)
WIDTH, LAYERS = 512, 6


def problem_on(cluster: Cluster, microbatches: int = 2) -> planner.PlanningProblem:
    return planner.make_problem(
        loss,
        [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS,
        jax.ShapeDtypeStruct((EXAMPLES * microbatches, WIDTH), jnp.float32),
        cluster=cluster,
        optimizer=optax.adam(1e-3),
        num_microbatches=microbatches,
    )


def plan_of(problem: planner.PlanningProblem, *stages: StagePlan) -> Plan:
    count = problem.num_microbatches
    schedule = one_f_one_b(len(stages), count)
    pipeline = PipelinePlan(stages, count, problem.microbatch_size, schedule)
    return Plan(
        model=problem.program.fingerprint,
        layers=problem.layers,
        cluster=problem.cluster,
        pipelines=(pipeline,),
    )


def member(name: str, start: int, devices: int) -> Member:
    return Member(SubMesh(name, start, (1, devices)), (devices, 1))


def predicted(problem: planner.PlanningProblem, *stages: StagePlan) -> planner.Prediction:
    found = planner.predict(plan_of(problem, *stages), problem).prediction
    assert found is not None
    assert found.lower_bound <= found.step_time
    return found


def whole(problem: planner.PlanningProblem) -> tuple[int, int]:
    return 0, problem.num_layers


@pytest.mark.parametrize("recompute", [False, True])
def test_alike_members_take_what_their_devices_take_as_one(recompute: bool):
    problem = problem_on(ALIKE)
    one = StagePlan.on(whole(problem), SubMesh("all", 0, (1, 4)), (4, 1), recompute=recompute)
    halves = (member("all", 0, 2), member("all", 2, 2))
    two = replace(one, members=halves, shares=Shares(batch=(8, 8)))
    (plain,) = predicted(problem, one).stages
    (union,) = predicted(problem, two).stages
    # Beside that they tell each other the loss.
    told = TASK_SECONDS + NEAR.latency + 4 / NEAR.bandwidth
    assert union.forward_seconds == pytest.approx(plain.forward_seconds + told)
    assert union.backward_seconds == pytest.approx(plain.backward_seconds)
    assert union.recompute_seconds == pytest.approx(plain.recompute_seconds)
    assert union.activation_bytes == plain.activation_bytes
    assert union.recomputed_bytes == plain.recomputed_bytes
    parameters = 4 * WIDTH * WIDTH * LAYERS
    # Half of the moments, and what is given and taken of one group of gradients.
    spared = parameters - parameters / REDUCTION_GROUPS * 1.5
    assert union.state_bytes == pytest.approx(plain.state_bytes - spared)


def test_members_exchange_gradients_and_parameters_once_a_step():
    problem = problem_on(UNLIKE)
    shares = Shares(batch=(12, 4))
    stage = StagePlan(whole(problem), (member("fast", 0, 1), member("slow", 0, 1)), shares=shares)
    (found,) = predicted(problem, stage).stages
    alone = [
        predicted(problem, StagePlan.on(whole(problem), each.submesh, (1, 1))).stages[0]
        for each in stage.members
    ]
    parameters = 4 * WIDTH * WIDTH * LAYERS
    # Of two members one gives its quarter and takes it, the other three quarters.
    moved = 2 * 0.75 * parameters / FAR.bandwidth
    messages = (REDUCTION_GROUPS + 1) * (TASK_SECONDS + FAR.latency)
    updated = 0.75 * (alone[0].update_seconds - TASK_SECONDS) + TASK_SECONDS
    assert found.update_seconds == pytest.approx(moved + messages + updated)
    # The slow one has a quarter of the examples and a third of the speed: the fast one waits not.
    assert found.members[0].forward_seconds > found.members[1].forward_seconds
    told = TASK_SECONDS + FAR.latency + 4 / FAR.bandwidth
    assert found.forward_seconds == pytest.approx(found.members[0].forward_seconds + told)
    assert found.members[0].forward_seconds == pytest.approx(
        TASK_SECONDS + 0.75 * (alone[0].forward_seconds - TASK_SECONDS)
    )


def test_a_stage_is_as_full_as_its_fullest_member():
    small = replace(SLOW, name="small card", memory_bytes=10**8)
    cluster = replace(
        UNLIKE, subclusters=(UNLIKE.subclusters[0], replace(UNLIKE.subclusters[1], kind=small))
    )
    problem = problem_on(cluster)
    members = (member("fast", 0, 2), member("slow", 0, 2))
    stage = StagePlan(whole(problem), members, shares=Shares(batch=(12, 4)))
    (found,) = predicted(problem, stage).stages
    assert found.memory_limit_bytes == 10**8
    assert found.memory_bytes == found.members[1].memory_bytes
    assert found.memory_bytes < found.members[0].memory_bytes
    assert found.activation_bytes == found.members[1].activation_bytes
    plan = planner.predict(plan_of(problem, stage), problem)
    assert planner.live_limits(plan) == (2,)


def test_crossings_take_each_members_rows():
    problem = problem_on(UNLIKE)
    half = problem.num_layers // 2
    first = StagePlan(
        (0, half), (member("fast", 0, 1), member("slow", 0, 1)), shares=Shares(batch=(12, 4))
    )
    second = StagePlan.on((half, problem.num_layers), SubMesh("fast", 1, (1, 1)), (1, 1))
    found = predicted(problem, first, second).stages[0]
    size = 4 * WIDTH * EXAMPLES
    # The receiver takes three quarters over the near link, then a quarter over the far one.
    expected = FAR.latency + size * (0.75 / NEAR.bandwidth + 0.25 / FAR.bandwidth)
    assert found.communication_seconds == pytest.approx(expected)


@examples(usual=10)
@given(st.integers(0, EXAMPLES), st.booleans())
def test_a_share_is_computed_in_proportion(size: int, recompute: bool):
    problem = problem_on(UNLIKE)
    members = (member("fast", 0, 1), member("slow", 0, 1))
    shares = Shares(batch=(size, EXAMPLES - size))
    stage = StagePlan(whole(problem), members, shares=shares, recompute=recompute)
    (found,) = predicted(problem, stage).stages
    for place, each in enumerate(members):
        alone = StagePlan.on(whole(problem), each.submesh, (1, 1), recompute=recompute)
        (all_of_it,) = predicted(problem, alone).stages
        part = shares.batch[place] / EXAMPLES
        bytes_of_all = all_of_it.activation_bytes
        assert found.members[place].activation_bytes == pytest.approx(part * bytes_of_all, abs=1)
        computed = all_of_it.forward_seconds - TASK_SECONDS
        assert found.members[place].forward_seconds == pytest.approx(TASK_SECONDS + part * computed)


def test_a_prediction_of_members_is_read_as_it_was_written():
    problem = problem_on(UNLIKE)
    members = (member("fast", 0, 2), member("slow", 0, 2))
    stage = StagePlan(whole(problem), members, shares=Shares(batch=(12, 4)))
    plan = planner.predict(plan_of(problem, stage), problem)
    assert Plan.from_json_dict(plan.to_json_dict()) == plan
    assert plan.prediction is not None
    assert planner.simulate(plan).makespan == pytest.approx(plan.prediction.step_time)


def test_each_member_has_its_track_in_the_predicted_timeline():
    """The slow card has a third of the examples that it could compute as fast."""
    problem = problem_on(UNLIKE)
    members = (member("fast", 0, 2), member("slow", 0, 2))
    stage = StagePlan(whole(problem), members, shares=Shares(batch=(12, 4)))
    plan = planner.predict(plan_of(problem, stage), problem)
    assert plan.prediction is not None
    (found,) = plan.prediction.stages
    timeline = planner.simulate(plan)
    assert timeline.tracks == timeline.member_tracks(0) == ("stage 0", "stage 0, member 1")
    for track, each in zip(timeline.tracks, found.members, strict=True):
        tasks = {event.name: event.duration for event in timeline.on(track)}
        assert tasks["F0"] == pytest.approx(each.forward_seconds)
        assert tasks["B0"] == pytest.approx(each.backward_seconds)
        assert tasks["update"] == pytest.approx(found.update_seconds)
    starts = [[event.start for event in timeline.on(track)] for track in timeline.tracks]
    assert starts[0] == starts[1]
    (parts,) = planner.step_parts(plan)
    count = plan.pipeline.num_microbatches
    assert parts.computing == pytest.approx(count * found.compute_seconds)


def test_shares_of_more_than_examples_are_not_predicted():
    problem = problem_on(UNLIKE)
    members = (member("fast", 0, 1), member("slow", 0, 1))
    message = r"pipelines\[0\].stages\[0\] has 2 members, and its shares are not those of the batch"
    with pytest.raises(InputError, match=message):
        predicted(problem, StagePlan(whole(problem), members))


def test_statistics_of_batches_are_summed_along_a_data_axis_too():
    """Four times for each normalisation: a round trip of the ring, of so many channels."""
    model = model_of(recipe("resnet-quickstart"))
    problem = planner.make_problem(
        model.loss,
        model.parameter_shapes(),
        model.batch_shapes(32),
        cluster=ALIKE,
        optimizer=optax.sgd(0.1),
        num_microbatches=2,
    )
    works = problem.works
    count = sum(work.forward_moves.count for work in works)
    assert count == 30
    slower = replace(NEAR, latency=NEAR.latency + 1e-4)
    found = []
    for link in (NEAR, slower):
        cluster = Cluster("alike", (Subcluster("all", FAST, 1, 4, link, link),))
        on_cluster = replace(problem, cluster=cluster)
        stage = StagePlan.on(whole(problem), SubMesh("all", 0, (1, 2)), (2, 1))
        found.append(predicted(on_cluster, stage).stages[0])
    fast, slow = found
    assert slow.forward_seconds - fast.forward_seconds == pytest.approx(2 * count * 1e-4)
    assert slow.backward_seconds - fast.backward_seconds == pytest.approx(2 * count * 1e-4)
    halves = slow.input_gradient_seconds - fast.input_gradient_seconds
    assert halves == pytest.approx(2 * count * 1e-4)
