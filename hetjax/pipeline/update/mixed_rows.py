"""Which rows of scanned parameters an optimizer mixes: one stage must have all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import optax
from jaxtyping import PyTree

from hetjax.pipeline.program.loss import parameter_shapes
from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.pipeline.update.traced_update import divided_trace, trace_update
from hetjax.pipeline.update.update_analysis import UpdateAnalysis
from hetjax.pipeline.update.update_by_rows import may_mix_rows


def mixed_rows(
    program: Program, optimizer: optax.GradientTransformation, parameters: PyTree
) -> tuple[tuple[int, ...], ...]:
    """Find the parameters of which an optimizer mixes the elements, where some are rows of a leaf.

    Args:
        program: the traced loss function, which knows what is frozen.
        optimizer: an Optax transformation.
        parameters: pytree of arrays or shapes, or a function without arguments that makes it.

    Returns:
        Groups of parameters, by place; none where each row is updated by itself.

    Raises:
        InputError: the optimizer's update cannot be traced.
    """
    leaves, frozen = program.leaves, program.frozen
    shapes, tree = jax.tree.flatten(parameter_shapes(parameters))

    def unflatten(values: Sequence[Any]) -> PyTree:
        return jax.tree.unflatten(tree, values)

    # Rows are many, and of most optimizers it can be told of the leaves.
    if not may_mix_rows(trace_update(optimizer, shapes, unflatten), leaves):
        return ()
    dtype, rows = program.loss_dtype, leaves.split_shapes(shapes)
    flat = divided_trace(optimizer, shapes, unflatten, dtype, frozen, leaves, 1.0).flat
    parts = [ParameterPart(leaf) for leaf in range(len(rows)) if leaf not in frozen.without_update]
    analysis = UpdateAnalysis(flat, rows, [parts], program.parameter_names, 1, frozen)
    groups: dict[int, list[int]] = {}
    for leaf, value in analysis.parameters.items():
        if value in analysis.local:
            groups.setdefault(analysis.component(value), []).append(leaf)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)
