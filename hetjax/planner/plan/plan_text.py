"""A plan in a few lines of plain text, as ``print(plan)`` shows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetjax.mesh.cluster import Cluster
from hetjax.mesh.quantities import format_bytes, format_seconds
from hetjax.planner.plan.prediction import MemberPrediction, Prediction, StagePrediction
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan
from hetjax.sharding.context.context_split import ContextSplit


def plan_text(
    cluster: Cluster,
    pipelines: Sequence[PipelinePlan],
    planner: str,
    prediction: Prediction | None,
    lost: Sequence[int] = (),
    notes: Sequence[str] = (),
) -> str:
    """A plan as plain text: the cluster, every stage, microbatches and schedule, what is predicted.

    Args:
        cluster: the cluster.
        pipelines: the pipelines.
        planner: what made the plan.
        prediction: what is expected of it; the text of a plan without one says so.
        lost: devices of the cluster that are gone.
        notes: what is to be known of the plan.

    Returns:
        A line for the whole, one for each pipeline, one for each stage and for each member of one
        that has several, the predicted step time beside the time that no schedule of these stages
        can go below, and one for each note. Memory is that of one device.

    Example:
        >>> from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster, SubMesh
        >>> from hetjax.planner import StagePlan
        >>> from hetjax.pipeline.schedules.warm_up import one_f_one_b
        >>> kind, link = DeviceKind("card", {"float32": 1e12}, 10**9, 1e11, "made up"), Link(1e9, 0)
        >>> cluster = Cluster("desk", (Subcluster("pair", kind, 1, 2, link, link),), ())
        >>> stage = StagePlan.on((0, 3), SubMesh("pair", 0, (1, 2)), (2, 1))
        >>> pipeline = PipelinePlan((stage,), 4, 8, one_f_one_b(1, 4))
        >>> print(plan_text(cluster, (pipeline,), "by hand", None))
        Plan on cluster desk: 1 stage on 2 of 2 devices, 32 examples a step, made by hand
          4 microbatches of 8 examples, schedule 1f1b
            stage 0: layers 0-2 on pair[0:2] 1x2, data 2
          without a prediction
    """
    stages = [stage for pipeline in pipelines for stage in pipeline.stages]
    used = sum(pipeline.num_devices for pipeline in pipelines)
    batch_size = sum(pipeline.batch_size for pipeline in pipelines)
    lines = [
        f"Plan on cluster {cluster.name}: {_count(len(stages), 'stage')} on {used} of "
        f"{_count(cluster.num_devices, 'device')}, {_count(batch_size, 'example')} a "
        f"step{_without(lost)}, made {planner if planner == 'by hand' else f'by {planner}'}"
    ]
    predicted = prediction.stages if prediction else ()
    first = 0
    for number, pipeline in enumerate(pipelines):
        name = f"pipeline {number}: " if len(pipelines) > 1 else ""
        end = first + len(pipeline.stages)
        lines.append(f"  {name}{_order(pipeline)}")
        lines += _stages(pipeline, cluster, first, predicted[first:end])
        first = end
    lines.append(f"  {_prediction(prediction)}")
    lines += [f"  {note}" for note in notes]
    return "\n".join(lines)


def _without(lost: Sequence[int]) -> str:
    if not lost:
        return ""
    return f", without device{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))}"


def _order(pipeline: PipelinePlan) -> str:
    microbatches = _count(pipeline.num_microbatches, "microbatch", "microbatches")
    size = _count(pipeline.microbatch_size, "example")
    return f"{microbatches} of {size}, schedule {pipeline.schedule.name}"


def _stages(
    pipeline: PipelinePlan, cluster: Cluster, first: int, predicted: Sequence[StagePrediction]
) -> list[str]:
    lines = []
    for place, stage in enumerate(pipeline.stages):
        start, end = stage.layers
        layers = f"layer {start}" if end - start == 1 else f"layers {start}-{end - 1}"
        memory = (_memory(predicted[place]),) if predicted else ()
        if len(stage.members) == 1:
            said = stage.devices_text, stage.sharding_text, *memory
        else:
            said = f"{len(stage.members)} members", *stage.rule_words, *memory
        lines.append(f"    stage {first + place}: {layers} on {', '.join(said)}")
        if len(stage.members) > 1:
            members = predicted[place].members if predicted else ()
            lines += _members(stage, cluster, pipeline.microbatch_size, members)
    return lines


def _members(
    stage: StagePlan, cluster: Cluster, microbatch_size: int, predicted: Sequence[MemberPrediction]
) -> Iterator[str]:
    """A line for each member: its devices and their kind, its mesh, and what it has."""
    for m, member in enumerate(stage.members):
        kind = cluster.subcluster(member.submesh.subcluster).kind.name
        said = f"{member.submesh} ({kind})", member.axes_text, *_shares(stage, m, microbatch_size)
        if stage.shares.context is not None and predicted:
            said = *said, _predicted_member(predicted[m])
        yield f"      {', '.join(said)}"


def _predicted_member(member: MemberPrediction) -> str:
    seconds = format_seconds(member.forward_seconds + member.backward_seconds)
    return f"{seconds} of computing, {format_bytes(member.memory_bytes)}"


def _shares(stage: StagePlan, member: int, microbatch_size: int) -> Iterator[str]:
    shares, split = stage.shares, stage.shares.context
    whole = _count(microbatch_size, "example")
    if split is not None:
        yield from _context(split, member)
        return
    yield f"{shares.batch[member]} of {whole}" if shares.batch else f"all of {whole}"
    parts = [share.sizes[member] / sum(share.sizes) for share in shares.parameters.values()]
    if parts:
        some = "" if min(parts) == max(parts) else f"{min(parts):.0%} to "
        yield f"{some}{max(parts):.0%} of {_count(len(parts), 'parameter')}"


def _context(split: ContextSplit, member: int) -> Iterator[str]:
    """The tokens and heads of a member."""
    group = f"group {split.group_of[member]}: " if len(split.groups) > 1 else ""
    yield f"{group}{split.tokens[member]:,} of {split.length:,} tokens"
    start, stop = split.head_ranges[member]
    if stop - start in (0, split.query_heads):
        yield "all heads" if stop - start else "no heads"
        return
    heads = f"head {start}" if stop - start == 1 else f"heads {start}-{stop - 1}"
    yield f"{heads} of {split.query_heads}"


def _memory(stage: StagePrediction) -> str:
    needed, there = format_bytes(stage.memory_bytes), format_bytes(stage.memory_limit_bytes)
    on_host = ""
    if stage.host_limit_bytes:
        held, share = format_bytes(stage.all_host_bytes), format_bytes(stage.host_limit_bytes)
        on_host = f" and {held} of {share} of its host's"
    return f"{needed} of {there}{on_host}" + ("" if stage.fits else ", which is too little")


def _prediction(prediction: Prediction | None) -> str:
    if prediction is None:
        return "without a prediction"
    return (
        f"predicted step time {format_seconds(prediction.step_time)}, "
        f"lower bound {format_seconds(prediction.lower_bound)}"
    )


def _count(number: int, one: str, several: str | None = None) -> str:
    return f"{number} {one if number == 1 else several or f'{one}s'}"
