"""The signatures of primitives that compute with whole arrays, each rule for a family of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from hetjax import _compat
from hetjax.sharding.deduction.signature import (
    Label,
    Labels,
    Rule,
    Signature,
    dtypes_of,
    numbered,
    shapes_of,
    unlabelled,
    with_value,
)


def elementwise_rule(*linear: frozenset[int]) -> Rule:
    """All arrays have one shape, but for scalars and for dimensions of size 1 that are repeated."""

    def rule(equation: _compat.JaxprEqn) -> Signature:
        (out, *_) = results = shapes_of(equation.outvars)
        operands = tuple(
            tuple(Label(i) if size == out[i] else None for i, size in enumerate(shape))
            for shape in shapes_of(equation.invars)
        )
        return Signature(operands, tuple(numbered(len(s)) for s in results), linear=linear)

    return rule


def region_rule(equation: _compat.JaxprEqn) -> Signature:
    """Each result is the operand at its place, whatever the others are."""
    labels: list[Labels] = []
    for shape in shapes_of(equation.invars):
        first = sum(map(len, labels))
        labels.append(tuple(Label(first + i) for i in range(len(shape))))
    return Signature(tuple(labels), tuple(labels), is_apart=True)


def conversion_rule(equation: _compat.JaxprEqn) -> Signature:
    """Linear where nothing is cut off: among floating types, and to integers no wider."""
    before, after = dtypes_of([*equation.invars, *equation.outvars])
    floating = all(jnp.issubdtype(dtype, jnp.inexact) for dtype in (before, after))
    integers = all(jnp.issubdtype(dtype, jnp.integer) for dtype in (before, after))
    linear = floating or (integers and after.itemsize <= before.itemsize)
    return elementwise_rule(*[frozenset({0})] * linear)(equation)


def division_rule(equation: _compat.JaxprEqn) -> Signature:
    """Linear in what is divided, unless the quotient is an integer."""
    linear = jnp.issubdtype(dtypes_of(equation.outvars)[0], jnp.inexact)
    return elementwise_rule(*[frozenset({0})] * linear)(equation)


def select_rule(equation: _compat.JaxprEqn) -> Signature:
    """Elementwise; the cases are linear together, the predicate is not."""
    cases = frozenset(range(1, len(equation.invars)))
    return elementwise_rule(cases)(equation)


def broadcast_in_dim_rule(equation: _compat.JaxprEqn) -> Signature:
    """Dimensions that the operand has may be divided; those that are new may not."""
    dimensions = equation.params["broadcast_dimensions"]
    shape = equation.params["shape"]
    (before, *_), (after,) = shapes_of(equation.invars), shapes_of(equation.outvars)
    operand = tuple(
        Label(place) if before[dimension] == after[place] else None
        for dimension, place in enumerate(dimensions)
    )
    # Dimensions that are new could be divided too; nothing but the user of the result asks for it.
    result = tuple(
        Label(place) if place in dimensions and Label(place) in operand else None
        for place in range(len(after))
    )

    def resized(name: int, size: int) -> Mapping[str, Any]:
        return {"shape": with_value(shape, name, size)}

    return Signature((operand,), (result,), linear=(frozenset({0}),), resized=resized)


def tile_rule(equation: _compat.JaxprEqn) -> Signature:
    """Dimensions that are not repeated may be divided."""
    labels = tuple(
        Label(place) if count == 1 else None for place, count in enumerate(equation.params["reps"])
    )
    return Signature((labels,), (labels,), linear=(frozenset({0}),))


def reshape_rule(equation: _compat.JaxprEqn) -> Signature:
    """Of dimensions that are merged or split, the first can be divided."""
    (before,), (after,) = shapes_of(equation.invars[:1]), shapes_of(equation.outvars)
    operand, result = unlabelled(before), unlabelled(after)
    factors: dict[int, tuple[int, int]] = {}
    for name, (old, new) in enumerate(_runs(before, after)):
        outer = math.gcd(before[old[0]], after[new[0]])
        if outer < 2 or equation.params["dimensions"] is not None:
            continue
        operand[old[0]] = Label(name, before[old[0]] // outer)
        result[new[0]] = Label(name, after[new[0]] // outer)
        factors[name] = (new[0], after[new[0]] // outer)

    def resized(name: int, size: int) -> Mapping[str, Any]:
        place, scale = factors[name]
        return {"new_sizes": with_value(after, place, size * scale)}

    return Signature((tuple(operand),), (tuple(result),), linear=(frozenset({0}),), resized=resized)


def _runs(
    before: Sequence[int], after: Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The shortest runs of dimensions, of both shapes, that hold as many elements as each other."""
    olds = [i for i, size in enumerate(before) if size != 1]
    news = [i for i, size in enumerate(after) if size != 1]
    if 0 in before:
        return []
    found = []
    while olds and news:
        old, new = [olds.pop(0)], [news.pop(0)]
        while (a := math.prod(before[i] for i in old)) != (b := math.prod(after[i] for i in new)):
            (old if a < b else new).append((olds if a < b else news).pop(0))
        found.append((tuple(old), tuple(new)))
    return found


