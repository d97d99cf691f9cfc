"""Rows of a batch on the devices of a worker, each of which has its part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding


def local_rows(shardings: Sequence[NamedSharding], size: int) -> tuple[int, int]:
    """The rows of a microbatch that this process's devices hold.

    Args:
        shardings: of the leaves, on the worker's devices.
        size: how many rows there are.

    Returns:
        The first one, and the one after the last.
    """
    spans = [
        index[0].indices(size)
        for sharding in shardings
        for index in sharding.addressable_devices_indices_map((size,)).values()
        if index is not None
    ]
    return min(span[0] for span in spans), max(span[1] for span in spans)


def global_array(
    rows: np.ndarray,
    num_rows: int,
    like: jax.ShapeDtypeStruct,
    sharding: NamedSharding,
    first: int,
) -> jax.Array:
    """A leaf of a microbatch, of which every process brings its own rows.

    Args:
        rows: those that this process's devices hold.
        num_rows: of the whole leaf.
        like: the dtype that it gets, and the shape of a row.
        sharding: how it lies.
        first: the first of this process's rows.
    """
    rows = np.asarray(rows).astype(like.dtype, copy=False)
    if sharding.is_fully_addressable:
        return jax.device_put(rows, sharding)

    def part(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(num_rows)
        return rows[(slice(start - first, stop - first), *index[1:])]

    return jax.make_array_from_callback((num_rows, *like.shape[1:]), sharding, part)
