"""The default planner: the exact search over the analytic cost model's stage table."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from hetjax.errors import InputError
from hetjax.planner.harp.candidate_plans import candidate_plan
from hetjax.planner.harp.lost_devices import check_lost, lost_of_nodes, widest_of_nodes
from hetjax.planner.harp.mixing import combinations
from hetjax.planner.harp.no_fit import does_not_fit
from hetjax.planner.harp.replicas import Timed, score_of, several_pipelines
from hetjax.planner.harp.restriction import other_numbers_of_stages, with_nodes
from hetjax.planner.harp.search import Candidate
from hetjax.planner.harp.simulated_search import (
    CLOSED_FORM_EXCESS,
    Judged,
    first_look,
    simulated_search,
)
from hetjax.planner.harp.stage_table import StageTable
from hetjax.planner.harp.synthesised_stages import synthesised_pipelines
from hetjax.planner.harp.table_making import make_stage_table, may_fit
from hetjax.planner.harp.union_search import one_union_stage, pipelines_of_unions
from hetjax.planner.plan.plan import Plan, validate
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.layer_runs import Runs

_SOON = 0.01
"""By what share a plan that is wanted soon may be slower than the best, in Harp's closed form."""

_ENOUGH = 0.25
"""A plan that only tells what another choice would cost is searched with this share of effort."""

_FAR = 0.15
"""By what share a search does not improve what a first look finds."""

_RUNNERS_UP = 8
"""How many plans that were met on the way are kept."""

_UNEVEN = 1.13
"""How much longer the pace is, at a guess, where devices cannot be shared out evenly any more."""


@dataclass(frozen=True)
class Alternative:
    """A plan that was not chosen.

    Args:
        plan: the plan, without a prediction.
        step_time: seconds of a step, by the same clock as the chosen plan's `Found.step_time`.
        score: what the objective makes least: seconds of a step, or its cost.
    """

    plan: Plan
    step_time: float
    score: float


@dataclass(frozen=True)
class Found:
    """A plan, and what it took to find it.

    Args:
        plan: the plan, without a prediction.
        step_time: seconds of a step, by the timeline of the search's own costs.
        score: what the objective makes least: seconds of a step, or its cost.
        candidates: how many stages the search chose among: runs of layers, each on a submesh with
            one way to run it, that fit into memory.
        profile_seconds: what it took to learn the candidates' costs: to count the layers' work and
            to fill the table.
        search_seconds: what the search took.
        runners_up: plans that were met on the way, of other submeshes or ways to run them.
        table: what the search chose from, to search it again.
        pace: seconds from one microbatch to the next.
        met: the candidates that were timed.
        closed_form_score: the least score by Harp's closed form.
    """

    plan: Plan
    step_time: float
    score: float
    candidates: int
    profile_seconds: float
    search_seconds: float
    runners_up: tuple[Alternative, ...] = ()
    table: StageTable | None = field(default=None, repr=False)
    pace: float | None = None
    met: tuple[Candidate, ...] = field(default=(), repr=False)
    closed_form_score: float = float("inf")


