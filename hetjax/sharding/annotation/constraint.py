"""`constrain`: how a value lies on the mesh that computes it, said inside a traced function."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from hetjax import _compat


def constrain(x: Any, sharding: NamedSharding) -> Any:
    """Say how a value, and its cotangent, lies.

    Unlike `jax.lax.with_sharding_constraint` it leaves no mesh in the value's type, so that the
    program can be traced, divided and differentiated like any other.

    Args:
        x: an array of a traced function.
        sharding: how it lies, on a mesh that may be abstract.

    Returns:
        The same array.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.sharding import AbstractMesh, PartitionSpec
        >>> lies = NamedSharding(AbstractMesh((1,), ("tensor",)), PartitionSpec("tensor"))
        >>> print(jax.make_jaxpr(lambda x: constrain(x, lies))(jnp.ones(2)).eqns[0].primitive)
        hetjax_constraint
    """
    return CONSTRAINT.bind(x, sharding=sharding)


def _compiled(x: Any, *, sharding: NamedSharding) -> Any:
    return jax.lax.with_sharding_constraint(x, sharding)


CONSTRAINT = _compat.linear_identity("hetjax_constraint", constrain, _compiled)
"""The primitive: as a computation it is the identity."""
