"""From a cluster, or a plan that is given, to the plan of a run; no device is used yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hetjax.collecting import seldom_collected
from hetjax.commands.context_planning import find_context, least_seconds_on
from hetjax.commands.devices import use_devices
from hetjax.commands.planning import Planned, find_plan, hetero_auto_on
from hetjax.commands.problems import problems_of, state_problems
from hetjax.configuration import Configuration
from hetjax.configuration.make import Ingredients
from hetjax.errors import InputError
from hetjax.mesh import Cluster
from hetjax.pipeline.program.traced_program import with_examples
from hetjax.pipeline.program.tracing import trace
from hetjax.planner import (
    Alternative,
    DynamicProgram,
    PartAlone,
    Plan,
    PlanningProblem,
    Prediction,
    complete,
    next_best,
    parts_alone,
    predict,
)
from hetjax.planner.harp.lost_devices import lost_in_part
from hetjax.planner.harp.microbatches import (
    PROMISING,
    choose_among,
    divisors,
    improve_promising,
    look_at,
    or_several_pipelines,
)
from hetjax.planner.harp.mixing import timed_parts
from hetjax.planner.plan.plan import validate_for
from hetjax.planner.predictions.predict import check_predictable
from hetjax.planner.work.profile import Profile
from hetjax.report import format_bytes

_NEAR = 0.1
"""A part of a cluster that is slower than the whole by more than this share is predicted without
annotations of its stages, which an integer program would take long to find."""

_FAR = 0.25
"""Of a part that looks slower by more than this share only the best number of microbatches is
searched well."""


@dataclass(frozen=True)
class Prepared:
    """A run that could begin.

    Args:
        ingredients: its model, data and optimizer.
        plan: its plan, with a prediction.
        planning_seconds: how long it took to plan, or to fit the plan that was given.
        planned: how the plan was found; None where it was given.
    """

    ingredients: Ingredients
    plan: Plan
    planning_seconds: float
    planned: Planned | None = None

    @property
    def prediction(self) -> Prediction:
        """What the plan is predicted to take."""
        return self.plan.predicted


@seldom_collected()
def prepare(
    ingredients: Ingredients,
    source: Cluster | Path,
    lost: frozenset[int] = frozenset(),
    told: Callable[[int, int, str], None] | None = None,
) -> Prepared:
    """Plan a run, or fit a plan to it.

    Args:
        ingredients: the model, the data and the optimizer.
        source: the cluster to plan for, or the file of a plan to follow.
        lost: devices of the cluster that a plan is made without.
        told: called after each number of microbatches that was tried; see `choose_microbatches`.

    Returns:
        What the run begins with.

    Raises:
        InputError: the model fits nowhere, or the plan does not fit the model.
    """
    began = time.perf_counter()
    runtime, play = ingredients.configuration.runtime, ingredients.configuration.cluster.play
    if isinstance(source, Cluster):
        use_devices(source, runtime, play=play)
        planned = find_plan(ingredients, source, lost, told)
        plan = complete(planned.found.plan, planned.problem, *planned.beside)
        check_memory(plan)
        return Prepared(ingredients, plan, time.perf_counter() - began, planned)
    given = _load(source, ingredients.configuration)
    use_devices(given.cluster, runtime, play=play)
    _check_playable(ingredients, given)
    plan = (predicted if given.is_predictable else unpredicted)(ingredients, given)
    check_memory(plan)
    return Prepared(ingredients, plan, time.perf_counter() - began)


def published_plan(ingredients: Ingredients, cluster: Cluster) -> Plan | None:
    """The plan that the configuration names to compare with; nothing is traced yet.

    Args:
        ingredients: the model, the data and the optimizer.
        cluster: the cluster that is planned for.

    Returns:
        The plan as it is in its file; None where none is named.

    Raises:
        InputError: it is not there, for another batch or cluster, or members of a stage share more
            than the examples or the context.
    """
    path = ingredients.configuration.planner.published
    if path is None:
        return None
    try:
        plan = _load(Path(path), ingredients.configuration)
    except InputError as error:
        raise InputError(f"planner.published: {error}") from error
    # Before anything is traced.
    check_predictable(plan, f"planner.published: {path}")
    if plan.cluster != cluster:
        raise InputError(
            f"planner.published is {path!r}, a plan for the cluster {plan.cluster.name!r}; it can "
            f"only be compared on the cluster that is planned for, {cluster.name!r}, and that must "
            f"be alike in every figure"
        )
    return plan


@seldom_collected()
def predicted(ingredients: Ingredients, given: Plan) -> Plan:
    """A plan that was given, with its prediction.

    Args:
        ingredients: the model, the data and the optimizer.
        given: the plan.

    Returns:
        The plan with its prediction, whether it fits or not.

    Raises:
        InputError: the plan was made for another model, or members of a stage share more than the
            examples or the context.
    """
    return predict(given, *problems_of(ingredients, given))


def unpredicted(ingredients: Ingredients, given: Plan) -> Plan:
    """A plan that was given, of which nothing can be predicted.

    Members of a stage share more than the examples or the context.

    Args:
        ingredients: the model, the data and the optimizer.
        given: the plan.

    Returns:
        The plan without a prediction.

    Raises:
        InputError: the plan was made for another model.
    """
    parameters = ingredients.parameter_shapes
    for pipeline in given.pipelines:
        shapes = with_examples(ingredients.batch, pipeline.microbatch_size)
        program = trace(
            ingredients.model.loss, parameters, shapes, divides_sequences=given.shares_context
        )
        validate_for(given, program)
    return replace(given, prediction=None)


def _check_playable(ingredients: Ingredients, plan: Plan) -> None:
    """Check that nothing is to be played that no played cluster can do."""
    runtime, cluster = ingredients.configuration.runtime, ingredients.configuration.cluster
    if cluster.play and runtime.name == "local" and plan.has_unions:
        raise InputError(
            "cluster.play is True, and the plan has a stage of several members, which no played "
            "cluster holds back; set cluster.play = False"
        )


def problems_beside(prepared: Prepared, given: Plan) -> tuple[PlanningProblem, ...]:
    """The problems that a plan solves which is compared with one that was found.

    Args:
        prepared: the plan that was found.
        given: the plan, for the same batch and cluster.

    Returns:
        As `problems_of`; what was traced for the search is not traced anew.
    """
    if prepared.planned is None or len(given.pipelines) > 1 or given.shares_context:
        return problems_of(prepared.ingredients, given)
    traced = prepared.planned.problems.traced(given.pipeline.num_microbatches)
    # It is rated by the analytic model, on all devices.
    return (replace(traced, lost=frozenset(), profile=Profile()),)


@seldom_collected()
def parts(prepared: Prepared) -> tuple[PartAlone, ...]:
    """What parts of the cluster would do alone, each with its best number of microbatches.

    By HeteroAuto or HexiSeq's planner where it made the plan for the whole, else by Harp's search:
    a program of HAP's wants several devices.

    Args:
        prepared: a plan that was found.

    Returns:
        The fastest first; nothing of a plan that was given.
    """
    planned = prepared.planned
    if planned is None:
        return ()
    problems = planned.problems

    def hetero_auto_plan(part: Cluster) -> Plan | None:
        lost = lost_in_part(prepared.plan.cluster, part, planned.problem.lost)
        found = hetero_auto_on(planned, part, lost)
        return found and found[1].plan

    if prepared.ingredients.configuration.planner.name == "heteroauto":
        return parts_alone(prepared.plan.cluster, hetero_auto_plan)

    if planned.context is not None:
        return _parts_sharing_context(prepared, planned)

    def plan_on(part: Cluster) -> Plan | None:
        asked = planned.problem.options
        options = replace(asked, min_stages=min(asked.min_stages, part.num_devices))
        lost = lost_in_part(prepared.plan.cluster, part, planned.problem.lost)
        if len(lost) == part.num_devices:
            return None
        on_part = partial(replace, cluster=part, options=options, lost=lost)
        was_misled = problems.is_misled
        looked = look_at(
            lambda count: on_part(problems.of(count)),
            prepared.plan.batch_size,
            DynamicProgram(),
            planned.tried,
        )
        if not looked:
            return None
        # What is far behind need not be known to the last percent.
        whole = planned.found.step_time
        is_far = min(found.step_time for _, found in looked) > whole * (1 + _FAR)
        improved = improve_promising(looked, DynamicProgram(), 0.0 if is_far else PROMISING)
        searched, found = min(improved, key=lambda each: each[1].score)
        problem = on_part(problems.traced(searched.num_microbatches))
        others = () if is_far else [each for each, _ in looked if each is not searched]
        found, beside = or_several_pipelines(
            problem,
            found,
            DynamicProgram(),
            others,
            lambda count: on_part(problems.traced(count)),
        )
        if problems.is_misled > was_misled:
            # Once, since all are traced after it.
            return plan_on(part)
        return complete(
            found.plan, problem, *beside, annotate=found.step_time <= whole * (1 + _NEAR)
        )

    return parts_alone(prepared.plan.cluster, plan_on)


def _parts_sharing_context(prepared: Prepared, planned: Planned) -> tuple[PartAlone, ...]:
    """The same where devices share sequences, by the scheduler's model."""
    cluster = prepared.plan.cluster
    # The plan's prediction knows more than the scheduler; the others' is scaled alike.
    scale = prepared.prediction.step_time / planned.found.step_time

    def step_time_on(part: Cluster) -> float | None:
        lost = lost_in_part(cluster, part, planned.problem.lost)
        seconds = least_seconds_on(planned.problems, planned.tried, part, lost)
        return seconds and scale * seconds

    return timed_parts(cluster, step_time_on)


