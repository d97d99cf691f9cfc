"""The job: everything that a worker needs to know to build its part, in one picklable value."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from hetjax.pipeline.program.traced_program import Program, with_examples
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.stages.cutting import Stage
from hetjax.pipeline.stages.shared_context import share_context
from hetjax.pipeline.stages.told_moves import with_told_moves
from hetjax.pipeline.stages.traced_modules import modules_of, trace_modules
from hetjax.pipeline.stages.traced_stage import TracedStage, Tracer, trace_stage
from hetjax.pipeline.update.unchanged_leaves import with_frozen_leaves
from hetjax.planner.plan.obeyed_reshards import obey_reshards
from hetjax.planner.plan.plan import Plan, validate, validate_for
from hetjax.planner.plan.plan_context import ring_of, token_order, with_tokens
from hetjax.runtime.compilation.compiled_stage import divided_programs
from hetjax.runtime.instructions.instruction import Expect, Instruction, Receive, Send, Tag
from hetjax.runtime.instructions.instruction_list import (
    EVALUATE,
    all_tasks,
    evaluation_instructions,
    training_instructions,
)
from hetjax.runtime.instructions.member_instructions import move_tag
from hetjax.runtime.instructions.placement import Placement, told
from hetjax.runtime.instructions.stage_annotator import StageAnnotator
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


def build(job: Job, traced: Mapping[int, Program] | None = None) -> Placement:
    """Trace, cut and differentiate a job's pipelines.

    Args:
        job: the job.
        traced: what `traced_losses` returned of it; None to trace here.

    Returns:
        The pipelines' programs with the shardings of their buffers.

    Raises:
        InputError: the plan does not fit the model, the batch or the optimizer.
    """
    make = functools.partial(
        build_pipelines, tracer_of=_tracers(job.plan), adapted=_context_shared(job.plan)
    )
    placement = _placed(job, make, traced)
    stages = [s for s, stage in enumerate(job.plan.stages) if len(stage.members) > 1]
    return replace(placement, divided={s: divided_programs(placement, s) for s in stages})


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


def traced_losses(job: Job) -> dict[int, Program]:
    """Trace a job's loss, at each size that microbatches have.

    Args:
        job: the job.

    Returns:
        The programs, by size.

    Raises:
        InputError: the plan is none, or the loss, the batch and the optimizer do not fit.
    """
    validate(job.plan)
    sizes = dict.fromkeys(pipeline.microbatch_size for pipeline in job.plan.pipelines)
    return {size: trace_job(job, size) for size in sizes}


def _placed(
    job: Job,
    make: Callable[..., PipelinePrograms],
    traced: Mapping[int, Program] | None = None,
) -> Placement:
    plan = job.plan
    traced = traced_losses(job) if traced is None else traced
    batch_size = jax.tree.leaves(job.batch)[0].shape[0]
    for program in traced.values():
        validate_for(plan, program, batch_size)
    cuts = [
        PipelineCut(
            plan.boundaries(pipeline),
            tuple(stage.recompute for stage in pipeline.stages),
            pipeline.num_microbatches,
            tuple(plan.recompute_positions(stage) for stage in pipeline.stages),
            tuple("optimizer_state" in stage.offload for stage in pipeline.stages),
        )
        for pipeline in plan.pipelines
    ]
    obeyed = [
        with_tokens(obey_reshards(plan, p, traced[p.microbatch_size]), token_order(p))
        for p in plan.pipelines
    ]
    pipelines = make(
        [told(plan, place, program) for place, program in enumerate(obeyed)],
        job.parameter_shapes(),
        job.optimizer,
        cuts,
        divide_state=plan.shard_optimizer_state,
    )
    return replace(Placement.of(pipelines, plan), traced=traced)


def _context_shared(plan: Plan) -> Callable[[PipelinePrograms, int], Stage]:
    """What makes a stage, as it was cut, one whose members share the context as the plan says."""

    def adapted(pipelines: PipelinePrograms, stage: int) -> Stage:
        place = pipelines.pipeline_of(stage)
        cut, order = pipelines.stages[stage], token_order(plan.pipelines[place])
        ring = None if order is None else ring_of(plan.stages[stage], plan.cluster, order)
        return cut if ring is None else share_context(cut, pipelines.traced[place], ring)

    return adapted


def _tracers(plan: Plan) -> Callable[[PipelinePrograms, int], Tracer]:
    """What traces each stage: where it has several members, with the moves among them."""

    def tracer_of(pipelines: PipelinePrograms, stage: int) -> Tracer:
        lies = StageAnnotator(pipelines, plan, stage)
        if not lies.is_union:
            return trace_stage

        def tracer(
            cut: Stage,
            parameters: Sequence[jax.ShapeDtypeStruct],
            batch: Sequence[jax.ShapeDtypeStruct],
            received: Sequence[jax.ShapeDtypeStruct],
            seeds: tuple[int, ...],
        ) -> TracedStage:
            sent = jax.eval_shape(cut.function, parameters, batch, received)
            values = zip(cut.receives, received, strict=True)
            # The last stage sends nothing on: its cotangent is that of the loss.
            sends = dict(enumerate(cut.sends))
            annotations = [
                *map(lies.part, cut.parameters),
                *(lies.example(shape.shape) for shape in batch),
                *(lies.passed(value, shape.shape) for value, shape in values),
                *(lies.passed(sends.get(i, -1), sent[i].shape) for i in seeds),
            ]
            flatten = with_told_moves(annotations, len(parameters), len(seeds))
            shares = lies.plan.shares
            if not shares.modules:
                return trace_stage(cut, parameters, batch, received, seeds, flatten)
            program = pipelines.traced[pipelines.pipeline_of(stage)]
            return trace_modules(
                cut,
                modules_of(program, shares.module_edges),
                parameters,
                batch,
                received,
                seeds,
                [
                    {(o.equation, o.operand): o.ways for o in operands}
                    for _, operands in shares.module_runs
                ],
                lies.value,
                flatten,
            )

        return tracer

    return tracer_of


def trace_job(job: Job, microbatch_size: int) -> Program:
    """Trace a job's loss at a size of microbatches; it knows what the optimizer leaves as it is."""
    shapes, parameters = with_examples(job.batch, microbatch_size), job.parameter_shapes()
    program = trace(
        job.loss_function,
        parameters,
        shapes,
        has_aux=job.has_aux,
        divides_sequences=job.plan.shares_context,
    )
    return with_frozen_leaves(program, job.optimizer, parameters)


def transfers(placement: Placement) -> list[Tag]:
    """Every transfer that a training or an evaluation step has, on any stage."""
    lists: list[Sequence[Instruction]] = []
    for stage in range(placement.pipelines.num_stages):
        plan = placement.pipeline_plan(stage)
        lists.append(training_instructions(placement.pipelines, plan.schedule, stage))
        lists.append(evaluation_instructions(placement.pipelines, plan.schedule, stage))
    tags = {
        instruction.tag
        for instructions in lists
        for instruction in instructions
        if isinstance(instruction, Send | Receive | Expect)
    }
    return sorted({*tags, *_moves(placement)})


def _moves(placement: Placement) -> Iterator[Tag]:
    """Every move among members that a step may have, whatever its schedule."""
    of_microbatches = {*all_tasks(recomputes=True), EVALUATE}
    for stage, programs in placement.divided.items():
        count = placement.pipeline_plan(stage).num_microbatches
        for name, divided in programs.items():
            microbatches = range(count) if name in of_microbatches else (-1,)
            for place, microbatch in itertools.product(divided.moves, microbatches):
                yield move_tag(stage, name, place, microbatch)
