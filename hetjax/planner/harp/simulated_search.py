"""The search by simulated steps: what the closed form finds is timed, and improved.

The closed form, Harp's equation 12, leaves out how links of unlike speed fill and drain, that
warm-up counts are whole numbers, what stages with the same parameters exchange, and that the update
of a stage may end after those before it. So it only names pipelines that are worth timing: the best
of all, and those that are nearly so at a few paces. The best of these by the clock are improved
step by step, until no neighbour is better.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hetjax.planner.costs.pass_cost import least_seconds
from hetjax.planner.harp.candidate_clock import CandidateClock
from hetjax.planner.harp.candidate_plans import slice_of
from hetjax.planner.harp.cost_search import rented_nodes, search_by_cost
from hetjax.planner.harp.fixed_pace import Place
from hetjax.planner.harp.near_best import near_best
from hetjax.planner.harp.neighbours import descend, fastest_ways
from hetjax.planner.harp.restriction import with_nodes
from hetjax.planner.harp.search import Candidate, search
from hetjax.planner.harp.stage_table import StageTable
from hetjax.planner.plan.prices import node_prices, price_of_nodes
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.layer_runs import Runs

CLOSED_FORM_EXCESS = 0.15
"""By what share a step may be longer by the closed form than by the clock: whoever looks for one
that beats a known step by the clock need not look at what is longer than it by more."""

_TASKS = 400_000
"""How many tasks of candidates are timed, about: some tenths of a second on a usual processor."""

_AT_LEAST = 8
"""So many candidates are timed, however many tasks they have."""

_IMPROVED = 4
"""The descent begins at so many candidates."""

_RENTED = 4
"""For so many numbers of rented nodes, the cheapest, pipelines near the best are timed."""


@dataclass(frozen=True)
class Judged:
    """A candidate and what its simulation says.

    Args:
        candidate: the candidate.
        makespan: seconds of its step.
        score: what the objective makes least: these seconds, or what they cost.
        num_devices: how many devices it uses.
    """

    candidate: Candidate
    makespan: float
    score: float
    num_devices: int

    @property
    def closed_form_score(self) -> float:
        """The score by the closed form."""
        return self.score * self.candidate.latency / self.makespan


def simulated_search(
    problem: PlanningProblem,
    runs: Runs,
    table: StageTable,
    met: Sequence[Candidate],
    effort: float = 1.0,
) -> tuple[Judged, ...]:
    """Find the pipeline whose simulated step has the least time, or the least cost.

    Args:
        problem: what to plan.
        runs: the work of every run of its layers.
        table: what stages and transfers cost.
        met: what `first_look` found.
        effort: what share of the candidates is timed that usually are.

    Returns:
        Candidates, the best first.
    """
    return search_by_clock(
        table, met, CandidateClock.of(problem, runs, table), _prices(problem), effort
    )


def search_by_clock(
    table: StageTable,
    met: Sequence[Candidate],
    clock: CandidateClock,
    prices: Sequence[float] | None = None,
    effort: float = 1.0,
) -> tuple[Judged, ...]:
    """Find the pipeline of the least time by a clock, or of the least cost.

    Args:
        table: what stages and transfers cost.
        met: what is the best by the closed form, and nearly so; one or more.
        clock: tells what a step takes.
        prices: what a node of each subcluster costs a second, where the cost counts.
        effort: what share of the candidates is timed that usually are.

    Returns:
        Candidates, the best first.
    """
    judge = _Judge(table, clock, prices, effort)
    judge.time(met)
    judge.time_ways(dict.fromkeys(each.places for each in met))
    judge.time_ways(dict.fromkeys(_worth_timing(table, judge, met)))
    for each in _unlike_first(judge.ranked())[:_IMPROVED]:
        if judge.may_time(each.candidate):
            descend(table, each.candidate, judge.score, judge.may_time)
    return judge.ranked()


def _unlike_first(ranked: Sequence[Judged]) -> list[Judged]:
    """The best of each number of stages, then the others."""
    first = {len(each.candidate.places): each for each in reversed(ranked)}
    bests = {id(each) for each in first.values()}
    return sorted(ranked, key=lambda each: id(each) not in bests)


def first_look(
    problem: PlanningProblem,
    runs: Runs,
    table: StageTable,
    parts: Iterable[StageTable] = (),
    near: float | None = None,
    tolerance: float = 0.0,
    below: float = float("inf"),
) -> tuple[Judged, ...]:
    """Time what is the best by the closed form.

    Args:
        problem: what to plan.
        runs: the work of every run of its layers.
        table: what stages and transfers cost.
        parts: tables that allow less, the larger ones first, whose best are timed as well: these
            may be none of the best of the whole, by a form that knows nothing of what stages share.
        near: as for `hetjax.planner.harp.search.search`.
        tolerance: as there.
        below: nothing is wanted whose score by the closed form is this or more.

    Returns:
        Candidates, the best first; empty where nothing fits, or only what is not wanted.
    """
    judge = _Judge(table, CandidateClock.of(problem, runs, table), _prices(problem))
    whole = _closed_form(table, judge, near, tolerance, below)
    judge.time(whole[:_AT_LEAST])
    bests = [(table, whole[0])] if whole else []
    for part in parts if whole else ():
        if any(_is_best_of(best, larger, part) for larger, best in bests):
            continue
        if judge.prices is not None or _least_makespan(problem, part) < judge.best().makespan:
            limit = judge.best().score * (1 + CLOSED_FORM_EXCESS)
            met = _closed_form(part, judge, below=limit)
            judge.time(met[:_AT_LEAST])
            bests += [(part, met[0])] if met else []
    return judge.ranked()


def _prices(problem: PlanningProblem) -> Sequence[float] | None:
    """What a node of each subcluster costs a second; None where the cost does not count."""
    return node_prices(problem.cluster) if problem.options.objective == "cost" else None


def _is_best_of(best: Candidate, larger: StageTable, part: StageTable) -> bool:
    """Whether the best of a table is that of one that allows no more, since that allows it."""
    allows_more = all(n >= m for (n, _), (m, _) in zip(larger.nodes, part.nodes, strict=True))
    rented = zip(rented_nodes(larger, best), part.nodes, strict=True)
    stages = part.max_stages or len(best.places)
    return allows_more and len(best.places) <= stages and all(n <= m for n, (m, _) in rented)


def _closed_form(
    table: StageTable,
    judge: _Judge,
    near: float | None = None,
    tolerance: float = 0.0,
    below: float = float("inf"),
) -> tuple[Candidate, ...]:
    """The best by the closed form, and what was met on the way."""
    if judge.prices is None:
        return search(table, near, tolerance, below)
    return search_by_cost(table, judge.prices, below)


def _least_makespan(problem: PlanningProblem, part: StageTable) -> float:
    """What a part takes at least."""
    devices = {
        subcluster.name: nodes * per_node
        for subcluster, (nodes, per_node) in zip(
            problem.cluster.subclusters, part.nodes, strict=True
        )
    }
    return problem.num_microbatches * least_seconds(problem, devices)


def _worth_timing(
    table: StageTable, judge: _Judge, found: Sequence[Candidate]
) -> Iterator[tuple[Place, ...]]:
    """Pipelines besides those that are the best by the closed form."""
    best = judge.best()
    number = judge.left(best.candidate) // 2
    if judge.prices is None:
        yield from near_best(table, best.makespan, number)
        return
    cheapest = sorted(found, key=judge.closed_form_score)
    rented = list(dict.fromkeys(rented_nodes(table, each) for each in cheapest))[:_RENTED]
    for nodes in rented:
        most = best.score / price_of_nodes(judge.prices, nodes)
        yield from near_best(with_nodes(table, nodes), most, number // len(rented))


class _Judge:
    """Times candidates and keeps what it found, until it has timed enough."""

    def __init__(
        self,
        table: StageTable,
        clock: CandidateClock,
        prices: Sequence[float] | None,
        effort: float = 1.0,
    ):
        self.prices = prices
        self._table, self._clock = table, clock
        self._makespans: dict[_Key, tuple[float, Candidate]] = {}
        self._tasks_left = int(_TASKS * effort)

    def makespan(self, candidate: Candidate) -> float:
        """Seconds of a step."""
        key = candidate.places, candidate.options, candidate.warm_up_counts
        if key not in self._makespans:
            self._tasks_left -= self._num_tasks(candidate)
            self._makespans[key] = self._clock.seconds(candidate), candidate
        return self._makespans[key][0]

    def score(self, candidate: Candidate) -> float:
        """What the objective makes least."""
        return self._rate(candidate) * self.makespan(candidate)

    def closed_form_score(self, candidate: Candidate) -> float:
        """The same by the closed form."""
        return self._rate(candidate) * candidate.latency

    def _rate(self, candidate: Candidate) -> float:
        if self.prices is None:
            return 1.0
        return price_of_nodes(self.prices, rented_nodes(self._table, candidate))

    def _num_tasks(self, candidate: Candidate) -> int:
        return 2 * self._table.num_microbatches * len(candidate.places)

    def left(self, like: Candidate) -> int:
        """How many more candidates may be timed that have as many tasks as this one."""
        return max(0, self._tasks_left // self._num_tasks(like))

    def may_time(self, candidate: Candidate) -> bool:
        """Whether one more may be timed."""
        return self.left(candidate) > 0

    def time(self, candidates: Iterable[Candidate]) -> None:
        """Time some candidates, however many there were before."""
        for each in candidates:
            self.makespan(each)

    def time_ways(self, every: Iterable[Sequence[Place]]) -> None:
        """Time the fastest ways to run pipelines."""
        for places in every:
            for candidate in fastest_ways(self._table, places):
                if not self.may_time(candidate):
                    return
                self.makespan(candidate)

    def best(self) -> Judged:
        """The best of all that were timed."""
        return self.ranked()[0]

    def ranked(self) -> tuple[Judged, ...]:
        """The best of each pipeline's candidates that were timed, the best of all first."""
        timed = (candidate for _, candidate in self._makespans.values())
        best: dict[tuple[Place, ...], Judged] = {}
        for each in sorted(map(self._judged, timed), key=_preference):
            best.setdefault(each.candidate.places, each)
        return tuple(best.values())

    def _judged(self, candidate: Candidate) -> Judged:
        devices = sum(slice_of(self._table, place).num_devices for place in candidate.places)
        makespan = self.makespan(candidate)
        return Judged(candidate, makespan, self._rate(candidate) * makespan, devices)


_Key = tuple[tuple[Place, ...], tuple[int, ...], tuple[int, ...]]


def _preference(judged: Judged) -> tuple[float, float, int, int]:
    candidate = judged.candidate
    # Rounded to nine digits: a difference below them should not cost devices.
    return (
        float(f"{judged.score:.9g}"),
        round(candidate.latency, 9),
        judged.num_devices,
        len(candidate.places),
    )
