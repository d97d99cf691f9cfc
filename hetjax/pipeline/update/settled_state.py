"""The dtypes that an optimizer's state comes to, which may be wider than those it begins with.

Where parameters are of several dtypes, an optimizer may begin with a state in that of one of them,
and leave it in the dtype that its arithmetic promotes to. Plain JAX traces such an update twice. A
plan's programs are compiled once, so there the state begins with the dtypes that it comes to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from hetjax.errors import InputError, together
from hetjax.pipeline.program.loss import path_names


def widened(state: PyTree, after: PyTree) -> PyTree:
    """An optimizer's state in the dtypes in which an update leaves it.

    Args:
        state: pytree of shapes, as the update takes it.
        after: the same, as the update returns it.

    Returns:
        The first, with the dtypes of the second; itself where these are the same.

    Raises:
        InputError: the update gives a leaf another shape, or a dtype that does not hold what the
            one before did; or it returns other leaves.
    """
    names, found = path_names(state), path_names(after)
    if names != found:
        made, given = (together([*map(repr, each)], 3) or "none" for each in (found, names))
        raise InputError(
            f"the optimizer's update returns a state of the leaves {made} for one of {given}; "
            f"allowed: the same leaves"
        )
    leaves, tree = jax.tree.flatten(state)
    later = jax.tree.leaves(after)
    for name, old, new in zip(names, leaves, later, strict=True):
        if old.shape != new.shape or not _holds(new.dtype, old.dtype):
            raise InputError(
                f"the optimizer's update makes the leaf {name!r} of its state "
                f"{new.dtype}{list(new.shape)}, which was {old.dtype}{list(old.shape)}; allowed: "
                f"the same shape, and the same dtype or a wider one"
            )
    if all(old.dtype == new.dtype for old, new in zip(leaves, later, strict=True)):
        return state
    return jax.tree.unflatten(
        tree,
        [
            jax.ShapeDtypeStruct(old.shape, new.dtype)
            for old, new in zip(leaves, later, strict=True)
        ],
    )


def widening_init(
    optimizer: optax.GradientTransformation, parameters: PyTree, dtypes: Sequence[Any]
) -> Callable[[PyTree], PyTree]:
    """What makes an optimizer's initial state in given dtypes.

    Args:
        optimizer: the optimizer.
        parameters: pytree of shapes.
        dtypes: those of the state's leaves.

    Returns:
        From the parameters to the state; the optimizer's own function where it needs no other.
    """
    made = jax.tree.leaves(jax.eval_shape(optimizer.init, parameters))
    if [leaf.dtype for leaf in made] == list(dtypes):
        return optimizer.init

    def init(parameters: PyTree) -> PyTree:
        leaves, tree = jax.tree.flatten(optimizer.init(parameters))
        wide = [
            leaf if jnp.result_type(leaf) == dtype else jnp.asarray(leaf, dtype)
            for leaf, dtype in zip(leaves, dtypes, strict=True)
        ]
        return jax.tree.unflatten(tree, wide)

    return init


def _holds(dtype: Any, other: Any) -> bool:
    """Whether a dtype holds the numbers of another one."""
    if dtype == other:
        return True
    try:
        return jnp.promote_types(dtype, other) == dtype
    except (TypeError, ValueError):
        # Random keys, and floats of a byte, have no common dtype with others.
        return False
