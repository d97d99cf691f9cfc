"""Descent from a candidate over its neighbours: what differs from it in one place."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from hetjax.planner.harp.candidate_plans import slice_of
from hetjax.planner.harp.fixed_pace import Place
from hetjax.planner.harp.search import Candidate, counts_at_paces, crossing_seconds
from hetjax.planner.harp.stage_table import StageTable

_T = TypeVar("_T")

_ALL_OPTIONS_UP_TO = 100
"""Up to so many ways to run all stages of a pipeline, each of them is tried."""

_NEARBY = (-2, -1, 1, 2)
"""By how many layers a boundary of two stages may move at once."""


def descend(
    table: StageTable,
    start: Candidate,
    score: Callable[[Candidate], float],
    go_on: Callable[[Candidate], bool],
) -> None:
    """Go from a candidate to its best neighbour, and on, until none is better.

    Args:
        table: what stages and transfers cost.
        start: where it begins.
        score: what is made least; whoever asks for a descent keeps what it says.
        go_on: whether one more candidate may be scored; where not, the descent ends.
    """
    best, before = start, None
    while best != before:
        before, least = best, score(best)
        for each in itertools.chain(_other_options(table, before), _neighbours(table, before)):
            if not go_on(each):
                return
            if score(each) < least:
                best, least = each, score(each)


def fastest_ways(table: StageTable, places: Sequence[Place]) -> Iterator[Candidate]:
    """The fastest ways to run the stages of a pipeline, for each warm-up count that it may have.

    Args:
        table: what stages and transfers cost.
        places: the stages' places.

    Yields:
        Candidates; none where nothing fits.
    """
    crossed = crossing_seconds(table, places)
    times = [_seconds(table, place) for place in places]
    limits = [slice_of(table, p).limits_of(p.layers) for p in places]
    for _, counts in counts_at_paces(table, crossed):
        fitting = [
            np.where(limit >= count, seconds, np.inf)
            for seconds, limit, count in zip(times, limits, counts, strict=True)
        ]
        if all(np.isfinite(each).any() for each in fitting):
            options = [int(each.argmin()) for each in fitting]
            yield from _ways_to_run(table, places, options, crossed)


def _ways_to_run(
    table: StageTable,
    places: Sequence[Place],
    options: Sequence[int],
    crossed: Sequence[tuple[float, float]] | None = None,
) -> Iterator[Candidate]:
    """A pipeline whose stages run in given ways, with every warm-up count that it may have."""
    crossed = crossing_seconds(table, places) if crossed is None else crossed
    pairs = list(zip(places, options, strict=True))
    seconds = [float(slice_of(table, p).seconds_of(p.layers)[option]) for p, option in pairs]
    slowest = max(*seconds, *(each for pair in crossed for each in pair), 0.0)
    if slowest == math.inf:
        return
    limits = [int(slice_of(table, p).limits_of(p.layers)[option]) for p, option in pairs]
    total = sum(seconds) + sum(map(sum, crossed))
    closing = slice_of(table, places[0]).closing
    if closing is not None:
        total += float(closing[options[0], places[0].layers[1]])
    for pace, counts in counts_at_paces(table, crossed, slowest):
        if all(count <= limit for count, limit in zip(counts, limits, strict=True)):
            latency = total + (table.num_microbatches - 1) * pace
            yield Candidate(tuple(places), tuple(options), counts, total, pace, latency)


def _other_options(table: StageTable, candidate: Candidate) -> Iterator[Candidate]:
    """The same stages, run in other ways: any, or where these are many, one of them."""
    places, options = candidate.places, candidate.options
    allowed = [range(_num_options(table, place)) for place in places]
    if math.prod(map(len, allowed)) <= _ALL_OPTIONS_UP_TO:
        for chosen in itertools.product(*allowed):
            yield from _ways_to_run(table, places, chosen)
        return
    for stage, every in enumerate(allowed):
        for option in every:
            yield from _ways_to_run(table, places, _with(options, stage, option))


def _neighbours(table: StageTable, candidate: Candidate) -> Iterator[Candidate]:
    """A boundary elsewhere, a stage on other devices, or one that takes over another's layers."""
    places, options = candidate.places, candidate.options
    for stage in range(len(places)):
        for place in _elsewhere(table, places, stage):
            moved = _with(places, stage, place)
            for option in range(_num_options(table, place)):
                yield from _ways_to_run(table, moved, _with(options, stage, option))
    for before, (a, b) in enumerate(itertools.pairwise(places)):
        for boundary in (b.layers[0] + by for by in _NEARBY):
            if a.layers[0] < boundary < b.layers[1]:
                first = replace(a, layers=(a.layers[0], boundary))
                second = replace(b, layers=(boundary, b.layers[1]))
                recut = (*places[:before], first, second, *places[before + 2 :])
                yield from _ways_to_run(table, recut, options)
        if len(places) > table.min_stages:
            for kept in (a, b):
                one = replace(kept, layers=(a.layers[0], b.layers[1]))
                for option in range(_num_options(table, one)):
                    yield from _ways_to_run(
                        table,
                        (*places[:before], one, *places[before + 2 :]),
                        (*options[:before], option, *options[before + 2 :]),
                    )


def _elsewhere(table: StageTable, places: Sequence[Place], stage: int) -> Iterator[Place]:
    """The other devices that a stage may have, of its subcluster and between its neighbours'."""
    own = places[stage]
    nodes, per_node = table.nodes[own.subcluster]
    low, high = 0, nodes * per_node
    if stage and places[stage - 1].subcluster == own.subcluster:
        low = places[stage - 1].start + slice_of(table, places[stage - 1]).num_devices
    if stage + 1 < len(places) and places[stage + 1].subcluster == own.subcluster:
        high = places[stage + 1].start
    for chosen, cut in enumerate(table.slices[own.subcluster]):
        for start in range(low, high - cut.num_devices + 1):
            in_node = start % per_node + cut.num_devices <= per_node
            whole = cut.shape[1] == per_node and start % per_node == 0
            place = replace(own, slice=chosen, start=start)
            if (in_node or whole) and table.may_hold(own.subcluster, start, cut) and place != own:
                yield place


def _num_options(table: StageTable, place: Place) -> int:
    return slice_of(table, place).num_options


def _seconds(table: StageTable, place: Place) -> np.ndarray:
    """What each option takes, for a first stage with what closes a step."""
    cut = slice_of(table, place)
    seconds = cut.seconds_of(place.layers)
    if place.layers[0] == 0 and cut.closing is not None:
        seconds = seconds + cut.closing[:, place.layers[1]]
    return seconds


def _with(values: Sequence[_T], place: int, value: _T) -> tuple[_T, ...]:
    return (*values[:place], value, *values[place + 1 :])
