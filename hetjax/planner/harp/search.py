"""The exact search over a stage table: contiguous layers on slices of subclusters.

A plan's latency is ``sum_i (t_i + f_i + b_i) + (M - 1) pace`` (Harp equation 12): one microbatch's
way through the pipeline and back, then one more microbatch every pace, which no stage and no
transfer may exceed; and, beyond Harp, what the first stage does once, when all passes are over.
For one pace a dynamic program from the last stage to the first finds the least
sum; its states hold the warm-up count, since that decides what fits in memory. The least sum does
not rise with the pace, so whole ranges of paces are ruled out by one of them.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetjax.planner.harp.counted_reach import MOST_COUNTS, CountedReach
from hetjax.planner.harp.fixed_pace import TOLERANCE, FixedPace, Place, extra_forwards
from hetjax.planner.harp.reach import first_that_may_hold, least_total
from hetjax.planner.harp.stage_table import StageTable, Transfers
from hetjax.planner.work.arrays import FloatArray

# Sums of the same times in another order differ by less, relatively.
_ROUNDING = 1e-12

_GROWTH = 1e-2
"""By what share the first pace that is looked at is above one that may have a pipeline; then by
twice as much, and so on, until one has."""


_MOST_AHEAD = 0.1
"""The most by which the first pace that is looked at is above the first that may have one."""

_NEARLY = 4e-3
"""How exactly the first pace is found at which a pipeline may fit, as a share of it."""


@dataclass(frozen=True)
class Candidate:
    """A whole pipeline that the table allows.

    Args:
        places: the stages' places.
        options: the option that each stage runs with.
        warm_up_counts: the warm-up count of each stage.
        total: seconds of one microbatch's way through the pipeline and back, and of what closes the
            step.
        pace: seconds from one microbatch to the next.
        latency: seconds of a step.
    """

    places: tuple[Place, ...]
    options: tuple[int, ...]
    warm_up_counts: tuple[int, ...]
    total: float
    pace: float
    latency: float


def search(
    table: StageTable,
    near: float | None = None,
    tolerance: float = 0.0,
    below: float = np.inf,
) -> tuple[Candidate, ...]:
    """Find the pipeline of the least latency.

    The search space: every division of the layers into contiguous stages; every order and subset of
    subclusters (unless the table fixes an order), each passed once; in a subcluster, submeshes of
    the table's shapes in the pipeline's order, with devices idle anywhere; every option of a stage;
    every pace. A stage fits if its live limit is at least its warm-up count.

    Args:
        table: what stages and transfers cost.
        near: a pace that the best one is expected to be near, and rather below than above, where
            something is known of it; it makes the search shorter and changes nothing of what is
            proven.
        tolerance: by what share of it the best latency may be below the one that is found; 0 for
            the best itself.
        below: no pipeline is wanted whose latency is this or more, which is soon told.

    Returns:
        The best candidate first, proven to be that or as near as is asked for, then others that
        were met on the way, by latency. Empty where nothing fits, or only what is not wanted.

    Source: Harp section 5.2, equations 12 to 19.
    """
    paces = all_paces(table)
    repeats = table.num_microbatches - 1
    most_counts = _most_counts(table)
    found: dict[tuple[Place, ...], Candidate] = {}
    best, better = below, 1 - max(tolerance, _ROUNDING)

    def settle(low: int, index: int) -> tuple[float, int]:
        """Solves one pace; returns a floor under the totals below it, and the index settled."""
        nonlocal best, tracked
        worth = best * better - repeats * paces[low]
        # What had to be told apart at the last pace will have to be at this one, too.
        floor, candidate, tracked = _solve(table, tracked, most_counts, paces[index], worth)
        if candidate is None:
            return floor, index
        tightest = price(table, candidate.places, _own_pace(table, candidate))
        if tightest is not None and tightest.total <= candidate.total * (1 + _ROUNDING):
            # The same total at a lower pace: the paces between the two are settled as well.
            candidate = tightest
            index = int(np.searchsorted(paces, tightest.pace))
        known = found.get(candidate.places)
        if known is None or candidate.latency < known.latency:
            found[candidate.places] = candidate
        best = min(best, candidate.latency)
        return floor, index

    last, growth = len(paces) - 1, _GROWTH
    floor = least_total(table)
    if repeats and np.isfinite(best):
        last = min(last, int(np.searchsorted(paces, (best * better - floor) / repeats)) - 1)
    first, tracked = _first_that_may_fit(table, paces, last, most_counts)
    if first > last:
        return ()
    # A microbatch's way takes about a pace a count: what is a step's time above the first pace
    # where all that is slower by as much is settled as well.
    soon = paces[first] * (1 + min(tracked / repeats, _MOST_AHEAD)) if tracked > 1 else 0.0
    tracked = min(2 * tracked, most_counts) if tracked > 1 else 1
    # What is to be searched, and whether its end is looked at next.
    ranges = [(floor + repeats * paces[min(first, last)], first, last, floor, True)]
    while ranges:
        _, low, high, floor, at_end = heapq.heappop(ranges)
        if repeats and np.isfinite(best):
            # No pace above this can do better, whatever the total.
            high = min(high, int(np.searchsorted(paces, (best * better - floor) / repeats)) - 1)
        if low > high or floor + repeats * paces[low] >= best * better:
            continue
        middle = high
        is_first = growth == _GROWTH and repeats * paces[low] > floor
        if not found and (np.isinf(best) or is_first):
            # What is tight is soon told.
            wanted = max(paces[low] * (1 + growth), soon) if near is None else near
            middle, growth = min(high, int(np.searchsorted(paces, wanted))), 2 * growth
        elif not at_end and not tolerance:
            middle = (low + high) // 2
        rest, index = settle(low, middle)
        near = None
        if np.isfinite(rest):
            bound = rest + repeats * paces[low]
            heapq.heappush(ranges, (bound, low, index - 1, rest, middle < high))
        if middle < high:
            bound = floor + repeats * paces[middle + 1]
            heapq.heappush(ranges, (bound, middle + 1, high, floor, True))
    met = sorted(found.values(), key=lambda candidate: candidate.latency)
    return tuple(met) if met and met[0].latency < below else ()


def price(table: StageTable, places: Sequence[Place], pace: float) -> Candidate | None:
    """What a pipeline costs at one pace, each stage with the fastest option that fits.

    Args:
        table: what stages and transfers cost.
        places: the stages' places.
        pace: seconds from one microbatch to the next.

    Returns:
        The candidate; None where a stage or a transfer is slower than the pace, or does not fit.
    """
    crossed = crossing_seconds(table, places)
    if any(max(pair) > pace for pair in crossed):
        return None
    counts = warm_up_counts(table, crossed, pace)
    options, total = [], sum(map(sum, crossed))
    for place, count in zip(places, counts, strict=True):
        cut = table.slices[place.subcluster][place.slice]
        seconds = cut.seconds_of(place.layers)
        fits = (cut.limits_of(place.layers) >= count) & (seconds <= pace)
        seconds = np.where(fits, seconds, np.inf)
        if place.layers[0] == 0 and cut.closing is not None:
            seconds = seconds + cut.closing[:, place.layers[1]]
        options.append(int(np.argmin(seconds)))
        total += float(seconds.min())
        if not np.isfinite(total):
            return None
    latency = total + (table.num_microbatches - 1) * pace
    return Candidate(tuple(places), tuple(options), tuple(counts), total, pace, latency)


def crossing_seconds(table: StageTable, places: Sequence[Place]) -> list[tuple[float, float]]:
    """The seconds of both transfers between each two stages."""
    return [
        (float(t.forward[b.layers[0]]), float(t.backward[b.layers[0]]))
        for a, b in itertools.pairwise(places)
        for t in [transfers_between(table, a, b)]
    ]


def warm_up_counts(
    table: StageTable, crossed: Sequence[tuple[float, float]], pace: float
) -> list[int]:
    """The warm-up count of each stage of a pipeline that a table allows."""
    return warm_up_counts_of(table.schedule, table.num_microbatches, crossed, pace)


def warm_up_counts_of(
    schedule: str,
    num_microbatches: int,
    crossed: Sequence[tuple[float, float]],
    pace: float,
) -> list[int]:
    """The warm-up count of each stage of a pipeline.

    Args:
        schedule: the name of a schedule of warm-up counts.
        num_microbatches: how many there are, which no count exceeds.
        crossed: both transfers between each two stages, in seconds.
        pace: seconds from one microbatch to the next.
    """
    if schedule == "gpipe":
        return [num_microbatches] * (len(crossed) + 1)
    counts = [1]
    for pair in reversed(crossed):
        counts.append(counts[-1] + extra_forwards(schedule, sum(pair) / 2, pace))
    return [min(count, num_microbatches) for count in reversed(counts)]


def transfers_between(table: StageTable, a: Place, b: Place) -> Transfers:
    """The transfers between two stages' submeshes."""
    if a.subcluster != b.subcluster:
        return table.between[a.subcluster][b.subcluster]
    _, per_node = table.nodes[a.subcluster]
    last = b.start + table.slices[b.subcluster][b.slice].num_devices - 1
    if a.start // per_node == last // per_node:
        return table.within[a.subcluster]
    return table.between[a.subcluster][a.subcluster]