def problem_to_profile(ingredients: Ingredients, cluster: Cluster) -> PlanningProblem:
    """What is to be measured for a configuration.

    Args:
        ingredients: the model, the data and the optimizer.
        cluster: the devices.

    Returns:
        The problem with the configured number of microbatches, or the one that is the best by the
        analytic model.

    Raises:
        InputError: the model fits nowhere.
    """
    settings = ingredients.configuration
    train, count = settings.train, settings.train.microbatches
    counts = divisors(train.batch_size) if count is None else (count,)
    problems = state_problems(ingredients, cluster, counts)
    if count is not None:
        return problems.traced(count)
    if settings.planner.shares_context:
        return find_context(problems, train.batch_size, counts, settings.planner).problem
    return choose_among(problems, train.batch_size, DynamicProgram(), counts).problem


@seldom_collected()
def alternatives(prepared: Prepared) -> tuple[Alternative, ...]:
    """The next best plans.

    Args:
        prepared: a plan that was found.

    Returns:
        The fastest first; nothing of a plan that was given.
    """
    planned = prepared.planned
    if planned is None or not _is_searched(prepared):
        return ()
    return next_best(planned.problem, planned.found, DynamicProgram(), planned.others)


def _is_searched(prepared: Prepared) -> bool:
    """Whether stages were searched for, and so others can be."""
    return prepared.ingredients.configuration.planner.name == "harp"


