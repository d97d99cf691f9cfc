"""HeteroAuto on traced programs: plans that are valid, fit, and are what its model says."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax.errors import DoesNotFitError, InputError
from hetjax.mesh import Cluster, Link, Subcluster, kind
from hetjax.planner import HeteroAuto, PlanningProblem, PlanOptions, make_problem
from hetjax.planner.h2.heteroauto_planner import modules_of_stages
from hetjax.planner.h2.layer_division import GroupShare, GroupWay
from hetjax.planner.h2.module_ways import Modules, ModuleWays
from hetjax.planner.h2.refine import refine

NEAR, FAR = Link(100e9, 1e-5), Link(12.5e9, 2e-5)
BLOCKS, WIDTH, VOCABULARY = 12, 1024, 4096


def loss(parameters, batch):
    x = parameters["embedding"][batch[:, :-1]]
    for up, down in parameters["blocks"]:
        x = x + jnp.tanh(x @ up) @ down
    logits = jax.nn.log_softmax(x @ parameters["head"])
    return -jnp.mean(jnp.take_along_axis(logits, batch[:, 1:, None], -1))


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


PARAMETERS = {
    "embedding": shape(VOCABULARY, WIDTH),
    "blocks": [(shape(WIDTH, 4 * WIDTH), shape(4 * WIDTH, WIDTH))] * BLOCKS,
    "head": shape(WIDTH, VOCABULARY),
}


def cluster(memory: float = 1.0, nodes: int = 1) -> Cluster:
    large, old = (
        replace(kind(name), memory_bytes=int(memory * kind(name).memory_bytes))
        for name in ("A100-40", "V100")
    )
    parts = (
        Subcluster("old", replace(old, name="old"), nodes, 4, NEAR, FAR),
        Subcluster("large", replace(large, name="large"), 1, 4, NEAR, FAR),
    )
    return Cluster("mixed", parts, (("old", "large", FAR),))


def problem_of(where: Cluster, count: int = 8, batch: int = 32, tokens: int = 512):
    return make_problem(
        loss,
        PARAMETERS,
        jax.ShapeDtypeStruct((batch, tokens + 1), np.dtype(np.int32)),
        cluster=where,
        optimizer=optax.adam(1e-3),
        num_microbatches=count,
    )


@pytest.fixture(scope="module")
def problem() -> PlanningProblem:
    return problem_of(cluster(nodes=2))


def test_all_devices_are_used_and_the_most_memory_comes_first(problem: PlanningProblem):
    plan = HeteroAuto().plan(problem)
    names = [stage.submesh.subcluster for stage in plan.stages]
    assert names == sorted(names)  # "large" before "old".
    assert sum(stage.num_devices for stage in plan.stages) == problem.cluster.num_devices
    widths = {stage.mesh_shape[0] for stage in plan.stages}
    assert len(widths) == 1


def test_the_timeline_is_near_what_its_model_says(problem: PlanningProblem):
    plan, strategy = HeteroAuto().find(problem)
    both = refine(plan, problem)
    assert both.found.prediction is not None
    assert both.refined.prediction is not None
    assert both.found.prediction.step_time == pytest.approx(strategy.step_time, rel=0.25)
    assert both.refined.prediction.step_time <= both.found.prediction.step_time
    assert [stage.layers for stage in both.refined.stages] == [s.layers for s in plan.stages]


def test_groups_of_nodes_are_never_worse(problem: PlanningProblem):
    alike, grouped = (
        HeteroAuto(is_grouped=each).find(problem)[1].step_time for each in (False, True)
    )
    assert grouped <= alike


def test_what_does_not_fit_is_made_again_or_refused():
    roomy, tight = (problem_of(cluster(memory), tokens=8192) for memory in (1.0, 0.1))
    assert not any(stage.recompute_layers for stage in HeteroAuto().plan(roomy).stages)
    plan = HeteroAuto().find(tight)[0]
    assert any(stage.recompute_layers for stage in plan.stages)
    with pytest.raises(DoesNotFitError, match="by HeteroAuto's plans, which use all devices"):
        HeteroAuto().plan(problem_of(cluster(0.01), tokens=8192))


def test_what_it_cannot_plan_is_said(problem: PlanningProblem):
    with pytest.raises(InputError, match="which uses all devices, and 1 are lost"):
        HeteroAuto().plan(replace(problem, lost=frozenset({3})))
    with pytest.raises(InputError, match="the program has none"):
        HeteroAuto().plan(replace(problem, sections=()))
    many = problem_of(cluster(nodes=60), count=32)
    with pytest.raises(
        InputError, match=r"are 61 stages or more .* of 1 has equal parts.* 12 modules"
    ):
        HeteroAuto().plan(many)


@pytest.mark.parametrize("per_node", [3, 5, 6])
def test_odd_numbers_of_devices_leave_none_over(per_node: int):
    parts = (Subcluster(name, kind("A100-40"), 1, per_node, NEAR, FAR) for name in ("a", "b"))
    # Two subclusters of one kind.
    odd = Cluster("odd", tuple(parts), (("a", "b", FAR),))
    plan = HeteroAuto().plan(problem_of(odd, count=4, batch=24))
    assert sum(stage.num_devices for stage in plan.stages) == 2 * per_node


def test_what_a_node_gets_from_both_neighbours_comes_over_one_card_or_two(
    problem: PlanningProblem,
):
    def paces(*cards: tuple[int, ...]) -> dict[tuple[int, int], float]:
        slow = Link(1e8, 1e-4)
        old, large = problem.cluster.subclusters
        old = replace(old, inter_node=slow, network_cards=cards)
        mine = replace(problem, cluster=replace(problem.cluster, subclusters=(old, large)))
        kinds = ModuleWays(mine, Modules.of(mine)).kinds()
        ways = {each.name: each.ways for each in kinds}["old"]
        return {
            (width, way.tensor): way.pace_seconds
            for width in (1, 2, 4)
            for way in ways(width, 8)
            if not way.repeats
        }

    one, two, crossed = paces(), paces((0, 1), (2, 3)), paces((0, 2), (1, 3))
    # Two stages a node: of their own cards, or both over both; then one stage over both cards.
    assert one[2, 1] == pytest.approx(2 * two[2, 1], rel=1e-2)
    assert crossed[2, 1] == pytest.approx(two[2, 1], rel=1e-2)
    assert one[4, 1] == pytest.approx(2 * two[4, 1], rel=1e-2)
    assert one[1, 1] == pytest.approx(one[2, 1])


@pytest.mark.parametrize(
    ("schedule", "allowed"), [("h_1f1b", {"h_1f1b", "1f1b"}), ("gpipe", {"gpipe"})]
)
def test_by_the_public_function(schedule: str, allowed: set[str]):
    made = hetjax.plan(
        loss,
        PARAMETERS,
        jax.ShapeDtypeStruct((32, 513), np.dtype(np.int32)),
        cluster=cluster(),
        optimizer=optax.adam(1e-3),
        num_microbatches=8,
        planner=HeteroAuto(),
        options=PlanOptions(schedule=schedule),
    )
    assert made.planner == "HeteroAuto"
    assert made.predicted.fits
    assert made.pipeline.schedule.name in allowed
    assert "refined, which is this plan" in made.notes[0]


def way(stages: int, last_layers: int = 0) -> GroupWay:
    return GroupWay(1, stages, False, False, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, last_layers=last_layers)


@pytest.mark.parametrize(
    ("shares", "num_modules", "expected"),
    [
        ([(2, 3, 0)], 6, [3, 3]),
        ([(2, 3, 0)], 5, [3, 2]),
        ([(2, 3, 0)], 4, [2, 2]),
        ([(2, 3, 1)], 5, [3, 2]),
        ([(1, 4, 0), (1, 2, 2)], 4, [4, 0]),
        ([(1, 4, 0), (3, 2, 0)], 8, [3, 2, 2, 1]),
    ],
)
def test_modules_that_are_too_many_are_taken_from_the_ends(
    shares: list[tuple[int, int, int]], num_modules: int, expected: list[int]
):
    given = [GroupShare(way(stages, fewer), layers) for stages, layers, fewer in shares]
    assert modules_of_stages(given, num_modules) == expected