def counts_at_paces(
    table: StageTable, crossed: Sequence[tuple[float, float]], slowest: float = 0.0
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """The warm-up counts that a pipeline may have, each with the least pace that gives it.

    Args:
        table: what stages and transfers cost.
        crossed: both transfers between each two stages, in seconds.
        slowest: what its slowest stage or transfer takes, which is the least pace.

    Yields:
        Paces, rising, and a warm-up count for each stage.
    """
    slowest = max(slowest, *(each for pair in crossed for each in pair), 0.0)
    paces = [slowest]
    if table.schedule == "h_1f1b":
        means = [sum(pair) / 2 for pair in crossed]
        # Where a count falls; a hair above where the division rounds.
        paces += [pace for m in means if m for pace in (2 * m, m / TOLERANCE * (1 + _ROUNDING))]
    seen: set[tuple[int, ...]] = set()
    for pace in sorted(paces):
        counts = tuple(warm_up_counts(table, crossed, pace)) if pace >= slowest else None
        if counts is not None and counts not in seen:
            seen.add(counts)
            yield pace, counts


def _own_pace(table: StageTable, candidate: Candidate) -> float:
    """The slowest stage or transfer of a candidate."""
    times = [
        float(table.slices[p.subcluster][p.slice].seconds_of(p.layers)[option])
        for p, option in zip(candidate.places, candidate.options, strict=True)
    ]
    for a, b in itertools.pairwise(candidate.places):
        transfers = transfers_between(table, a, b)
        times += [float(transfers.forward[b.layers[0]]), float(transfers.backward[b.layers[0]])]
    return max(times)


def all_paces(table: StageTable) -> FloatArray:
    """Every pace at which something changes, rising."""
    stages = [
        cut.seconds[np.isfinite(cut.seconds) & (cut.live_limits > 0)]
        for slices in table.slices
        for cut in slices
    ]
    links = [*table.within, *(each for row in table.between for each in row)]
    one_way = np.concatenate([t for link in links for t in (link.forward, link.backward)])
    changes = [*stages, one_way[one_way > 0]]
    if table.schedule == "h_1f1b":
        # Where a warm-up count falls; a hair above where the division rounds.
        mean = np.concatenate([(link.forward + link.backward) / 2 for link in links])
        mean = mean[mean > 0]
        changes += [2 * mean, mean / TOLERANCE * (1 + _ROUNDING)]
    paces = np.unique(np.concatenate(changes))
    return paces if len(paces) else np.array([1.0])


def _solve(
    table: StageTable, tracked: int, most_counts: int, pace: float, worth: float
) -> tuple[float, Candidate | None, int]:
    """The least total at one pace.

    Most models fit whatever the warm-up counts, so they are first left out of account; only where
    the pipeline found so does not fit, and could still be worth it, they are tracked, as many as it
    has at first. The last one that is tracked stands for all above it, so what fits is exact.

    Args:
        table: what stages and transfers cost.
        tracked: how many warm-up counts are told from each other at first.
        most_counts: the largest warm-up count that has to be told from the ones above it.
        pace: seconds from one microbatch to the next.
        worth: no candidate is needed whose total is this or more.

    Returns:
        A floor under the totals at this pace and below; the candidate, if one is needed; how many
        counts were told from each other.
    """
    gpipe = table.schedule == "gpipe"
    reach = _reach(table, most_counts, pace) if most_counts > 1 else None
    if reach is not None and reach.least_count is None:
        return np.inf, None, tracked
    while True:
        counts = (table.num_microbatches,) if gpipe else tuple(range(1, tracked + 1))
        total, places = FixedPace(table, counts, pace, reach).solution()
        if places is None:
            return np.inf, None, tracked
        candidate = price(table, places, pace)
        if candidate is not None and candidate.total <= total * (1 + _ROUNDING):
            return total, candidate, tracked
        if total >= worth:
            return total, None, tracked
        assert not gpipe, "one count has one price"
        assert tracked < most_counts, "all counts were told from each other"
        reached = warm_up_counts(table, crossing_seconds(table, places), pace)[0]
        tracked = min(max(reached, tracked + max(1, tracked // 2)), most_counts)


def _first_that_may_fit(
    table: StageTable, paces: FloatArray, last: int, most_counts: int
) -> tuple[int, int]:
    """Where the paces begin at which a pipeline may fit, about, and its least warm-up count there.

    Args:
        table: what stages and transfers cost.
        paces: paces, rising.
        last: the last of them that is of interest.
        most_counts: the largest warm-up count that has to be told from the ones above it.

    Returns:
        The place of a pace: there is nothing below it; that after the last one where there is
        nothing at all. And how many counts are to be told from each other: 1 where it is not
        memory that rules out the paces below.
    """
    first = first_that_may_hold(table, paces)
    if first > last or most_counts == 1:
        return first, 1

    def least_count(place: int) -> int | None:
        return _reach(table, most_counts, float(paces[place])).least_count

    if least_count(first) is not None:
        return first, 1
    # At the first there is nothing; at the one after that is looked for, there may be.
    past, step = first, 2 * _GROWTH
    while True:
        past = min(last, int(np.searchsorted(paces, paces[past] * (1 + step))))
        count, step = least_count(past), 2 * step
        if count is not None:
            break
        first = past
        if past == last:
            return last + 1, 1
    while past - first > 1 and paces[past] > paces[first] * (1 + _NEARLY):
        wanted = int(np.searchsorted(paces, (paces[first] * paces[past]) ** 0.5))
        middle = min(max(wanted, first + 1), past - 1)
        found = least_count(middle)
        if found is None:
            first = middle
        else:
            past, count = middle, found
    return first + 1, count


def _reach(table: StageTable, most_counts: int, pace: float) -> CountedReach:
    if table.schedule == "gpipe":
        return CountedReach(table, pace, table.num_microbatches, 1)
    return CountedReach(table, pace, 1, min(most_counts, MOST_COUNTS))


def _most_counts(table: StageTable) -> int:
    """The largest warm-up count that has to be told from the ones above it."""
    devices = sum(nodes * per_node for nodes, per_node in table.nodes)
    stages = min(table.num_layers, devices, table.max_stages or devices)
    # No transfer takes longer than the pace, so no boundary adds more than this.
    reached = 1 + (stages - 1) * max(extra_forwards(table.schedule, 1.0, 1.0), 1)
    limits = [cut.live_limits for slices in table.slices for cut in slices]
    binding = [each[each < table.num_microbatches].max(initial=0) for each in limits]
    return int(min(table.num_microbatches, reached, max(binding, default=0) + 1))
