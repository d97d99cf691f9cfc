"""Operands that are read no sooner than another array is there, by compilers that forget barriers.

A backward pass makes an attention's scores again of queries and keys that were kept. All that this
takes is there from its start, and XLA's compiler for cards may make the scores of all layers then,
which lie there until their turn. It drops barriers before it puts a program into order. So what it
reads is mixed, bit by bit, with a number that depends on the array to wait for, and that is nothing
without the compiler knowing it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def taken_after(awaited: Any, *arrays: Any) -> list[Any]:
    """Arrays that a compiler cannot read before another one is there.

    Args:
        awaited: the other one, of any shape.
        arrays: what waits for it.

    Returns:
        The same arrays, bit by bit; unchanged where their numbers, or those of the one that they
        wait for, do not have 8, 16 or 32 bits.

    Example:
        >>> (found,) = taken_after(jnp.float32(jnp.nan), jnp.array([-0.0, 3.0], jnp.bfloat16))
        >>> [float(each) for each in found]
        [-0.0, 3.0]
    """
    if not _has_bits(awaited):
        return list(arrays)
    first = _bits(awaited[(0,) * awaited.ndim]).astype(jnp.uint32)
    # Shifted out in two halves: a compiler knows what a shift by all bits leaves.
    nothing = first >> 16 >> 16
    return [_mixed(array, nothing) if _has_bits(array) else array for array in arrays]


def _mixed(array: Any, nothing: Any) -> Any:
    bits = _bits(array)
    return jax.lax.bitcast_convert_type(bits | nothing.astype(bits.dtype), array.dtype)


def _bits(array: Any) -> Any:
    return jax.lax.bitcast_convert_type(array, _UNSIGNED[array.dtype.itemsize])


def _has_bits(array: Any) -> bool:
    is_number = jnp.issubdtype(array.dtype, jnp.number)
    return is_number and array.dtype.itemsize in _UNSIGNED and array.size > 0
