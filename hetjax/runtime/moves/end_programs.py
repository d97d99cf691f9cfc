"""The programs of a transfer's ends: they cut parts out of shards, add summands, and join parts.

Each is compiled once for all transfers that do the same on the same devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from hetjax.runtime.compilation.compiled_stage import Compiled
from hetjax.sharding.annotation.bounds import Bounds, extent, within
from hetjax.sharding.deduction.summands import added

PROGRAMS = 1024
"""How many programs of each kind are kept."""


class CutPart(NamedTuple):
    """A part that is cut out of a device's shard.

    Args:
        bounds: the part.
        held: what the shard is of the array, which is no scalar.
        dtype: its type.
    """

    bounds: Bounds
    held: Bounds
    dtype: np.dtype


@lru_cache(PROGRAMS)
def cutting_program(parts: tuple[CutPart, ...], device: Any) -> Compiled:
    """Compile what cuts parts out of a device's shards; takes the shard of each part.

    Args:
        parts: the parts.
        device: the device.

    Returns:
        From the shards to the parts.
    """

    def cut(*shards: jax.Array) -> list[jax.Array]:
        return [
            shard[within(part.bounds, part.held)] for shard, part in zip(shards, parts, strict=True)
        ]

    sharding = SingleDeviceSharding(device)
    shapes = [
        jax.ShapeDtypeStruct(extent(part.held), part.dtype, sharding=sharding) for part in parts
    ]
    return jax.jit(cut).lower(*shapes).compile()


class JoinedPart(NamedTuple):
    """A part of an array that is made of pieces on one device.

    Args:
        bounds: the part.
        sums: for each of its pieces what it is of the array, and how many summands it has.
        shape: the shape of what is made; where slices are unlike it is padded.
        is_scalar: whether pieces have no dimension, since the array has none.
        dtype: its type.
        device: on which the pieces lie, and the part.
    """

    bounds: Bounds
    sums: tuple[tuple[Bounds, int], ...]
    shape: tuple[int, ...]
    is_scalar: bool
    dtype: np.dtype
    device: Any

    def extent(self, bounds: Bounds) -> tuple[int, ...]:
        """The shape of a piece."""
        return () if self.is_scalar else extent(bounds)


@lru_cache(PROGRAMS)
def joining_program(parts: tuple[JoinedPart, ...]) -> Compiled:
    """Compile what makes parts of several arrays on one device.

    Args:
        parts: the parts.

    Returns:
        From all summands of all pieces of all parts, one after the other, to the parts.
    """

    def join(*arrays: jax.Array) -> list[jax.Array]:
        rest = iter(arrays)
        return [
            _joined(part, [[next(rest) for _ in range(count)] for _, count in part.sums])
            for part in parts
        ]

    shapes = [
        jax.ShapeDtypeStruct(
            part.extent(bounds), part.dtype, sharding=SingleDeviceSharding(part.device)
        )
        for part in parts
        for bounds, count in part.sums
        for _ in range(count)
    ]
    outputs = [SingleDeviceSharding(part.device) for part in parts]
    return jax.jit(join, out_shardings=outputs).lower(*shapes).compile()


def _joined(part: JoinedPart, summands: Sequence[Sequence[jax.Array]]) -> jax.Array:
    """A part of an array, of the summands of its pieces."""
    pieces = [
        (bounds, added(each) if each else jnp.zeros(part.extent(bounds), part.dtype))
        for (bounds, _), each in zip(part.sums, summands, strict=True)
    ]
    if pieces and part.extent(part.bounds) == part.shape:
        if len(pieces) == 1 and pieces[0][0] == part.bounds:
            return pieces[0][1]
        ways = [axis for axis in range(len(part.shape)) if _in_a_row(part, axis)]
        if ways:
            in_order = sorted(pieces, key=lambda each: each[0][ways[0]])
            return jnp.concatenate([piece for _, piece in in_order], ways[0])
    whole = jnp.zeros(part.shape, part.dtype)
    for bounds, piece in pieces:
        whole = whole.at[within(bounds, part.bounds)].set(piece)
    return whole


def _in_a_row(part: JoinedPart, axis: int) -> bool:
    """Whether the pieces of a part lie one after the other along a dimension."""
    around = part.bounds
    return all(
        (*bounds[:axis], *bounds[axis + 1 :]) == (*around[:axis], *around[axis + 1 :])
        for bounds, _ in part.sums
    )