def squeeze_rule(equation: _compat.JaxprEqn) -> Signature:
    """Dimensions of size 1 go; the others stay as they are."""
    (shape,) = shapes_of(equation.invars)
    gone = {dimension % len(shape) for dimension in equation.params["dimensions"]}
    operand = tuple(None if i in gone else Label(i) for i in range(len(shape)))
    result = tuple(label for label in operand if label is not None)
    return Signature((operand,), (result,), linear=(frozenset({0}),))


def transpose_rule(equation: _compat.JaxprEqn) -> Signature:
    """Dimensions change their places."""
    operand = numbered(len(equation.params["permutation"]))
    result = tuple(operand[place] for place in equation.params["permutation"])
    return Signature((operand,), (result,), linear=(frozenset({0}),))


def reduction_rule(*, adds: bool) -> Rule:
    """Over some dimensions one value is made; a sum may be of parts."""

    def rule(equation: _compat.JaxprEqn) -> Signature:
        axes = set(equation.params["axes"])
        (shape,) = shapes_of(equation.invars)
        operand = tuple(Label(i) if adds or i not in axes else None for i in range(len(shape)))
        result = tuple(Label(i) for i in range(len(shape)) if i not in axes)
        return Signature(
            (operand,),
            (result,),
            summed=frozenset(axes) if adds else frozenset(),
            linear=(frozenset({0}),) if adds else (),
        )

    return rule


def along_rule(parameter: str, *, linear: bool = False) -> Rule:
    """All but one dimension, which is named by a parameter, are independent."""

    def rule(equation: _compat.JaxprEqn) -> Signature:
        def labels(shape: Sequence[int]) -> Labels:
            axis = equation.params[parameter] % len(shape) if shape else -1
            return tuple(None if i == axis else Label(i) for i in range(len(shape)))

        operands = tuple(labels(shape) for shape in shapes_of(equation.invars))
        results = tuple(labels(shape) for shape in shapes_of(equation.outvars))
        everything = frozenset(range(len(operands)))
        return Signature(operands, results, linear=(everything,) if linear else ())

    return rule


def stack_rule(equation: _compat.JaxprEqn) -> Signature:
    """Operands come to lie behind each other along a new dimension, which may not be divided."""
    shapes = shapes_of(equation.invars)
    operand, axis = numbered(len(shapes[0])), equation.params["axis"]
    result = (*operand[:axis], None, *operand[axis:])
    return Signature((operand,) * len(shapes), (result,), linear=(frozenset(range(len(shapes))),))


def unstack_rule(equation: _compat.JaxprEqn) -> Signature:
    """What lies behind each other along a dimension, which goes, becomes results of their own."""
    shapes = shapes_of(equation.outvars)
    result, axis = numbered(len(shapes[0])), equation.params["axis"]
    operand = (*result[:axis], None, *result[axis:])
    return Signature((operand,), (result,) * len(shapes), linear=(frozenset({0}),))


def fft_rule(equation: _compat.JaxprEqn) -> Signature:
    """The last dimensions are transformed; those before are independent."""
    return leading_rule(frozenset({0}), own=len(equation.params["fft_lengths"]))(equation)


def leading_rule(*linear: frozenset[int], own: int = 2) -> Rule:
    """Each array of the last dimensions, as a matrix, by itself: those before are independent."""

    def rule(equation: _compat.JaxprEqn) -> Signature:
        shapes = shapes_of(equation.invars)
        count = len(shapes[0]) - own

        def labels(shape: Sequence[int]) -> Labels:
            return (*numbered(count), *[None] * (len(shape) - count))

        results = tuple(map(labels, shapes_of(equation.outvars)))
        return Signature(tuple(map(labels, shapes)), results, linear=linear)

    return rule


