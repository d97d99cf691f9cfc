"""Times of a step: as many as there are stages, and what a backward pass takes."""

import pytest

from hetjax.errors import InputError
from hetjax.pipeline.timeline.times import StepTimes

FITTING = {"forward": [1.0] * 2, "backward": [2.0] * 2, "sends": [0.5], "returns": [0.5]}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("forward", [], "forward has no times"),
        ("forward", [1.0], "backward has 2 times; 1 stages need 1"),
        ("returns", [], "returns has 0 times; 2 stages need 1"),
        ("update", [1.0], "update has 1 times; 2 stages need 2"),
        ("recompute", [1.0], "recompute has 1 times; 2 stages need 2"),
        ("input_gradient", [1.0] * 2, "input_gradient has 2 times and weight_gradient 0"),
        ("backward", [1.0, -1.0], "times must be finite and not negative"),
        ("backward", [1.0, float("nan")], "times must be finite and not negative"),
    ],
)
def test_times_that_do_not_fit_are_refused(field: str, value: list[float], message: str):
    with pytest.raises(InputError, match=message):
        StepTimes(**(FITTING | {field: value}))


def test_a_backward_pass_takes_what_its_order_leaves_to_it():
    whole = StepTimes(**FITTING)
    assert not whole.can_split
    assert whole.backward_seconds(0, split=False, recomputed=False) == 2.0
    with pytest.raises(InputError, match="a schedule with W tasks needs them"):
        whole.backward_seconds(0, split=True, recomputed=False)
    times = StepTimes(
        **FITTING, input_gradient=[0.75] * 2, weight_gradient=[1.0] * 2, recompute=[0.0, 0.25]
    )
    assert times.can_split
    assert times.backward_seconds(1, split=True, recomputed=False) == 1.0
    assert times.backward_seconds(1, split=True, recomputed=True) == 0.75
    assert times.backward_seconds(1, split=False, recomputed=False) == 2.25
    assert times.compute == (3.0, 3.25)
    assert times.communication == (0.5,)
