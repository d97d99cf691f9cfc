"""Parts of arrays that a switch cuts and joins, each once: so nothing is compiled for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from hetjax.pipeline.program.loss import from_host, host_shape
from hetjax.sharding.annotation.bounds import Bounds, contains, extent, within

ArrayPart = tuple[Bounds, Any]
"""A part of an array, and what it holds."""


def join_pieces(bounds: Bounds, dtype: Any, pieces: Sequence[ArrayPart], device: Any) -> jax.Array:
    """A part of an array on a device of JAX, of pieces of it that are there.

    Args:
        bounds: the part.
        dtype: its type.
        pieces: JAX arrays on the device, or NumPy's, as `host_array` makes them; they make up the
            part, or it is empty.
        device: the device.

    Returns:
        The part.
    """
    part = jax.ShapeDtypeStruct(extent(bounds), dtype)
    if len(pieces) == 1 and pieces[0][0] == bounds:
        return _put(pieces[0][1], part, device)
    if all(isinstance(_readable(piece), np.ndarray) for _, piece in pieces):
        like = host_shape(part)
        array = np.empty(like.shape, like.dtype)
        for around, piece in pieces:
            array[within(around, bounds)] = piece
        return _put(array, part, device)
    whole = jnp.zeros(extent(bounds), dtype, device=SingleDeviceSharding(device))
    for around, piece in pieces:
        whole = whole.at[within(around, bounds)].set(piece)
    return whole


def _put(array: Any, part: jax.ShapeDtypeStruct, device: Any) -> jax.Array:
    placed = jax.device_put(array, device)
    return from_host(placed, part) if isinstance(array, np.ndarray) else placed


def cut_piece(pieces: Sequence[ArrayPart], bounds: Bounds) -> Any:
    """A part of an array, of pieces of which one has it all; of several the one that came last."""
    around, array = next(piece for piece in reversed(pieces) if contains(piece[0], bounds))
    return array if around == bounds else _readable(array)[within(bounds, around)]


def _readable(array: Any) -> Any:
    """A view that NumPy cuts without compilation, where the host can read the device's memory."""
    if not isinstance(array, jax.Array):
        return array
    on_host = next(iter(array.devices())).platform == "cpu"
    is_plain = not jnp.issubdtype(array.dtype, jax.dtypes.extended)
    return np.asarray(array) if on_host and is_plain else array
