"""Stages that share the context are predicted as they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from context_jobs import JOB, LENGTH, SIZE, context_plan, problem_of, split_of

from hetjax.pipeline.program.traced_program import num_bytes
from hetjax.planner.costs.context_cost import ContextPrograms, amounts_alone, context_programs
from hetjax.planner.costs.union_cost import executions_of
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.prediction import StagePrediction
from hetjax.planner.predictions.predict import predict
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.context_items import ComputedRun, Item, Moved
from hetjax.planner.work.context_walk import Amounts
from hetjax.planner.work.profile import Composition, Profile, WayTimes
from hetjax.planner.work.stage_work import measure
from hetjax.runtime.instructions.divided_program import DividedProgram, MoveGroup
from hetjax.runtime.workers.job import Job, build
from hetjax.sharding.attention.work import attention_work
from hetjax.sharding.context import (
    ContextSplit,
    ContextTransfer,
    HeadBytes,
    heads_to_tokens,
    ring_gradient_step,
    ring_step,
    tokens_to_heads,
)
from hetjax.sharding.resolution.crossing import crossing
from hetjax.sharding.resolution.network import Network
from hetjax.sharding.resolution.senders import BestLink

UNEVEN = split_of(((7, (0, 4)), (5, (4, 6))), ((8, (0, 6)),))
RINGS = split_of(((9, (0, 6)),), ((4, (0, 6)),), ((7, (0, 6)),))
EXCHANGE = split_of(((17, (2, 6)), (3, (0, 2))))
BLOCKS, HEAD = 2, HeadBytes(4, 4)


def programs_of(plan: Plan) -> ContextPrograms:
    return context_programs(plan, plan.pipeline, 0, problem_of(plan), None)


def alone_of(problem: PlanningProblem) -> tuple[Amounts, Amounts]:
    return amounts_alone(problem, (0, problem.program.num_positions), 0, None)


def sent(items: tuple[Item, ...]) -> Counter[tuple[int, int]]:
    total: Counter[tuple[int, int]] = Counter()
    for item in items:
        if isinstance(item, Moved):
            total.update(item.messages)
    return total


def really_sent(program: DividedProgram) -> Counter[tuple[int, int]]:
    """What the runtime's moves carry from member to member; each is one device."""
    total: Counter[tuple[int, int]] = Counter()
    groups = (step for step in program.steps if isinstance(step, MoveGroup))
    for move in (move for group in groups for move in group.moves):
        shape = program.program.shapes[move.input]
        devices = {d: d for d in move.destination.devices}
        senders = BestLink(Network.alike())
        size = num_bytes(shape) / max(1, np.prod(shape.shape))
        assert move.source is not None
        found = crossing(move.source, move.destination, shape.shape or (1,), devices, senders)
        for part in found.parts:
            volume = np.prod([stop - start for start, stop in part.bounds])
            for pair in part.messages:
                total[pair] += int(size * volume)
    return +total


@pytest.mark.parametrize("split", [UNEVEN, RINGS, EXCHANGE], ids=["uneven", "rings", "exchange"])
@pytest.mark.parametrize(
    "again",
    [{}, {"recompute": True}, {"recompute_layers": ((0, 1),)}],
    ids=["kept", "recomputed", "layer by layer"],
)
def test_what_is_sent_is_what_the_runtime_sends(split: ContextSplit, again: dict[str, Any]):
    plan = context_plan(split, **again)
    found = programs_of(plan).tasks
    arguments = {name: each for name, each in JOB.items() if name != "source"}
    divided = build(Job(**arguments, plan=plan)).divided[0]
    names = {
        "F": "forward",
        "B": "backward",
        **({"R": "recompute"} if "recompute" in again else {}),
    }
    for task, name in names.items():
        assert sent(found[task].items) == really_sent(divided[name])


def test_layers_that_are_made_again_keep_little():
    kept, again = (
        programs_of(context_plan(UNEVEN, recompute_layers=runs)).programs.residual_bytes
        for runs in ((), ((0, 1),))
    )
    # Of all that blocks make nothing is kept, but for tables of angles and of tokens.
    assert again < kept / 4


