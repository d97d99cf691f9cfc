"""The context of a plan: in which order tokens of a pipeline are, and the rings of its stages."""

from __future__ import annotations

from dataclasses import replace

from jax.sharding import PartitionSpec

from hetjax.mesh.cluster import Cluster
from hetjax.pipeline.program.sequence import token_dimensions
from hetjax.pipeline.program.traced_program import Program
from hetjax.planner.plan.member_annotations import union_of_members
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.attention.mask import Spans, TokenSpan
from hetjax.sharding.context.positions import positions_in_order
from hetjax.sharding.context.ring_attention import ContextRing


def token_order(pipeline: PipelinePlan) -> Spans | None:
    """The positions of a pipeline's tokens, in the order in which members have them.

    Of stages that share the context in unlike ways the one with the most groups decides: what
    balances it does no harm to the others.

    Args:
        pipeline: the pipeline.

    Returns:
        The positions; None where no stage shares the context.
    """
    splits = [stage.shares.context for stage in pipeline.stages]
    known = [split for split in splits if split is not None]
    if not known:
        return None
    split = max(known, key=lambda split: len(split.groups))
    return tuple(TokenSpan(*run) for run in positions_in_order(split))


def with_tokens(program: Program, order: Spans | None) -> Program:
    """The program of a pipeline, with its tokens where stages share the context.

    Args:
        program: the traced loss function.
        order: the positions of the pipeline's tokens.

    Returns:
        The program.

    Raises:
        InputError: something depends on the order of the tokens.
    """
    return program if order is None else replace(program, tokens=token_dimensions(program))


def ring_of(stage: StagePlan, cluster: Cluster, order: Spans) -> ContextRing | None:
    """How the members of a stage share tokens and heads.

    Args:
        stage: the stage.
        cluster: the devices.
        order: the positions of its pipeline's tokens.

    Returns:
        The ring; None where the stage shares nothing.
    """
    split = stage.shares.context
    return split and ContextRing(union_of_members(stage.members, cluster), split, order)


def values_inside(stage: StagePlan, cluster: Cluster, program: Program) -> dict[int, HSharding]:
    """How values lie on a stage whose members share the context, where its plan says how inside.

    Args:
        stage: the stage.
        cluster: the devices.
        program: the program of its pipeline, with its tokens.

    Returns:
        By value: each member has its tokens, or all of what has none.
    """
    split = stage.shares.context
    if split is None or len(stage.members) == 1:
        return {}
    union, found = union_of_members(stage.members, cluster), {}
    for value, axes in stage.values.items():
        members = tuple(group.with_spec(PartitionSpec(*axes)) for group in union)
        dimension = program.tokens.values.get(value)
        found[value] = (
            HSharding(members) if dimension is None else HSharding(members, dimension, split.tokens)
        )
    return found
