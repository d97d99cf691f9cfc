"""How the plan of a configuration is found: by the search of Harp, HAP, H2 or HexiSeq."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hetjax.commands.context_planning import ContextFound, check_context_settings, find_context
from hetjax.commands.problems import state_problems
from hetjax.commands.profiling import check_measured, profile_database
from hetjax.configuration import Configuration
from hetjax.configuration.make import Ingredients
from hetjax.errors import DoesNotFitError, InputError
from hetjax.mesh import Cluster
from hetjax.planner import (
    Alternative,
    DynamicProgram,
    Found,
    HapPlanner,
    HeteroAuto,
    PlanningProblem,
    does_not_fit,
)
from hetjax.planner.harp.microbatches import (
    choose_among,
    coupling_among,
    divisors,
    notes_of,
    notes_of_chosen,
)
from hetjax.planner.problem.problems import Problems
from hetjax.planner.profiler import ProfileDatabase, num_to_measure

MOST_SLOWER = 2
"""How many numbers of microbatches in turn may be slower than the best of HAP's planner before it
tries no others."""


@dataclass(frozen=True)
class Planned:
    """How a plan was found.

    Args:
        problem: what was planned.
        found: the figures of the search.
        tried: the numbers of microbatches that were tried.
        problems: the problem for each of them.
        others: the plans for the other numbers.
        beside: the problems of the other sizes of microbatches that the plan has.
        context: how its devices share sequences, where HexiSeq's planner made it.
    """

    problem: PlanningProblem
    found: Found
    tried: tuple[int, ...]
    problems: Problems
    others: tuple[Alternative, ...] = ()
    beside: tuple[PlanningProblem, ...] = ()
    context: ContextFound | None = None

    @property
    def num_to_measure(self) -> int | None:
        """How many candidates a profile would measure; None where some of it was made."""
        table = self.found.table
        if self.problem.profile.measurements or table is None:
            return None
        return num_to_measure(self.problem, table)


def find_plan(
    ingredients: Ingredients,
    cluster: Cluster,
    lost: frozenset[int],
    told: Callable[[int, int, str], None] | None,
) -> Planned:
    """The plan of the configured number of microbatches, or of the best.

    Args:
        ingredients: the model, the data and the optimizer.
        cluster: the devices.
        lost: devices that cannot be used.
        told: called after each number of microbatches that was tried; see `choose_microbatches`.

    Returns:
        How the plan was found.

    Raises:
        InputError: the model fits nowhere, or what is asked for goes with no such plan.
    """
    settings, planner = ingredients.configuration, DynamicProgram()
    _CHECKS.get(settings.planner.name, lambda _: None)(settings)
    batch_size, count = settings.train.batch_size, settings.train.microbatches
    folder = settings.planner.profile
    database = None if folder is None else profile_database(folder)
    counts = divisors(batch_size) if count is None else (count,)
    problems = state_problems(ingredients, cluster, counts, database, lost)
    if settings.planner.name in ("hap", "heteroauto"):
        by = _synthesised if settings.planner.name == "hap" else _by_hetero_auto
        known = counts if database is None else _measured(problems, counts, database)
        return by(problems, batch_size, known)
    if settings.planner.shares_context:
        fewest = problems.traced(counts[0])
        if database is not None and not fewest.profile.corrects_costs:
            check_measured(fewest, database)
        context = find_context(problems, batch_size, counts, settings.planner)
        return Planned(context.problem, context.found, context.compared, problems, context=context)
    if count is not None:
        problem = problems.of(count)
        if database is not None:
            check_measured(problem, database)
        found = planner.find(problem)
        if found is None:
            raise InputError(does_not_fit(problem))
        found = replace(found, plan=replace(found.plan, notes=notes_of(problem, problems.program)))
        return Planned(problem, found, counts, problems)
    if database is not None:
        measured = [n for n in counts if problems.of(n).profile.measurements]
        if not measured:
            check_measured(problems.of(batch_size), database)
        counts = tuple(measured)
    choice = choose_among(problems, batch_size, planner, counts, told)
    if choice.found.plan.notes:
        # Parts of the cluster are compared by what they take for the same loss.
        counts = (choice.problem.num_microbatches,)
    return Planned(choice.problem, choice.found, counts, problems, choice.others, choice.beside)


def _measured(
    problems: Problems, counts: Sequence[int], database: ProfileDatabase
) -> Sequence[int]:
    """The numbers of microbatches for which a profile has measurements of this program.

    Where it has some of another one alone, which correct the cost model, all of them.
    """
    known = {count: problems.traced(count) for count in counts}
    measured = [count for count, each in known.items() if each.profile.measurements]
    first = known[counts[0]]
    if not measured and not first.profile.corrects_costs:
        check_measured(first, database)
    return measured or counts


def _synthesised(problems: Problems, batch_size: int, counts: Sequence[int]) -> Planned:
    """The fastest plan of HAP's planner for some numbers of microbatches.

    Synthesis takes long, and microbatches soon cost more than they save: it ends where several in
    turn were slower than the best.
    """
    return _looked_at(problems, batch_size, counts, _hap_found, DoesNotFitError, MOST_SLOWER)


def _by_hetero_auto(problems: Problems, batch_size: int, counts: Sequence[int]) -> Planned:
    """The fastest plan of HeteroAuto's for some numbers of microbatches."""
    return _looked_at(problems, batch_size, counts, _refined, InputError, len(counts))