@dataclass(frozen=True)
class DynamicProgram:
    """The plan of the least latency, found exactly; see `hetjax.planner.harp.search.search`.

    Where the objective is the cost, it is the plan of the least cost; see
    `hetjax.planner.harp.cost_search.search_by_cost`. Where a plan may have several pipelines, the
    best of them are weighed against the one; see `hetjax.planner.harp.replicas.several_pipelines`.

    Latencies are Harp's closed form; what is nearly the best by it is simulated, and the least
    makespan decides; see `hetjax.planner.harp.simulated_search`.

    Source: Harp section 5.2.
    """

    def plan(self, problem: PlanningProblem) -> Plan:
        """The fastest plan that fits.

        Args:
            problem: what to plan.

        Returns:
            The plan, without a prediction.

        Raises:
            InputError: the model fits nowhere; the message says what it needs and what would help.
        """
        found = self.find(problem)
        if found is None:
            raise InputError(does_not_fit(problem))
        return found.plan

    def find(self, problem: PlanningProblem) -> Found | None:
        """The fastest plan that fits, and what it took to find it.

        Args:
            problem: what to plan.

        Returns:
            The plan and the figures of the search; None where the model fits nowhere.
        """
        found = self.first_look(problem)
        return found and self.improved(problem, found)

    def first_look(self, problem: PlanningProblem, below: float = float("inf")) -> Found | None:
        """A plan of one pipeline that is the best by the closed form, or about so.

        One stage over all devices of several subclusters is looked at, too.

        It takes a part of the time that it takes to find the best, and is mostly that; so it tells
        which of many problems are worth more.

        Args:
            problem: what to plan.
            below: no plan is wanted whose score by the closed form is this or more.

        Returns:
            The plan and the figures of the search; None where the model fits nowhere, or only as it
            is not wanted.
        """
        began = time.perf_counter()
        runs = problem.runs
        table = make_stage_table(problem, runs)
        seconds = problem.profile_seconds + time.perf_counter() - began
        found = _found(problem, runs, table, seconds, below=below)
        return _or_union_stage(problem, runs, table, found, seconds, below)

    def may_fit(self, problem: PlanningProblem) -> bool:
        """Whether a model might fit with one microbatch at a time; if not, nothing fits.

        Args:
            problem: what to plan.
        """
        return may_fit(problem, problem.runs)

    def improved(
        self, problem: PlanningProblem, first: Found, below: float = float("inf")
    ) -> Found:
        """The best plan, by what is known from a first look.

        Args:
            problem: what to plan.
            first: what the first look found.
            below: a plan of several pipelines is only wanted where its score is less than this.

        Returns:
            The plan, of one pipeline or several, and the figures of both searches.
        """
        began = time.perf_counter()
        assert first.table is not None, "what was found has its table"
        runs = problem.runs
        one = first
        if first.met and not _is_union_far_ahead(first, below):
            met = [*first.met, *_met_otherwise(problem, runs, first)]
            judged = simulated_search(problem, runs, first.table, met)
            one = _made(problem, first.table, judged, first.profile_seconds)
            one = _or_union_stage(problem, runs, first.table, one, first.profile_seconds)
        assert one is not None, "a plan was found"
        validate(one.plan)
        name = DynamicProgram.__name__
        limit = min(below, one.score)
        mixed = pipelines_of_unions(problem, runs, first.table, limit, name)
        if mixed is not None:
            one = _better(problem, one, mixed)
            validate(one.plan)
        bases = [one.plan, *(each.plan for each in one.runners_up)]
        synthesised = synthesised_pipelines(problem, bases, min(below, one.score))
        if synthesised is not None:
            one = _better(problem, one, synthesised)
            validate(one.plan)
        if problem.options.max_pipelines > 1 and not problem.lost:
            one = self._or_several([problem], one, min(below, one.score))
        seconds = time.perf_counter() - began
        return replace(one, search_seconds=first.search_seconds + seconds)

    def or_several(self, problems: Sequence[PlanningProblem], known: Found) -> Found:
        """The better of a plan of one pipeline and of several, with microbatches of unlike sizes.

        Args:
            problems: what to plan, for microbatches of some sizes; the first is that of what is
                known.
            known: the best plan of one pipeline.

        Returns:
            What is known, or the same with another plan, of several pipelines.
        """
        began = time.perf_counter()
        first = problems[0]
        alike = [each for each in problems if _is_alike(each, first)]
        if first.options.max_pipelines == 1 or first.lost:
            return known
        one = self._or_several(alike, known, known.score)
        seconds = time.perf_counter() - began
        return replace(one, search_seconds=known.search_seconds + seconds)

    def _or_several(self, problems: Sequence[PlanningProblem], one: Found, below: float) -> Found:
        """The better of a plan that is known and the best of several pipelines."""

        def timed(found: Found | None) -> Timed | None:
            return found and (found.step_time, found.plan)

        def look(smaller: PlanningProblem, below: float) -> Timed | None:
            return timed(self.first_look(smaller, below))

        def find(smaller: PlanningProblem, _: float) -> Timed | None:
            return timed(self.find(smaller))

        several = several_pipelines(problems, look, find, below)
        if several is None:
            return one
        validate(several[1])
        return _better(problems[0], one, several)

    def find_without(
        self, problem: PlanningProblem, lost: Collection[int], before: Found
    ) -> Found | None:
        """A plan without devices that are lost, soon: its latency is within 1% of the best.

        Args:
            problem: what was planned.
            lost: devices that cannot be used any more, counted through the cluster.
            before: what was found when they were there.

        Returns:
            The plan of one pipeline, on the same cluster; None where the model fits nowhere.

        Raises:
            InputError: there is no such device, none is left, or the objective is the cost.
        """
        check_lost(problem.cluster, lost)
        without = replace(problem, lost=frozenset(lost))
        assert before.table is not None, "what was found has its table"
        table = replace(
            before.table,
            lost=lost_of_nodes(problem.cluster, lost),
            widest=widest_of_nodes(problem.cluster, lost),
        )
        runs = problem.runs
        left = problem.cluster.num_devices - len(set(lost))
        more = problem.cluster.num_devices / left * _UNEVEN
        near = None if before.pace is None else before.pace * more
        found = _found(without, runs, table, 0.0, near, _SOON)
        if found is not None:
            validate(found.plan)
        return found

    def find_within(
        self,
        problem: PlanningProblem,
        restrictions: Sequence[Callable[[StageTable], StageTable]],
        below: float = float("inf"),
    ) -> tuple[Alternative | None, ...]:
        """The best plans where less is allowed.

        Args:
            problem: what to plan.
            restrictions: each makes a stage table that allows less.
            below: no plan is wanted whose score by the closed form is this or more.

        Returns:
            For each restriction the best plan; None where nothing fits, or only what is not wanted.
        """
        runs = problem.runs
        whole = make_stage_table(problem, runs)
        found: list[Alternative | None] = []
        for restriction in restrictions:
            table = restriction(whole)
            met = first_look(problem, runs, table, below=below)
            judged = met and simulated_search(
                problem, runs, table, [each.candidate for each in met], _ENOUGH
            )
            found.append(_alternative(problem, table, judged[0]) if judged else None)
        return tuple(found)


