"""Summands: partial sums with a dimension for them, which JAX can stack, and additions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from hetjax.sharding.annotation.subgroup import entries_of
from hetjax.sharding.deduction.bottom_tier import spec_of


def as_parts(array: Any, rows: int = 0) -> Any:
    """A partial sum as an array of its summands; any other array as it is.

    Args:
        array: a traced array under the mesh of its submesh.
        rows: where the dimension of the summands comes: after so many dimensions.

    Returns:
        The summands, each on the devices that have it.
    """
    spec = spec_of(array)
    if not spec.unreduced:
        return array
    entries = entries_of(spec, array.ndim)
    parts = PartitionSpec(*entries[:rows], tuple(sorted(spec.unreduced)), *entries[rows:])
    return _mapped(lambda part: jnp.expand_dims(part, rows), array, spec, parts)


def as_sum(array: Any, axes: frozenset[str], rows: int = 0) -> Any:
    """What `as_parts` gave, as a partial sum again.

    Args:
        array: the summands, or an array that was no partial sum.
        axes: the axes along which it is a partial sum; none where it is no sum.
        rows: where the dimension of the summands is.

    Returns:
        The partial sum.
    """
    if not axes:
        return array
    entries = entries_of(spec_of(array), array.ndim)
    whole = PartitionSpec(*entries[:rows], *entries[rows + 1 :], unreduced=axes)
    return _mapped(lambda part: jnp.sum(part, axis=rows), array, spec_of(array), whole)


def added(summands: Sequence[Any]) -> Any:
    """The sum of summands, rounded after each addition, on whatever device it is made.

    Without a word, a compiler may keep more digits of short floats in between: receivers of unlike
    kinds would then have unlike sums.

    Args:
        summands: traced arrays, all of one shape.

    Returns:
        The sum, in the order given.
    """
    total, *others = summands
    is_short = jnp.issubdtype(total.dtype, jnp.floating) and total.dtype.itemsize < 4
    for other in others:
        total = total + other
        if is_short:
            digits = jnp.finfo(total.dtype)
            total = jax.lax.reduce_precision(total, digits.nexp, digits.nmant)
    return total


def _mapped(
    function: Callable[[Any], Any], array: Any, source: PartitionSpec, after: PartitionSpec
) -> Any:
    """Apply a function to what each device has of an array."""
    mapped = jax.shard_map(function, in_specs=source, out_specs=after, check_vma=False)
    return mapped(array)
