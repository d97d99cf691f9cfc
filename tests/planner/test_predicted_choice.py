"""Context splits that fit by prediction, where the scheduler counts less than devices hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

from hetjax.errors import DoesNotFitError
from hetjax.mesh import Cluster, Link, Subcluster
from hetjax.mesh.kinds import DeviceKind
from hetjax.models import GPTConfig, language_model
from hetjax.planner import HexiSeqPlanner, Plan, PlanningProblem, make_problem, predict
from hetjax.planner.hexiseq.context_choice import ContextChoice, context_models
from hetjax.planner.hexiseq.predicted_choice import one_stage_plan
from hetjax.planner.hexiseq.scheduler import schedule_groups

LENGTH = 4096
MODEL = language_model(GPTConfig(64, 2, 32, 4, LENGTH))
PART = 0.9
"""Of what the first host takes for all tokens, and of what the second one takes for half."""


def hosts(memory: Sequence[int]) -> Cluster:
    near = Link(1e9, 1e-5)
    parts = tuple(
        Subcluster(name, DeviceKind(name, {"float32": 1e9}, size, 1e9, "made up"), 1, 1, near, near)
        for name, size in zip("ab", memory, strict=True)
    )
    return Cluster("two hosts", parts, (("a", "b", near),))


def problem_on(cluster: Cluster, length: int = LENGTH) -> PlanningProblem:
    return make_problem(
        MODEL.loss,
        lambda: MODEL.init(jax.random.key(0)),
        {"tokens": np.zeros((1, length + 1), np.int32)},
        cluster=cluster,
        optimizer=optax.adam(1e-3),
        num_microbatches=1,
        divides_sequences=True,
    )


def held(plan: Plan) -> list[int]:
    (stage,) = plan.predicted.stages
    return [each.memory_bytes for each in stage.members or (stage,)]


@pytest.fixture(scope="module")
def short() -> PlanningProblem:
    """Hosts on which neither even halves fit nor all on the first, also if layers are made again.

    What they hold is predicted of hosts that have much more.
    """
    problem = problem_on(hosts([10**9, 10**9]))
    again = context_models(problem)[1]

    def told(*groups: Sequence[int]) -> list[int]:
        choice = ContextChoice(schedule_groups(again, groups), again)
        return held(predict(one_stage_plan(problem, choice), problem))

    even = HexiSeqPlanner("ulysses").choices(problem)[1]
    halves = held(predict(one_stage_plan(problem, even), problem))
    limits = [int(PART * each) for each in (told([0])[0], halves[1])]
    return replace(problem, cluster=hosts(limits))


def test_a_split_is_found_that_the_scheduler_did_not_see_the_need_of(short: PlanningProblem):
    choice = HexiSeqPlanner().choose(short)
    assert not predict(one_stage_plan(short, choice), short).predicted.fits
    plan = HexiSeqPlanner().plan(short)
    assert plan.predicted.fits
    split = plan.stages[0].shares.context
    assert split is not None
    assert split.tokens[0] > split.tokens[1] > 0


@pytest.mark.parametrize("system", ["ring", "ulysses"])
def test_even_splits_stay_even_and_do_not_fit(short: PlanningProblem, system: str):
    with pytest.raises(DoesNotFitError):
        HexiSeqPlanner(system).plan(short)


@pytest.mark.parametrize(("nodes", "per_node"), [(7, 1), (1, 6)])
def test_devices_that_messages_make_useless_are_left_out(nodes: int, per_node: int):
    """Of a model that is so small, whatever is sent takes longer than to compute everything."""
    link = Link(1e9, 1e-4)
    fast = DeviceKind("fast", {"float32": 1e12}, 10**10, 1e11, "made up")

    def seconds(nodes: int, per_node: int) -> float:
        part = Subcluster("a", fast, nodes, per_node, link, link)
        problem = problem_on(Cluster("alike", (part,)), length=256)
        return HexiSeqPlanner().plan(problem).predicted.step_time

    assert seconds(nodes, per_node) == seconds(1, 1)


def test_a_fast_device_is_not_left_out_for_slow_ones():
    """Messages make all but one device useless, of whatever kind the scheduler has chosen."""
    near, far = Link(25e9, 1e-6), Link(1e9, 1e-5)
    slow, fast = (
        Subcluster(
            name, DeviceKind(name, {"float32": flops}, 10**10, 3e11, "made up"), 1, n, near, far
        )
        for name, flops, n in (("slow", 8e12, 2), ("fast", 15e12, 1))
    )
    joined = Cluster("cards", (slow, fast), (("slow", "fast", far),))
    both, alone = (
        HexiSeqPlanner().plan(problem_on(cluster, length=512)).predicted.step_time
        for cluster in (joined, Cluster("card", (fast,)))
    )
    assert both <= alone
