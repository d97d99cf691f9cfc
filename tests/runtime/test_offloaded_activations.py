"""Activations in the hosts' memory: the same bits, and few microbatches on the devices at once."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
from cases import Case, examples, random_case
from execution import job_of, running, train
from hypothesis import given
from hypothesis import strategies as st
from offloading import CLIPPED, held, offloading, same
from small_models import make_batch

from hetjax.planner.plan.stage_plan import Offloaded as Kind


def steps(case: Case) -> tuple[Any, list[np.ndarray], int]:
    batches = [make_batch(case.plan.batch_size, seed) for seed in range(2)]
    with running(job_of(case, CLIPPED)) as executor:
        n = sum(type(i).__name__ == "Store" for w in executor.workers for i in w.training)
        return train(executor, batches), held(executor), n


@examples(usual=4, full=100)
@given(number=st.integers(0, 2**32 - 1), state=st.booleans())
def test_offloaded_activations_give_the_same_bits(number: int, state: bool):
    case = random_case(Random(number), 3, 6)
    losses, expected, _ = steps(case)
    kinds: tuple[Kind, ...] = ("activations", *(("optimizer_state",) if state else ()))
    found, offloaded, n = steps(replace(case, plan=offloading(case.plan, *kinds)))
    print(n, state)
    assert found == losses
    assert same(offloaded, expected)