def top_k_rule(equation: _compat.JaxprEqn) -> Signature:
    """The dimension that is searched may not be divided."""
    (shape,) = shapes_of(equation.invars)
    axis = equation.params.get("axis", -1) % len(shape)
    labels = tuple(None if i == axis else Label(i) for i in range(len(shape)))
    return Signature((labels,), (labels, labels))


def reverse_rule(equation: _compat.JaxprEqn) -> Signature:
    """Dimensions that are turned may not be divided."""
    (shape,) = shapes_of(equation.invars)
    turned = set(equation.params["dimensions"])
    labels = tuple(None if i in turned else Label(i) for i in range(len(shape)))
    return Signature((labels,), (labels,), linear=(frozenset({0}),))


def dot_general_rule(equation: _compat.JaxprEqn) -> Signature:
    """Contracted dimensions are summed; all others are independent."""
    (left_sum, right_sum), (left_batch, right_batch) = equation.params["dimension_numbers"]
    shapes = shapes_of(equation.invars)
    numbers = itertools.count()
    labels = [unlabelled(shape) for shape in shapes]
    summed = set()
    for a, b in zip(left_sum, right_sum, strict=True):
        labels[0][a] = labels[1][b] = label = Label(next(numbers))
        summed.add(label.name)
    result: list[Label | None] = []
    for a, b in zip(left_batch, right_batch, strict=True):
        labels[0][a] = labels[1][b] = Label(next(numbers))
        result.append(labels[0][a])
    for side in labels:
        for dimension, label in enumerate(side):
            if label is None:
                side[dimension] = Label(next(numbers))
                result.append(side[dimension])
    operands = tuple(tuple(side) for side in labels)
    linear = (frozenset({0}), frozenset({1}))
    return Signature(operands, (tuple(result),), frozenset(summed), linear)


def convolution_rule(equation: _compat.JaxprEqn) -> Signature:
    """Examples and output features are independent; over input features it is a sum."""
    numbers = equation.params["dimension_numbers"]
    left, right, out = map(unlabelled, shapes_of([*equation.invars, *equation.outvars]))
    left[numbers.lhs_spec[0]] = out[numbers.out_spec[0]] = Label(0)
    ungrouped = (equation.params["feature_group_count"], equation.params["batch_group_count"])
    summed: frozenset[int] = frozenset()
    if ungrouped == (1, 1):
        right[numbers.rhs_spec[0]] = out[numbers.out_spec[1]] = Label(1)
        left[numbers.lhs_spec[1]] = right[numbers.rhs_spec[1]] = Label(2)
        summed = frozenset({2})
    if equation.params["batch_group_count"] != 1:
        left[numbers.lhs_spec[0]] = out[numbers.out_spec[0]] = None
    linear = (frozenset({0}), frozenset({1}))
    return Signature((tuple(left), tuple(right)), (tuple(out),), summed, linear)


def window_rule(equation: _compat.JaxprEqn) -> Signature:
    """Dimensions that a window does not slide over are independent."""
    params = equation.params
    sizes = params["window_dimensions"]
    trivial = [
        (size, stride, dilation, *padding) == (1, 1, 1, 0, 0)
        for size, stride, dilation, padding in zip(
            sizes,
            params["window_strides"],
            params.get("base_dilation", (1,) * len(sizes)),
            params["padding"],
            strict=True,
        )
    ]
    labels = tuple(Label(i) if free else None for i, free in enumerate(trivial))
    linear = (frozenset({0}),) if equation.primitive.name == "reduce_window_sum" else ()
    operands = tuple(labels for _ in equation.invars)
    return Signature(operands, tuple(labels for _ in equation.outvars), linear=linear)


def random_bits_rule(equation: _compat.JaxprEqn) -> Signature:
    """Keys are independent; what is drawn for one may not be divided."""
    (keys,), shape = shapes_of(equation.invars), equation.params["shape"]
    operand = numbered(len(keys))

    return Signature((operand,), ((*operand, *(None,) * len(shape)),))


def keys_rule(equation: _compat.JaxprEqn) -> Signature:
    """Keys along the first dimensions; what a key is made of, or makes, is not divided."""
    shapes = shapes_of([*equation.invars, *equation.outvars])
    rank = min(len(shape) for shape in shapes)
    found = [(*numbered(rank), *(None,) * (len(shape) - rank)) for shape in shapes]
    count = len(equation.invars)
    return Signature(tuple(found[:count]), tuple(found[count:]))
