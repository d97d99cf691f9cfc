"""Frozen parameters: the rest trains as on one device, and nothing is done for what is frozen."""

from collections.abc import Sequence
from random import Random

import jax
import numpy as np
import optax
from cases import examples, random_case
from execution import gathered_state, job_of, keep_gradients, one_device_gradients, running, train
from hypothesis import given
from hypothesis import strategies as st
from one_device import largest_error, tolerance_of
from small_models import Model, make_batch


def freezing(
    model: Model, trained: optax.GradientTransformation, frozen: Sequence[bool]
) -> optax.GradientTransformation:
    """An optimizer of a model's parameters that leaves some of them as they are."""
    tree = jax.tree.structure(model.init())
    labels = jax.tree.unflatten(tree, ["frozen" if each else "trained" for each in frozen])
    return optax.multi_transform({"trained": trained, "frozen": optax.set_to_zero()}, labels)


@examples(usual=4)
@given(number=st.integers(0, 2**32 - 1))
def test_gradients_of_the_rest_equal_those_of_one_device(number: int):
    rng = Random(number)
    case = random_case(rng, 5, 6, rng.choice((1, 1, 3)))
    count = len(case.program.parameters)
    frozen = [rng.random() < 0.6 for _ in range(count)]
    frozen[rng.randrange(count)] = False
    batch, before = make_batch(case.plan.batch_size), make_batch(case.plan.batch_size, 1)
    loss, _, gradients = one_device_gradients(case.model, batch)
    tolerance = tolerance_of(case.model)
    optimizer = freezing(case.model, keep_gradients(), frozen)
    with running(job_of(case, optimizer)) as executor:
        *_, (found_loss, _) = train(executor, [before, batch])
        found = gathered_state(executor)
    np.testing.assert_allclose(found_loss, loss, rtol=tolerance)
    wanted = [g for g, stays in zip(jax.tree.leaves(gradients), frozen, strict=True) if not stays]
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        assert largest_error(mine, np.asarray(theirs)) <= tolerance
