"""How long a candidate's step takes by its timeline: the clock that a search judges by."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetjax.mesh.cluster import Cluster
from hetjax.pipeline.stages.holders import Holders
from hetjax.pipeline.timeline.simulate import warm_up_ends
from hetjax.pipeline.timeline.times import StepTimes
from hetjax.planner.costs.cost_model import estimate
from hetjax.planner.costs.crossing_ends import End, is_in_one_node, transfer_link
from hetjax.planner.costs.exchange_cost import ExchangedBytes, exchange_seconds
from hetjax.planner.costs.network_cards import with_shared_cards
from hetjax.planner.costs.told_updates import told_latency, told_moments
from hetjax.planner.costs.union_cost import UnionExecution, estimate_union
from hetjax.planner.harp.candidate_plans import candidate_ends, slice_of
from hetjax.planner.harp.fixed_pace import Place
from hetjax.planner.harp.search import Candidate, transfers_between
from hetjax.planner.harp.stage_table import StageTable
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.arrays import FloatArray
from hetjax.planner.work.execution import Execution
from hetjax.planner.work.layer_runs import Runs
from hetjax.planner.work.repeating_layers import Repetition, runs_by_repetition


class StageSeconds(NamedTuple):
    """What stages take of so many layers, by their first layer; each field an array.

    Args:
        forward: the forward pass of one microbatch, with what it leaves open of the copies of
            activations.
        backward: its backward pass, likewise.
        update: what is done once a step.
        exchange: of that, what devices of the stage exchange.
    """

    forward: FloatArray
    backward: FloatArray
    update: FloatArray
    exchange: FloatArray


Tied = tuple[NDArray[np.bool_], ExchangedBytes]
"""Parameters that several layers use: which ones, and what these tell each other of them."""


class CandidateClock:
    """Tells the seconds of candidates of one stage table, and keeps what they have in common.

    Args:
        table: what the candidates were chosen from.
        cluster: the devices.
        lost: of these, those that cannot be used.
        estimate: what runs of layers take in one way to run them, and of so many layers.
        tied: the parameters that several layers use.
    """

    def __init__(
        self,
        table: StageTable,
        cluster: Cluster,
        lost: Collection[int],
        estimate: Callable[[Execution | UnionExecution, int], StageSeconds],
        tied: Sequence[Tied],
    ):
        self._table, self._cluster, self._lost = table, cluster, lost
        self._estimate_in, self._tied = estimate, tied
        self._estimates: dict[_Way, StageSeconds] = {}

    @classmethod
    def of(cls, problem: PlanningProblem, runs: Runs, table: StageTable) -> CandidateClock:
        """The clock by the cost model.

        Args:
            problem: what was planned.
            runs: the work of every run of its layers.
            table: what the candidates were chosen from.
        """
        assert runs.used is not None, "a search looks at all runs"
        by_repetition = runs_by_repetition(runs, problem.repeatable_layers)
        tied = [
            (runs.used[place] > 0, ExchangedBytes.of(runs.shapes[place]))
            for place in np.flatnonzero(runs.used.sum(axis=1) > 1)
        ]

        @functools.cache
        def of_length(repeats: Repetition, length: int) -> Runs:
            return by_repetition[repeats].of_length(length)

        def estimate_in(execution: Execution | UnionExecution, length: int) -> StageSeconds:
            of_runs = of_length(execution.repeats, length)
            if isinstance(execution, UnionExecution):
                union = estimate_union(problem, of_runs, execution)
                return StageSeconds(
                    union.forward_seconds,
                    union.backward_seconds,
                    union.update_seconds,
                    union.exchange_seconds,
                )
            each = estimate(problem, of_runs, execution)
            return StageSeconds(
                each.paced_forward_seconds,
                each.paced_backward_seconds,
                each.update_seconds,
                each.exchange_seconds,
            )

        return cls(table, problem.cluster, problem.lost, estimate_in, tied)

    def seconds(self, candidate: Candidate) -> float:
        """Seconds of a step, with the exchange of what stages share."""
        stages = candidate_ends(self._table, self._cluster, self._lost, candidate)
        times = self.times(candidate, stages)
        ends = warm_up_ends(candidate.warm_up_counts, self._table.num_microbatches, times)
        sharing = self.sharing(candidate.places, stages)
        together = max((end for end, own in zip(ends, sharing, strict=True) if own), default=0.0)
        starts = [together + own if own else end for end, own in zip(ends, sharing, strict=True)]
        exchanges = [
            self._stage_seconds(place, option)[3]
            for place, option in zip(candidate.places, candidate.options, strict=True)
        ]
        summed = [start + each for start, each in zip(starts, exchanges, strict=True)]
        latency = told_latency(self._cluster, [[submesh for submesh, _ in end] for end in stages])
        told = told_moments(summed, latency)
        return max(
            (max(start, moment - exchange) if update else start) + update
            for start, moment, exchange, update in zip(
                starts, told, exchanges, times.update, strict=True
            )
        )

    def times(self, candidate: Candidate, stages: Sequence[End]) -> StepTimes:
        """The times of a candidate's tasks, and of its transfers beside each other.

        Args:
            candidate: the candidate.
            stages: where its stages are.
        """
        estimates = [
            self._stage_seconds(place, option)
            for place, option in zip(candidate.places, candidate.options, strict=True)
        ]
        crossings = [
            (transfers_between(self._table, a, b), b.layers[0])
            for a, b in itertools.pairwise(candidate.places)
        ]
        slower = [self._slowness(a, b) for a, b in itertools.pairwise(stages)]
        times = StepTimes(
            forward=[forward for forward, *_ in estimates],
            backward=[backward for _, backward, *_ in estimates],
            sends=[
                _slowed(float(transfers.forward[layer]), by)
                for (transfers, layer), by in zip(crossings, slower, strict=True)
            ],
            returns=[
                _slowed(float(transfers.backward[layer]), by)
                for (transfers, layer), by in zip(crossings, slower, strict=True)
            ],
            update=[update for _, _, update, _ in estimates],
        )
        return with_shared_cards(times, self._cluster, stages)

    def _slowness(self, a: End, b: End) -> _Slowness | None:
        """What the nodes of two stages and their network cards make of the table's transfers.

        The table knows of two whole nodes. Of stages on several submeshes it knows more than that.
        """
        submeshes = [submesh for end in (a, b) for submesh, _ in end]
        if len(submeshes) > 2:
            return None
        sender, receiver = submeshes
        if is_in_one_node(self._cluster, sender, receiver):
            return None
        whole = self._cluster.node_link(sender.subcluster, receiver.subcluster)
        own = transfer_link(self._cluster, sender, receiver)
        return whole.latency, whole.bandwidth / own.bandwidth

    def _stage_seconds(self, place: Place, option: int) -> tuple[float, float, float, float]:
        """What a stage takes in one way to run it: see `StageSeconds`."""
        cut, (first, end) = slice_of(self._table, place), place.layers
        key = place.subcluster, cut.shape, option, end - first
        if key not in self._estimates:
            self._estimates[key] = self._estimate_in(cut.options[option], end - first)
        forward, backward, update, exchange = (float(each[first]) for each in self._estimates[key])
        return forward, backward, update, exchange

    def sharing(self, places: Sequence[Place], stages: Sequence[End]) -> Sequence[float]:
        """How long each stage exchanges parameters that layers of several stages use.

        Args:
            places: of the stages, which tell their layers.
            stages: where they are.
        """
        pieces: list[tuple[Holders, ExchangedBytes]] = []
        for used, size in self._tied:
            holders = tuple(s for s, each in enumerate(places) if used[slice(*each.layers)].any())
            if len(holders) > 1:
                pieces.append((Holders(holders, holders), size))
        if not pieces:
            return [0.0] * len(places)
        submeshes = [[submesh for submesh, _ in end] for end in stages]
        return exchange_seconds(self._cluster, submeshes, pieces)


_Slowness = tuple[float, float]
"""The latency of a link, and how many times as long its bytes take as between two whole nodes."""


def _slowed(seconds: float, by: _Slowness | None) -> float:
    """What a transfer takes over other network cards than those of two nodes."""
    if by is None or not seconds:
        return seconds
    latency, times = by
    return latency + times * (seconds - latency)


_Way = tuple[int, tuple[int, int], int, int]
"""A subcluster, the shape of a slice of it, an option there, and a number of layers."""
