"""Schedules as data: complete, ordered, free of deadlock, whatever their tasks."""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_schedules import random_schedule

from hetjax.errors import InputError
from hetjax.pipeline.schedules.schedule import (
    Schedule,
    Task,
    check,
    dependency_order,
    input_source,
    live_microbatches,
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    rng = Random(draw(st.integers(0, 2**32)))
    return random_schedule(rng, draw(st.integers(1, 8)), draw(st.integers(1, 16)))


def explicit(*stages: str) -> Schedule:
    return Schedule(
        "explicit", tuple(tuple(Task.parse(t) for t in stage.split()) for stage in stages)
    )


@given(schedules())
def test_every_task_runs_once_after_what_it_waits_for(schedule: Schedule):
    done: dict[tuple[int, Task], int] = {}
    for step, (stage, task) in enumerate(dependency_order(schedule)):
        assert (stage, task) not in done
        source = input_source(schedule, stage, task)
        assert source is None or done[source] < step
        if task.kind in ("R", "B"):
            assert done[stage, Task("F", task.microbatch)] < step
        if task.kind == "W":
            assert done[stage, Task("B", task.microbatch)] < step
        done[stage, task] = step
    assert len(done) == sum(map(len, schedule.order))


@given(schedules())
def test_check_accepts_what_can_be_executed(schedule: Schedule):
    check(schedule)


@given(schedules())
def test_json_round_trip(schedule: Schedule):
    assert Schedule.from_json(schedule.to_json()) == schedule


def test_a_microbatch_is_live_until_its_weight_gradient():
    schedule = explicit("F0 F1 R1 B0 B1 W0 F2 W1 B2")
    assert live_microbatches(schedule) == ((1, 2, 2, 2, 2, 2, 2, 2, 1),)
    assert schedule.live_bound(0) == 2
    assert schedule.warm_up_counts == (2,)
    assert schedule.splits_backward
    assert not explicit("F0 B0").splits_backward


def of_rows(*rows: Any) -> Schedule:
    """Whatever is written as an order; pairs are tasks of such a kind and microbatch."""
    return Schedule("explicit", tuple(of_row(row) if type(row) is list else row for row in rows))


def of_row(row: Sequence[Any]) -> Any:
    return tuple(Task(*each) if isinstance(each, tuple) else each for each in row)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (explicit("F0 B0", "F0"), r"stage 1: task B0 is missing"),
        (explicit("F0 B0 F2 B2"), r"stage 0: task F1 is missing"),
        (explicit("F0 B0 F0"), r"stage 0: task F0 stands twice"),
        (explicit("F0 B1 F1 B0"), r"stage 0: task B1 comes before its forward F1"),
        (explicit("F0 W0 B0"), r"stage 0: task W0 comes before its backward B0"),
        (explicit("F0 B0 W0 W0"), r"stage 0: task W0 stands twice"),
        (explicit("R0 F0 B0"), r"stage 0: task R0 comes before its forward F0"),
        (explicit("F0 B0 R0"), r"stage 0: task R0 comes after its backward B0"),
        (explicit("F0 B0 F1 B1", "F1 B1 F0 B0"), r"stage 0 waits at B0 for stage 1; stage 1 wait"),
        (Schedule("explicit", ()), r"has no tasks"),
        (Schedule("explicit", ((),)), r"has no tasks"),
        (of_rows(["F0", "B0"]), r"stage 0: 'F0' is no Task; .* Task\('F', 0\)"),
        (of_rows(Task("F", 0)), r"order is .*; allowed: a tuple of tasks"),
        (of_rows([Task("F", -1)]), r"microbatch -1; allowed: whole numbers from"),
        (of_rows([("F", "0")]), r"microbatch '0'; allowed: whole numbers"),
        (of_rows([("G", 0)]), r"stage 0: kind of task 'G'. Allowed: B, F, R"),
    ],
    ids=[
        "missing",
        "skipped",
        "twice",
        "backward first",
        "weights first",
        "weights twice",
        "recomputed first",
        "recomputed late",
        "deadlock",
        "no stage",
        "no task",
        "a text",
        "no list",
        "before the first",
        "no number",
        "of no kind",
    ],
)
def test_check_refuses(schedule: Schedule, message: str):
    with pytest.raises(InputError, match=message):
        check(schedule)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"name": "explicit"}, "no field 'order'"),
        ({"name": "1f2b", "order": [["F0", "B0"]]}, "unknown schedule '1f2b'; did you mean '1f1b'"),
        ({"name": "1f1b", "order": ["F0", "B0"]}, "list of lists"),
        ({"name": "1f1b", "order": "F0"}, "list of lists"),
        ({"name": "1f1b", "order": [["F0", "X0"]]}, "task 'X0' is not one of F, R, B, W"),
        ({"name": "1f1b", "order": [["F0", 0]]}, "task 0 is not one of F, R, B, W"),
        ({"name": "1f1b", "order": [["B0", "F0"]]}, "comes before its forward"),
    ],
)
def test_from_json_refuses(value: dict, message: str):
    with pytest.raises(InputError, match=message):
        Schedule.from_json(value)