def _load(path: Path, configuration: Configuration) -> Plan:
    plan = Plan.load(path)
    if plan.batch_size != configuration.train.batch_size:
        counts = (
            f"{p.num_microbatches} microbatches of {p.microbatch_size}" for p in plan.pipelines
        )
        raise InputError(
            f"{path}: the plan computes {plan.batch_size} examples a step ({', '.join(counts)}), "
            f"and train.batch_size is {configuration.train.batch_size}; make them equal"
        )
    return plan


def check_memory(plan: Plan) -> None:
    """Check that a plan's stages fit on their devices, and what they offload on their hosts.

    Args:
        plan: the plan; one without a prediction is not judged.

    Raises:
        InputError: naming the stage, what it needs and what there is.
    """
    if plan.prediction is None:
        return
    for s, stage in enumerate(plan.prediction.stages):
        if not stage.fits_host:
            raise InputError(
                f"the plan does not fit: stage {s} on {plan.stages[s].devices_text} offloads "
                f"{', '.join(plan.stages[s].offload)}, {format_bytes(stage.all_host_bytes)} for "
                f"each device, and a device's share of host_memory in the cluster is "
                f"{format_bytes(stage.host_limit_bytes)}"
            )
        if not stage.fits:
            raise InputError(
                f"the plan does not fit: stage {s} on {plan.stages[s].devices_text} needs "
                f"{format_bytes(stage.memory_bytes)} a device (of these "
                f"{format_bytes(stage.state_bytes)} of parameters, gradients and optimizer "
                f"state), a device has {format_bytes(stage.memory_limit_bytes)}"
            )
