"""How fast the lab's hosts are at a moment, for `prediction_trainer`.

Processors that others use too are faster at one time than at another, by tens of percent for
seconds and for minutes. So some of the runs of layers that a profile measured are measured again,
on all hosts at once, beside the steps that it predicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

import ray

from hetjax.pipeline.timeline.times import StepTimes
from hetjax.planner import Plan, PlanningProblem
from hetjax.planner.profiler import Measured, Measurement, Request, survey
from hetjax.runtime.ray.ray_cluster import worker_options
from hetjax.runtime.ray.ray_profiling import ProfilingWorker
from hetjax.runtime.ray.ray_worker import computation_settings

_RUNS = 6
"""How many runs of layers are measured again, the longest ones."""

_DEADLINE = 300.0
"""Seconds that a worker may take to start, or to measure a run."""


class Pace:
    """A worker on every host that measures again what a profile measured there.

    Args:
        problem: the problem, with its profile.
        measured: the program.
    """

    def __init__(self, problem: PlanningProblem, measured: Measured):
        self._requests = {
            each.name: _longest(problem, each.name) for each in problem.cluster.subclusters
        }
        actor_class: Any = ray.remote(ProfilingWorker)
        self._workers: dict[str, Any] = {
            each.name: actor_class.options(**worker_options(each, 1)).remote(each)
            for each in problem.cluster.subclusters
        }
        reference, settings = ray.put(measured), computation_settings()
        prepared = [each.prepare.remote(settings, reference) for each in self._workers.values()]
        ray.get(prepared, timeout=_DEADLINE)
        # The first time their programs are compiled.
        self.now()

    def now(self) -> dict[str, float]:
        """By what the passes of each host take longer now than the profile says."""
        taken = dict.fromkeys(self._workers, 0.0)
        for turn in range(_RUNS):
            asked = {
                name: worker.measure.remote(self._requests[name][turn][0])
                for name, worker in self._workers.items()
            }
            for name, reference in asked.items():
                taken[name] += _passes(ray.get(reference, timeout=_DEADLINE))
        return {
            name: seconds / sum(known for _, known in self._requests[name])
            for name, seconds in taken.items()
        }

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers.values():
            ray.kill(worker)


def at_pace(plan: Plan, moments: Sequence[Mapping[str, float]]) -> StepTimes:
    """What the tasks of a predicted plan's stages take by the pace of some moments.

    Args:
        plan: the plan.
        moments: by what each host's passes took longer then.

    Returns:
        The times of its first pipeline, with transfers as predicted.
    """
    times = plan.predicted.times
    factors = [
        mean(each[stage.submesh.subcluster] for each in moments) for stage in plan.pipeline.stages
    ]
    tasks = ("forward", "backward", "update", "input_gradient", "weight_gradient", "recompute")
    longer = {
        # Empty where there are none.
        name: [factor * each for factor, each in zip(factors, getattr(times, name), strict=False)]
        for name in tasks
    }
    return replace(times, **longer)


def _longest(problem: PlanningProblem, host: str) -> list[tuple[Request, float]]:
    """The longest runs of layers that were measured on a host, and what their passes took."""
    found = []
    for wanted in survey(problem).wanted:
        times = problem.profile.ways.get(wanted.way)
        if wanted.way.subcluster == host and times is not None:
            run = wanted.request.layers
            seconds = float(times.forward.of(run) + times.backward.of(run))
            found.append((replace(wanted.request, updates=False), seconds))
    return sorted(found, key=lambda pair: -pair[1])[:_RUNS]


def _passes(measurement: Measurement) -> float:
    return measurement.forward_seconds + measurement.backward_seconds
