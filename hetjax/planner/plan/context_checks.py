"""What makes no sense in the context splits of a pipeline's stages, or for a program."""

from __future__ import annotations

from hetjax import _compat
from hetjax.errors import InputError
from hetjax.pipeline.program.traced_program import Program
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan
from hetjax.sharding.attention.equation import attends_to_itself, attention_of
from hetjax.sharding.attention.primitive import ATTENTION


def check_contexts(pipeline: PipelinePlan, where: str) -> None:
    """Check that the stages of a pipeline share one sequence, each among its members.

    Args:
        pipeline: the pipeline.
        where: what errors name as the place.

    Raises:
        InputError: naming the field, its value and what is allowed.
    """
    splits = [stage.shares.context for stage in pipeline.stages]
    known = next((split for split in splits if split is not None), None)
    if known is None:
        return
    for s, (stage, split) in enumerate(zip(pipeline.stages, splits, strict=True)):
        place = f"{where}.stages[{s}].shares.context"
        if split is None:
            raise InputError(
                f"{place} is not given, and that of another stage is; tokens are in one order in "
                f"all stages: a stage of one member has one group of one device"
            )
        for field in ("length", "query_heads", "key_value_heads"):
            here, there = getattr(split, field), getattr(known, field)
            if here != there:
                raise InputError(
                    f"{place}.{field} is {here}, and {there} in another stage; allowed: the same"
                )
        _check_context(stage, place)


def _check_context(stage: StagePlan, place: str) -> None:
    split, shares = stage.shares.context, stage.shares
    assert split is not None
    places = [*range(len(stage.members))]
    if [*split.devices] != places:
        raise InputError(
            f"{place}.groups have the devices {[*split.devices]}; allowed: the places of the "
            f"stage's members in order, {places}"
        )
    if shares.batch:
        raise InputError(
            f"{place} is given beside shares.batch {list(shares.batch)}; a stage divides its "
            f"examples or their tokens: allowed is one of the two"
        )
    if shares.modules:
        raise InputError(f"{place} is given beside shares.modules; allowed is one of the two")
    if stage.sharding == "data" or all(m.mesh_shape[0] == 1 for m in stage.members):
        return
    raise InputError(
        f"{place} is given, and the stage's sharding is {stage.sharding!r}; allowed: 'data'"
    )


def check_context_for(stage: StagePlan, program: Program, where: str) -> None:
    """Check that a stage's context split is of the program's attentions.

    Args:
        stage: the stage.
        program: the traced loss function.
        where: what errors name as the place.

    Raises:
        InputError: naming the field, its value and what is allowed.
    """
    split = stage.shares.context
    if split is None:
        return
    for step in program.steps:
        if step.name != ATTENTION.name or step.equation is None:
            continue
        attention = attention_of(step.equation, step.inputs)
        query, key = (program.avals[each] for each in (attention.query, attention.key))
        found = {
            "length": query.shape[attention.token_dimension],
            "query_heads": query.shape[-2],
            "key_value_heads": key.shape[-2],
        }
        for field, number in found.items():
            if getattr(split, field) != number:
                raise InputError(
                    f"{where}.shares.context.{field} is {getattr(split, field)}, and the model's "
                    f"attentions have {number}; allowed: {number}"
                )
        if not attends_to_itself(step.equation):
            raise InputError(
                f"{where}.shares.context: members cannot share the tokens of the attention at "
                f"{_compat.source_line(step.equation)}, which is not of a sequence to itself; "
                f"allowed: queries and keys of the same tokens, with a mask by their own positions"
            )
