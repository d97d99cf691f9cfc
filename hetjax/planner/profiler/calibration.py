"""By how much a program's passes are longer on a device than the cost model has them.

Where its layers were measured, that is what they took. Where only another program's were, it is
what these tell of classes of work: the cost model knows two figures of a device, and classes more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from statistics import median

from hetjax.pipeline.program.work_classes import Work, steps_work
from hetjax.pipeline.stages.backward import differentiate
from hetjax.pipeline.stages.cutting import cut
from hetjax.planner.costs.cost_model import computing_seconds
from hetjax.planner.costs.member_rates import class_rates
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.profiler.measured_runs import layer_classes
from hetjax.planner.work.execution import Execution
from hetjax.planner.work.profile import Profile, Way, WayTimes
from hetjax.planner.work.rates import TASK_SECONDS
from hetjax.planner.work.run_structure import inputs_of

Factors = tuple[float, float]
"""What seconds of forward and backward passes are multiplied by."""


def calibration(
    problem: PlanningProblem,
    ways: Mapping[Way, WayTimes],
    classes: Mapping[str, Mapping[str, float]],
) -> dict[tuple[str, tuple[int, int]], Factors]:
    """What the cost model's seconds of the whole program are to be multiplied by.

    Args:
        problem: the planning problem.
        ways: times of its layers, by the devices and how they share a stage.
        classes: by subcluster, what a device takes for classes of work, in seconds.

    Returns:
        Factors by subcluster and shape; of subclusters of which nothing is known, none.
    """
    found = _by_classes(problem, classes, classes.keys() - {way.subcluster for way in ways})
    return {
        **{(name, (1, 1)): factors for name, factors in found.items()},
        **_by_ways(problem, ways),
    }


def _by_ways(
    problem: PlanningProblem, ways: Mapping[Way, WayTimes]
) -> dict[tuple[str, tuple[int, int]], Factors]:
    whole = problem.runs.of((0, problem.num_layers))
    factors: dict[tuple[str, tuple[int, int]], list[Factors]] = {}
    for way, times in ways.items():
        measured = times.forward.of(whole.layers), times.backward.of(whole.layers)
        factors.setdefault((way.subcluster, way.shape), []).append(
            _factors(map(float, measured), _expected(problem, way))
        )
    return {
        devices: (median(f for f, _ in pairs), median(b for _, b in pairs))
        for devices, pairs in factors.items()
    }


def _by_classes(
    problem: PlanningProblem, rates: Mapping[str, Mapping[str, float]], names: Set[str]
) -> dict[str, Factors]:
    if not names:
        return {}
    known = class_rates(replace(problem, profile=Profile(classes=rates)))
    alike = layer_classes(problem)
    passes = _passes(problem, alike)
    found: dict[str, Factors] = {}
    for name in names:
        taken = (
            TASK_SECONDS
            + sum(
                times * known[name].seconds(tuple(passes[number][way].items()))
                for number, times in Counter(alike).items()
            )
            for way in (0, 1)
        )
        found[name] = _factors(taken, _expected(problem, Way(name, (1, 1), (1, 1), "data")))
    return found


def _factors(taken: Iterable[float], expected: Iterable[float]) -> Factors:
    """Factors of both passes; of a backward pass that there is none of, 1."""
    forward, backward = (
        one / other if other else 1.0 for one, other in zip(taken, expected, strict=True)
    )
    return forward, backward


def _expected(problem: PlanningProblem, way: Way) -> tuple[float, float]:
    """What the cost model says of both passes, but for transfers: measured runs have none."""
    part = problem.cluster.subcluster(way.subcluster)
    execution = Execution(
        kind=part.kind,
        link=part.intra_node,
        mesh_shape=way.mesh_shape,
        sharding=way.sharding,
        subcluster=way.subcluster,
        shape=way.shape,
    )
    analytic, whole = replace(problem, profile=Profile()), problem.runs.of((0, problem.num_layers))
    return computing_seconds(analytic, whole, execution)


def _passes(problem: PlanningProblem, alike: Sequence[int]) -> dict[int, tuple[Work, Work]]:
    """The work by class of the forward and the backward pass of layers, once for those alike."""
    program, last = problem.program, problem.num_layers - 1
    runs = cut(program, problem.layers)
    inputs = inputs_of(program, runs)
    found: dict[int, tuple[Work, Work]] = {}
    for number in set(alike):
        layer = alike.index(number)
        programs = differentiate(
            runs[layer],
            *inputs[layer],
            is_last=layer == last,
            cotangents_in=() if layer == last else problem.works[layer + 1].returned,
        )
        backward = steps_work(programs.backward.steps) if programs.has_backward else {}
        found[number] = steps_work(programs.forward.steps), backward
    return found
