"""The optimizer's update and a step's metrics, as one device computes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetjax.pipeline.program.loss import accumulator_dtype

Result = TypeVar("Result")


def update_function(
    optimizer: optax.GradientTransformation, unflatten: Callable[[Sequence[Any]], Any]
) -> Callable[..., tuple[Any, ...]]:
    """The whole update, as one device computes it.

    Where the loss or the norm is not finite, parameters and state come out as they went in, bit for
    bit. Optimizers that look for infinities themselves (a loss scale that halves) are then not
    asked.

    Args:
        optimizer: an Optax transformation; one that takes the ``value`` of the loss gets it.
        unflatten: from leaves to the parameters' pytree.

    Returns:
        A function of (parameter leaves, summed gradient leaves, state, total, count) to (new
        parameter leaves, new state leaves, metrics). The metrics are the loss, the norm of the mean
        gradient, and the squared norm of each leaf of it, ``[leaves]``. With ``set_back=True`` it
        returns also zeros in the place of the gradients.
    """
    unguarded = unguarded_update(optimizer, unflatten)

    def update(
        parameters: Sequence[Any],
        gradients: Sequence[Any],
        state: Any,
        total: Any,
        count: Any,
        *,
        set_back: bool = False,
    ) -> tuple[Any, ...]:
        metrics = _metrics(_means(parameters, gradients, count), total, count)

        def applied() -> tuple[list[Any], ...]:
            updated, new_state, _ = unguarded(parameters, gradients, state, total, count)
            return updated, jax.tree.leaves(new_state), *zeros_of(gradients, set_back)

        def kept() -> tuple[list[Any], ...]:
            return list(parameters), jax.tree.leaves(state), *zeros_of(gradients, set_back)

        updated, new_state, *zeros = if_finite(metrics, applied, kept)
        return updated, new_state, metrics, *zeros

    return update


def unguarded_update(
    optimizer: optax.GradientTransformation,
    unflatten: Callable[[Sequence[Any]], Any],
    loss_seed: float = 1.0,
) -> Callable[..., tuple[list[Any], Any, tuple[Any, Any, Any]]]:
    """`update_function`, but that a step is applied whatever its numbers are.

    The new state is a pytree.

    Args:
        optimizer: an Optax transformation.
        unflatten: from leaves to the parameters' pytree.
        loss_seed: what the summed gradients are multiplied by.
    """
    extended = optax.with_extra_args_support(optimizer)

    def update(
        parameters: Sequence[Any], gradients: Sequence[Any], state: Any, total: Any, count: Any
    ) -> tuple[list[Any], Any, tuple[Any, Any, Any]]:
        means = _means(parameters, gradients, count if loss_seed == 1.0 else count * loss_seed)
        tree = unflatten(parameters)
        metrics = _metrics(means, total, count)
        # A gradient that is not there is one that the update does not read.
        given = [
            jnp.zeros_like(p) if m is None else m for p, m in zip(parameters, means, strict=True)
        ]
        updates, state = optimizer_updates(extended, unflatten(given), state, tree, metrics[0])
        updated = optax.apply_updates(tree, updates)
        return jax.tree.leaves(updated), state, metrics

    return update


def optimizer_updates(
    optimizer: optax.GradientTransformationExtraArgs,
    gradients: Any,
    state: Any,
    parameters: Any,
    loss: Any,
) -> tuple[Any, Any]:
    """What an optimizer makes of gradients, and of the loss where it takes that as ``value``.

    Args:
        optimizer: an Optax transformation, with support of extra arguments.
        gradients: pytree of the parameters' structure.
        state: its state.
        parameters: the parameters.
        loss: the mean loss.

    Returns:
        The updates and the new state.
    """
    try:
        return optimizer.update(gradients, state, parameters, value=loss)
    except TypeError as error:
        # No signature tells it: a chain takes all keywords, and hands them on to what may not.
        if "unexpected keyword argument 'value'" not in str(error):
            raise
        return optimizer.update(gradients, state, parameters)


def _means(parameters: Sequence[Any], gradients: Sequence[Any], count: Any) -> list[Any]:
    counts = {g.dtype: count.astype(g.dtype) for g in gradients if g is not None}
    return [
        None if g is None else (g / counts[g.dtype]).astype(p.dtype)
        for g, p in zip(gradients, parameters, strict=True)
    ]


def _metrics(means: Sequence[Any], total: Any, count: Any) -> tuple[Any, Any, Any]:
    """The mean loss, the norm of the gradients that there are, and the squared norm of each."""
    there = [mean for mean in means if mean is not None]
    summed = (np.dtype(jnp.finfo(accumulator_dtype(mean.dtype)).dtype) for mean in there)
    wide = max(summed, key=lambda each: each.itemsize)
    none = jnp.zeros((), wide)
    squares = [none if mean is None else _squared_norm(mean, wide) for mean in means]
    squared = sum(s for s, mean in zip(squares, means, strict=True) if mean is not None)
    return total.astype(count.dtype) / count, jnp.sqrt(squared), jnp.stack(squares)


def _squared_norm(array: Any, wide: np.dtype) -> Any:
    """As `optax.tree.norm` has it: what an optimizer clips by is then the same sum."""
    array = array.astype(np.result_type(wide, np.complex64) if jnp.iscomplexobj(array) else wide)
    return jnp.sum(jnp.square(jnp.real(array)) + jnp.square(jnp.imag(array)))


def zeros_of(gradients: Sequence[Any], set_back: bool) -> tuple[list[Any], ...]:
    """Zeros in the place of gradients, where they are set back.

    They are made in the branches of `if_finite`, where XLA sees what they take the place of.

    Args:
        gradients: the summed gradients.
        set_back: whether to make any.
    """
    return ([jnp.zeros_like(gradient) for gradient in gradients],) if set_back else ()


def if_finite(
    metrics: tuple[Any, ...], applied: Callable[[], Result], kept: Callable[[], Result]
) -> Result:
    """What is applied, or what is kept where loss or norm is not finite.

    A conditional: a selection element by element keeps XLA from updating in place, and an update
    then takes half as long again.

    Args:
        metrics: those of `update_function`.
        applied: makes the first.
        kept: makes the other.
    """
    loss, norm, _ = metrics
    return jax.lax.cond(jnp.isfinite(loss) & jnp.isfinite(norm), applied, kept)
