"""Several pipelines beside each other: a cluster divided among them, and a batch by their speed.

Each pipeline gets nodes of its own and as many microbatches as it can compute in the time that the
others take; at the end of a step they exchange the gradients of what they all hold. It pays where a
pipeline over the whole cluster would be long, or would cross slow links for each microbatch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from hetjax.mesh.cluster import Cluster
from hetjax.pipeline.program.traced_program import num_bytes
from hetjax.planner.costs.cost_model import least_seconds
from hetjax.planner.costs.sharing_cost import SharedParameters, sharing_seconds
from hetjax.planner.harp.simulated_search import CLOSED_FORM_EXCESS
from hetjax.planner.harp.table_making import ALL_ORDERS_UP_TO
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.prices import node_prices, step_cost
from hetjax.planner.plan.stage_plan import Member, PipelinePlan
from hetjax.planner.problem.problem import PlanningProblem

_WORTH = 0.99
"""Divisions of a cluster that can save less than 1% of the score are not planned for."""


@dataclass(frozen=True)
class SubclusterPart:
    """What a pipeline gets of a subcluster.

    Args:
        subcluster: its name.
        nodes: how many nodes.
        devices_per_node: how many devices of each.
        start: the first device, counted in the subcluster.
    """

    subcluster: str
    nodes: int
    devices_per_node: int
    start: int


ClusterPart = tuple[SubclusterPart, ...]
"""What one pipeline gets of a cluster."""

Timed = tuple[float, Plan]
"""Seconds of a step, and the plan that takes them."""

BestOn = Callable[[PlanningProblem, float], Timed | None]
"""The best plan of one pipeline for a problem; None where nothing fits, or only what takes these
seconds or more by Harp's closed form."""


def divisions(cluster: Cluster, most: int) -> Iterator[tuple[ClusterPart, ...]]:
    """The ways to divide a cluster among several pipelines.

    All subclusters or some of them are put into groups in every way (where there are many: all in
    one group, or each alone), and each group is cut into equal parts: of its nodes, or of the
    devices of a node that is alone in its subcluster.

    Args:
        cluster: the cluster.
        most: how many pipelines there are at most.

    Yields:
        The parts that pipelines get, two or more.

    Example:
        >>> from hetjax.mesh import Link, Subcluster, kind
        >>> near = Link(25e9, 10e-6)
        >>> cluster = Cluster("home", (Subcluster("fast", kind("RTX4090"), 2, 4, near, near),))
        >>> for parts in divisions(cluster, 4):
        ...     print([taken.start for part in parts for taken in part])
        [0, 4]
    """
    for groups in _groupings(range(len(cluster.subclusters))):
        choices = [
            [n for n in range(1, most + 1) if _divides(cluster, group, n)] for group in groups
        ]
        for counts in itertools.product(*choices):
            if 1 < sum(counts) <= most:
                yield tuple(
                    part
                    for group, count in zip(groups, counts, strict=True)
                    for part in _equal_parts(cluster, group, count)
                )


def several_pipelines(
    problem: PlanningProblem, look: BestOn, find: BestOn, below: float = float("inf")
) -> Timed | None:
    """The best plan of several pipelines, by the problem's objective.

    Microbatches have one size. For each division of the cluster their numbers are such that the
    slowest pipeline is as fast as it can be, which is exact where more microbatches take longer: no
    number is faster once it does not help to give one of the slowest pipeline's to another.
    Divisions are tried in the order of what they take at least, and the best of them is planned
    anew with the better of two planners.

    Args:
        problem: what to plan; its `max_pipelines` limits the number of pipelines.
        look: plans one pipeline, soon.
        find: plans one pipeline, well.
        below: no plan is wanted whose score is this or more, nor one that must be nearly so.

    Returns:
        Seconds of a step, with the exchange of gradients, and the plan; None where nothing fits, or
        nothing can be better.
    """
    most = min(problem.options.max_pipelines, problem.num_microbatches)
    by_least = sorted(
        ((least_score(problem, parts), parts) for parts in divisions(problem.cluster, most)),
        key=lambda pair: pair[0],
    )
    best: tuple[ClusterPart, ...] | None = None
    known = _KnownPipelines()
    for least, parts in by_least:
        if least >= below * _WORTH:
            break
        division = _ClusterDivision(problem, parts, look, known)
        if division.floor(below) >= below * _WORTH:
            continue
        timed = division.best()
        if timed is not None and score_of(problem, timed[1], timed[0]) < below:
            below, best = score_of(problem, timed[1], timed[0]), parts
    return None if best is None else _ClusterDivision(problem, best, find, _KnownPipelines()).best()