def _found(
    problem: PlanningProblem,
    runs: Runs,
    table: StageTable,
    profile_seconds: float,
    near: float | None = None,
    tolerance: float = 0.0,
    below: float = float("inf"),
) -> Found | None:
    """What a first look at a table finds."""
    began = time.perf_counter()
    if problem.options.objective == "cost" and table.lost:
        raise InputError("the objective is 'cost' and devices are lost; plan for 'step_time'")
    parts = () if tolerance else _parts(problem, table)
    judged = first_look(problem, runs, table, parts, near, tolerance, below)
    if not judged:
        return None
    seconds = time.perf_counter() - began
    return replace(_made(problem, table, judged, profile_seconds), search_seconds=seconds)


def _is_alike(problem: PlanningProblem, other: PlanningProblem) -> bool:
    """Whether pipelines of both may be in one plan, whose positions they share."""
    ours, theirs = problem.program, other.program
    return (ours.fingerprint, ours.num_positions) == (theirs.fingerprint, theirs.num_positions)


def _is_union_far_ahead(first: Found, below: float) -> bool:
    """Whether a stage over a union, or what is known, is far better than all pipelines here."""
    if not first.plan.has_unions or not first.runners_up:
        return False
    return first.runners_up[0].score > min(first.score, below) * (1 + _FAR)


def _or_union_stage(
    problem: PlanningProblem,
    runs: Runs,
    table: StageTable,
    found: Found | None,
    profile_seconds: float,
    below: float = float("inf"),
) -> Found | None:
    """The better of what was found and one stage over several subclusters."""
    union = one_union_stage(problem, runs, DynamicProgram.__name__)
    if union is None:
        return found
    if found is not None:
        return _better(problem, found, union)
    seconds, plan = union
    score = score_of(problem, plan, seconds)
    if score >= below:
        return None
    return Found(
        plan=plan,
        step_time=seconds,
        score=score,
        candidates=_num_candidates(table),
        profile_seconds=profile_seconds,
        search_seconds=0.0,
        table=table,
        closed_form_score=score,
    )


