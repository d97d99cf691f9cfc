"""Pipelines that pass their submeshes more than once train as one device does."""

from __future__ import annotations

from random import Random

import jax
import numpy as np
import optax
from cases import examples
from execution import job_of, one_device_steps, running, train
from hypothesis import given
from hypothesis import strategies as st
from one_device import TOLERANCE, check_gradients
from shared_devices import random_shared_case
from small_models import make_batch

NUMBERS = st.integers(0, 2**32 - 1)


@examples(usual=1, full=100)
@given(number=NUMBERS)
def test_loss_and_gradients_equal_those_of_one_device(number: int):
    """Whatever the turns, halves of backward passes and meshes."""
    check_gradients(random_shared_case(Random(number)))


@examples(usual=1, full=30)
@given(number=NUMBERS)
def test_steps_equal_those_of_one_device(number: int):
    case = random_shared_case(Random(number), exact=True)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3, eps=1e-5))
    batches = [make_batch(case.plan.batch_size, seed) for seed in range(4)]
    with jax.numpy_dtype_promotion("standard"):
        expected = one_device_steps(case.model, optimizer, batches)
    with running(job_of(case, optimizer)) as executor:
        found = train(executor, batches)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)
