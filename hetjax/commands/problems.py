"""What is to be planned, as a configuration says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hetjax.commands.profiling import with_profile
from hetjax.configuration import Configuration
from hetjax.configuration.make import Ingredients
from hetjax.mesh import Cluster
from hetjax.pipeline.program.traced_program import Program, with_examples
from hetjax.planner import (
    MAX_PIPELINES,
    PipelinePlan,
    Plan,
    PlanningProblem,
    PlanOptions,
    make_problem,
)
from hetjax.planner.problem.problem import trace_microbatch
from hetjax.planner.problem.problems import Problems
from hetjax.planner.profiler import ProfileDatabase


def problems_of(ingredients: Ingredients, given: Plan) -> tuple[PlanningProblem, ...]:
    """The problems that a plan which was given solves.

    Args:
        ingredients: the model, the data and the optimizer.
        given: the plan.

    Returns:
        One for each size of microbatches: a trace does for all pipelines of one.
    """
    unlike = {each.microbatch_size: each for each in given.pipelines}.values()
    return tuple(
        state_problem(
            ingredients,
            given.cluster,
            each.num_microbatches,
            given=each,
            divides_sequences=given.shares_context,
        )
        for each in unlike
    )


def state_problems(
    ingredients: Ingredients,
    cluster: Cluster,
    counts: tuple[int, ...],
    database: ProfileDatabase | None = None,
    lost: frozenset[int] = frozenset(),
) -> Problems:
    """The problems for numbers of microbatches.

    Args:
        ingredients: the model, the data and the optimizer.
        cluster: the devices.
        counts: the numbers.
        database: measurements to plan with; None to plan by the devices' figures.
        lost: devices that cannot be used.
    """
    settings = ingredients.configuration
    divides_sequences = settings.planner.shares_context

    def state(count: int) -> PlanningProblem:
        problem = state_problem(ingredients, cluster, count, divides_sequences=divides_sequences)
        problem = replace(problem, lost=lost)
        return problem if database is None else with_profile(problem, database)

    def trace(count: int) -> Program:
        parameters, batch = ingredients.parameter_shapes, ingredients.batch
        return trace_microbatch(
            ingredients.model.loss,
            parameters,
            batch,
            count,
            divides_sequences=divides_sequences,
        )[0]

    return Problems(
        state,
        trace,
        settings.train.batch_size,
        # What was measured is found by what is computed, which takes a trace.
        counts if database is None else (),
    )


def state_problem(
    ingredients: Ingredients,
    cluster: Cluster,
    num_microbatches: int,
    *,
    given: PipelinePlan | None = None,
    divides_sequences: bool = False,
) -> PlanningProblem:
    """What is to be planned; a pipeline that is given has its own microbatches and stages.

    Args:
        ingredients: the model, the data and the optimizer.
        cluster: the devices.
        num_microbatches: microbatches in a step.
        given: a pipeline that is predicted as it is.
        divides_sequences: whether plans may divide sequences.
    """
    return make_problem(
        ingredients.model.loss,
        ingredients.parameter_shapes,
        _batch(ingredients, given),
        cluster=cluster,
        optimizer=ingredients.optimizer,
        num_microbatches=num_microbatches,
        options=_options(ingredients.configuration, is_given=given is not None),
        divides_sequences=divides_sequences,
    )


def _options(configuration: Configuration, *, is_given: bool) -> PlanOptions:
    """What a plan may be; stages and pipelines of one that is given are as they are."""
    planner = configuration.planner
    options = PlanOptions(planner.schedule, planner.num_layers, planner.allow_recompute)
    if is_given:
        return replace(options, max_pipelines=1)
    return replace(
        options,
        min_stages=planner.min_stages,
        max_stages=planner.max_stages,
        max_pipelines=_max_pipelines(configuration),
        union_stages=_may_have_unions(configuration),
        synthesised_stages=planner.synthesised_stages and _may_have_unions(configuration),
        objective=planner.objective,
        max_passes=_max_passes(configuration),
    )


def _may_have_unions(configuration: Configuration) -> bool:
    """As it is set; not where a schedule will be changed, nor where times are held back."""
    train, is_played = configuration.train, configuration.cluster.play
    is_played = is_played and configuration.runtime.name == "local"
    return configuration.planner.union_stages and not (train.tune or train.beside or is_played)


def _max_passes(configuration: Configuration) -> int:
    """As many as are set; one where a schedule will be changed."""
    train = configuration.train
    return 1 if train.tune or train.beside else configuration.planner.max_passes


def _max_pipelines(configuration: Configuration) -> int:
    """As many as are set; one where a schedule will be changed, which is of one pipeline."""
    if configuration.planner.max_pipelines is not None:
        return configuration.planner.max_pipelines
    train = configuration.train
    return 1 if train.tune or train.beside else MAX_PIPELINES


def _batch(ingredients: Ingredients, given: PipelinePlan | None) -> Mapping[str, Any]:
    """Shapes of a step's batch, or of a pipeline's share of it."""
    if given is None:
        return ingredients.batch
    return with_examples(ingredients.batch, given.num_microbatches * given.microbatch_size)
