"""The discrete-event model: a schedule and the times of its tasks give a timeline."""

from __future__ import annotations

from collections.abc import Sequence

from hetjax.errors import InputError
from hetjax.pipeline.schedule import (
    Schedule,
    Task,
    dependency_order,
    input_source,
    split_microbatches,
)
from hetjax.pipeline.timeline import Event, Timeline, link_track, stage_track
from hetjax.pipeline.times import StepTimes


def simulate_schedule(schedule: Schedule, times: StepTimes) -> Timeline:
    """Runs a schedule in a discrete-event model of the stages and the links between them.

    A task starts when its stage has finished the task before it and its input has arrived. A
    result enters the link as soon as it is computed and the link's same direction is free; links
    are full-duplex, first in, first out, and a send does not occupy the stage. Each stage updates
    its parameters after its last task.

    Args:
        schedule: what every stage runs, in order.
        times: what it takes.

    Returns:
        The timeline from 0. A transfer or an update that takes no time has no event.

    Raises:
        InputError: the times are of another number of stages, the schedule splits backward passes
            and the times do not say how, or it deadlocks.

    Source: Harp section 4.2.1, the graph of its equation 3.

    Example:
        >>> from hetjax.pipeline.warm_up import gpipe
        >>> simulate_schedule(gpipe(2, 2), StepTimes([1.0, 1.0], [2.0, 2.0], [0.5], [0.5])).makespan
        10.0
    """
    if times.num_stages != schedule.num_stages:
        raise InputError(
            f"times are of {times.num_stages} stages; the schedule has {schedule.num_stages}"
        )
    seconds = [
        dict(zip(tasks, task_seconds(tasks, times, stage), strict=True))
        for stage, tasks in enumerate(schedule.order)
    ]
    events: list[Event] = []
    free: dict[str, float] = {}
    arrival: dict[tuple[int, Task], float] = {}

    def occupy(track: str, kind: str, task: Task | None, ready: float, seconds: float) -> float:
        start = max(ready, free.get(track, 0.0))
        end = free[track] = start + seconds
        if seconds > 0 or kind not in ("send", "update"):
            name, microbatch = (str(task), task.microbatch) if task else (kind, None)
            events.append(Event(track, name, kind, microbatch, start, end))
        return end

    for stage, task in dependency_order(schedule):
        source = input_source(schedule, stage, task)
        ready = arrival[source] if source else 0.0
        end = occupy(stage_track(stage), task.kind, task, ready, seconds[stage][task])
        if task.kind == "F" and stage + 1 < schedule.num_stages:
            end = occupy(link_track(stage, stage + 1), "send", task, end, times.sends[stage])
        elif task.kind == "B" and stage > 0:
            end = occupy(link_track(stage, stage - 1), "send", task, end, times.returns[stage - 1])
        arrival[stage, task] = end
    for stage, update in enumerate(times.update):
        occupy(stage_track(stage), "update", None, 0.0, update)
    return Timeline(tuple(events))


def warm_up_makespan(counts: Sequence[int], num_microbatches: int, times: StepTimes) -> float:
    """The makespan of a schedule of warm-up counts, without its timeline.

    Args:
        counts: N_i of every stage, from 1 to M, never above the count of the stage before.
        num_microbatches: M.
        times: what tasks, transfers and updates take; backward passes with recomputation in them.

    Returns:
        Seconds, to the bit what `simulate_schedule` finds for `from_warm_up_counts`, in a
        twentieth of the time: for searches that judge many plans.

    Example:
        >>> warm_up_makespan([2, 2], 2, StepTimes([1.0, 1.0], [2.0, 2.0], [0.5], [0.5]))
        10.0
    """
    ends = warm_up_ends(counts, num_microbatches, times)
    updates = times.update or [0.0] * len(ends)
    return max(end + update for end, update in zip(ends, updates, strict=True))


def warm_up_ends(
    counts: Sequence[int], num_microbatches: int, times: StepTimes
) -> tuple[float, ...]:
    """When every stage ends its last backward pass, in a schedule of warm-up counts.

    Args:
        counts: as for `warm_up_makespan`.
        num_microbatches: M.
        times: what tasks and transfers take.

    Returns:
        Seconds from the start of the step, one a stage.
    """
    last = len(counts) - 1
    forward, backward = list(times.forward), list(times.backward)
    sends, returns = list(times.sends), list(times.returns)
    free = [0.0] * (last + 1)
    sent, returned = [0.0] * last, [0.0] * last
    arrived = [[0.0] * num_microbatches for _ in counts]
    started = [0] * (last + 1)
    for microbatch in range(num_microbatches):
        # All forward tasks that come before this microbatch's backward task, stage by stage.
        for stage, count in enumerate(counts):
            here, seconds, end = arrived[stage], forward[stage], free[stage]
            begin, stop = started[stage], min(microbatch + count, num_microbatches)
            if stage == last:
                for each in range(begin, stop):
                    end = max(here[each], end) + seconds
            else:
                there, link, crossing = arrived[stage + 1], sent[stage], sends[stage]
                for each in range(begin, stop):
                    end = max(here[each], end) + seconds
                    link = there[each] = max(end, link) + crossing
                sent[stage] = link
            free[stage], started[stage] = end, stop
        ready = 0.0
        for stage in range(last, -1, -1):
            end = free[stage] = max(ready, free[stage]) + backward[stage]
            if stage:
                ready = returned[stage - 1] = max(end, returned[stage - 1]) + returns[stage - 1]
    return tuple(free)


def task_seconds(tasks: Sequence[Task], times: StepTimes, stage: int) -> tuple[float, ...]:
    """What every task of a stage's order takes.

    Args:
        tasks: the order of one stage.
        times: the times of its tasks.
        stage: which stage.

    Returns:
        Seconds, one a task.

    Raises:
        InputError: the order splits backward passes and the times do not say how.
    """
    split = split_microbatches(tasks)
    recomputed = {task.microbatch for task in tasks if task.kind == "R"}

    def seconds(task: Task) -> float:
        match task.kind:
            case "F":
                return times.forward[stage]
            case "R":
                return times.recompute_seconds(stage)
            case "B":
                return times.backward_seconds(
                    stage,
                    split=task.microbatch in split,
                    recomputed=task.microbatch in recomputed,
                )
            case "W":
                return times.weight_gradient[stage]

    return tuple(map(seconds, tasks))
