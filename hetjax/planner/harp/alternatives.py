"""The next best plans: what else could be done, in words, and what it would cost."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from hetjax.planner.harp.dynamic_program import Alternative, DynamicProgram, Found
from hetjax.planner.harp.restriction import (
    other_numbers_of_stages,
    with_nodes,
    without_recomputation,
)
from hetjax.planner.harp.simulated_search import CLOSED_FORM_EXCESS
from hetjax.planner.harp.stage_table import StageTable
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan
from hetjax.planner.problem.problem import PlanningProblem

Restriction = Callable[[StageTable], StageTable]

_ORDERS_UP_TO = 3
"""Up to this many subclusters other orders of them are tried."""


def next_best(
    problem: PlanningProblem,
    found: Found,
    planner: DynamicProgram,
    others: Sequence[Alternative] = (),
    most: int = 5,
) -> tuple[Alternative, ...]:
    """The plans that would be chosen if one could not have the chosen one.

    They are those that the search met on the way, and the best with fewer or more stages (where
    there are few), without recomputation, with a node less of each subcluster, and with the
    subclusters in another order. Plans that differ in the same words count as one.

    Args:
        problem: what was planned.
        found: its plan.
        planner: what found it.
        others: plans that were found besides, such as for other numbers of microbatches.
        most: how many there are at most.

    Returns:
        The best by the objective first.
    """
    restrictions = _restrictions(problem, found.plan) if len(found.plan.pipelines) == 1 else []
    known = _unlike(found.plan, [*found.runners_up, *others])
    # What is behind those that are shown would not be among them.
    last = known[most - 1].score if len(known) >= most else float("inf")
    restricted = planner.find_within(problem, restrictions, last * (1 + CLOSED_FORM_EXCESS))
    return tuple(_unlike(found.plan, [*known, *filter(None, restricted)])[:most])


def _unlike(chosen: Plan, others: Sequence[Alternative]) -> list[Alternative]:
    """The best of each that differ in the same words from the one that was chosen, by score."""
    by_words: dict[str, Alternative] = {}
    for each in sorted(others, key=lambda each: each.score):
        if words := differences(chosen, each.plan):
            by_words.setdefault(words, each)
    return list(by_words.values())


def differences(chosen: Plan, other: Plan) -> str:
    """What another plan does differently, in words.

    Args:
        chosen: the plan to compare with.
        other: a plan for the same model and cluster.

    Returns:
        The few things that say most, such as ``"7 stages instead of 8; rtx4090 first"``; nothing
        where the stages are the same, but for which ones of alike devices they are on.
    """
    said = [
        *_union_differences(chosen, other),
        *_batch_differences(chosen, other),
        *_device_differences(chosen, other),
        *_order_differences(chosen, other),
    ]
    if len(chosen.stages) != len(other.stages):
        said.append(f"{_count(len(other.stages), 'stage')} instead of {len(chosen.stages)}")
    else:
        said += _stage_differences(chosen, other)
    if not said and [each.layers for each in chosen.stages] != [e.layers for e in other.stages]:
        said.append("layers cut elsewhere")
    return "; ".join(said)


def _restrictions(problem: PlanningProblem, plan: Plan) -> list[Restriction]:
    stages, cluster = plan.stages, problem.cluster
    found: list[Restriction] = []
    for least, most in other_numbers_of_stages(problem, len(stages)):
        found.append(partial(replace, min_stages=least, max_stages=most))
    if any(map(_again, stages)):
        found.append(without_recomputation)
    nodes = [subcluster.nodes for subcluster in cluster.subclusters]
    used = _passed(plan.pipelines[0])
    for place, subcluster in enumerate(cluster.subclusters):
        if subcluster.name in used and sum(nodes) > 1:
            fewer = [*nodes[:place], nodes[place] - 1, *nodes[place + 1 :]]
            found.append(partial(with_nodes, nodes=fewer))
    names = [subcluster.name for subcluster in cluster.subclusters]
    if len(names) <= _ORDERS_UP_TO and len(used) > 1:
        for order in itertools.permutations(range(len(names))):
            if [names[place] for place in order if names[place] in used] != used:
                found.append(partial(replace, order=order))
    return found


def _batch_differences(chosen: Plan, other: Plan) -> Iterator[str]:
    ours, theirs = len(chosen.pipelines), len(other.pipelines)
    if ours != theirs:
        yield f"{_count(theirs, 'pipeline')} instead of {ours}"
    elif (mine := _batches(chosen)) != (its := _batches(other)):
        yield f"{its} instead of {mine}"


def _batches(plan: Plan) -> str:
    return " and ".join(
        f"{_count(each.num_microbatches, 'microbatch')} of {each.microbatch_size}"
        for each in plan.pipelines
    )


def _device_differences(chosen: Plan, other: Plan) -> Iterator[str]:
    ours, theirs = _devices(chosen), _devices(other)
    for subcluster in chosen.cluster.subclusters:
        name = subcluster.name
        more = theirs[name] - ours[name]
        if theirs[name] == 0 < ours[name]:
            yield f"without {name}"
        elif more:
            yield f"{_count(abs(more), 'device')} {'more' if more > 0 else 'fewer'} of {name}"


def _union_differences(chosen: Plan, other: Plan) -> Iterator[str]:
    """Which unlike devices share a stage in one plan and not in the other."""
    ours, theirs = _unions(chosen), _unions(other)
    if theirs and theirs != ours:
        yield f"one stage shared by {' and by '.join(theirs)}"
    elif ours and not theirs:
        yield "no stage shared by unlike devices"


def _unions(plan: Plan) -> list[str]:
    shared = (stage for stage in plan.stages if len(stage.members) > 1)
    return list(dict.fromkeys(_joined(_subclusters(stage)) for stage in shared))


def _joined(names: Sequence[str]) -> str:
    *first, last = dict.fromkeys(names)
    return f"{', '.join(first)} and {last}" if first else last


def _devices(plan: Plan) -> Counter[str]:
    counts: Counter[str] = Counter()
    for stage in plan.stages:
        for submesh in stage.submeshes:
            counts[submesh.subcluster] += submesh.num_devices
    return counts


def _order_differences(chosen: Plan, other: Plan) -> Iterator[str]:
    if len(chosen.pipelines) == len(other.pipelines):
        for ours, theirs in zip(chosen.pipelines, other.pipelines, strict=True):
            passed, before = _passed(theirs), _passed(ours)
            if len(passed) > 1 and [name for name in before if name in passed] != passed:
                yield f"in the order {', '.join(passed)}"


def _passed(pipeline: PipelinePlan) -> list[str]:
    """The subclusters of a pipeline, in its order."""
    return list(dict.fromkeys(name for stage in pipeline.stages for name in _subclusters(stage)))


def _subclusters(stage: StagePlan) -> list[str]:
    return [submesh.subcluster for submesh in stage.submeshes]


def _stage_differences(chosen: Plan, other: Plan) -> Iterator[str]:
    """How stages differ, of plans with equally many."""
    pairs = list(zip(chosen.stages, other.stages, strict=True))
    if any(_subclusters(a) != _subclusters(b) for a, b in pairs):
        return
    sizes = [s for s, (a, b) in enumerate(pairs) if _sizes(a) != _sizes(b)]
    if sizes:
        yield f"{_stages(sizes)} on submeshes of another size"
    again = [s for s, (a, b) in enumerate(pairs) if _again(b) > _again(a)]
    if again:
        yield f"{_stages(again)} recomputing"
    kept = [s for s, (a, b) in enumerate(pairs) if _again(a) > _again(b)]
    if kept:
        yield f"{_stages(kept)} not recomputing"
    moved = [s for s, (a, b) in enumerate(pairs) if a.offload != b.offload]
    if moved:
        yield f"{_stages(moved)} offloading otherwise"
    sharded = [s for s, (a, b) in enumerate(pairs) if s not in sizes and _mesh(a) != _mesh(b)]
    if sharded:
        yield f"{_stages(sharded)} sharded otherwise"


def _again(stage: StagePlan) -> bool:
    """Whether it makes anything again."""
    return stage.repeats != "nothing"


def _sizes(stage: StagePlan) -> list[int]:
    return [submesh.num_devices for submesh in stage.submeshes]


def _mesh(stage: StagePlan) -> tuple[object, ...]:
    """How its arrays are divided."""
    return *(member.mesh_shape for member in stage.members), stage.sharding, stage.shares


def _stages(places: Sequence[int]) -> str:
    *first, last = map(str, places)
    return f"stages {', '.join(first)} and {last}" if first else f"stage {last}"


def _count(number: int, what: str) -> str:
    plural = what + ("es" if what.endswith("ch") else "s")
    return f"{number} {what if number == 1 else plural}"
