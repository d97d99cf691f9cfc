"""Random step times and random executable schedules, for the property tests."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from hypothesis import strategies as st

from hetjax.pipeline.schedules.schedule import EXPLICIT, Schedule, Task
from hetjax.pipeline.timeline.times import StepTimes

SECONDS = st.floats(0.01, 10.0)


@st.composite
def step_times(
    draw: st.DrawFn, min_stages: int = 1, max_stages: int = 16, split: bool = True
) -> StepTimes:
    """Any times of a number of stages; recomputation on some of them.

    Split, they have times of halves, which may take more or less than the whole.
    """
    stages = draw(st.integers(min_stages, max_stages))

    def times(length: int = stages, values: st.SearchStrategy[float] = SECONDS) -> list[float]:
        return draw(st.lists(values, min_size=length, max_size=length))

    return StepTimes(
        forward=times(),
        backward=times(),
        sends=times(stages - 1, st.just(0.0) | SECONDS),
        returns=times(stages - 1, st.just(0.0) | SECONDS),
        update=times(values=st.just(0.0) | SECONDS),
        input_gradient=times() if split else (),
        weight_gradient=times() if split else (),
        recompute=times(values=st.just(0.0) | SECONDS),
    )


def random_schedule(
    rng: Random,
    num_stages: int,
    num_microbatches: int,
    groups: Sequence[Sequence[int]] = (),
) -> Schedule:
    """An executable order, drawn task by task among all that could run next.

    Stages of a group share devices, and take turns as they were drawn.
    """
    drawn: list[tuple[int, Task]] = []
    ready = [(0, Task("F", m)) for m in range(num_microbatches)]
    while ready:
        stage, task = ready.pop(rng.randrange(len(ready)))
        drawn.append((stage, task))
        if task.kind == "F":
            if rng.random() < 0.3:
                drawn.append((stage, Task("R", task.microbatch)))
            last = stage == num_stages - 1
            ready.append((stage, Task("B", task.microbatch)) if last else (stage + 1, task))
        elif task.kind == "B":
            if stage:
                ready.append((stage - 1, task))
            if rng.random() < 0.6:
                ready.append((stage, Task("W", task.microbatch)))
    order = (tuple(task for s, task in drawn if s == stage) for stage in range(num_stages))
    turns = (tuple(stage for stage, _ in drawn if stage in group) for group in groups)
    return Schedule(EXPLICIT, tuple(order), tuple(turns))


@st.composite
def random_schedules(draw: st.DrawFn, num_stages: int, max_microbatches: int = 8) -> Schedule:
    """Executable orders with R and W of some microbatches."""
    num_microbatches = draw(st.integers(1, max_microbatches))
    return random_schedule(Random(draw(st.integers(0, 2**32))), num_stages, num_microbatches)
