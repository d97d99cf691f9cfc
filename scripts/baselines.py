"""Training as one writes it by hand with `jax.jit`: what hetjax is measured against."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from benchmarking import Size

from hetjax.models import GPTConfig, LanguageModel, language_model

BASELINES = ("full batch", "scan", "loop")
"""A step on the whole batch, or on its microbatches by `jax.lax.scan` or by a Python loop."""


def model_of(size: Size) -> LanguageModel:
    """The benchmarked GPT."""
    return language_model(
        GPTConfig(
            vocabulary=size.vocabulary,
            blocks=size.blocks,
            width=size.width,
            heads=size.heads,
            sequence=size.sequence,
            tied_embeddings=False,
        )
    )


def optimizer() -> optax.GradientTransformation:
    """The benchmarks' optimizer."""
    return optax.adamw(1e-3)


class HandWritten:
    """A model in training, without hetjax.

    Args:
        size: sizes of model and batch.
        baseline: one of `BASELINES`.
    """

    def __init__(self, size: Size, baseline: str):
        model = model_of(size)
        make = {"full batch": full_batch, "scan": scan, "loop": loop}[baseline]
        self._step = make(model.loss, optimizer(), size.microbatches)
        self._parameters = jax.jit(model.init)(jax.random.key(0))
        self._state = optimizer().init(self._parameters)
        self._tokens = size.tokens()
        self.loss = 0.0

    def step(self) -> float:
        """Run a step; its seconds."""
        began = time.perf_counter()
        self._parameters, self._state, loss = self._step(
            self._parameters, self._state, {"tokens": self._tokens}
        )
        jax.block_until_ready((self._parameters, loss))
        seconds = time.perf_counter() - began
        self.loss = float(loss)
        return seconds


def full_batch(
    loss: Callable[..., Any], optimizer: optax.GradientTransformation, microbatches: int
) -> Callable[..., Any]:
    """A jitted step on the whole batch: (parameters, state, batch) to both anew and the loss."""
    del microbatches

    def mean_loss(parameters: Any, batch: Any) -> jax.Array:
        total, count = loss(parameters, batch)
        return total / count

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(parameters: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(mean_loss)(parameters, batch)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    return step


def scan(
    loss: Callable[..., Any], optimizer: optax.GradientTransformation, microbatches: int
) -> Callable[..., Any]:
    """A jitted step that sums the gradients of the microbatches in a `jax.lax.scan`."""

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(parameters: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        def accumulate(sums: Any, microbatch: Any) -> tuple[Any, None]:
            return _add_gradients(loss, parameters, sums, microbatch), None

        parts = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)
        sums, _ = jax.lax.scan(accumulate, _no_gradients(parameters), parts)
        return _updated(optimizer, parameters, state, sums)

    return step


def loop(
    loss: Callable[..., Any], optimizer: optax.GradientTransformation, microbatches: int
) -> Callable[..., Any]:
    """A step that calls a jitted function for each microbatch, and another one for the update."""
    accumulate = jax.jit(partial(_add_gradients, loss), donate_argnums=1)
    update = jax.jit(partial(_updated, optimizer), donate_argnums=(0, 1))
    start = jax.jit(_no_gradients)

    def step(parameters: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        sums = start(parameters)
        examples = len(jax.tree.leaves(batch)[0])
        for rows in np.split(np.arange(examples), microbatches):
            microbatch = jax.tree.map(lambda x, rows=rows: x[rows], batch)
            sums = accumulate(parameters, sums, microbatch)
        return update(parameters, state, sums)

    return step


def one_device_losses(
    loss: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    parameters: Any,
    batches: Sequence[Any],
    microbatches: int = 1,
) -> list[float]:
    """The losses of plain `jax.jit` on one device, a batch a step.

    Args:
        loss: (parameters, batch) -> the sum of losses and their number.
        optimizer: the optimizer.
        parameters: the first ones; they are kept.
        batches: what to train on.
        microbatches: of a step, whose gradients are added up.

    Returns:
        Mean losses.
    """
    step = loop(loss, optimizer, microbatches)
    parameters = jax.tree.map(jnp.copy, parameters)
    state, losses = optimizer.init(parameters), []
    for batch in batches:
        parameters, state, value = step(parameters, state, batch)
        losses.append(float(value))
    return losses


def _no_gradients(parameters: Any) -> tuple[Any, jax.Array, jax.Array]:
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    return zeros, jnp.zeros(()), jnp.zeros(())


def _add_gradients(
    loss: Callable[..., Any], parameters: Any, sums: Any, microbatch: Any
) -> tuple[Any, jax.Array, jax.Array]:
    gradients, total, count = sums
    (value, number), found = jax.value_and_grad(loss, has_aux=True)(parameters, microbatch)
    return jax.tree.map(jnp.add, gradients, found), total + value, count + number


def _updated(
    optimizer: optax.GradientTransformation, parameters: Any, state: Any, sums: Any
) -> tuple[Any, Any, jax.Array]:
    gradients, total, count = sums
    means = jax.tree.map(lambda gradient: gradient / count, gradients)
    updates, state = optimizer.update(means, state, parameters)
    return optax.apply_updates(parameters, updates), state, total / count
