"""The signatures of primitives that take part of an array, or put it there."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hetjax import _compat
from hetjax.sharding.deduction.signature import (
    Label,
    Labels,
    Signature,
    dtypes_of,
    shapes_of,
    unlabelled,
    with_value,
)


def pad_rule(equation: _compat.JaxprEqn) -> Signature:
    """Dimensions that grow or shrink may not be divided."""
    labels = tuple(
        Label(i) if config == (0, 0, 0) else None
        for i, config in enumerate(equation.params["padding_config"])
    )
    return Signature((labels, ()), (labels,), linear=(frozenset({0, 1}),))


def slice_rule(equation: _compat.JaxprEqn) -> Signature:
    """Dimensions of which a part is taken may not be divided."""
    params, (shape,) = equation.params, shapes_of(equation.invars)
    strides = params["strides"] or (1,) * len(shape)
    labels = tuple(
        Label(i) if (start, stop, stride) == (0, size, 1) else None
        for i, (start, stop, stride, size) in enumerate(
            zip(params["start_indices"], params["limit_indices"], strides, shape, strict=True)
        )
    )

    def resized(name: int, size: int) -> Mapping[str, Any]:
        return {"limit_indices": with_value(params["limit_indices"], name, size)}

    return Signature((labels,), (labels,), linear=(frozenset({0}),), resized=resized)


def dynamic_slice_rule(equation: _compat.JaxprEqn) -> Signature:
    """Dimensions of which a part is taken may not be divided."""
    sizes = equation.params["slice_sizes"]
    (shape, *starts) = shapes_of(equation.invars)
    labels = tuple(Label(i) if sizes[i] == size else None for i, size in enumerate(shape))

    def resized(name: int, size: int) -> Mapping[str, Any]:
        return {"slice_sizes": with_value(sizes, name, size)}

    operands = (labels, *((),) * len(starts))
    return Signature(operands, (labels,), linear=(frozenset({0}),), resized=resized)


def dynamic_update_slice_rule(equation: _compat.JaxprEqn) -> Signature:
    """Dimensions of which a part is replaced may not be divided."""
    (shape, update, *starts) = shapes_of(equation.invars)
    labels = tuple(
        Label(i) if size == part else None
        for i, (size, part) in enumerate(zip(shape, update, strict=True))
    )
    operands = (labels, labels, *((),) * len(starts))
    return Signature(operands, (labels,), linear=(frozenset({0, 1}),))


def gather_rule(equation: _compat.JaxprEqn) -> Signature:
    """Indices and whole windows are independent; what is looked up in may not be divided."""
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    (shape, indices), (out,) = shapes_of(equation.invars), shapes_of(equation.outvars)
    operand, where, result, dimensions = _indexed(
        shape,
        indices,
        out,
        sizes,
        windows=numbers.offset_dims,
        gone=(*numbers.collapsed_slice_dims, *numbers.operand_batching_dims),
        chosen=numbers.start_index_map,
        batching=(numbers.operand_batching_dims, numbers.start_indices_batching_dims),
    )

    def resized(name: int, size: int) -> Mapping[str, Any]:
        return (
            {"slice_sizes": with_value(sizes, dimensions[name], size)} if name in dimensions else {}
        )

    fills = equation.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
    fill = equation.params["fill_value"]
    # Unless told otherwise, floating numbers are filled with NaN, of which a sum is NaN.
    is_nan = fill is None and jnp.issubdtype(dtypes_of(equation.outvars)[0], jnp.inexact)
    linear = (frozenset({0}),) if not fills or is_nan or fill == 0 else ()
    return Signature((operand, where), (result,), linear=linear, resized=resized)


def scatter_add_rule(equation: _compat.JaxprEqn) -> Signature:
    """As a gather; over the indices it is a sum, which is added to the operand once."""
    numbers = equation.params["dimension_numbers"]
    shape, indices, updates = shapes_of(equation.invars)
    batching = numbers.operand_batching_dims
    gone = (*numbers.inserted_window_dims, *batching)
    kept = [dimension for dimension in range(len(shape)) if dimension not in gone]
    windows = dict(zip(kept, numbers.update_window_dims, strict=True))
    sizes = [updates[windows[i]] if i in windows else 1 for i in range(len(shape))]
    operand, where, update, _ = _indexed(
        shape,
        indices,
        updates,
        sizes,
        windows=numbers.update_window_dims,
        gone=gone,
        chosen=numbers.scatter_dims_to_operand_dims,
        batching=(batching, numbers.scatter_indices_batching_dims),
    )
    inside = {label for label in operand if label is not None}
    summed = frozenset(label.name for label in where if label and label not in inside)
    return Signature(
        (operand, where, update), (operand,), summed, (frozenset({0, 2}),), base=frozenset({0})
    )


def scatter_rule(equation: _compat.JaxprEqn) -> Signature:
    """As a gather; the indices may not be divided, since what is replaced is replaced whole."""
    found = scatter_add_rule(equation)
    inside = set(found.results[0])
    operands = tuple(
        tuple(label if label in inside else None for label in labels) for labels in found.operands
    )
    name, is_unique = equation.primitive.name, equation.params["unique_indices"]
    linear: tuple[frozenset[int], ...] = ()
    if name == "scatter" and is_unique:
        # Where two updates meet, which one stays may differ from summand to summand.
        linear = (frozenset({0, 2}),)
    if name == "scatter-mul":
        linear = (frozenset({0}),)
    return Signature(operands, found.results, linear=linear)


def _indexed(
    shape: Sequence[int],
    indices: Sequence[int],
    out: Sequence[int],
    sizes: Sequence[int],
    *,
    windows: Sequence[int],
    gone: Sequence[int],
    chosen: Sequence[int],
    batching: tuple[Sequence[int], Sequence[int]],
) -> tuple[Labels, Labels, Labels, Mapping[int, int]]:
    """Labels of an operand, its indices and what is taken from it; windows' dimensions by label."""
    numbers = itertools.count()
    operand, where, result = map(unlabelled, (shape, indices, out))
    dimensions = {}
    kept = [dimension for dimension in range(len(shape)) if dimension not in gone]
    for dimension, place in zip(kept, windows, strict=True):
        if sizes[dimension] == shape[dimension] and dimension not in chosen:
            operand[dimension] = result[place] = label = Label(next(numbers))
            dimensions[label.name] = dimension
    outer = [place for place in range(len(out)) if place not in windows]
    for dimension, place in zip(range(len(indices) - 1), outer, strict=True):
        where[dimension] = result[place] = Label(next(numbers))
    for a, b in zip(*batching, strict=True):
        operand[a] = where[b]
    return tuple(operand), tuple(where), tuple(result), dimensions
