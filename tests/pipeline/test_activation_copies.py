"""Copies of activations around tasks: what is read is there, and little is there at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_schedules import random_schedule, step_times

from hetjax import InputError
from hetjax.pipeline.schedules.activation_copies import (
    MOST_THERE,
    PLACES,
    activation_copies,
    travelling,
)
from hetjax.pipeline.schedules.memory import (
    MicrobatchBytes,
    host_peak_bytes,
    live_limit,
    peak_bytes,
)
from hetjax.pipeline.schedules.schedule import Schedule, Task
from hetjax.pipeline.schedules.warm_up import from_warm_up_counts, gpipe, one_f_one_b
from hetjax.pipeline.timeline.quick_clock import makespan
from hetjax.pipeline.timeline.simulate import simulate_schedule, stage_clocks
from hetjax.pipeline.timeline.times import StepTimes

SEEDS = st.integers(0, 2**32 - 1)
TRAVELS = MicrobatchBytes(activation=1.0, offloaded=1.0)


def drawn(seed: int, stages: int = 2, microbatches: int = 7) -> Schedule:
    return random_schedule(Random(seed), stages, microbatches)


def check_copies(tasks: Sequence[Task]) -> None:
    """Each that travels leaves after F, has left before it comes, and is there when it is read."""
    read = travelling(tasks)
    there: set[int] = set()
    left: set[int] = set()
    for place, (task, around) in enumerate(zip(tasks, activation_copies(tasks), strict=True)):
        there -= {*around.awaited}
        left |= {*around.awaited}
        assert left >= {*around.fetched}
        there |= {*around.fetched}
        if task.microbatch in read and task.kind != "F" and place <= read[task.microbatch]:
            assert task.microbatch in there
        if task.kind == "F":
            there.add(task.microbatch)
            assert around.stored == ((task.microbatch,) if task.microbatch in read else ())
        there -= {*around.awaited_after}
        left |= {*around.awaited_after}
        assert left >= {*around.fetched_after}
        there |= {*around.fetched_after}
    assert left == {*read}


@given(seed=SEEDS)
def test_what_is_read_has_come_back(seed: int):
    for tasks in drawn(seed).order:
        check_copies(tasks)


@given(seed=SEEDS)
def test_three_microbatches_are_there_at_most(seed: int):
    for tasks in drawn(seed).order:
        # What is made again ahead of its use is there from then on.
        plain = [task for task in tasks if task.kind in "FB"]
        assert peak_bytes(plain, TRAVELS) <= MOST_THERE
        assert host_peak_bytes(plain, TRAVELS) == most_away(plain)


def most_away(tasks: Sequence[Task]) -> int:
    """Counted task by task, from F to the task that reads."""
    made = {task.microbatch: place for place, task in enumerate(tasks) if task.kind == "F"}
    spans = [(made[m], place) for m, place in travelling(tasks).items()]
    return max((sum(a <= k <= b for a, b in spans) for k in range(len(tasks))), default=0)


@pytest.mark.parametrize("schedule", [one_f_one_b(8, 16), gpipe(2, 16)])
def test_usual_schedules_have_two_there(schedule: Schedule):
    for tasks in schedule.order:
        assert peak_bytes(tasks, TRAVELS) <= PLACES
    assert host_peak_bytes(schedule.order[0], TRAVELS) >= 6


def test_as_many_fit_as_are_told():
    # Three places of 9 and what stays of each on a device, 9 of each on the host.
    microbatch = MicrobatchBytes(activation=10.0, offloaded=9.0)
    assert live_limit(45.0, replace(microbatch, offloaded=0.0), 32) == 4
    assert live_limit(45.0, microbatch, 32, host_room=1e9) == 18
    assert live_limit(45.0, microbatch, 32, host_room=60.0) == 6
    assert live_limit(45.0, microbatch, 32) == 4
    counts = from_warm_up_counts([18], 32, "h_1f1b")
    assert peak_bytes(counts.order[0], microbatch) <= 45.0


@given(times=step_times(max_stages=3), seed=SEEDS, copy=st.floats(0.01, 5.0), data=st.data())
def test_times_with_copies(times: StepTimes, seed: int, copy: float, data: st.DataObject):
    """Copies make no task earlier, and cost at most their own time where nothing overlaps."""
    schedule = drawn(seed, times.num_stages)
    flags = data.draw(st.lists(st.booleans(), min_size=times.num_stages, max_size=times.num_stages))
    copies = [copy] * times.num_stages
    told = replace(times, stores=copies, fetches=copies, copies_overlap=flags)
    timeline = simulate_schedule(schedule, told)
    without = simulate_schedule(schedule, times).makespan
    count = sum(len(travelling(tasks)) for tasks in schedule.order)
    assert without - 1e-9 <= timeline.makespan <= without + 2 * count * copy + 1e-9
    assert makespan(schedule, told) == timeline.makespan
    kinds = [event.kind for event in timeline.events]
    assert kinds.count("store") == kinds.count("fetch") == count
    for stage, clock in enumerate(stage_clocks(schedule, told)):
        tasks = [e for e in timeline.on(f"stage {stage}") if e.kind != "update"]
        assert clock.end == tasks[-1].end
        check_events(timeline.on(f"link {stage}->host"), timeline.on(f"link host->{stage}"))
        if not flags[stage]:
            busy = sorted(
                (e.start, e.end)
                for track in (f"stage {stage}", f"link {stage}->host", f"link host->{stage}")
                for e in timeline.on(track)
            )
            assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(busy))


def check_events(stores: Sequence, fetches: Sequence) -> None:
    """Each direction does one copy at a time, and nothing comes before it has left."""
    for row in (stores, fetches):
        assert all(a.end <= b.start for a, b in itertools.pairwise(row))
    left = {event.microbatch: event.end for event in stores}
    assert all(left[event.microbatch] <= event.start for event in fetches)


def test_short_copies_beside_long_tasks_cost_little():
    times = StepTimes([1.0], [2.0], [], [], stores=[0.5], fetches=[0.5], copies_overlap=[True])
    plain = simulate_schedule(gpipe(1, 16), StepTimes([1.0], [2.0], [], [])).makespan
    # The first one to be read, and the one that is read after the last F.
    assert simulate_schedule(gpipe(1, 16), times).makespan <= plain + 2 * 0.5
    alone = replace(times, copies_overlap=[False])
    assert simulate_schedule(gpipe(1, 16), alone).makespan == plain + 32 * 0.5


def test_times_of_copies_are_given_together():
    with pytest.raises(InputError, match="stores has 1 times, fetches 0 and copies_overlap 0"):
        StepTimes([1.0], [2.0], [], [], stores=[0.5])
