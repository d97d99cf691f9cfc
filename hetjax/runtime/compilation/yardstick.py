"""A fixed computation that tells how fast a device is at the moment."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp

_SIZE = 256
"""Rows and columns of the matrices."""

_SECONDS = 5e-3
"""How long it takes, at about."""


class Yardstick:
    """Matrix products on one device, timed again and again.

    A processor that others use too is now faster, now slower, by tens of percent within seconds;
    so is a device that grows hot. What is measured at unlike moments is compared by this.

    Args:
        device: the device.
    """

    def __init__(self, device: Any):
        # A processor's own seconds have no waiting for a quota in them, or for another process.
        self._clock = time.process_time if device.platform == "cpu" else time.perf_counter
        self._matrix = jax.device_put(jnp.eye(_SIZE) / 2, device)
        self._program = jax.jit(_products).lower(self._matrix, 1).compile()
        self._count = 1
        self.seconds()
        self._count = max(1, round(_SECONDS / max(self.seconds(), 1e-9)))

    def seconds(self) -> float:
        """What a product takes now."""
        # While the first ones run, what ran before may still give its memory back.
        return min(self._timed(), self._timed())

    def _timed(self) -> float:
        began = self._clock()
        jax.block_until_ready(self._program(self._matrix, self._count))
        return (self._clock() - began) / self._count


def _products(matrix: jax.Array, count: Any) -> jax.Array:
    return jax.lax.fori_loop(0, count, lambda _, each: jnp.tanh(matrix @ each), matrix)
