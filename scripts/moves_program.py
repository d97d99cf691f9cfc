"""The Transformer of moves as one program of two devices: what XLA's own sums cost.

It is what moves between members are compared with: one program of equal devices needs no host
between two sums. Unlike shares cannot be written so without padding.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from benchmarking import Size
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from moves_model import DIVIDED, Crossing, batch_of, parameters_of, summed_loss

_AXIS = "tensor"
_RATE = 1e-9


class OneProgram:
    """The Transformer in training by one program of the first two devices of this process.

    Args:
        size: of the model and its batch.
        sums: whether the devices add up what they make. Else each scales what it has made, and
            trains something else: what a step takes without moves.
    """

    def __init__(self, size: Size, *, sums: bool):
        mesh = Mesh(np.array(jax.devices()[:2]), (_AXIS,))
        specs = _specs(size)
        enter, leave = _crossings(sums)
        self._gradients = jax.jit(
            jax.shard_map(
                partial(_gradients, enter, leave),
                mesh=mesh,
                in_specs=(specs, PartitionSpec()),
                out_specs=specs,
                check_vma=False,
            )
        )
        self._parameters = jax.device_put(
            parameters_of(size), jax.tree.map(partial(NamedSharding, mesh), specs)
        )
        whole, everywhere = batch_of(size), NamedSharding(mesh, PartitionSpec())
        self._batches = [
            jax.device_put(
                {name: rows[start : start + size.microbatch_size] for name, rows in whole.items()},
                everywhere,
            )
            for start in range(0, size.microbatches * size.microbatch_size, size.microbatch_size)
        ]

    def step(self) -> float:
        """Run one step; its seconds."""
        start = time.perf_counter()
        total, *others = (self._gradients(self._parameters, batch) for batch in self._batches)
        for gradients in others:
            total = _added(total, gradients)
        self._parameters = jax.block_until_ready(_updated(self._parameters, -_RATE, total))
        return time.perf_counter() - start


def _specs(size: Size) -> dict[str, Any]:
    block = {name: PartitionSpec(*[None] * dimension, _AXIS) for name, dimension in DIVIDED.items()}
    return {"blocks": [block] * size.blocks, "first": PartitionSpec()}


def _crossings(sums: bool) -> tuple[Crossing, Crossing]:
    """Megatron's f and g: the one adds up cotangents, the other what devices have made."""

    def met(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, _AXIS) if sums else x * 1.001

    enter, leave = jax.custom_vjp(lambda x: x), jax.custom_vjp(met)
    enter.defvjp(lambda x: (x, None), lambda _, cotangent: (met(cotangent),))
    leave.defvjp(lambda x: (met(x), None), lambda _, cotangent: (cotangent,))
    return enter, leave


def _gradients(enter: Crossing, leave: Crossing, parameters: Any, batch: Any) -> Any:
    return jax.grad(lambda held: summed_loss(held, batch, enter, leave)[0])(parameters)


_added = jax.jit(optax.tree.add, donate_argnums=0)
_updated = jax.jit(optax.tree.add_scale, donate_argnums=(0, 2))
