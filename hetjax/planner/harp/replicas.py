"""Several pipelines beside each other: a cluster divided among them, and a batch by their speed.

Each pipeline gets nodes of its own and as many microbatches as it can compute in the time that the
others take; at the end of a step they exchange the gradients of what they all hold. It pays where a
pipeline over the whole cluster would be long, or would cross slow links for each microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hetjax.mesh.cluster import Cluster
from hetjax.pipeline.program.traced_program import num_bytes
from hetjax.planner.costs.pass_cost import least_seconds
from hetjax.planner.costs.sharing_cost import SharedParameters, sharing_seconds
from hetjax.planner.harp.batch_shares import BatchShare, share_out
from hetjax.planner.harp.divisions import ClusterPart, devices_of, divisions
from hetjax.planner.harp.simulated_search import CLOSED_FORM_EXCESS
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.prices import node_prices, step_cost
from hetjax.planner.plan.stage_plan import Member, PipelinePlan
from hetjax.planner.problem.problem import PlanningProblem

_WORTH = 0.99
"""Divisions of a cluster that can save less than 1% of the score are not planned for."""

Timed = tuple[float, Plan]
"""Seconds of a step, and the plan that takes them."""

BestOn = Callable[[PlanningProblem, float], Timed | None]
"""The best plan of one pipeline for a problem; None where nothing fits, or only what takes these
seconds or more by Harp's closed form."""


def several_pipelines(
    problems: Sequence[PlanningProblem], look: BestOn, find: BestOn, below: float = float("inf")
) -> Timed | None:
    """The best plan of several pipelines, by the problems' objective.

    The microbatches of a pipeline have a size of one of the problems, each pipeline's its own. For
    each division of the cluster their sizes and numbers are such that the slowest pipeline is as
    fast as it can be, which is exact where more microbatches take longer. Divisions are tried in
    the order of what they take at least, and the best of them is planned anew, with the sizes that
    were found, by the better of two planners.

    Args:
        problems: what to plan, for microbatches of one size or of several; their `max_pipelines`
            limits the number of pipelines.
        look: plans one pipeline, soon.
        find: plans one pipeline, well.
        below: no plan is wanted whose score is this or more, nor one that must be nearly so.

    Returns:
        Seconds of a step, with the exchange of gradients, and the plan; None where nothing fits, or
        nothing can be better.
    """
    first = problems[0]
    most = min(first.options.max_pipelines, max(each.num_microbatches for each in problems))
    least = first.options.min_stages
    large = (
        parts
        for parts in divisions(first.cluster, most, first.dtype)
        if all(sum(devices_of(part).values()) >= least for part in parts)
    )
    floors = ((_floor(problems, parts), parts) for parts in large)
    best: Plan | None = None
    best_parts: tuple[ClusterPart, ...] = ()
    known = _KnownPipelines()
    for floor, parts in sorted(floors, key=lambda pair: pair[0].score()):
        worth = below * _WORTH
        if floor.score() >= worth:
            break
        division = _ClusterDivision([problems] * len(parts), parts, look, known)
        timed = division.best(floor.seconds_within(worth))
        if timed is not None and score_of(first, timed[1], timed[0]) < below:
            below, best, best_parts = score_of(first, timed[1], timed[0]), timed[1], parts
    if best is None:
        return None
    chosen = [
        [each for each in problems if each.microbatch_size == pipeline.microbatch_size]
        for pipeline in best.pipelines
    ]
    return _ClusterDivision(chosen, best_parts, find, _KnownPipelines()).best()


@dataclass(frozen=True)
class _KnownPipelines:
    """What was planned before: for each pipeline what it takes, or what it takes at least."""

    plans: dict[_Key, Timed | None] = field(default_factory=dict)
    floors: dict[_Key, float] = field(default_factory=dict)

    def floor(self, key: _Key) -> float:
        """What a pipeline takes at least: no less than one with fewer microbatches."""
        *same, count = key
        return max(
            (t for (*of, fewer), t in self.floors.items() if of == same and fewer <= count),
            default=0.0,
        )


