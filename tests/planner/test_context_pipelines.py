"""Pipelines whose stages share the context: faster where islands are far apart, or have sequences
of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from baselines import one_device_losses
from hypothesis import given
from hypothesis import strategies as st

import hetjax
from hetjax.mesh import Cluster, Link, Subcluster, SubMesh, kind
from hetjax.mesh.kinds import DeviceKind
from hetjax.models import GPTConfig, LanguageModel, language_model
from hetjax.planner import (
    HexiSeqPlanner,
    Plan,
    PlanningProblem,
    PlanOptions,
    make_problem,
    predict,
    simulate,
)
from hetjax.planner.hexiseq import stage_splits
from hetjax.planner.hexiseq.context_choice import (
    ContextChoice,
    context_models,
    context_pipeline,
    context_plan,
)
from hetjax.planner.hexiseq.context_devices import ContextDevices
from hetjax.planner.hexiseq.context_layouts import layouts
from hetjax.planner.hexiseq.context_model import ContextModel
from hetjax.planner.hexiseq.context_pipelines import ContextPipelines, context_pipelines
from hetjax.planner.hexiseq.context_work import transformer_work
from hetjax.planner.hexiseq.group_layout import GroupLayout
from hetjax.planner.hexiseq.planned_pipelines import planned
from hetjax.planner.hexiseq.predicted_choice import PREDICTED
from hetjax.planner.hexiseq.program_work import attending_layers
from hetjax.planner.hexiseq.scheduler import ContextSchedule
from hetjax.planner.hexiseq.single_members import SingleMembers
from hetjax.planner.hexiseq.stage_splits import StageSplits
from hetjax.planner.plan.plan import validate, validate_for
from hetjax.planner.plan.stage_plan import Member, Shares, StagePlan
from hetjax.planner.predictions.complete import annotated_context
from hetjax.planner.predictions.context_moves import context_moves
from hetjax.sharding.context.context_split import ContextGroup, ContextSplit

BLOCKS, LENGTH, EXAMPLES = 6, 128, 8
MODEL = language_model(GPTConfig(64, BLOCKS, 64, 4, LENGTH))
SMALL = language_model(GPTConfig(64, 2, 32, 4, LENGTH))
BATCH = {"tokens": np.random.default_rng(0).integers(0, 64, (EXAMPLES, LENGTH + 1), np.int32)}
HALF = language_model(GPTConfig(64, 2, 32, 4, LENGTH, compute_dtype="bfloat16"))
SHORT, SHORT_BATCH = 32, {"tokens": BATCH["tokens"][:, :33]}
NARROW = language_model(GPTConfig(64, 2, 32, 4, SHORT))
WIDE = language_model(GPTConfig(64, 2, 128, 4, SHORT))
"""Of which parameters are the most that a device holds."""
OPTIMIZER = optax.adam(1e-3)


def islands(bandwidth: float, memory: int = 10**9, host_memory: int | None = None) -> Cluster:
    """Two islands of two devices, one twice as fast as the other, with a link of some bytes/s.

    The slower one has as much memory as is said.
    """
    near, far = Link(1e10, 1e-6), Link(bandwidth, 1e-5)
    parts = tuple(
        Subcluster(
            f"speed-{speed}",
            DeviceKind(f"speed-{speed}", {"float32": speed * 1e9}, size, speed * 1e9, "made up"),
            1,
            2,
            near,
            near,
            host_memory_bytes=host_memory,
        )
        for speed, size in ((2, 10**9), (1, memory))
    )
    return Cluster("two islands", parts, ((parts[0].name, parts[1].name, far),))


@functools.cache
def traced(model: LanguageModel, microbatches: int, length: int) -> PlanningProblem:
    return make_problem(
        model.loss,
        lambda: model.init(jax.random.key(0)),
        SHORT_BATCH if length == SHORT else BATCH,
        cluster=islands(2e6),
        optimizer=OPTIMIZER,
        num_microbatches=microbatches,
        divides_sequences=True,
    )


def problem_on(
    cluster: Cluster,
    microbatches: int = EXAMPLES,
    model: LanguageModel = MODEL,
    most_pipelines: int = 4,
    length: int = LENGTH,
) -> PlanningProblem:
    options = PlanOptions(max_pipelines=most_pipelines)
    problem = traced(model, microbatches, length)
    return dataclasses.replace(problem, cluster=cluster, options=options)


def best_pipelines(problem: PlanningProblem) -> tuple[ContextPipelines, Plan]:
    found = context_pipelines(problem, 4, PREDICTED)
    plans = [(each, planned(problem, each)) for each in found]
    fitting = [pair for pair in plans if pair[1].predicted.fits]
    return min(fitting, key=lambda pair: pair[1].predicted.step_time)


@pytest.mark.parametrize(("bandwidth", "wins"), [(2e6, True), (1e10, False)])
def test_a_pipeline_of_islands_wins_where_they_are_far_apart(bandwidth: float, wins: bool):
    problem = problem_on(islands(bandwidth), most_pipelines=1)
    pipelines, plan = best_pipelines(problem)
    validate(plan)
    validate_for(plan, problem.program)
    assert [len(stage.members) for stage in plan.stages] == [2, 2]
    (pipeline,) = pipelines.pipelines
    assert pipeline.layers[0] == 0
    assert pipeline.layers[-1] == problem.num_layers
    one = predict(HexiSeqPlanner().plan(problem), problem)
    assert (plan.predicted.step_time < one.predicted.step_time) == wins


def test_the_faster_island_has_more_blocks():
    problem = problem_on(islands(2e6))
    (first, *_) = context_pipelines(problem, 4)
    (pipeline,) = first.pipelines
    stages = first.plan(problem).stages
    counts = dict(zip((each.subclusters_text for each in stages), pipeline.choices, strict=True))
    assert {name: each.blocks for name, each in counts.items()} == {"speed-2": 4, "speed-1": 2}


def test_islands_with_sequences_of_their_own_win_where_gradients_are_few():
    """The faster one has more of them; a pipeline would hand on every token, twice."""
    problem = problem_on(islands(2e7), model=SMALL)
    pipelines, plan = best_pipelines(problem)
    validate(plan)
    validate_for(plan, problem.program)
    assert [len(pipeline.stages) for pipeline in plan.pipelines] == [1, 1]
    assert [pipeline.num_microbatches for pipeline in plan.pipelines] == [5, 3]
    one = predict(HexiSeqPlanner().plan(problem), problem)
    assert plan.predicted.step_time < one.predicted.step_time
    assert sorted(context_moves(plan, problem)) == [0, 1]
    # What was estimated is near what is predicted, though that walks over the program.
    assert pipelines.seconds == pytest.approx(plan.predicted.step_time, rel=0.1)


def test_islands_that_are_much_slower_have_a_block_of_those_that_have_most():
    near, far = Link(1e10, 1e-6), Link(1e9, 1e-5)
    parts = tuple(
        Subcluster(
            f"part-{place}",
            DeviceKind(f"speed-{speed}", {"float32": speed * 1e9}, 10**9, speed * 1e9, "made up"),
            *(1, 1, near, near),
        )
        for place, speed in enumerate((20, 20, 1, 1))
    )
    links = tuple((a.name, b.name, far) for a, b in itertools.combinations(parts, 2))
    model = language_model(GPTConfig(64, 4, 64, 4, LENGTH))
    problem = problem_on(Cluster("four", parts, links), model=model, most_pipelines=1)
    found = context_pipelines(problem, 4)
    blocks = {tuple(choice.blocks for choice in each.pipelines[0].choices) for each in found}
    assert (1, 1, 1, 1) in blocks
    assert all(sum(each) == 4 for each in blocks)


def test_layouts_on_devices_that_are_alike_are_told_once():
    near = Link(1e10, 1e-6)
    kind = DeviceKind("one", {"float32": 1e9}, 10**9, 1e9, "made up")
    cluster = Cluster("alike", (Subcluster("nodes", kind, 3, 1, near, near),))
    model = language_model(GPTConfig(64, 3, 64, 4, LENGTH))
    problem = problem_on(cluster, model=model, most_pipelines=1)
    # Stages of one node and of two, in both orders, and three of one.
    counts = [len(each.pipelines[0].choices) for each in context_pipelines(problem, 4)]
    assert counts.count(2) <= 2
    assert counts.count(3) == 1


def test_stages_that_hold_more_microbatches_make_layers_again():
    """Where the activations of one fit and not those of several."""
    problem = problem_on(islands(2e6), most_pipelines=1)
    splits = StageSplits(context_models(problem))
    part = (0, 1)
    kept, again = (splits.best(part, 3, live, is_last=False) for live in (1, 10**4))
    assert kept is not None
    assert again is not None
    assert not kept.model.work.is_recomputed
    assert again.model.work.is_recomputed


def test_there_are_no_more_stages_or_pipelines_than_there_may_be():
    one_each = problem_on(islands(2e6), most_pipelines=1)
    assert not context_pipelines(one_each, 1)
    assert not context_pipelines(problem_on(islands(2e6), microbatches=1), 4)
    for stages, pipelines in itertools.product((1, 2), (1, 2)):
        problem = problem_on(islands(2e6), most_pipelines=pipelines)
        for found in context_pipelines(problem, stages):
            assert len(found.pipelines) <= pipelines
            assert all(len(each.choices) <= stages for each in found.pipelines)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    stages=st.integers(1, 4),
    pipelines=st.integers(1, 6),
)
def test_every_layout_has_every_device_once(sizes: list[int], stages: int, pipelines: int):
    edges = [0, *itertools.accumulate(sizes)]
    found = list(layouts([tuple(range(*e)) for e in itertools.pairwise(edges)], stages, pipelines))
    assert len({frozenset(each) for each in found}) == len(found)
    for layout in found:
        devices = [device for parts in layout for part in parts for device in part]
        assert sorted(devices) == list(range(sum(sizes)))
        assert len(layout) <= pipelines
        assert all(len(parts) <= stages for parts in layout)
        assert layout != ((tuple(range(sum(sizes))),),)


def of_slow(plan: Plan) -> StagePlan:
    """The stage on the slower island."""
    return next(stage for stage in plan.stages if stage.subclusters_text == "speed-1")


def test_a_stage_without_memory_for_whole_parameters_is_one_member():
    """Nothing of members that share the context fits, by prediction."""
    problem = problem_on(islands(2e6, memory=600_000), model=HALF, most_pipelines=1)
    shared = [predict(each.plan(problem), problem) for each in context_pipelines(problem, 4)]
    assert not any(plan.predicted.fits for plan in shared)
    _, plan = best_pipelines(problem)
    validate(plan)
    validate_for(plan, problem.program)
    assert plan.predicted.fits
    (member,) = of_slow(plan).members
    assert member.mesh_shape == (1, 2)
    assert of_slow(plan).parameters
    assert sorted(len(stage.members) for stage in plan.stages) == [1, 2]


def test_it_leaves_state_with_its_hosts_where_that_is_not_enough():
    def fitting(host_memory: int | None) -> list[Plan]:
        cluster = islands(2e6, memory=2_400_000, host_memory=host_memory)
        problem = problem_on(cluster, model=WIDE, most_pipelines=1, length=SHORT)
        plans = [planned(problem, each) for each in context_pipelines(problem, 4)]
        return [plan for plan in plans if plan.predicted.fits]

    assert not fitting(None)
    with_hosts = fitting(10**9)
    assert with_hosts
    assert all(of_slow(plan).offload == ("optimizer_state",) for plan in with_hosts)


def test_only_a_slice_of_one_subcluster_is_one_member():
    near = Link(1e10, 1e-6)
    kind = DeviceKind("one", {"float32": 1e9}, 10**9, 1e9, "made up")
    parts = tuple(Subcluster(name, kind, 2, 4, near, near) for name in ("a", "b"))
    problem = problem_on(Cluster("two", parts, (("a", "b", near),)), model=SMALL)
    members = SingleMembers(problem, context_models(problem)[0])

    def submesh(*devices: int) -> str | None:
        found = members.best(devices, (0, problem.num_layers), 2, 1)
        return found and str(found.submesh)

    assert submesh(1) == "a[1:2] 1x1"
    assert submesh(2, 3) == "a[2:4] 1x2"
    assert submesh(*range(8, 16)) == "b[0:8] 2x4"
    # With a gap, over a node's border, of a node and a half, of two subclusters.
    for devices in ((0, 2), (3, 4), tuple(range(6)), tuple(range(4, 12))):
        assert submesh(*devices) is None


TRAINED = {
    "one pipeline": (SMALL, islands(2e6), EXAMPLES),
    "several": (SMALL, islands(2e7), EXAMPLES),
    "beside a tensor axis": (WIDE, islands(2e6, memory=2_700_000), EXAMPLES),
    "beside offloaded state": (
        WIDE,
        islands(2e6, memory=2_400_000, host_memory=10**9),
        EXAMPLES,
    ),
    "beside a data axis and offloaded state": (
        NARROW,
        islands(2e6, memory=320_000, host_memory=10**9),
        EXAMPLES // 2,
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_they_train_as_one_device_does(name: str):
    count, (model, cluster, microbatches) = 4 if name == "several" else 1, TRAINED[name]
    length, batch = (LENGTH, BATCH) if model is SMALL else (SHORT, SHORT_BATCH)
    _, plan = best_pipelines(problem_on(cluster, microbatches, model, count, length))
    assert len(plan.pipelines) == min(count, 2)
    if name.startswith("beside"):
        wanted = (2, 1) if "data" in name else (1, 2)
        assert of_slow(plan).members[0].mesh_shape == wanted
        assert len(of_slow(plan).offload) == ("offloaded" in name)
    parameters = model.init(jax.random.key(0))

    def loss(parameters: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        total, count, *_ = model.loss(parameters, batch)
        return total, jnp.float32(count)

    with jax.numpy_dtype_promotion("standard"):
        expected = one_device_losses(loss, OPTIMIZER, parameters, [batch] * 2, EXAMPLES)
    runtime = hetjax.LocalOptions(jax.devices("cpu")[:4])
    with hetjax.Trainer(plan, model.loss, parameters, OPTIMIZER, batch, runtime=runtime) as trainer:
        found = [trainer.train_step(batch).loss for _ in range(2)]
    np.testing.assert_allclose(found, expected, rtol=2e-5)


def island_chain(memory: int, host_bandwidth: float = 1e12) -> Cluster:
    """Four islands of two devices each, with links between them that are slow."""
    near, far, host = Link(1e10, 1e-6), Link(2e6, 1e-5), Link(host_bandwidth, 1e-6)
    own = DeviceKind("card", {"float32": 1e9}, memory, 1e9, "made up")
    parts = [
        Subcluster(f"island-{n}", own, 1, 2, near, near, host_memory_bytes=10**9, host_link=host)
        for n in range(4)
    ]
    pairs = itertools.combinations(parts, 2)
    return Cluster("four islands", tuple(parts), tuple((a.name, b.name, far) for a, b in pairs))


def test_a_stage_that_makes_layers_again_offloads_activations_where_that_is_faster():
    """The first of four stages holds four microbatches, of which it has room for two."""

    def problem_with(host_bandwidth: float) -> PlanningProblem:
        problem = problem_on(island_chain(3_100_000, host_bandwidth), most_pipelines=1)
        return dataclasses.replace(problem, optimizer_bytes=0)

    problem = problem_with(1e12)
    runs = attending_layers(problem)
    edges = (0, runs[2][0], runs[3][0], runs[4][0], problem.num_layers)
    group = ContextGroup((0, 1), (LENGTH // 2,) * 2, ((0, 2), (2, 4)))
    shares = Shares(context=ContextSplit(LENGTH, 4, 4, (group,)))
    stages = tuple(
        StagePlan(
            layers,
            tuple(Member(SubMesh(f"island-{n}", place, (1, 1)), (1, 1)) for place in range(2)),
            shares=shares,
            recompute_layers=runs[:2] if n == 0 else (),
        )
        for n, layers in enumerate(itertools.pairwise(edges))
    )
    made = context_plan(problem, context_pipeline(problem, stages, EXAMPLES))
    again = predict(made, problem)
    plan = annotated_context(made, problem)
    validate(plan)
    assert [stage.repeats for stage in plan.stages] == 4 * ["nothing"]
    assert [stage.offload for stage in plan.stages] == [("activations",), (), (), ()]
    assert plan.predicted.fits
    assert plan.predicted.step_time < 0.95 * again.predicted.step_time

    # Where the way to the host takes longer than layers do, they are made again: those for which
    # there is no room.
    slow = problem_with(1e6)
    kept = annotated_context(dataclasses.replace(made, cluster=slow.cluster), slow)
    assert [stage.offload for stage in kept.stages] == 4 * [()]
    assert [len(stage.recompute_layers) for stage in kept.stages] == [1, 0, 0, 0]
    assert kept.predicted.fits
    assert kept.predicted.step_time < again.predicted.step_time
    # What is predicted of a step has the copies that its timeline shows.
    sent = predict(dataclasses.replace(plan, cluster=slow.cluster), slow)
    assert sent.predicted.step_time > kept.predicted.step_time
    assert simulate(sent).makespan == sent.predicted.step_time


def test_stages_that_fit_after_all_only_with_layers_made_again_make_them():
    """The scheduler says that all can be kept, and the prediction that it cannot."""
    near = Link(1e10, 1e-6)
    own = DeviceKind("card", {"float32": 1e9}, 3_150_000, 1e9, "made up")
    parts = tuple(
        Subcluster(f"island-{n}", own, 1, 2, near, near, max_tensor_parallelism=1) for n in (0, 1)
    )
    cluster = Cluster("two islands", parts, ((parts[0].name, parts[1].name, Link(2e6, 1e-5)),))
    problem = problem_on(cluster, most_pipelines=1)
    (found, *_) = context_pipelines(problem, 4, PREDICTED)
    kept = [isinstance(each, ContextChoice) for each in found.pipelines[0].choices]
    assert kept == [True, True]
    assert not predict(found.plan(problem), problem).predicted.fits
    plan = planned(problem, found)
    assert plan.predicted.fits
    assert any(stage.recompute_layers for stage in plan.stages)
    assert [len(stage.members) for stage in plan.stages] == [2, 2]


def test_devices_of_unlike_subclusters_are_not_taken_for_alike():
    """Two of one subcluster and one of another are joined otherwise than one and two."""
    near, far, slow = Link(300e9, 5e-6), Link(50e9, 1e-5), Link(1e9, 1e-4)
    parts = tuple(Subcluster(name, kind("A100-80"), 2, 1, near, far) for name in "abcd")
    pairs = itertools.combinations("abcd", 2)
    cluster = Cluster("four", parts, tuple((*pair, slow) for pair in pairs))
    work = transformer_work(
        2**15, width=2048, layers=8, query_heads=16, sequences=4, divides_state=False
    )
    model = ContextModel(ContextDevices(cluster, lost=frozenset({3, 5})), work)
    splits = StageSplits([model])
    splits.best((0, 1, 2), 8, is_last=True)
    found = splits.best((4, 6, 7), 8, is_last=True)
    alone = StageSplits([model]).best((4, 6, 7), 8, is_last=True)
    assert found is not None
    assert alone is not None
    assert found.schedule == alone.schedule


def test_subclusters_that_are_alike_but_for_their_names_are_asked_once(monkeypatch: Any):
    problem = problem_on(island_chain(10**9))
    splits, asked = StageSplits(context_models(problem)[:1]), []
    schedule = stage_splits.schedule_context

    def counted(model: ContextModel) -> ContextSchedule:
        asked.append(model)
        return schedule(model)

    monkeypatch.setattr(stage_splits, "schedule_context", counted)
    found = [splits.best(part, 2, is_last=False) for part in ((0, 1), (2, 3), (6, 7))]
    assert len(asked) == 1
    assert [each and each.schedule.split.devices for each in found] == [(0, 1), (2, 3), (6, 7)]


def test_memory_of_hosts_that_is_too_small_loses_no_plan():
    """Layers that are made again fit, state that would be offloaded does not."""

    def best(host_memory: int | None) -> Plan:
        cluster = islands(2e6, memory=3_000_000, host_memory=host_memory)
        return best_pipelines(problem_on(cluster, most_pipelines=1))[1]

    assert best(1000).predicted.step_time == best(None).predicted.step_time


def test_links_that_join_no_members_cost_nothing():
    near, far = Link(1e8, 0.0), Link(25e9, 0.0)
    work = transformer_work(2**12, width=512, layers=2, query_heads=8, divides_state=False)
    parts = tuple(Subcluster(name, kind("A100-80"), 1, 2, near, near) for name in "ab")
    cluster = Cluster("two nodes", parts, (("a", "b", far),))

    def once(*devices: int) -> float:
        model = ContextModel(ContextDevices(cluster), work)
        return model.once_seconds(GroupLayout(model.devices, [devices]))

    assert once(0, 1) == pytest.approx(once(0, 2) * 25e9 / 1e8)
    assert once(0, 1, 2) > once(0, 1)


def test_each_device_of_a_member_sends_its_own_state_to_its_host():
    near = Link(25e9, 0.0)
    part = Subcluster("cards", kind("A100-80"), 1, 8, near, near, host_memory_bytes=10**12)
    work = transformer_work(2**12, width=512, layers=2, query_heads=8, divides_state=False)
    work = dataclasses.replace(work, offloaded_bytes=12.0)

    def copied(size: int) -> float:
        devices = ContextDevices(Cluster("one node", (part,)), tensor={"cards": size})
        layout = GroupLayout(devices, [tuple(range(devices.num_devices))])
        kept = dataclasses.replace(work, offloaded_bytes=0.0)
        offloading, keeping = (ContextModel(devices, each) for each in (work, kept))
        return offloading.once_seconds(layout) - keeping.once_seconds(layout)

    assert copied(8) == pytest.approx(copied(1))


@pytest.mark.parametrize("trained", ["blocks", "last block"])
def test_attention_before_which_nothing_is_trained_is_planned(trained: str):
    """It is not differentiated, and its moves are inside of it."""

    def label(path: Any, _: Any) -> str:
        name = jax.tree_util.keystr(path)
        is_early = "embedding" in name or (trained == "last block" and "['0" in name)
        return "frozen" if is_early else "trained"

    def labels(parameters: Any) -> Any:
        return jax.tree_util.tree_map_with_path(label, parameters)

    problem = make_problem(
        SMALL.loss,
        lambda: SMALL.init(jax.random.key(0)),
        BATCH,
        cluster=islands(1e10),
        optimizer=optax.multi_transform(
            {"trained": OPTIMIZER, "frozen": optax.set_to_zero()}, labels
        ),
        num_microbatches=EXAMPLES,
        divides_sequences=True,
    )
    plan = HexiSeqPlanner().plan(problem)
    assert plan.predicted.fits
    assert plan.stages[0].members_share_context


def test_a_lost_device_takes_no_more_than_its_member_from_a_stage():
    near = Link(25e9, 1e-6)
    cluster = Cluster("one node", (Subcluster("cards", kind("A100-80"), 1, 8, near, near),))
    lost, part = frozenset({7}), tuple(range(7))
    work = transformer_work(2**12, width=512, layers=2, query_heads=8, divides_state=False)
    pairs = ContextDevices(cluster, lost=lost, tensor={"cards": 2})
    without_room = ContextDevices(cluster, lost=lost, usable_memory=1e-6)
    splits = StageSplits([ContextModel(devices, work) for devices in (without_room, pairs)])
    found = splits.best(part, 2, is_last=True)
    assert found is not None
    assert set(found.schedule.split.devices) <= {0, 1, 2}
    # What cuts a member is refused all the same.
    assert pairs.of(part) == (0, 1, 2)
    assert pairs.of((0, 1, 2)) is None
