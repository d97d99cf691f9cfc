"""Pipelines that pass their submeshes more than once train as one device does."""

from __future__ import annotations

from random import Random

from cases import examples
from hypothesis import given
from hypothesis import strategies as st
from one_device import check_gradients, check_steps
from shared_devices import random_shared_case

NUMBERS = st.integers(0, 2**32 - 1)


@examples(usual=1, full=100)
@given(number=NUMBERS)
def test_loss_and_gradients_equal_those_of_one_device(number: int):
    """Whatever the turns, halves of backward passes and meshes."""
    check_gradients(random_shared_case(Random(number)), evaluates=True)


@examples(usual=1, full=30)
@given(number=NUMBERS)
def test_steps_equal_those_of_one_device(number: int):
    check_steps(random_shared_case(Random(number), exact=True), steps=4)
