"""From a cluster, or a plan that is given, to the plan of a run; no device is used yet."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from hetjax.commands.devices import use_devices
from hetjax.configuration import Configuration
from hetjax.configuration.make import Ingredients
from hetjax.errors import InputError
from hetjax.mesh import Cluster
from hetjax.pipeline.program import with_examples
from hetjax.pipeline.structural_layers import LayeredSection
from hetjax.planner import PipelinePlan, Plan, PlanningProblem, make_problem, predict, solve
from hetjax.report import format_bytes


@dataclass(frozen=True)
class Prepared:
    """A run that could begin.

    Args:
        ingredients: its model, data and optimizer.
        plan: its plan, with a prediction.
        planning_seconds: how long it took to plan, or to fit the plan that was given.
        sections: the structure that the plan's layers follow; empty where they follow cost alone,
            or the plan was given.
    """

    ingredients: Ingredients
    plan: Plan
    planning_seconds: float
    sections: tuple[LayeredSection, ...] = ()


def prepare(ingredients: Ingredients, source: Cluster | Path) -> Prepared:
    """Plan a run, or fit a plan to it.

    Args:
        ingredients: the model, the data and the optimizer.
        source: the cluster to plan for, or the file of a plan to follow.

    Returns:
        What the run begins with.

    Raises:
        InputError: the model fits nowhere, or the plan does not fit the model.
    """
    began = time.perf_counter()
    sections: tuple[LayeredSection, ...] = ()
    if isinstance(source, Cluster):
        use_devices(source, ingredients.configuration.runtime)
        problem = _problem(ingredients, source)
        plan, sections = solve(problem), problem.sections
    else:
        given = _load(source, ingredients.configuration)
        use_devices(given.cluster, ingredients.configuration.runtime)
        # One trace does for all pipelines whose microbatches have one size.
        unlike = {each.microbatch_size: each for each in given.pipelines}.values()
        plan = predict(given, *(_problem(ingredients, given.cluster, each) for each in unlike))
        _check_memory(plan)
    return Prepared(ingredients, plan, time.perf_counter() - began, sections)


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


def _problem(
    ingredients: Ingredients, cluster: Cluster, given: PipelinePlan | None = None
) -> PlanningProblem:
    """What is to be planned; a pipeline that is given has its own microbatches and stages."""
    train, planner = ingredients.configuration.train, ingredients.configuration.planner
    return make_problem(
        ingredients.model.loss,
        jax.eval_shape(ingredients.parameters),
        _batch(ingredients, given),
        cluster=cluster,
        optimizer=ingredients.optimizer,
        num_microbatches=given.num_microbatches if given else train.microbatches,
        num_layers=planner.num_layers,
        schedule=planner.schedule,
        allow_recompute=planner.allow_recompute,
        min_stages=1 if given else planner.min_stages,
        max_stages=None if given else planner.max_stages,
    )


def _batch(ingredients: Ingredients, given: PipelinePlan | None) -> Mapping[str, Any]:
    """Shapes of a step's batch, or of a pipeline's share of it."""
    if given is None:
        return ingredients.batch
    return with_examples(ingredients.batch, given.num_microbatches * given.microbatch_size)


def _check_memory(plan: Plan) -> None:
    assert plan.prediction is not None
    for s, stage in enumerate(plan.prediction.stages):
        if stage.memory_bytes > stage.memory_limit_bytes:
            raise InputError(
                f"the plan does not fit: stage {s} on {plan.stages[s].submesh} needs "
                f"{format_bytes(stage.memory_bytes)} a device (of these "
                f"{format_bytes(stage.state_bytes)} of parameters, gradients and optimizer "
                f"state), a device has {format_bytes(stage.memory_limit_bytes)}"
            )