@dataclass(frozen=True)
class _KnownPipelines:
    """What was planned before: for each pipeline what it takes, or what it takes at least."""

    plans: dict[tuple[object, int], Timed | None] = field(default_factory=dict)
    floors: dict[tuple[object, int], float] = field(default_factory=dict)


class _ClusterDivision:
    """Pipelines on given parts of a cluster.

    Args:
        problem: what to plan.
        parts: what the pipelines get.
        best_on: plans one pipeline.
        known: what was planned before, on parts that may be the same.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        parts: Sequence[ClusterPart],
        best_on: BestOn,
        known: _KnownPipelines,
    ):
        self._problem, self._parts, self._best_on, self._known = problem, parts, best_on, known
        self._speeds = [1 / least_seconds(problem, _devices(part)) for part in parts]

    def floor(self, below: float) -> float:
        """A floor under the score, by one number of microbatches for each pipeline.

        With any other numbers some pipeline has more than here, and takes no less time.

        Args:
            below: a score from which on it does not matter by how much it is more.
        """
        counts = _proportional(self._problem.num_microbatches, self._speeds)
        in_time = self._problem.options.objective == "step_time"
        most = below if in_time else float("inf")
        fastest = min(
            self._seconds_up_to(part, count, most)
            for part, count in zip(self._parts, counts, strict=True)
        )
        return least_score(self._problem, self._parts, fastest)

    def best(self) -> Timed | None:
        """The best plan; None where a pipeline does not fit."""
        counts = share_out(
            self._problem.num_microbatches,
            [lambda count, part=part: self._seconds(part, count) for part in self._parts],
            self._speeds,
        )
        timed = [self._best(part, count) for part, count in zip(self._parts, counts, strict=True)]
        found = [each for each in timed if each]
        if len(found) < len(self._parts):
            return None
        plan = _joined(self._problem, self._parts, [plan for _, plan in found])
        shared = SharedParameters.of(plan, self._problem.program)
        exchange = max(sharing_seconds(plan, shared))
        return max(seconds for seconds, _ in found) + exchange, plan

    def _best(self, part: ClusterPart, count: int) -> Timed | None:
        key = _key(part, count)
        plans = self._known.plans
        if key not in plans:
            plans[key] = self._best_on(_problem_on(self._problem, part, count), float("inf"))
        return plans[key]

    def _seconds_up_to(self, part: ClusterPart, count: int, most: float) -> float:
        """What a pipeline takes, or `most` where it is about that or more."""
        key, known = _key(part, count), self._known
        if key not in known.plans:
            if known.floors.get(key, 0.0) >= most:
                return most
            problem = _problem_on(self._problem, part, count)
            found = self._best_on(problem, most * (1 + CLOSED_FORM_EXCESS))
            if found is None and most < float("inf"):
                known.floors[key] = most
                return most
            known.plans[key] = found
        return self._seconds(part, count)

    def _seconds(self, part: ClusterPart, count: int) -> float:
        found = self._best(part, count)
        return found[0] if found else float("inf")


def _key(part: ClusterPart, count: int) -> tuple[object, int]:
    """What tells whether two pipelines are planned alike."""
    return tuple(replace(taken, start=0) for taken in part), count


def least_score(
    problem: PlanningProblem, parts: Sequence[ClusterPart], slowest: float | None = None
) -> float:
    """A floor under the score of a plan whose pipelines are on given parts of a cluster.

    All devices compute as fast as they can, and pipelines exchange the gradients of all parameters,
    and their new values, over all their links at once.

    Args:
        problem: what to plan.
        parts: what the pipelines get.
        slowest: what the slowest pipeline takes at least before that, in seconds, where more is
            known than that.

    Returns:
        Seconds, or what they cost.
    """
    devices: Counter[str] = Counter()
    for part in parts:
        devices.update(_devices(part))
    computing = problem.num_microbatches * least_seconds(problem, devices)
    size = sum(num_bytes(problem.program.avals[value]) for value in problem.program.parameters)
    # Who updates nothing sends its gradients and gets new values; who shares in updates, less.
    moved = 2 * size * (1 - 1 / len(parts))
    exchange = max(moved / _exchange_bandwidth(problem.cluster, part) for part in parts)
    seconds = max(computing, slowest or 0.0) + exchange
    if problem.options.objective == "step_time":
        return seconds
    names = [subcluster.name for subcluster in problem.cluster.subclusters]
    prices = dict(zip(names, node_prices(problem.cluster), strict=True))
    # Every pipeline rents a node, or has its share of one, and all work is done somewhere.
    waiting = sum(
        min(
            prices[each.subcluster]
            * each.devices_per_node
            / problem.cluster.subcluster(each.subcluster).devices_per_node
            for each in part
        )
        for part in parts
    )
    working = problem.num_microbatches * min(
        prices[name] * least_seconds(problem, {name: subcluster.devices_per_node})
        for name, subcluster in zip(names, problem.cluster.subclusters, strict=True)
        if name in devices
    )
    return max(working + exchange * waiting, seconds * waiting)


def _exchange_bandwidth(cluster: Cluster, part: ClusterPart) -> float:
    """Bytes/s that leave a part for others at most, of one direction."""
    fastest = 0.0
    for taken in part:
        subcluster = cluster.subcluster(taken.subcluster)
        links = [link for a, b, link in cluster.links if subcluster.name in (a, b)]
        far = max(link.bandwidth for link in (subcluster.inter_node, *links))
        far *= subcluster.num_cards
        near = subcluster.intra_node.bandwidth * taken.devices_per_node
        in_node = taken.devices_per_node < subcluster.devices_per_node
        fastest += taken.nodes * max(far, near * in_node)
    return fastest


def score_of(problem: PlanningProblem, plan: Plan, step_time: float) -> float:
    """What the objective of a problem makes least: seconds of a step, or its cost."""
    if problem.options.objective == "step_time":
        return step_time
    cost = step_cost(plan, step_time)
    assert cost is not None, "the problem was stated with prices"
    return cost


def share_out(
    total: int, seconds: Sequence[Callable[[int], float]], speeds: Sequence[float]
) -> tuple[int, ...]:
    """How many microbatches each pipeline gets, so that the slowest is as fast as it can be.

    Args:
        total: how many there are, at least one for each.
        seconds: for each pipeline what some number takes it, infinite for one that does not fit;
            more never take less.
        speeds: a first guess at their speeds, in any unit.

    Returns:
        Numbers of 1 or more.

    Example:
        >>> share_out(9, [lambda n: 1.0 * n, lambda n: 2.0 * n], [1.0, 1.0])
        (6, 3)
    """
    counts = _proportional(total, speeds)
    for _ in range(3):
        times = [takes(count) for takes, count in zip(seconds, counts, strict=True)]
        if max(times) == float("inf"):
            break
        counts = _proportional(total, [n / t for n, t in zip(counts, times, strict=True)])
    while True:
        times = [takes(count) for takes, count in zip(seconds, counts, strict=True)]
        slowest = times.index(max(times))
        if counts[slowest] == 1:
            return tuple(counts)
        if times[slowest] == float("inf") == seconds[slowest](1):
            return tuple(counts)  # It fits with no number, of which there may be thousands.
        others = [place for place in range(len(counts)) if place != slowest]
        then, receiver = min((seconds[place](counts[place] + 1), place) for place in others)
        if then >= times[slowest]:
            return tuple(counts)
        counts[slowest] -= 1
        counts[receiver] += 1


def _proportional(total: int, weights: Sequence[float]) -> list[int]:
    """Numbers of 1 or more with a sum, as near to proportional as they can be."""
    spare = total - len(weights)
    exact = [spare * weight / sum(weights) for weight in weights]
    counts = [int(each) for each in exact]
    rest = sorted(range(len(weights)), key=lambda place: counts[place] - exact[place])
    for place in rest[: spare - sum(counts)]:
        counts[place] += 1
    return [1 + count for count in counts]


def _groupings(places: Sequence[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """The ways to put subclusters into groups."""
    if len(places) <= ALL_ORDERS_UP_TO:
        for count in range(len(places), 0, -1):
            for chosen in itertools.combinations(places, count):
                yield from _set_partitions(chosen)
    else:
        yield (tuple(places),)
        yield tuple((place,) for place in places)


def _set_partitions(places: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    if not places:
        yield ()
        return
    first, rest = places[0], places[1:]
    for others in _set_partitions(rest):
        yield ((first,), *others)
        for at, group in enumerate(others):
            yield (*others[:at], (first, *group), *others[at + 1 :])


def _divides(cluster: Cluster, group: Sequence[int], count: int) -> bool:
    """Whether a group of subclusters can be cut into so many equal parts."""
    subclusters = [cluster.subclusters[place] for place in group]
    return all(
        s.nodes % count == 0 or (s.nodes == 1 and s.devices_per_node % count == 0)
        for s in subclusters
    )


def _equal_parts(cluster: Cluster, group: Sequence[int], count: int) -> Iterator[ClusterPart]:
    for number in range(count):
        part = []
        for subcluster in (cluster.subclusters[place] for place in group):
            nodes, per_node = subcluster.nodes, subcluster.devices_per_node
            if nodes % count == 0:
                nodes //= count
            else:
                per_node //= count
            part.append(SubclusterPart(subcluster.name, nodes, per_node, number * nodes * per_node))
        yield tuple(part)


def _problem_on(problem: PlanningProblem, part: ClusterPart, count: int) -> PlanningProblem:
    """The problem of one pipeline: some of the cluster, and of the microbatches."""
    whole = problem.cluster.part([taken.subcluster for taken in part])
    subclusters = tuple(
        each.reduced(taken.nodes, taken.devices_per_node)
        for each, taken in zip(whole.subclusters, part, strict=True)
    )
    cluster = replace(whole, subclusters=subclusters)
    options = replace(
        problem.options,
        min_stages=min(problem.options.min_stages, cluster.num_devices),
        max_pipelines=1,
        objective="step_time",
        # Who shares a stage need not share a batch.
        union_stages=False,
    )
    return replace(problem, cluster=cluster, num_microbatches=count, options=options)


def _devices(part: ClusterPart) -> dict[str, int]:
    """How many devices of each subcluster a part has."""
    return {taken.subcluster: taken.nodes * taken.devices_per_node for taken in part}


def _joined(problem: PlanningProblem, parts: Sequence[ClusterPart], plans: Sequence[Plan]) -> Plan:
    """The plan of several pipelines, each on its part of the cluster."""
    pipelines = tuple(_moved(plan.pipeline, part) for plan, part in zip(plans, parts, strict=True))
    return replace(plans[0], cluster=problem.cluster, pipelines=pipelines)


def _moved(pipeline: PipelinePlan, part: ClusterPart) -> PipelinePlan:
    starts = {taken.subcluster: taken.start for taken in part}

    def moved(member: Member) -> Member:
        submesh = member.submesh
        start = submesh.start + starts[submesh.subcluster]
        return replace(member, submesh=replace(submesh, start=start))

    stages = tuple(replace(s, members=tuple(map(moved, s.members))) for s in pipeline.stages)
    return replace(pipeline, stages=stages)
