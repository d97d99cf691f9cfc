"""The trace of an optimizer's whole update, and what it is not given by a step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from hetjax.errors import InputError
from hetjax.pipeline.program.frozen_leaves import NONE_FROZEN, FrozenLeaves
from hetjax.pipeline.program.loss import accumulator_dtype
from hetjax.pipeline.program.repeated_steps import without_repeats
from hetjax.pipeline.program.stacked_leaves import StackedLeaves
from hetjax.pipeline.program.traced_program import FlatJaxpr, flatten_jaxpr
from hetjax.pipeline.update.settled_state import widened, widening_init
from hetjax.pipeline.update.update_by_rows import UpdateByRows, update_by_rows
from hetjax.pipeline.update.whole_update import unguarded_update


def trace_update(
    optimizer: optax.GradientTransformation,
    parameters: Sequence[jax.ShapeDtypeStruct],
    unflatten: Callable[[Sequence[Any]], Any],
    loss_dtype: Any = jnp.float32,
    frozen: FrozenLeaves = NONE_FROZEN,
    loss_seed: float = 1.0,
) -> FlatJaxpr:
    """Trace the whole update, as one device computes it.

    Args:
        optimizer: any Optax transformation.
        parameters: shapes of all parameter leaves.
        unflatten: from the leaves to the parameters' pytree.
        loss_dtype: of the summed loss and the count.
        frozen: leaves without a gradient, which are then no inputs, and without an update, whose
            new values are no outputs.
        loss_seed: what the summed gradients are multiplied by.

    Returns:
        From parameters, summed gradients, optimizer state, summed loss and count to new parameters,
        new state, and the three metrics of `update_function`.

    Raises:
        InputError: the optimizer's init or update fails, or asks for what a step does not have; or
            its state does not keep its leaves, their shapes, or dtypes that hold what was there.
    """
    shapes = tuple(parameters)
    tree = jax.tree.structure(unflatten(shapes))
    return _traced(optimizer, tree, shapes, np.dtype(loss_dtype), frozen, loss_seed)


def divided_trace(
    optimizer: optax.GradientTransformation,
    parameters: Sequence[jax.ShapeDtypeStruct],
    unflatten: Callable[[Sequence[Any]], Any],
    loss_dtype: Any,
    frozen: FrozenLeaves,
    leaves: StackedLeaves,
    loss_seed: float,
) -> UpdateByRows:
    """Trace the whole update of parameters, some of which are rows of leaves.

    Args:
        optimizer: any Optax transformation.
        parameters: shapes of all parameter leaves.
        unflatten: from the leaves to the parameters' pytree.
        loss_dtype: of the summed loss and the count.
        frozen: parameters without a gradient, and without an update: all rows of a leaf or none.
        leaves: which leaves count as a parameter for each row.
        loss_seed: what the summed gradients are multiplied by.

    Returns:
        The update, by rows.
    """
    of_leaves = FrozenLeaves(
        leaves.joined_places(frozen.without_gradient), leaves.joined_places(frozen.without_update)
    )
    flat = trace_update(optimizer, parameters, unflatten, loss_dtype, of_leaves, loss_seed)
    return update_by_rows(flat, leaves, of_leaves)


def settled_init(
    optimizer: optax.GradientTransformation, parameters: PyTree
) -> Callable[[PyTree], PyTree]:
    """What makes an optimizer's initial state in the dtypes that its updates keep.

    Args:
        optimizer: any Optax transformation.
        parameters: pytree of shapes.

    Returns:
        From the parameters to the state.

    Raises:
        InputError: as `trace_update`.
    """
    leaves, tree = jax.tree.flatten(parameters)
    flat = trace_update(optimizer, leaves, lambda values: jax.tree.unflatten(tree, values))
    dtypes = [flat.avals[value].dtype for value in flat.inputs[2 * len(leaves) : -2]]
    return widening_init(optimizer, parameters, dtypes)


# It takes seconds for hundreds of leaves, and is asked for by whoever plans, cuts and divides.
@functools.lru_cache(maxsize=2)
def _traced(
    optimizer: optax.GradientTransformation,
    tree: Any,
    parameters: tuple[jax.ShapeDtypeStruct, ...],
    loss_dtype: np.dtype,
    frozen: FrozenLeaves,
    loss_seed: float,
) -> FlatJaxpr:
    def unflatten(leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(tree, leaves)

    # As it is, so that JAX knows its trace for all who ask.
    with _naming_what_it_wants("init", "the parameters"):
        state = jax.eval_shape(optimizer.init, unflatten(parameters))
    gradients = [
        jax.ShapeDtypeStruct(p.shape, accumulator_dtype(p.dtype))
        for leaf, p in enumerate(parameters)
        if leaf not in frozen.without_gradient
    ]
    scalar = jax.ShapeDtypeStruct((), loss_dtype)
    _check_asks(state)
    unguarded = unguarded_update(optimizer, unflatten, loss_seed)

    def update(parameters: Any, gradients: Any, state: Any, total: Any, count: Any) -> Any:
        given = iter(gradients)
        every = [
            None if leaf in frozen.without_gradient else next(given)
            for leaf in range(len(parameters))
        ]
        updated, *rest = unguarded(parameters, every, state, total, count)
        kept = [new for leaf, new in enumerate(updated) if leaf not in frozen.without_update]
        return kept, *rest

    # Optax mixes dtypes in its own arithmetic, whatever the caller is strict about.
    with jax.numpy_dtype_promotion("standard"), _naming_what_it_wants("update", _GIVEN):
        make = jax.make_jaxpr(update, return_shape=True)
        closed, made = make(list(parameters), gradients, state, scalar, scalar)
        while (wide := widened(state, made[1])) is not state:
            state = wide
            closed, made = make(list(parameters), gradients, state, scalar, scalar)
    return without_repeats(flatten_jaxpr(closed, inline_conditionals=True))


_LINE_SEARCHES = (
    optax.ScaleByBacktrackingLinesearchState,
    optax.ScaleByZoomLinesearchState,
)


def _check_asks(state: Any) -> None:
    """Refuse optimizers that compute the loss again within a step, by what their state holds."""
    kinds = (*_LINE_SEARCHES, optax.ScaleByLBFGSState)
    parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, kinds))
    if not any(isinstance(part, _LINE_SEARCHES) for part in parts):
        return
    is_lbfgs = any(isinstance(part, optax.ScaleByLBFGSState) for part in parts)
    raise InputError(
        f"the optimizer is {'optax.lbfgs with its' if is_lbfgs else 'one with a'} line search, "
        f"which wants 'grad' and 'value_fn' to compute the loss at other parameters within a step; "
        f"a step computes it once, and gives an optimizer its 'value' alone"
    )


_GIVEN = "the gradients, its state, the parameters, and the 'value' of the loss where it takes one"


@contextmanager
def _naming_what_it_wants(what: str, given: str) -> Iterator[None]:
    """Errors of an optimizer as what they mostly are: something that it is not given."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        # These two say by themselves what is wrong.
        if not text or not isinstance(error, TypeError | ValueError):
            text = f"{type(error).__name__}: {text}" if text else type(error).__name__
        raise InputError(f"the optimizer's {what} fails: {text} (it is given {given})") from error
