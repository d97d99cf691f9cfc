"""From a configuration to a plan: all that comes before the first device is used."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import optax
from jaxtyping import PyTree

from hetjax.commands.devices import use_devices
from hetjax.configuration import Configuration
from hetjax.configuration.make import batch_shapes, first_parameters, make_data, make_model
from hetjax.configuration.make import make_optimizer
from hetjax.data import DataSet
from hetjax.errors import InputError
from hetjax.mesh import Cluster
from hetjax.models import LanguageModel
from hetjax.planner import DynamicProgram, Plan, PlanningProblem, make_problem, predict
from hetjax.report import format_bytes


@dataclass(frozen=True)
class Prepared:
    """A run that could begin.

    Args:
        configuration: its settings.
        model: the model.
        dataset: the data.
        optimizer: the optimizer.
        plan: the plan, with a prediction.
        planning_seconds: how long it took to plan, or to fit the plan that was given.
    """

    configuration: Configuration
    model: LanguageModel
    dataset: DataSet
    optimizer: optax.GradientTransformation
    plan: Plan
    planning_seconds: float

    @property
    def parameters(self) -> Callable[[], PyTree]:
        """A function that makes the first parameters."""
        return first_parameters(self.model, self.configuration.train.seed)

    @property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a step's batch."""
        return batch_shapes(self.model, self.configuration.train.batch_size)

    @property
    def tokens_per_step(self) -> int:
        """How many tokens a step predicts."""
        return self.configuration.train.batch_size * self.model.sequence


def prepare(configuration: Configuration, source: Cluster | Path) -> Prepared:
    """Make a configuration's model and data, and its plan.

    Args:
        configuration: the settings.
        source: the cluster to plan for, or the file of a plan to follow.

    Returns:
        What the run begins with.

    Raises:
        InputError: something does not fit; nothing has been allocated then.
    """
    given = None if isinstance(source, Cluster) else _load(source, configuration)
    cluster = source if isinstance(source, Cluster) else given.cluster if given else None
    assert cluster is not None
    use_devices(cluster, configuration.runtime)
    model = make_model(configuration.model)
    optimizer = make_optimizer(configuration.optimizer, configuration.train.steps)
    dataset = make_data(configuration.data, configuration.train, model)
    began = time.perf_counter()
    problem = _problem(configuration, model, optimizer, cluster, given)
    plan = predict(given or DynamicProgram().plan(problem), problem)
    if given:
        _check_memory(plan)
    return Prepared(
        configuration, model, dataset, optimizer, plan, time.perf_counter() - began
    )


def _load(path: Path, configuration: Configuration) -> Plan:
    plan = Plan.load(path)
    if len(plan.pipelines) != 1:
        raise InputError(
            f"{path}: the plan has {len(plan.pipelines)} pipelines; the runtime executes plans of "
            f"one"
        )
    if plan.batch_size != configuration.train.batch_size:
        raise InputError(
            f"{path}: the plan computes {plan.batch_size} examples a step "
            f"({plan.pipeline.num_microbatches} microbatches of {plan.pipeline.microbatch_size}), "
            f"and train.batch_size is {configuration.train.batch_size}; make them equal"
        )
    return plan


def _problem(
    configuration: Configuration,
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    cluster: Cluster,
    given: Plan | None,
) -> PlanningProblem:
    """What is to be planned; for a plan that is given, its own microbatches count."""
    train, planner = configuration.train, configuration.planner
    parameters = jax.eval_shape(first_parameters(model, train.seed))
    return make_problem(
        model.loss,
        parameters,
        batch_shapes(model, train.batch_size),
        cluster=cluster,
        optimizer=optimizer,
        num_microbatches=given.pipeline.num_microbatches if given else train.microbatches,
        num_layers=planner.num_layers,
        schedule=planner.schedule,
        allow_recompute=planner.allow_recompute,
        min_stages=1 if given else planner.min_stages,
        max_stages=None if given else planner.max_stages,
    )


def _check_memory(plan: Plan) -> None:
    assert plan.prediction is not None
    for s, stage in enumerate(plan.prediction.stages):
        if stage.memory_bytes > stage.memory_limit_bytes:
            raise InputError(
                f"the plan does not fit: stage {s} on {plan.pipeline.stages[s].submesh} needs "
                f"{format_bytes(stage.memory_bytes)} a device (of these "
                f"{format_bytes(stage.state_bytes)} of parameters, gradients and optimizer "
                f"state), a device has {format_bytes(stage.memory_limit_bytes)}"
            )