def _better(problem: PlanningProblem, found: Found, timed: Timed) -> Found:
    """What was found, with the better of its plan and another one; the other is a runner-up."""
    step_time, plan = timed
    other = Alternative(plan, step_time, score_of(problem, plan, step_time))
    known = Alternative(found.plan, found.step_time, found.score)
    chosen, beaten = (other, known) if other.score < known.score else (known, other)
    return replace(
        found,
        **vars(chosen),
        runners_up=(beaten, *found.runners_up),
        closed_form_score=min(found.closed_form_score, chosen.score),
    )


def _made(
    problem: PlanningProblem, table: StageTable, judged: Sequence[Judged], profile_seconds: float
) -> Found:
    best, *others = judged
    plan = candidate_plan(problem, table, best.candidate, DynamicProgram.__name__)
    return Found(
        plan=plan,
        step_time=best.makespan,
        score=best.score,
        candidates=_num_candidates(table),
        profile_seconds=profile_seconds,
        search_seconds=0.0,
        runners_up=_runners_up(problem, table, best, others),
        table=table,
        pace=best.candidate.pace,
        met=tuple(each.candidate for each in judged),
        closed_form_score=min(each.closed_form_score for each in judged),
    )


def _parts(problem: PlanningProblem, table: StageTable) -> Iterator[StageTable]:
    """The tables of parts of a cluster, those of `hetjax.planner.harp.mixing`, and of one stage.

    The larger parts come first.
    """
    if table.min_stages == 1 and table.max_stages != 1:
        yield replace(table, max_stages=1)
    for names in reversed([*combinations(problem.cluster)]):
        used = (each.name in names for each in problem.cluster.subclusters)
        nodes = [n if use else 0 for use, (n, _) in zip(used, table.nodes, strict=True)]
        if any(nodes) and list(nodes) != [n for n, _ in table.nodes]:
            yield with_nodes(table, nodes)


def _met_otherwise(problem: PlanningProblem, runs: Runs, first: Found) -> Iterator[Candidate]:
    """Candidates with fewer and with more stages than what a first look found.

    Those with as many are so alike that all that are nearly the best may be among them.
    """
    assert first.table is not None, "what was found has its table"
    limit = first.score * (1 + CLOSED_FORM_EXCESS)
    for least, most in other_numbers_of_stages(problem, len(first.plan.stages)):
        table = replace(first.table, min_stages=least, max_stages=most)
        for each in first_look(problem, runs, table, below=limit):
            yield each.candidate


def _runners_up(
    problem: PlanningProblem, table: StageTable, best: Judged, others: Sequence[Judged]
) -> tuple[Alternative, ...]:
    """The first few that differ in more than in their layers."""
    by_manner: dict[_Manner, Judged] = {}
    for each in others:
        by_manner.setdefault(_manner(each.candidate), each)
    by_manner.pop(_manner(best.candidate), None)
    first = itertools.islice(by_manner.values(), _RUNNERS_UP)
    return tuple(_alternative(problem, table, each) for each in first)


def _alternative(problem: PlanningProblem, table: StageTable, judged: Judged) -> Alternative:
    plan = candidate_plan(problem, table, judged.candidate, DynamicProgram.__name__)
    return Alternative(plan, judged.makespan, judged.score)


_Manner = tuple[tuple[int, int, int, int], ...]


def _manner(candidate: Candidate) -> _Manner:
    """Where a candidate's stages are and how they run, but for their layers."""
    return tuple(
        (place.subcluster, place.slice, place.start, option)
        for place, option in zip(candidate.places, candidate.options, strict=True)
    )


def _num_candidates(table: StageTable) -> int:
    return sum(cut.num_candidates for slices in table.slices for cut in slices)
