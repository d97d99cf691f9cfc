"""The job: everything that a worker needs to know to build its part, in one picklable value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jaxtyping import PyTree

from hetjax.pipeline.build import (
    PipelineCut,
    PipelinePrograms,
    build_pipelines,
    cut_pipelines,
)
from hetjax.pipeline.program.loss import parameter_shapes
from hetjax.pipeline.program.traced_program import Program, trace, with_examples
from hetjax.planner.plan.plan import Plan, validate, validate_for
from hetjax.runtime.instructions.instruction import Expect, Instruction, Receive, Send, Tag
from hetjax.runtime.instructions.instruction_list import (
    evaluation_instructions,
    training_instructions,
)
from hetjax.runtime.instructions.placement import Placement, told
from hetjax.runtime.workers.feed import BatchSource


@dataclass(frozen=True, eq=False)
class Job:
    """A training job.

    Args:
        loss_function: the plain JAX loss; see `hetjax.pipeline.trace`.
        parameters: pytree of arrays, or a function without arguments that makes it.
        batch: pytree of shapes, of the batch of a whole step.
        optimizer: an Optax transformation.
        plan: the plan.
        source: where training batches come from; None where each step is given its batch.
        deadline: seconds after which waiting for another worker is an error.
        has_aux: whether the loss function returns figures beside the loss.
    """

    loss_function: Callable[..., Any]
    parameters: PyTree | Callable[[], PyTree]
    batch: PyTree
    optimizer: optax.GradientTransformation
    plan: Plan
    source: BatchSource | None = None
    deadline: float = 300.0
    has_aux: bool = False

    def parameter_shapes(self) -> PyTree:
        """Shapes of the parameters."""
        return parameter_shapes(self.parameters)


def build(job: Job) -> Placement:
    """Trace, cut and differentiate a job's pipelines.

    Args:
        job: the job.

    Returns:
        The pipelines' programs with the shardings of their buffers.

    Raises:
        InputError: the plan does not fit the model, the batch or the optimizer.
    """
    return _placed(job, build_pipelines)


def lay_out(job: Job) -> Placement:
    """Trace and cut a job's pipelines: where its training state lies, without programs.

    Args:
        job: the job.

    Returns:
        What every stage holds, and how it is divided.

    Raises:
        InputError: the plan does not fit the model, the batch or the optimizer.
    """
    return _placed(job, cut_pipelines)


def _placed(job: Job, make: Callable[..., PipelinePrograms]) -> Placement:
    plan = job.plan
    validate(plan)
    sizes = [pipeline.microbatch_size for pipeline in plan.pipelines]
    traced = {size: trace_job(job, size) for size in dict.fromkeys(sizes)}
    batch_size = jax.tree.leaves(job.batch)[0].shape[0]
    for program in traced.values():
        validate_for(plan, program, batch_size)
    cuts = [
        PipelineCut(
            plan.boundaries(pipeline),
            tuple(stage.recompute for stage in pipeline.stages),
            pipeline.num_microbatches > 1,
        )
        for pipeline in plan.pipelines
    ]
    pipelines = make(
        [told(pipeline, traced[pipeline.microbatch_size]) for pipeline in plan.pipelines],
        job.parameter_shapes(),
        job.optimizer,
        cuts,
        divide_state=plan.shard_optimizer_state,
    )
    return Placement.of(pipelines, plan)


def trace_job(job: Job, microbatch_size: int) -> Program:
    """Trace a job's loss at a size of microbatches."""
    shapes = with_examples(job.batch, microbatch_size)
    return trace(job.loss_function, job.parameter_shapes(), shapes, has_aux=job.has_aux)


def transfers(placement: Placement) -> list[Tag]:
    """Every transfer that a training or an evaluation step has, on any stage."""
    lists: list[Sequence[Instruction]] = []
    for stage in range(placement.pipelines.num_stages):
        plan = placement.pipeline_plan(stage)
        lists.append(training_instructions(placement.pipelines, plan.schedule, stage))
        lists.append(evaluation_instructions(placement.pipelines, plan.num_microbatches, stage))
    return sorted(
        {
            instruction.tag
            for instructions in lists
            for instruction in instructions
            if isinstance(instruction, Send | Receive | Expect)
        }
    )