def all_transfers(split: ContextSplit, *, is_backward: bool) -> Iterator[ContextTransfer]:
    yield from tokens_to_heads(split, HEAD, is_backward=is_backward)
    yield from heads_to_tokens(split, HEAD, is_backward=is_backward)
    for step in range(1, len(split.groups)):
        yield from ring_step(split, HEAD, step)
        if is_backward:
            yield from ring_gradient_step(split, HEAD, step)


@pytest.mark.parametrize("split", [UNEVEN, RINGS, EXCHANGE], ids=["uneven", "rings", "exchange"])
def test_attention_sends_what_the_formulas_say(split: ContextSplit):
    found = programs_of(context_plan(split))
    table = LENGTH * 24 * 4  # The gradient of the table of positions comes to all members.
    for task, is_backward in (("F", False), ("B", True)):
        expected: Counter[tuple[int, int]] = Counter()
        for each in all_transfers(split, is_backward=is_backward):
            expected[each.sender, each.receiver] += BLOCKS * SIZE * each.num_bytes
        others = sent(found.tasks[task].items)
        others.subtract(expected)
        share = {d: n / LENGTH for d, n in enumerate(split.tokens)}
        for (sender, _), size in others.items():
            assert size == (share[sender] * table if is_backward else 4)


def flops(found: ContextPrograms, name: str) -> Any:
    items = found.tasks[name].items
    return sum(item.amounts.flops for item in items if isinstance(item, ComputedRun))


def test_members_compute_all_products_between_them():
    plan = context_plan(UNEVEN)
    problem = problem_of(plan)
    found = context_programs(plan, plan.pipeline, 0, problem, None)
    plain = [step.equation for step in problem.program.steps if step.equation is not None]
    attention = sum(work.products for each in plain if (work := attention_work(each)))
    whole = sum(work.forward.matmul_flops for work in problem.works) - attention
    blocks = [
        step for step in found.programs.forward.steps if step.name.startswith("attention_block")
    ]
    attended = sum(found.trace.computed[step].flops.sum() for step in blocks)
    assert flops(found, "F").sum() - attended == pytest.approx(whole)
    # At most what is seen of it with tiles that are not divided.
    pairs = SIZE * 6 * LENGTH * LENGTH
    assert 2 * 2 * 4 * pairs / 2 * BLOCKS <= attended <= 2 * 2 * 4 * pairs * BLOCKS


@pytest.mark.parametrize("split", [UNEVEN, RINGS, EXCHANGE], ids=["uneven", "rings", "exchange"])
def test_members_are_slower_by_as_much_as_the_stage_on_one_device(split: ContextSplit):
    plan = context_plan(split)
    problem = problem_of(plan)
    alone, nothing = alone_of(problem), np.zeros(problem.num_layers)
    # Long, so that what starting programs takes does not count.
    rates = {name: 1e-6 for each in alone for name in each.classes}
    names = [part.name for part in problem.cluster.subclusters]
    known = replace(problem, profile=Profile(classes=dict.fromkeys(names, rates)))

    def predicted(problem: PlanningProblem) -> StagePrediction:
        return predict(replace(plan, prediction=None), problem).predicted.stages[0]

    forward, backward = (
        Composition(3.0 * sum(1e-6 * float(x) for x in each.classes.values()), nothing)
        for each in alone
    )
    times = WayTimes(forward, backward, Composition(0.0, nothing))
    (stage,) = plan.pipeline.stages
    ways = {execution.way: times for execution in executions_of(plan.cluster, stage)}
    measured = replace(known, profile=replace(known.profile, ways=ways))
    for before, after in zip(predicted(known).members, predicted(measured).members, strict=True):
        assert after.forward_seconds == pytest.approx(3 * before.forward_seconds, rel=1e-2)
        assert after.backward_seconds == pytest.approx(3 * before.backward_seconds, rel=1e-2)


def test_what_one_device_computes_is_what_its_layers_do():
    plan = context_plan(UNEVEN)
    problem = problem_of(plan)
    (work,) = measure(problem.program, (0, problem.program.num_positions))
    for alone, cost in zip(alone_of(problem), (work.forward, work.backward), strict=True):
        assert (alone.flops, alone.traffic) == (cost.matmul_flops, cost.bytes)
