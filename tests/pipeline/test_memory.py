from random import Random

from hypothesis import given
from hypothesis import strategies as st
from random_schedules import random_schedule

from hetjax.pipeline.schedules.memory import MicrobatchBytes, live_limit, peak_bytes
from hetjax.pipeline.schedules.schedule import Schedule, Task
from hetjax.pipeline.schedules.warm_up import from_warm_up_counts

SIZES = st.integers(0, 100)


def tasks(text: str) -> list[Task]:
    return [Task.parse(each) for each in text.split()]


def test_whole_passes_hold_one_activation_a_live_microbatch():
    schedule = from_warm_up_counts([3], 8)
    assert peak_bytes(schedule.order[0], MicrobatchBytes(10.0)) == 30.0


def test_what_is_recomputed_counts_from_its_task_or_during_the_backward_pass():
    microbatch = MicrobatchBytes(activation=1.0, recomputed=10.0)
    assert peak_bytes(tasks("F0 F1 B0 B1"), microbatch) == 12.0
    assert peak_bytes(tasks("F0 F1 R0 R1 B0 B1"), microbatch) == 22.0


def test_what_is_deferred_counts_until_the_weight_gradient():
    microbatch = MicrobatchBytes(activation=10.0, deferred=4.0)
    assert peak_bytes(tasks("F0 B0 F1 B1 W0 W1"), microbatch) == 18.0
    assert peak_bytes(tasks("F0 B0 W0 F1 B1 W1"), microbatch) == 14.0


@given(
    seed=st.integers(0, 2**32),
    microbatch=st.builds(MicrobatchBytes, SIZES, SIZES, SIZES),
    room=st.integers(0, 2000),
)
def test_as_many_microbatches_as_may_live_fit(seed: int, microbatch: MicrobatchBytes, room: int):
    schedule: Schedule = random_schedule(Random(seed), 1, 8)
    limit = live_limit(room, microbatch, schedule.num_microbatches)
    if schedule.live_bound(0) <= limit:
        assert peak_bytes(schedule.order[0], microbatch) <= room + microbatch.deferred
