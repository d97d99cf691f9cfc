"""How long a candidate's step takes by its timeline: the clock that a search judges by."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from hetjax.pipeline.program.traced_program import num_bytes
from hetjax.pipeline.stages.holders import Holders
from hetjax.pipeline.timeline.simulate import warm_up_ends
from hetjax.pipeline.timeline.times import StepTimes
from hetjax.planner.costs.cost_model import Estimate, estimate
from hetjax.planner.costs.crossing_ends import End
from hetjax.planner.costs.network_cards import with_shared_cards
from hetjax.planner.costs.sharing_cost import exchange_seconds
from hetjax.planner.costs.union_cost import UnionEstimate, UnionExecution, estimate_union
from hetjax.planner.harp.candidate_plans import candidate_ends, slice_of
from hetjax.planner.harp.fixed_pace import Place
from hetjax.planner.harp.search import Candidate, transfers_between
from hetjax.planner.harp.stage_table import StageTable
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.arrays import FloatArray
from hetjax.planner.work.layer_runs import Runs
from hetjax.planner.work.repeating_layers import runs_by_repetition


class CandidateClock:
    """Tells the seconds of candidates of one stage table, and keeps what they have in common.

    Args:
        problem: what was planned.
        runs: the work of every run of its layers.
        table: what the candidates were chosen from.
    """

    def __init__(self, problem: PlanningProblem, runs: Runs, table: StageTable):
        assert runs.used is not None, "a search looks at all runs"
        self.problem = problem
        self.table = table
        self._runs = runs_by_repetition(runs, problem.repeatable_layers)
        self._estimates: dict[_Way, Estimate | UnionEstimate] = {}
        self._tied = [
            (runs.used[place] > 0, num_bytes(runs.shapes[place]))
            for place in np.flatnonzero(runs.used.sum(axis=1) > 1)
        ]

    def seconds(self, candidate: Candidate) -> float:
        """Seconds of a step, with the exchange of what stages share."""
        stages = candidate_ends(self.problem, self.table, candidate)
        times = self._times(candidate, stages)
        ends = warm_up_ends(candidate.warm_up_counts, self.table.num_microbatches, times)
        sharing = self._sharing(candidate.places, stages)
        together = max((end for end, own in zip(ends, sharing, strict=True) if own), default=0.0)
        return max(
            (together + own if own else end) + update
            for end, own, update in zip(ends, sharing, times.update, strict=True)
        )

    def _times(self, candidate: Candidate, stages: Sequence[End]) -> StepTimes:
        """The times of a candidate's tasks, and of its transfers beside each other."""
        estimates = [
            (self._estimate(place, option), place.layers)
            for place, option in zip(candidate.places, candidate.options, strict=True)
        ]
        crossings = [
            (transfers_between(self.table, a, b), b.layers[0])
            for a, b in itertools.pairwise(candidate.places)
        ]
        times = StepTimes(
            forward=[_of(each.forward_seconds, layers) for each, layers in estimates],
            backward=[_of(each.backward_seconds, layers) for each, layers in estimates],
            sends=[float(transfers.forward[layer]) for transfers, layer in crossings],
            returns=[float(transfers.backward[layer]) for transfers, layer in crossings],
            update=[_of(each.update_seconds, layers) for each, layers in estimates],
        )
        return with_shared_cards(times, self.problem.cluster, stages)

    def _estimate(self, place: Place, option: int) -> Estimate | UnionEstimate:
        """What runs of layers take in one way."""
        cut = slice_of(self.table, place)
        key = place.subcluster, cut.shape, option
        if key not in self._estimates:
            execution = cut.options[option]
            runs = self._runs[execution.repeats]
            self._estimates[key] = (
                estimate_union(self.problem, runs, execution)
                if isinstance(execution, UnionExecution)
                else estimate(self.problem, runs, execution)
            )
        return self._estimates[key]

    def _sharing(self, places: Sequence[Place], stages: Sequence[End]) -> Sequence[float]:
        """How long each stage exchanges parameters that layers of several stages use."""
        pieces: list[tuple[Holders, int]] = []
        for used, size in self._tied:
            holders = tuple(s for s, each in enumerate(places) if used[slice(*each.layers)].any())
            if len(holders) > 1:
                pieces.append((Holders(holders, holders), size))
        if not pieces:
            return [0.0] * len(places)
        submeshes = [[submesh for submesh, _ in end] for end in stages]
        return exchange_seconds(self.problem.cluster, submeshes, pieces)


_Way = tuple[int, tuple[int, int], int]
"""A subcluster, the shape of a slice of it, and an option there."""


def _of(values: FloatArray, layers: tuple[int, int]) -> float:
    return float(values[layers] if values.ndim else values)
