"""A model's run of equal blocks: one after another, or stacked and scanned over.

Both forms hold the same numbers: made from the same key, the stacked parameters are the others'
stacked along a new leading axis. Of a scan JAX traces one block, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.models.pure import counted_rngs

Blocks = nnx.List | nnx.Module
"""A list of blocks, or one block whose every parameter has a leading axis of blocks."""


def make_blocks(
    make: Callable[[int, nnx.Rngs], nnx.Module], count: int, *, stacked: bool, rngs: nnx.Rngs
) -> Blocks:
    """Make ``count`` blocks, each from a key of its own.

    Args:
        make: makes the block of an index; where they are stacked, that of 0 stands for all.
        count: how many.
        stacked: whether to stack them for `run_blocks` to scan over.
        rngs: where the keys come from.

    Returns:
        The blocks.
    """
    keys = jax.random.split(rngs.params(), count)
    if stacked:
        return nnx.vmap(lambda key: make(0, counted_rngs(key)))(keys)
    return nnx.List([make(index, counted_rngs(key)) for index, key in enumerate(keys)])


def run_blocks(
    blocks: Blocks,
    x: jax.Array,
    call: Callable[[Any, jax.Array, int | jax.Array], jax.Array],
    count: int,
) -> jax.Array:
    """Apply the blocks in order.

    Args:
        blocks: of `make_blocks`.
        x: [B, T, D].
        call: takes a block, its input and its index (a uint32 scalar within a scan) and returns
            its output, shaped like ``x``.
        count: how many blocks there are.

    Returns:
        [B, T, D].
    """
    if isinstance(blocks, nnx.List):
        for index, block in enumerate(blocks):
            x = call(block, x, index)
        return x
    graph, stacked = nnx.split(blocks)

    def body(x: jax.Array, scanned: tuple[Any, jax.Array]) -> tuple[jax.Array, None]:
        state, index = scanned
        return call(nnx.merge(graph, state), x, index), None

    indices = jnp.arange(count, dtype=jnp.uint32)
    return jax.lax.scan(body, x, (nnx.to_pure_dict(stacked), indices))[0]
