"""What an optimizer's update computes in matrix products, as Muon's orthogonal steps do."""

from __future__ import annotations

import math

import jax
import optax
from jaxtyping import PyTree

from hetjax.pipeline.program.costs import REPEATABLE, step_cost
from hetjax.pipeline.program.loss import parameter_shapes
from hetjax.pipeline.update.traced_update import trace_update
from hetjax.pipeline.update.unchanged_leaves import frozen_leaves


def update_products(optimizer: optax.GradientTransformation, parameters: PyTree) -> float:
    """FLOPs of matrix products in an optimizer's update, for each element that it updates.

    Args:
        optimizer: an Optax transformation.
        parameters: pytree of arrays or shapes, or a function without arguments that makes it.

    Returns:
        FLOPs of a step; of a loop whose turns are not known, those of one turn.

    Raises:
        InputError: the optimizer's update cannot be traced, or trains nothing.

    Example:
        >>> from optax.contrib import muon
        >>> shapes = {"w": jax.ShapeDtypeStruct((64, 64), "float32")}
        >>> update_products(optax.adam(1e-3), shapes), update_products(muon(1e-3), shapes)
        (0.0, 1920.0)
    """
    leaves, tree = jax.tree.flatten(parameter_shapes(parameters))
    flat = trace_update(optimizer, leaves, lambda values: jax.tree.unflatten(tree, values))
    flops = sum(step_cost(s).matmul_flops for s in flat.steps if s.name not in REPEATABLE)
    frozen = frozen_leaves(optimizer, parameters).without_update
    sizes = (math.prod(leaf.shape) for place, leaf in enumerate(leaves) if place not in frozen)
    return flops / max(1, sum(sizes))
