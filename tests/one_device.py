"""The main check of the project: a case gives the loss and the gradients of plain `jax.jit`.

A gradient's error is taken relative to the largest entry of its own leaf, so that a leaf with small
gradients must be as right as one with large ones. Gradients of single examples may cancel in their
mean, which then keeps the rounding of what cancelled: plain JAX with and without `jax.jit` differs
by as much. So where an error is larger than allowed, it is taken relative to what was averaged.
Within an example they may cancel, too: in those of a scalar all numbers are added up. So an error
is allowed by which one device's own gradients move when the last bits of the parameters do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from cases import Case
from execution import (
    gathered_state,
    job_of,
    keep_gradients,
    one_device_gradients,
    one_device_steps,
    running,
    train,
)
from small_models import Batch, Model, make_batch

from hetjax.pipeline.program.loss import path_names

TOLERANCE = 1e-5
DOUBLE_TOLERANCE = 1e-12
HALF_TOLERANCE = 0.05
"""bfloat16 has 8 bits: sums over microbatches or devices that round differently differ by that."""


def tolerance_of(model: Model) -> float:
    """By how much a model's figures may differ from those of one device, relatively."""
    if not model.exact:
        return HALF_TOLERANCE
    return DOUBLE_TOLERANCE if model.double else TOLERANCE


@contextmanager
def float64() -> Iterator[None]:
    """JAX computes in float64 where it is asked to, in all threads."""
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


@dataclass(frozen=True)
class HeldOut:
    """A source of which one batch is held out."""

    def batch(self, step: int, batch_size: int, rows: slice | None = None) -> Batch:
        return {name: leaf[rows or slice(None)] for name, leaf in make_batch(batch_size).items()}

    def held_out_batches(self, batch_size: int) -> list[Batch]:
        return [self.batch(0, batch_size)]


def largest_error(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest error of an array, relative to its largest entry."""
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    scale = np.max(np.abs(expected))
    error = np.max(np.abs(found - expected))
    return float(error / scale) if scale else float(error)


def check_gradients(case: Case, *, evaluates: bool = False) -> None:
    """Check loss, norm and gradients of a step after another one, and the loss of an evaluation."""
    batch, before = make_batch(case.plan.batch_size), make_batch(case.plan.batch_size, 1)
    loss, norm, gradients = one_device_gradients(case.model, batch)
    tolerance = tolerance_of(case.model)
    with running(job_of(case, keep_gradients(), source=HeldOut())) as executor:
        *_, reported = train(executor, [before, batch])
        found = gathered_state(executor)
        if evaluates:
            total, count = executor.evaluate(0)
            np.testing.assert_allclose(total / count, loss, rtol=tolerance)
    np.testing.assert_allclose(reported, (loss, norm), rtol=tolerance)
    names = path_names(case.model.init())
    for leaf, (name, ours, theirs) in enumerate(zip(names, found, gradients, strict=True)):
        error = largest_error(ours, theirs)
        if error > tolerance:
            error *= _cancellation(case, batch, leaf, theirs)
        if error > tolerance and case.model.exact:
            error -= 2 * _movement(case, batch, leaf)
        assert error <= tolerance, name


def _movement(case: Case, batch: Batch, leaf: int) -> float:
    """How far a leaf's gradient moves on one device when parameters do, by half of a last bit."""
    gradient = jax.jit(jax.grad(case.model.mean_loss))
    parameters, rng = case.model.init(), np.random.default_rng(0)

    def of_leaf(parameters: Any) -> np.ndarray:
        return np.asarray(jax.tree.leaves(gradient(parameters, batch))[leaf])

    def moved(array: Any) -> Any:
        array = np.asarray(array)
        if not np.issubdtype(array.dtype, np.floating):
            return array
        by = np.finfo(array.dtype).eps / 2 * rng.choice((-1, 1), array.shape)
        return (array * (1 + by)).astype(array.dtype)

    here, there = of_leaf(parameters), (jax.tree.map(moved, parameters) for _ in range(4))
    return max(largest_error(of_leaf(each), here) for each in there)


def _cancellation(case: Case, batch: Batch, leaf: int, gradient: np.ndarray) -> float:
    """A leaf's largest gradient, over the largest mean size of its examples' own gradients."""
    single = jax.jit(jax.grad(case.model.mean_loss))
    sizes = []
    for example in range(case.plan.batch_size):
        alone = {key: rows[example : example + 1] for key, rows in batch.items()}
        gradients = jax.tree.leaves(single(case.model.init(), alone))
        sizes.append(np.abs(np.nan_to_num(np.asarray(gradients[leaf], np.float64))))
    largest = float(np.max(np.mean(sizes, axis=0)))
    return min(1.0, float(np.max(np.abs(gradient))) / largest) if largest else 1.0


def check_steps(case: Case, steps: int = 10) -> None:
    """Check the losses of some steps of Adam."""
    # Adam makes a whole step of a gradient that is nothing but rounding, unless epsilon is larger.
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3, eps=1e-5))
    batches = [make_batch(case.plan.batch_size, seed) for seed in range(steps)]
    with jax.numpy_dtype_promotion("standard"):
        expected = one_device_steps(case.model, optimizer, batches)
    with running(job_of(case, optimizer)) as executor:
        found = train(executor, batches)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)
