"""The rules that give equations their signatures, each for a family of primitives."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hetjax import _compat
from hetjax.sharding.deduction.signature import Label, Labels, Rule, Signature, dtypes_of, shapes_of


def _unlabelled(shape: Sequence[int]) -> list[Label | None]:
    return [None] * len(shape)


def _with(values: Sequence[int], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _numbered(rank: int, first: int = 0) -> Labels:
    return tuple(Label(first + dimension) for dimension in range(rank))


def elementwise_rule(*linear: frozenset[int]) -> Rule:
    """All arrays have one shape, but for scalars and for dimensions of size 1 that are repeated."""

    def rule(equation: _compat.JaxprEqn) -> Signature:
        (out, *_) = results = shapes_of(equation.outvars)
        operands = tuple(
            tuple(Label(i) if size == out[i] else None for i, size in enumerate(shape))
            for shape in shapes_of(equation.invars)
        )
        return Signature(operands, tuple(_numbered(len(s)) for s in results), linear=linear)

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
        return {"shape": _with(shape, name, size)}

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
    operand, result = _unlabelled(before), _unlabelled(after)
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
        return {"new_sizes": _with(after, place, size * scale)}

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
    operand = _numbered(len(equation.params["permutation"]))
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
    operand, axis = _numbered(len(shapes[0])), equation.params["axis"]
    result = (*operand[:axis], None, *operand[axis:])
    return Signature((operand,) * len(shapes), (result,), linear=(frozenset(range(len(shapes))),))


def unstack_rule(equation: _compat.JaxprEqn) -> Signature:
    """What lies behind each other along a dimension, which goes, becomes results of their own."""
    shapes = shapes_of(equation.outvars)
    result, axis = _numbered(len(shapes[0])), equation.params["axis"]
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
            return (*_numbered(count), *[None] * (len(shape) - count))

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
    labels = [_unlabelled(shape) for shape in shapes]
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


def attention_rule(equation: _compat.JaxprEqn) -> Signature:
    """Examples, groups of heads, and queries are independent; each query needs all keys."""
    operands, labels = _attention_labels(equation)
    rows = operands[0][:-1]
    return Signature(tuple(operands), ((*rows, None), rows), resized=_without_spans(labels))


def attention_backward_rule(equation: _compat.JaxprEqn) -> Signature:
    """Over queries the gradients of keys and values are sums, over keys those of queries."""
    operands, labels = _attention_labels(equation)
    q, k, v = operands[:3]
    keys = [
        tuple(labels.keys if i == len(each) - 3 else label for i, label in enumerate(each))
        for each in (k, v)
    ]
    operands[1:3] = keys
    place = 3
    if not equation.params["mask"].is_full:
        operands[4], place = (labels.keys,), 5
    if equation.params["has_segments"]:
        operands[place + 1] = (*q[:-3], labels.keys)
    rows = q[:-1]
    operands += [(*rows, None), rows, (*rows, None)]
    return Signature(
        tuple(operands),
        (q, *keys),
        summed=frozenset({labels.queries.name, labels.keys.name}),
        linear=(frozenset({len(operands) - 1}),),
        resized=_without_spans(labels),
    )


def linear_cross_entropy_rule(equation: _compat.JaxprEqn) -> Signature:
    """Tokens are independent, and over them the gradient of the weights is a sum."""
    hidden, weights, *others = shapes_of(equation.invars)
    tokens = _numbered(len(hidden) - 1)
    # Of what `jax.vmap` maps, each has weights of its own.
    mapped = tokens[: len(weights) - 2]
    of_weights = (*mapped, None, None)
    operands = ((*tokens, None), of_weights, *[tokens] * len(others))
    if not equation.primitive.name.endswith("backward"):
        return Signature(operands, (tokens, tokens))
    return Signature(
        operands,
        ((*tokens, None), of_weights),
        summed=frozenset(label.name for label in tokens[len(mapped) :] if label is not None),
        linear=(frozenset({len(operands) - 1}),),
    )


class _AttentionLabels(NamedTuple):
    """What the dimensions of an attention belong to, beside its examples."""

    queries: Label
    keys: Label
    groups: Label


def _attention_labels(equation: _compat.JaxprEqn) -> tuple[list[Labels], _AttentionLabels]:
    """Labels of an attention's operands, but for its residuals; keys are not divided."""
    q, k, _, *_ = shapes_of(equation.invars)
    batch = _numbered(len(q) - 3)
    labels = _AttentionLabels(*(Label(len(batch) + i) for i in range(3)))
    heads = Label(labels.groups.name, max(1, q[-2] // k[-2]))
    side = (*batch, None, labels.groups, None)
    operands: list[Labels] = [(*batch, labels.queries, heads, None), side, side]
    if not equation.params["mask"].is_full:
        operands += [(labels.queries,), (None,)]
    if equation.params["has_segments"]:
        operands += [(*batch, labels.queries), (*batch, None)]
    return operands, labels


def _without_spans(labels: _AttentionLabels) -> Callable[[int, int], Mapping[str, Any]]:
    """Of some of the tokens, positions are known as data alone."""
    spans = {labels.queries.name: "query_spans", labels.keys.name: "key_spans"}

    def resized(name: int, size: int) -> Mapping[str, Any]:
        return {spans[name]: None} if name in spans else {}

    return resized


def convolution_rule(equation: _compat.JaxprEqn) -> Signature:
    """Examples and output features are independent; over input features it is a sum."""
    numbers = equation.params["dimension_numbers"]
    left, right, out = map(_unlabelled, shapes_of([*equation.invars, *equation.outvars]))
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
        return {"limit_indices": _with(params["limit_indices"], name, size)}

    return Signature((labels,), (labels,), linear=(frozenset({0}),), resized=resized)


def dynamic_slice_rule(equation: _compat.JaxprEqn) -> Signature:
    """Dimensions of which a part is taken may not be divided."""
    sizes = equation.params["slice_sizes"]
    (shape, *starts) = shapes_of(equation.invars)
    labels = tuple(Label(i) if sizes[i] == size else None for i, size in enumerate(shape))

    def resized(name: int, size: int) -> Mapping[str, Any]:
        return {"slice_sizes": _with(sizes, name, size)}

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
        return {"slice_sizes": _with(sizes, dimensions[name], size)} if name in dimensions else {}

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
    operand, where, result = map(_unlabelled, (shape, indices, out))
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
    operand = _numbered(len(keys))

    return Signature((operand,), ((*operand, *(None,) * len(shape)),))


def keys_rule(equation: _compat.JaxprEqn) -> Signature:
    """Keys along the first dimensions; what a key is made of, or makes, is not divided."""
    shapes = shapes_of([*equation.invars, *equation.outvars])
    rank = min(len(shape) for shape in shapes)
    found = [(*_numbered(rank), *(None,) * (len(shape) - rank)) for shape in shapes]
    count = len(equation.invars)
    return Signature(tuple(found[:count]), tuple(found[count:]))


class BlockLabel(enum.IntEnum):
    """The labels of a block of an attention; queries and keys have labels of their own."""

    BATCH = 0
    QUERIES = 1
    QUERY_HEADS = 2
    KEYS = 3
    KEY_SLOTS = 4


def attention_block_inside_rule(equation: _compat.JaxprEqn) -> Signature:
    """A block that one member computes: its devices can each have some of its slots.

    All slots have as many query heads as the next one; else heads are not divided.
    """
    block = equation.params["block"]
    counts = block.heads_of_slots
    signature = attention_block_rule(equation)
    slots = Label(BlockLabel.KEY_SLOTS)
    heads = Label(BlockLabel.KEY_SLOTS, counts[0]) if len(set(counts)) == 1 else None
    names: dict[int, Label | None] = {
        BlockLabel.QUERY_HEADS: heads,
        BlockLabel.KEY_SLOTS: slots if heads else None,
    }

    def inside(many: Sequence[Labels]) -> tuple[Labels, ...]:
        return tuple(
            tuple(names.get(label.name, label) if label else None for label in labels)
            for labels in many
        )

    def resized(name: int, size: int) -> Mapping[str, Any]:
        if name != BlockLabel.KEY_SLOTS:
            return {}
        return {"block": dataclasses.replace(block, slots=block.slots[:size])}

    return Signature(inside(signature.operands), inside(signature.results), resized=resized)


def attention_block_rule(equation: _compat.JaxprEqn) -> Signature:
    """Each member computes a block of its own: of the queries and of the keys that it has."""
    batch, *of_queries = BlockLabel.BATCH, BlockLabel.QUERIES, BlockLabel.QUERY_HEADS
    query = (batch, *of_queries, None)
    key = (batch, BlockLabel.KEYS, BlockLabel.KEY_SLOTS, None)
    row, block = query[:3], equation.params["block"]
    segments = [row[:2], key[:2]] if block.has_segments else []
    is_backward = equation.primitive.name.endswith("backward")
    results = [query, key, key] if is_backward else [query, row]
    continued = ([query] if is_backward else results) if block.is_continued else []
    operands = [query, key, key, *segments, *([query, row, row] * is_backward), *continued]

    def located(ranges: Mapping[int, tuple[int, int]]) -> Mapping[str, Any]:
        return {"block": block.located(ranges)}

    def labels(names: Sequence[BlockLabel | None]) -> Labels:
        return tuple(None if name is None else Label(name) for name in names)

    return Signature(tuple(map(labels, operands)), tuple(map(labels, results)), located=located)
