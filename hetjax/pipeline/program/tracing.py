"""Tracing a loss function: once, at one size of its batch, to a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from hetjax import _compat
from hetjax.errors import InputError, shown
from hetjax.pipeline.program.loops import with_open_loops
from hetjax.pipeline.program.loss import (
    abstract,
    check_count,
    check_examples,
    from_host,
    host_shape,
    parameter_shapes,
    path_names,
    sums,
    traced_once,
)
from hetjax.pipeline.program.traced_program import Program, fingerprint_of, flatten_jaxpr
from hetjax.sharding.attention.match import match_attention


def trace(
    loss_function: Callable[..., Any],
    parameters: PyTree,
    batch: PyTree,
    *,
    has_aux: bool = False,
    divides_sequences: bool = False,
) -> Program:
    """Trace a loss function to a program.

    Args:
        loss_function: ``loss_function(parameters, batch)``, a plain JAX function. It returns either
            a scalar (the mean over the batch's examples) or a pair of scalars ``(total, count)``:
            the loss is then the sum of totals over the sum of counts, over all microbatches.
        parameters: pytree of arrays or shapes, all of floating dtype, or a function that makes it.
        batch: pytree of arrays or shapes; the first axis of each leaf is that of the examples.
        has_aux: whether it returns a pair of that and a pytree of scalars.
        divides_sequences: whether sequences will be divided: then all attention is put in single
            equations, also where it is written as a softmax between two products.

    Returns:
        The program.

    Raises:
        InputError: a parameter is not floating, a batch leaf has no example axis, the loss is
            not a floating scalar, its count depends on the parameters, or there is attention that
            cannot be put in an equation and shall be.

    Example:
        >>> import jax.numpy as jnp
        >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
        >>> program = trace(loss, jnp.ones((4, 2)), jnp.ones((8, 4)))
        >>> [step.name for step in program.steps][0]
        'dot_general'
    """
    if isinstance(loss_function, type):
        raise InputError(
            f"loss_function is the class {loss_function.__qualname__}; give a function of "
            f"parameters and a batch, or an object that can be called so"
        )
    if not callable(loss_function):
        raise InputError(
            f"loss_function is {shown(loss_function)}; give a function of parameters and a batch"
        )
    parameters, batch = parameter_shapes(parameters), abstract(batch)
    check_examples(batch)
    parameter_leaves, parameter_tree = jax.tree.flatten(parameters)
    batch_leaves, batch_tree = jax.tree.flatten(batch)
    aux_trees: list[Any] = []

    def flat_loss(parameter_values: Sequence[Any], batch_values: Sequence[Any]) -> list[Any]:
        values = map(from_host, batch_values, batch_leaves)
        result = traced_once(
            loss_function,
            jax.tree.unflatten(parameter_tree, parameter_values),
            jax.tree.unflatten(batch_tree, values),
        )
        total, count, aux, aux_tree = sums(result, batch_leaves[0].shape[0], has_aux=has_aux)
        aux_trees.append(aux_tree)
        # Whoever adds up the figures needs the count beside them.
        return [total, count, *([count] if has_aux else []), *aux]

    closed = jax.make_jaxpr(flat_loss)(parameter_leaves, [host_shape(x) for x in batch_leaves])
    split, names = len(parameter_leaves), path_names(parameters)
    check_count(_compat.depends_on(closed, 1)[:split], names)
    written = flatten_jaxpr(closed)
    model = fingerprint_of(names, [written.avals[v] for v in written.inputs[:split]], written.steps)
    unmatched = ""
    if divides_sequences:
        matched = match_attention(closed, split)
        matched.check()
        written, unmatched = flatten_jaxpr(matched.program), matched.refused
    flat, leaves = with_open_loops(written, split)
    split = len(leaves.places)
    return Program(
        avals=flat.avals,
        parameters=flat.inputs[:split],
        parameter_names=leaves.split_names(names),
        batch=flat.inputs[split:],
        batch_names=path_names(batch),
        steps=flat.steps,
        total=flat.outputs[0],
        count=flat.outputs[1],
        leaves=leaves,
        model=model,
        aux=flat.outputs[2:],
        aux_tree=aux_trees[-1] if has_aux else None,
        unmatched=unmatched,
    )
