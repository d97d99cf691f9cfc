"""A model's run of equal blocks: one after another, or stacked and scanned over.

Both forms hold the same numbers: made from the same key, the stacked parameters are the others'
stacked along a new leading axis. Either way JAX traces one block, however many there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax import _compat
from hetjax.models.pure import counted_rngs, structure_of

Blocks = nnx.List | nnx.Module
"""A list of blocks, or one block whose every parameter has a leading axis of blocks."""


@dataclass(frozen=True)
class BlockForm:
    """How a block is made: blocks of equal forms differ in their numbers alone.

    Args:
        module: the block's class.
        config: the model's shape, the first that its class takes.
        options: what it takes beside that and the keys, by name.
    """

    module: Callable[..., nnx.Module]
    config: Hashable
    options: tuple[tuple[str, Hashable], ...] = ()

    def make(self, key: jax.Array) -> nnx.Module:
        """The block whose numbers come from a key."""
        return self.module(self.config, rngs=counted_rngs(key), **dict(self.options))


def make_blocks(forms: Sequence[BlockForm], *, stacked: bool, rngs: nnx.Rngs) -> Blocks:
    """Make blocks, each from a key of its own.

    Args:
        forms: of each block.
        stacked: whether to stack them for `run_blocks` to scan over; their forms are equal then.
        rngs: where the keys come from.

    Returns:
        The blocks.
    """
    keys = jax.random.split(rngs.params(), len(forms))
    if stacked:
        return nnx.vmap(forms[0].make)(keys)
    return nnx.List([_made_once(form, key) for form, key in zip(forms, keys, strict=True)])


def _made_once(form: BlockForm, key: jax.Array) -> nnx.Module:
    if _compat.is_traced(key):
        return nnx.merge(_graph(form), _numbers(form, key))
    return form.make(key)


@functools.lru_cache(maxsize=32)
def _graph(form: BlockForm) -> nnx.GraphDef[Any]:
    return structure_of(lambda: form.make(jax.random.key(0)))[0]


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _numbers(form: BlockForm, key: jax.Array) -> Any:
    return nnx.to_pure_dict(nnx.state(form.make(key)))


def call_block(block: nnx.Module, *arrays: Any, told: tuple[Hashable, ...] = ()) -> Any:
    """Call a block; of blocks that are alike JAX traces the first, and takes it for the others.

    Args:
        block: the block.
        arrays: what it is called with: arrays, or None.
        told: what it is called with beside these, constants that its trace depends on.

    Returns:
        What it returns.
    """
    if not _compat.is_traced(arrays[0]):
        # Compiled whole, it would round otherwise than its operations do one by one.
        return block(*arrays, *told)
    graph, state = nnx.split(block)
    return _traced_once(graph, nnx.to_pure_dict(state), arrays, told)


# What is inlined leaves no call behind: a jaxpr of these blocks can be cut anywhere in them.
@functools.partial(jax.jit, static_argnums=(0, 3), inline=True)
def _traced_once(
    graph: nnx.GraphDef[Any], state: Any, arrays: tuple[Any, ...], told: tuple[Hashable, ...]
) -> Any:
    return nnx.merge(graph, state)(*arrays, *told)


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
