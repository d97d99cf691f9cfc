"""What an optimizer's update computes for each element, as a digest that models share."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from weakref import WeakKeyDictionary

import jax
import optax
from jaxtyping import PyTree

from hetjax.pipeline.program.costs import Cost, step_cost
from hetjax.pipeline.program.loss import parameter_shapes
from hetjax.pipeline.program.traced_program import FlatJaxpr
from hetjax.pipeline.update.traced_update import trace_update
from hetjax.pipeline.update.unchanged_leaves import frozen_leaves


def update_digest(optimizer: optax.GradientTransformation, parameters: PyTree) -> str:
    """The digest of an optimizer's update, by which measured rates of updates are known.

    Args:
        optimizer: an Optax transformation.
        parameters: pytree of arrays or shapes, or a function without arguments that makes it.

    Returns:
        64 hexadecimal digits: the same for optimizers that do the same work for each element that
        they update, at any learning rate, whatever the model is.

    Raises:
        InputError: the optimizer's update cannot be traced, or trains nothing.

    Example:
        >>> shapes = [{"w": jax.ShapeDtypeStruct((n, n), "float32")} for n in (128, 512)]
        >>> one, other = (update_digest(optax.adam(1e-3), each) for each in shapes)
        >>> one == other, one == update_digest(optax.sgd(1e-3), shapes[0])
        (True, False)
    """
    leaves, tree = jax.tree.flatten(parameter_shapes(parameters))
    flat = trace_update(optimizer, leaves, lambda values: jax.tree.unflatten(tree, values))
    if flat not in _found:
        frozen = frozen_leaves(optimizer, parameters).without_update
        updated = [leaf for place, leaf in enumerate(leaves) if place not in frozen]
        _found[flat] = _digest(flat, max(1, sum(math.prod(leaf.shape) for leaf in updated)))
    return _found[flat]


_found: WeakKeyDictionary[FlatJaxpr, str] = WeakKeyDictionary()
"""What was found of traces before: problems are stated for each number of microbatches."""


def _digest(flat: FlatJaxpr, elements: int) -> str:
    """The digest of the trace of an update of so many elements."""
    costs: dict[str, Cost] = defaultdict(Cost)
    # Arrays of constants are one for all leaves of a shape, and the compiler makes them.
    varying = set(flat.inputs)
    for step in flat.steps:
        if not varying.isdisjoint(step.values()):
            costs[step.name] += step_cost(step)
            varying.update(step.outputs)
    # What is done once, such as a schedule's arithmetic, is nothing for each element.
    work = {
        name: (round(cost.flops / elements, 1), round(cost.bytes / elements))
        for name, cost in costs.items()
    }
    text = json.dumps(sorted((name, *each) for name, each in work.items() if any(each)))
    return hashlib.sha256(text.encode()).hexdigest()