def _looked_at(
    problems: Problems,
    batch_size: int,
    counts: Sequence[int],
    find: Callable[[PlanningProblem], Found],
    refusal: type[InputError],
    most_slower: int,
) -> Planned:
    """The fastest plan for some numbers of microbatches; where these change the loss, the first.

    Args:
        problems: the problem for each number.
        batch_size: examples in a step.
        counts: the numbers, rising.
        find: finds the plan for one problem.
        refusal: what it raises where there is none.
        most_slower: how many in turn may be slower than the best before the others are left.

    Raises:
        InputError: there is no plan for any number.
    """
    coupling = coupling_among(problems.traced, batch_size, counts)
    found: list[tuple[PlanningProblem, Found]] = []
    refused: InputError | None = None
    slower, tried = 0, 0
    for count in counts:
        tried += 1
        problem = problems.traced(count)
        try:
            made = find(problem)
        except refusal as error:
            refused = error
            continue
        is_better = all(made.step_time < other.step_time for _, other in found)
        slower = 0 if is_better else slower + 1
        found.append((problem, made))
        if coupling is not None or slower >= most_slower:
            break
    if not found:
        assert refused is not None, "some number of microbatches is tried"
        raise refused
    problem, best = min(found, key=lambda each: each[1].step_time)
    notes = notes_of_chosen(problem, counts, coupling, problems.program)
    best = replace(best, plan=replace(best.plan, notes=(*best.plan.notes, *notes)))
    # Where numbers change the loss, parts of the cluster are compared for the same one.
    of = tuple(counts[:tried]) if coupling is None else (problem.num_microbatches,)
    return Planned(problem, best, of, problems)


def hetero_auto_on(
    planned: Planned, part: Cluster, lost: frozenset[int]
) -> tuple[PlanningProblem, Found] | None:
    """What HeteroAuto finds for a part of the cluster that it planned for.

    Args:
        planned: how the plan for the whole was found.
        part: some of its subclusters.
        lost: devices of the part that cannot be used.

    Returns:
        The problem and the best plan for one of the numbers of microbatches that were tried; None
        where there is none.
    """
    looked: list[tuple[PlanningProblem, Found]] = []
    for count in planned.tried:
        problem = replace(planned.problems.traced(count), cluster=part, lost=lost)
        with contextlib.suppress(InputError):
            looked.append((problem, _refined(problem)))
    looked = [each for each in looked if (told := each[1].plan.prediction) and told.fits]
    return min(looked, key=lambda each: each[1].step_time, default=None)


def _check_hetero_auto(settings: Configuration) -> None:
    """Check that nothing is asked for that a plan of HeteroAuto's does not have."""
    planner, what = settings.planner, "planner.name is 'heteroauto', whose plans use all devices"
    if planner.objective == "cost":
        raise InputError(
            f"planner.objective is 'cost', and {what}, whatever they cost; set planner.name = "
            f"'harp'"
        )
    for name, default in (("min_stages", 1), ("max_stages", None)):
        if (value := getattr(planner, name)) != default:
            raise InputError(
                f"planner.{name} is {value}, and {what}, in as many stages as are fastest; leave "
                f"it out, or set planner.name = 'harp'"
            )


def _refined(problem: PlanningProblem) -> Found:
    began = time.perf_counter()
    plan, strategy = HeteroAuto().refined(problem)
    searched = time.perf_counter() - began
    step, looked = plan.predicted.step_time, strategy.candidates
    return Found(plan, step, step, looked, problem.profile_seconds, searched)


def _check_synthesised(settings: Configuration) -> None:
    """Check that nothing is asked for that a plan of HAP's planner does not have."""
    train, what = settings.train, "planner.name is 'hap', whose plan is one stage of all devices"
    if settings.cluster.play and settings.runtime.name == "local":
        raise InputError(
            f"cluster.play is True, and {what}, which no played cluster holds back; set "
            f"cluster.play = False"
        )
    if train.tune or train.beside:
        name = "train.tune" if train.tune else "train.beside"
        raise InputError(f"{name} is given, and {what}: there is no other schedule; leave it out")
    if settings.planner.min_stages > 1:
        raise InputError(
            f"planner.min_stages is {settings.planner.min_stages}, and {what}; allowed is 1: leave "
            f"it out, or set planner.name = 'harp'"
        )
    if settings.planner.objective == "cost":
        raise InputError(
            f"planner.objective is 'cost', and {what}, whatever they cost; set planner.name = "
            f"'harp'"
        )


def _hap_found(problem: PlanningProblem) -> Found:
    began = time.perf_counter()
    made = HapPlanner().synthesise(problem)
    searched = time.perf_counter() - began
    step, looked = made.seconds, made.found.expansions
    return Found(made.plan, step, step, looked, problem.profile_seconds, searched)


_CHECKS: Mapping[str, Callable[[Configuration], None]] = {
    "hap": _check_synthesised,
    "heteroauto": _check_hetero_auto,
    "hexiseq": check_context_settings,
}
"""What checks that nothing is asked for that a planner's plans do not have, by its name."""
