"""Two pipelines of microbatches of unlike sizes, of which the first has two stages, for tests."""

from __future__ import annotations

from cases import CLUSTER

from hetjax.mesh import SubMesh
from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan


def unlike_pipelines(program: Program, cut: int, small: int) -> Plan:
    """The plan, of two microbatches and one.

    Args:
        program: the loss, traced at the size of the first pipeline's microbatches.
        cut: the position where its second stage begins.
        small: examples in the microbatch of the second pipeline.
    """
    layers = (0, cut, program.num_positions)
    stages = [
        StagePlan.on(span, SubMesh("first", first, (1, 1)), (1, 1))
        for first, span in enumerate(((0, 1), (1, 2), (0, 2)))
    ]
    pipelines = (
        PipelinePlan(tuple(stages[:2]), 2, program.num_examples, one_f_one_b(2, 2)),
        PipelinePlan(tuple(stages[2:]), 1, small, one_f_one_b(1, 1)),
    )
    return Plan(program.fingerprint, layers, CLUSTER, pipelines)
