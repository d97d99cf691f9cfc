"""The Transformer of moves between two members: Megatron's blocks, each with four sums.

A device has some heads, and some columns of the first product; what both make of them is added up
twice in the forward pass and twice in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from benchmarking import Size

Crossing = Callable[[jax.Array], jax.Array]
"""What is done with activations where the part begins that devices divide, or where it ends."""

MOVES_OF_A_BLOCK = 4
MOVES = Size(
    blocks=12, width=256, heads=8, sequence=128, vocabulary=1, microbatches=4, microbatch_size=2
)
"""48 moves a microbatch, of 256 KB each."""

DIVIDED = {"query": 1, "key": 1, "value": 1, "out": 0, "up": 1, "down": 0}
"""The dimension of each weight of a block that devices divide: heads or columns."""


def parameters_of(size: Size) -> dict[str, Any]:
    """The initial parameters."""
    rng, width, each = np.random.default_rng(0), size.width, size.width // size.heads

    def weights(*shape: int) -> np.ndarray:
        return rng.normal(0, width**-0.5, shape).astype(np.float32)

    blocks = [
        {
            "query": weights(width, size.heads, each),
            "key": weights(width, size.heads, each),
            "value": weights(width, size.heads, each),
            "out": weights(size.heads, each, width),
            "up": weights(width, 4 * width),
            "down": weights(4 * width, width),
        }
        for _ in range(size.blocks)
    ]
    return {"blocks": blocks, "first": weights(width, width)}


def batch_of(size: Size) -> dict[str, np.ndarray]:
    """The batch of every step."""
    rng = np.random.default_rng(1)
    shape = (size.microbatches * size.microbatch_size, size.sequence, size.width)
    return {name: rng.normal(size=shape).astype(np.float32) for name in ("x", "y")}


def summed_loss(
    parameters: Mapping[str, Any], batch: Mapping[str, Any], enter: Crossing, leave: Crossing
) -> tuple[jax.Array, jax.Array]:
    """The summed loss of examples, and its count.

    Args:
        parameters: whole, or a device's part.
        batch: the examples.
        enter: from activations that all devices have, to where they are divided.
        leave: from what the devices make of them, to what all have.
    """
    x = batch["x"] @ parameters["first"]
    for weights in parameters["blocks"]:
        x = _block(x, weights, enter, leave)
    errors = (x - batch["y"]) ** 2
    return jnp.sum(errors), jnp.float32(errors.size)


def _block(
    x: jax.Array, weights: Mapping[str, jax.Array], enter: Crossing, leave: Crossing
) -> jax.Array:
    h = enter(_normalized(x))
    query, key, value = (
        jnp.einsum("bsd,dhe->bshe", h, weights[name]) for name in ("query", "key", "value")
    )
    scores = jnp.einsum("bshe,bthe->bhst", query, key) * query.shape[-1] ** -0.5
    mixed = jnp.einsum("bhst,bthe->bshe", jax.nn.softmax(scores), value)
    x = x + leave(jnp.einsum("bshe,hed->bsd", mixed, weights["out"]))
    h = enter(_normalized(x))
    return x + leave(jax.nn.gelu(h @ weights["up"]) @ weights["down"])


def _normalized(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
