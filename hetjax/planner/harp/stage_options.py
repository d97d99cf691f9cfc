"""The ways to run stages on one shape of submesh: which runs of layers fit, and what they take.

All is computed for every run at once, in a list of them; see
`hetjax.planner.work.layer_runs.Runs.by_length`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from hetjax.planner.costs.cost_model import estimate
from hetjax.planner.costs.held_memory import memory
from hetjax.planner.costs.pass_cost import told_tensor_costs
from hetjax.planner.costs.update_cost import update_seconds
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.arrays import FloatArray, IntArray
from hetjax.planner.work.execution import Execution
from hetjax.planner.work.layer_runs import Runs
from hetjax.planner.work.rates import USABLE_MEMORY
from hetjax.planner.work.repeating_layers import RepeatingRuns

Option_co = TypeVar("Option_co", covariant=True)


@dataclass(frozen=True, eq=False)
class StageOption(Generic[Option_co]):
    """What stages take that run in one way, each field an array over the runs of layers.

    Args:
        option: how they run.
        limits: how many live microbatches fit; 0 where the stage does not fit at all.
        seconds: forward plus backward pass of one microbatch, and in all but a pipeline's first
            stage its share of what is done once a step, which hides behind no other stage; infinite
            where the stage does not fit.
        closing: what the first stage does once a step, of the runs from the first layer on.
    """

    option: Option_co
    limits: NDArray[np.int32]
    seconds: FloatArray
    closing: FloatArray

    @functools.cached_property
    def _sums(self) -> tuple[float, int]:
        return float(self.closing.sum()), int(self.limits.sum())

    @functools.cached_property
    def _fitting(self) -> tuple[IntArray, NDArray[np.int32], FloatArray]:
        """Which of the runs fit, and their figures."""
        places = np.flatnonzero(self.limits)
        return places, self.limits[places], self.seconds[places]

    def is_as_good(self, other: StageOption[Any]) -> bool:
        """Whether no run is better off with the other one."""
        mine, its = self._sums, other._sums
        # What is so for each is so for the sums, which are soon compared.
        if mine[0] > its[0] or mine[1] < its[1]:
            return False
        places, limits, seconds = other._fitting
        return bool(
            (self.seconds[places] <= seconds).all()
            and (self.limits[places] >= limits).all()
            and (self.closing <= other.closing).all()
        )


def fitting(
    problem: PlanningProblem,
    runs: RepeatingRuns,
    options: Sequence[Execution],
    memory_factor: float,
) -> NDArray[np.bool_]:
    """The runs of layers that fit with one live microbatch, in some way.

    Args:
        problem: the planning problem.
        runs: the work of a list of runs, by what they make again.
        options: the ways.
        memory_factor: by how much every device's memory is multiplied.
    """
    fits = np.zeros(runs["nothing"].boundary_bytes.shape, dtype=bool)
    for option in options:
        fits |= live_limits(problem, runs[option.repeats], option, memory_factor) > 0
    return fits


def best_options(
    problem: PlanningProblem,
    runs: RepeatingRuns,
    options: Sequence[Execution],
    memory_factor: float,
) -> list[StageOption[Execution]]:
    """The options that are the best for any run of layers.

    A tensor axis of which the integer program tells nothing is for runs that fit in no other way:
    generic rules divide it, which the cost model cannot judge well enough to weigh them. After it
    comes optimizer state in the hosts' memory, whose copies every step waits for.

    Args:
        problem: the planning problem.
        runs: the work of a list of runs, by what they make again.
        options: the ways.
        memory_factor: by how much every device's memory is multiplied.
    """
    fits = np.zeros(runs["nothing"].boundary_bytes.shape, dtype=bool)
    kept: list[StageOption[Execution]] = []

    def rank(option: Execution) -> tuple[bool, bool]:
        is_untold = option.mesh_shape[1] > 1 and not told_tensor_costs(problem, option)
        return option.host_link is not None, is_untold

    # Of what is for runs that fit in no other way, one way does not stand back for another.
    fits_otherwise, reached = fits, (False, False)
    ranked = ((rank(option), option) for option in options)
    for ranks, option in sorted(ranked, key=lambda pair: pair[0]):
        if ranks != reached:
            fits_otherwise, reached = fits.copy(), ranks
        limits = live_limits(problem, runs[option.repeats], option, memory_factor)
        limits = np.where(fits_otherwise, np.int32(0), limits) if any(reached) else limits
        fits |= limits > 0
        found = _stage_option(problem, runs[option.repeats], option, limits)
        if not any(each.is_as_good(found) for each in kept):
            kept.append(found)
    return kept


def live_limits(
    problem: PlanningProblem, runs: Runs, option: Execution, memory_factor: float
) -> NDArray[np.int32]:
    """How many live microbatches of each run fit with an option; none of the run of no layer.

    Args:
        problem: the planning problem.
        runs: the work of a list of runs; where the option recomputes, the backward pass has the
            repetition in it.
        option: how they run.
        memory_factor: by how much every device's memory is multiplied.
    """
    usable = option.kind.memory_bytes * USABLE_MEMORY * memory_factor

    def found() -> NDArray[np.int32]:
        held = memory(problem, runs, option)
        most = problem.num_microbatches
        limits = held.live_limit(usable, most, option.host_bytes).astype(np.int32)
        limits[0] = 0
        return limits

    # Asked twice: whether anything may fit, and what does.
    key = (usable, problem.num_microbatches, option.way, option.sharding, option.repeats)
    key = (*key, option.examples, option.updates, option.members, option.host_link)
    key = (*key, option.activation_link)
    return runs.once(("live limits", *key), found)


def _stage_option(
    problem: PlanningProblem, runs: Runs, option: Execution, limits: NDArray[np.int32]
) -> StageOption[Execution]:
    """What the runs that fit take with an option."""
    assert runs.listed is not None, "they are in a list"
    is_first = runs.listed[0] == 0
    update, _ = update_seconds(problem, runs, option)
    seconds = np.full(limits.shape, np.inf)
    fits = np.flatnonzero(limits)
    if len(fits):
        each = estimate(problem, runs, option)
        taken = each.paced_forward_seconds[fits] + each.paced_backward_seconds[fits]
        taken += update[fits] / problem.num_microbatches * ~is_first[fits]
        # To the nanosecond, so that stages that are alike share one cost.
        seconds[fits] = np.round(taken, 9)
    return StageOption(option, limits, seconds, update[is_first])