_Key = tuple[ClusterPart, int, int]


class _ClusterDivision:
    """Pipelines on given parts of a cluster.

    Args:
        problems: for each of the pipelines what to plan, for microbatches of one size or more.
        parts: what the pipelines get.
        best_on: plans one pipeline.
        known: what was planned before, on parts that may be the same.
    """

    def __init__(
        self,
        problems: Sequence[Sequence[PlanningProblem]],
        parts: Sequence[ClusterPart],
        best_on: BestOn,
        known: _KnownPipelines,
    ):
        self._parts, self._best_on, self._known = parts, best_on, known
        self._problems = [{each.microbatch_size: each for each in of_one} for of_one in problems]

    def best(self, most: float = float("inf")) -> Timed | None:
        """The best plan.

        Args:
            most: no plan is wanted whose pipelines take this or longer, before they exchange what
                they hold.

        Returns:
            Seconds and the plan; None where a pipeline does not fit, or nothing is as it is wanted.
        """
        problem = next(iter(self._problems[0].values()))
        shares = share_out(
            problem.num_microbatches * problem.microbatch_size,
            [list(of_one) for of_one in self._problems],
            [
                [least_seconds(each, devices_of(part)) for each in of_one.values()]
                for of_one, part in zip(self._problems, self._parts, strict=True)
            ],
            self._seconds,
            most,
        )
        if shares is None:
            return None
        found = [self._known.plans[self._key(place, each)] for place, each in enumerate(shares)]
        timed = [each for each in found if each]
        assert len(timed) == len(found), "what is shared out was planned"
        plan = _joined(problem, self._parts, [plan for _, plan in timed])
        shared = SharedParameters.of(plan, problem.program)
        return max(seconds for seconds, _ in timed) + max(sharing_seconds(plan, shared)), plan

    def _seconds(self, pipeline: int, share: BatchShare, most: float) -> float:
        """What a pipeline takes, or `most` where it is about that or more."""
        key, known = self._key(pipeline, share), self._known
        if key not in known.plans:
            if known.floor(key) >= most:
                return most
            problem = self._problems[pipeline][share.size]
            smaller = _problem_on(problem, self._parts[pipeline], share.count)
            found = self._best_on(smaller, most * (1 + CLOSED_FORM_EXCESS))
            if found is None and most < float("inf"):
                known.floors[key] = most
                return most
            known.plans[key] = found
        found = known.plans[key]
        return found[0] if found else float("inf")

    def _key(self, pipeline: int, share: BatchShare) -> _Key:
        """What tells whether two pipelines are planned alike."""
        part = tuple(replace(taken, start=0) for taken in self._parts[pipeline])
        return part, share.size, share.count


@dataclass(frozen=True)
class _Floor:
    """A floor under the score of a plan whose pipelines are on given parts of a cluster.

    Args:
        computing: what computing takes at least, in seconds.
        exchange: the same for the exchange of gradients after that.
        working: what computing costs at least; 0 where seconds are the score.
        rate: what a second of all pipelines costs at least; 1 where seconds are the score.
    """

    computing: float
    exchange: float
    working: float
    rate: float

    def score(self) -> float:
        """Seconds, or what they cost."""
        seconds = self.computing + self.exchange
        return max(self.working + self.exchange * self.rate, seconds * self.rate)

    def seconds_within(self, score: float) -> float:
        """From which seconds of the slowest pipeline on a score is reached."""
        return score / self.rate - self.exchange


def least_score(problems: Sequence[PlanningProblem], parts: Sequence[ClusterPart]) -> float:
    """A floor under the score of a plan whose pipelines are on given parts of a cluster.

    All devices compute as fast as they can, and pipelines exchange the gradients of all parameters
    that are updated, and their new values, over all their links at once.

    Args:
        problems: what to plan, for microbatches of one size or of several.
        parts: what the pipelines get.

    Returns:
        Seconds, or what they cost.
    """
    return _floor(problems, parts).score()


