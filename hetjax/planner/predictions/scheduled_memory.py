"""What devices hold by a schedule, of what is predicted of their stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from hetjax.pipeline.schedules.memory import (
    MicrobatchBytes,
    host_peak_bytes,
    live_limit,
    peak_bytes,
    row_peak_bytes,
)
from hetjax.pipeline.schedules.schedule import Schedule
from hetjax.planner.plan.prediction import Held, MemberPrediction, Prediction, StagePrediction
from hetjax.planner.work.rates import USABLE_MEMORY

HeldT = TypeVar("HeldT", StagePrediction, MemberPrediction)


def with_memories(held: Sequence[StagePrediction], schedule: Schedule) -> Iterator[StagePrediction]:
    """Stages with what their devices hold by a schedule; of those that share devices, all.

    Args:
        held: the stages of a pipeline.
        schedule: its schedule.
    """
    together = {stage: group for group in schedule.groups for stage in group}
    rows = dict(zip(schedule.sharing, schedule.rows, strict=True))
    for s, stage in enumerate(held):
        if s not in together:
            yield _with_memory(stage, schedule, s)
            continue
        there = {each: held[each] for each in together[s]}
        peak = row_peak_bytes(
            rows[together[s]], {k: _microbatch_bytes(v) for k, v in there.items()}
        )
        working = max(each.working_bytes for each in there.values())
        state = sum(each.state_bytes for each in there.values())
        updating = max(each.update_bytes for each in there.values())
        yield replace(stage, memory_bytes=int(state + max(working + peak, updating)))


def _with_memory(stage: StagePrediction, schedule: Schedule, index: int) -> StagePrediction:
    """A stage with what its devices hold by a schedule: of several members the fullest ones'."""
    if not stage.members:
        return _with_own_memory(stage, schedule, index)
    members = tuple(_with_own_memory(member, schedule, index) for member in stage.members)
    fullest = max(members, key=lambda member: member.memory_bytes / member.memory_limit_bytes)
    # Hosts of other members may be fuller.
    host = max(members, key=lambda each: each.all_host_bytes / max(each.host_limit_bytes, 1))
    return replace(
        stage,
        members=members,
        state_bytes=fullest.state_bytes,
        working_bytes=fullest.working_bytes,
        activation_bytes=fullest.activation_bytes,
        recomputed_bytes=fullest.recomputed_bytes,
        deferred_bytes=fullest.deferred_bytes,
        memory_bytes=fullest.memory_bytes,
        memory_limit_bytes=fullest.memory_limit_bytes,
        update_bytes=fullest.update_bytes,
        offloaded_bytes=fullest.offloaded_bytes,
        host_bytes=host.host_bytes,
        host_limit_bytes=host.host_limit_bytes,
        host_activation_bytes=host.host_activation_bytes,
    )


def _with_own_memory(held: HeldT, schedule: Schedule, index: int) -> HeldT:
    """A stage of one member, or a member, with what its devices and hosts hold by a schedule."""
    tasks, microbatch = schedule.order[index], _microbatch_bytes(held)
    in_tasks = held.working_bytes + peak_bytes(tasks, microbatch)
    return replace(
        held,
        memory_bytes=int(held.state_bytes + max(in_tasks, held.update_bytes)),
        host_activation_bytes=int(host_peak_bytes(tasks, microbatch)),
    )


def live_limits_of(held: Sequence[StagePrediction], count: int) -> tuple[int, ...]:
    """How many live microbatches fit on each stage of a pipeline.

    Args:
        held: the stages.
        count: how many microbatches the pipeline has.
    """
    return tuple(
        min(
            max(1, live_limit(_room(each), _microbatch_bytes(each), count, _host_room(each)))
            for each in stage.members or (stage,)
        )
        for stage in held
    )


def fits_by(held: Sequence[StagePrediction], schedule: Schedule) -> bool:
    """Whether the stages of a pipeline fit by a schedule, in the memory that a plan may fill.

    Args:
        held: the stages.
        schedule: the schedule.
    """
    return all(map(has_room, with_memories(held, schedule)))


def has_room(stage: StagePrediction) -> bool:
    """Whether a stage fits in the memory that a plan may fill, and its hosts' in theirs.

    Args:
        stage: the stage.
    """
    return stage.fits_host and stage.memory_bytes <= USABLE_MEMORY * stage.memory_limit_bytes


def leaves_room(prediction: Prediction) -> bool:
    """Whether all stages of a plan fit in the memory that a plan may fill; see `has_room`.

    Args:
        prediction: what is predicted of the plan.
    """
    return all(map(has_room, prediction.stages))


def memory_rank(prediction: Prediction) -> int:
    """What ranks plans by the memory that they need, those first that leave the runtime its part.

    Args:
        prediction: what is predicted of a plan.

    Returns:
        0 where it leaves that, 1 where it fills the devices, as what was written by hand may, and
        2 where it does not fit.
    """
    return 2 - prediction.fits - leaves_room(prediction)


def _microbatch_bytes(held: Held) -> MicrobatchBytes:
    return MicrobatchBytes(
        held.activation_bytes, held.recomputed_bytes, held.deferred_bytes, held.offloaded_bytes
    )


def _room(held: Held) -> float:
    """What microbatches may hold of the memory that a plan may fill."""
    return USABLE_MEMORY * held.memory_limit_bytes - held.state_bytes - held.working_bytes


def _host_room(held: Held) -> float:
    """What they may hold in the hosts' memory."""
    return held.host_limit_bytes - held.host_bytes
