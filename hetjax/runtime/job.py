"""The job: everything that a worker needs to know to build its part, in one picklable value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jaxtyping import PyTree

from hetjax.errors import InputError
from hetjax.pipeline.build import PipelineProgram, build_pipeline
from hetjax.pipeline.program import Program, abstract, trace
from hetjax.planner.plan import PipelinePlan, Plan, validate, validate_for
from hetjax.runtime.feed import BatchSource
from hetjax.runtime.instructions import (
    Expect,
    Instruction,
    Receive,
    Send,
    Tag,
    evaluation_instructions,
    training_instructions,
)
from hetjax.runtime.placement import Placement


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
    """

    loss_function: Callable[..., Any]
    parameters: PyTree | Callable[[], PyTree]
    batch: PyTree
    optimizer: optax.GradientTransformation
    plan: Plan
    source: BatchSource | None = None
    deadline: float = 300.0

    @property
    def pipeline_plan(self) -> PipelinePlan:
        """The plan's pipeline."""
        return self.plan.pipeline

    def parameter_shapes(self) -> PyTree:
        """Shapes of the parameters."""
        if callable(self.parameters):
            return abstract(jax.eval_shape(self.parameters))
        return abstract(self.parameters)


def microbatch(batch: PyTree, size: int) -> PyTree:
    """Shapes of a microbatch, from those of a batch."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), batch)


def build(job: Job) -> Placement:
    """Trace, cut and differentiate a job's pipeline.

    Args:
        job: the job.

    Returns:
        The pipeline's programs with the shardings of their buffers.

    Raises:
        InputError: the plan does not fit the model, the batch or the optimizer.
    """
    plan = job.plan
    validate(plan)
    if len(plan.pipelines) != 1:
        raise InputError(
            f"the plan has {len(plan.pipelines)} pipelines; the runtime executes plans of one"
        )
    pipeline = job.pipeline_plan
    program = trace_job(job)
    batch_size = jax.tree.leaves(job.batch)[0].shape[0]
    validate_for(plan, program, batch_size)
    programs = build_pipeline(
        program,
        job.parameter_shapes(),
        job.optimizer,
        boundaries=plan.boundaries(pipeline),
        recompute=[stage.recompute for stage in pipeline.stages],
        accumulate=pipeline.num_microbatches > 1,
    )
    placement = Placement(programs, pipeline)
    for stage in range(len(pipeline.stages)):
        placement.parameters(stage)
    return placement


def trace_job(job: Job) -> Program:
    """Trace a job's loss at the size of its plan's microbatches."""
    shapes = microbatch(job.batch, job.pipeline_plan.microbatch_size)
    return trace(job.loss_function, job.parameter_shapes(), shapes)


def transfers(pipeline: PipelineProgram, plan: PipelinePlan) -> list[Tag]:
    """Every transfer that a training or an evaluation step has, on any stage."""
    lists: list[Sequence[Instruction]] = []
    for stage in range(pipeline.num_stages):
        lists.append(training_instructions(pipeline, plan.schedule, stage))
        lists.append(evaluation_instructions(pipeline, plan.num_microbatches, stage))
    return sorted(
        {
            instruction.tag
            for instructions in lists
            for instruction in instructions
            if isinstance(instruction, Send | Receive | Expect)
        }
    )