def _floor(problems: Sequence[PlanningProblem], parts: Sequence[ClusterPart]) -> _Floor:
    problem, cluster = problems[0], problems[0].cluster
    examples = problem.num_microbatches * problem.microbatch_size

    def of_example(devices: Mapping[str, int]) -> float:
        return min(least_seconds(each, devices) / each.microbatch_size for each in problems)

    computing = examples / sum(1 / of_example(devices_of(part)) for part in parts)
    program = problem.program
    size = sum(
        num_bytes(program.avals[value])
        for leaf, value in enumerate(program.parameters)
        if leaf not in program.frozen.without_update
    )
    # Who updates nothing sends its gradients and gets new values; who shares in updates, less.
    moved = 2 * size * (1 - 1 / len(parts))
    exchange = max(moved / _exchange_bandwidth(cluster, part) for part in parts)
    if problem.options.objective == "step_time":
        return _Floor(computing, exchange, 0.0, 1.0)
    names = [subcluster.name for subcluster in cluster.subclusters]
    prices = dict(zip(names, node_prices(cluster), strict=True))
    # Every pipeline rents a node, or has its share of one, and all work is done somewhere.
    rate = sum(
        min(
            prices[each.subcluster]
            * each.devices_per_node
            / cluster.subcluster(each.subcluster).devices_per_node
            for each in part
        )
        for part in parts
    )
    used = {each.subcluster for part in parts for each in part}
    working = examples * min(
        prices[name] * of_example({name: subcluster.devices_per_node})
        for name, subcluster in zip(names, cluster.subclusters, strict=True)
        if name in used
    )
    return _Floor(computing, exchange, working, rate)


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


def _problem_on(problem: PlanningProblem, part: ClusterPart, count: int) -> PlanningProblem:
    """The problem of one pipeline: some of the cluster, and of the microbatches.

    Of network cards that others use too, it has the share of its devices.
    """
    whole = problem.cluster.part([taken.subcluster for taken in part])
    taken_of = list(zip(whole.subclusters, part, strict=True))
    shares = {each.name: each.card_share(taken.devices_per_node) for each, taken in taken_of}
    cluster = replace(
        whole,
        subclusters=tuple(
            each.reduced(taken.nodes, taken.devices_per_node) for each, taken in taken_of
        ),
        links=tuple(
            (a, b, replace(link, bandwidth=link.bandwidth * min(shares[a], shares[b])))
            for a, b, link in whole.links
        ),
    )
    options = replace(
        problem.options,
        max_pipelines=1,
        objective="step_time",
        # Who shares a stage need not share a batch.
        union_stages=False,
    )
    return replace(problem, cluster=cluster, num_microbatches=count, options=options)


def _joined(problem: PlanningProblem, parts: Sequence[ClusterPart], plans: Sequence[Plan]) -> Plan:
    """The plan of several pipelines, each on its part of the cluster, with layers of its own."""
    layers = tuple(sorted({position for plan in plans for position in plan.layers}))
    pipelines = tuple(
        _moved(plan.pipeline, part, [layers.index(position) for position in plan.layers])
        for plan, part in zip(plans, parts, strict=True)
    )
    return replace(plans[0], cluster=problem.cluster, layers=layers, pipelines=pipelines)


def _moved(pipeline: PipelinePlan, part: ClusterPart, layers: Sequence[int]) -> PipelinePlan:
    """A pipeline on its part of a cluster, whose layers have other numbers."""
    starts = {taken.subcluster: taken.start for taken in part}

    def moved(member: Member) -> Member:
        submesh = member.submesh
        start = submesh.start + starts[submesh.subcluster]
        return replace(member, submesh=replace(submesh, start=start))

    def renumbered(run: tuple[int, int]) -> tuple[int, int]:
        return layers[run[0]], layers[run[1]]

    stages = tuple(
        replace(
            stage,
            layers=renumbered(stage.layers),
            members=tuple(map(moved, stage.members)),
            recompute_layers=tuple(map(renumbered, stage.recompute_layers)),
        )
        for stage in pipeline.stages
    )
    return replace(pipeline, stages=stages)
