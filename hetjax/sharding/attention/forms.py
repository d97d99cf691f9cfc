"""What is known of the values that masks are made of, without computing them.

A mask of a million tokens cannot be looked at. But it is made of numbers that count along a
dimension, of comparisons of these, and of logic: each value is followed as one of a few forms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Uniform:
    """One number everywhere.

    Args:
        value: the number.
    """

    value: Any


@dataclass(frozen=True)
class Counting:
    """A sum of indices along dimensions.

    Args:
        factors: what each dimension's index is multiplied by, where that is not 0.
        constant: what is added.
    """

    factors: tuple[tuple[int, int], ...]
    constant: float


@dataclass(frozen=True)
class Distance:
    """How far a sum of indices is from 0.

    Args:
        of: the sum.
    """

    of: Counting


@dataclass(frozen=True)
class Data:
    """Some array, repeated along dimensions that it has not.

    Args:
        base: its variable.
        dims: for each of its dimensions which one of the value it is; None for one of size 1 that
            is repeated.
    """

    base: Any
    dims: tuple[int | None, ...]


@dataclass(frozen=True)
class Near:
    """Where the index along one dimension is at most so much larger than that along another.

    Args:
        first: the one.
        second: the other.
        most: how much.
    """

    first: Any
    second: Any
    most: int


@dataclass(frozen=True)
class Same:
    """Where two arrays of integers have the same number.

    Args:
        first: the one.
        second: the other.
    """

    first: Data
    second: Data


@dataclass(frozen=True)
class Region:
    """Two numbers: one where some conditions hold together, the other elsewhere.

    Args:
        conditions: the conditions, `Near` and `Same`.
        inside: the number where all of them hold.
        outside: the number elsewhere.
    """

    conditions: frozenset[Near | Same]
    inside: Any
    outside: Any


Form = Uniform | Counting | Distance | Data | Region

_LARGEST_CONSTANT = 2**26

_COUNTING = frozenset(map(np.dtype, ("int32", "int64", "float32", "float64")))

_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "eq": np.equal,
    "ne": np.not_equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "abs": np.abs,
    "select_n": lambda which, *cases: cases[int(which)],
    "stop_gradient": lambda x: x,
    "copy": lambda x: x,
    "name": lambda x: x,
}

_ORDERS = frozenset({"eq", "ne", "ge", "gt", "le", "lt"})
_SWAPPED = {"ge": "le", "gt": "lt", "le": "ge", "lt": "gt"}
_REVERSED = {"ge": "lt", "gt": "le"}


def form_of_constant(array: Any) -> Form | None:
    """The form of an array that is known; None where it is none of them."""
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return None
    array = np.asarray(array)
    if not array.size or array.size > _LARGEST_CONSTANT:
        return None
    first = array.flat[0]
    if (array == first).all():
        return Uniform(first)
    long = [i for i, size in enumerate(array.shape) if size > 1]
    inner = array.reshape([array.shape[i] for i in long])
    if len(long) == 1 and counts_exactly(array.dtype):
        with np.errstate(over="ignore", invalid="ignore"):
            steps = np.diff(inner.astype(np.float64))
        if (steps == steps[0]).all() and steps[0].is_integer():
            return Counting(((long[0], int(steps[0])),), float(first))
    return _band(inner, (long[0], long[1])) if len(long) == 2 else None


def _band(matrix: np.ndarray, dims: tuple[int, int]) -> Region | None:
    """A matrix of one number near a diagonal and another one elsewhere."""
    distance = np.subtract.outer(np.arange(matrix.shape[0]), np.arange(matrix.shape[1]))
    other = matrix[matrix != matrix[0, 0]][0]
    for inside, outside in ((matrix[0, 0], other), (other, matrix[0, 0])):
        seen = matrix == inside
        low, high = int(distance[seen].min()), int(distance[seen].max())
        near = (distance >= low) & (distance <= high)
        if (seen == near).all() and (matrix[~seen] == outside).all():
            conditions = {Near(dims[0], dims[1], high), Near(dims[1], dims[0], -low)}
            kept = {c for c in conditions if c.most < matrix.shape[dims.index(c.first)] - 1}
            return Region(frozenset(kept), inside, outside)
    return None


def moved(form: Form | None, places: Mapping[int, int | None]) -> Form | None:
    """A form of a value whose dimensions change their places.

    Args:
        form: the form.
        places: where each dimension goes; None for one of size 1 that goes or is repeated.
    """
    match form:
        case Counting():
            factors = ((places[d], f) for d, f in form.factors)
            return Counting(tuple((d, f) for d, f in factors if d is not None), form.constant)
        case Distance():
            of = moved(form.of, places)
            assert isinstance(of, Counting)
            return Distance(of)
        case Data():
            return replace(form, dims=tuple(None if d is None else places[d] for d in form.dims))
        case Region():
            found = [_moved_condition(each, places) for each in form.conditions]
            kept = frozenset(each for each in found if each is not None)
            return replace(form, conditions=kept) if len(kept) == len(found) else None
    return form


def reversed_region(region: Region) -> Region | None:
    """The same numbers, told by where the condition does not hold; None where it is not one `Near`.

    Args:
        region: the region.
    """
    match [*region.conditions]:
        case [Near(first, second, most)]:
            # Whole numbers that are not at most so much larger are smaller by more.
            there = frozenset({Near(second, first, -most - 1)})
            return Region(there, region.outside, region.inside)
    return None


def _moved_condition(condition: Near | Same, places: Mapping[int, Any]) -> Near | Same | None:
    if isinstance(condition, Same):
        sides = [moved(each, places) for each in (condition.first, condition.second)]
        return Same(*sides)  # type: ignore[arg-type]
    first, second = places[condition.first], places[condition.second]
    return None if first is None or second is None else Near(first, second, condition.most)


def computed(
    name: str, operands: Sequence[Form | None], shape: Sequence[int], dtype: Any
) -> Form | None:
    """The form of what an elementwise equation makes.

    Args:
        name: its primitive.
        operands: the forms of its operands, with the dimensions of the result.
        shape: the result's shape.
        dtype: the result's dtype.

    Returns:
        The form; None where it is none of them.
    """
    if name == "convert_element_type":
        return _converted(operands[0], dtype)
    operation = _OPERATIONS.get(name)
    if operation is None:
        return None
    if all(isinstance(each, Uniform | Region) for each in operands):
        return _by_regions(operation, operands)
    if all(isinstance(each, Uniform | Counting) for each in operands):
        return _counted(name, operands, shape)
    first, second = (*operands, None, None)[:2]
    if isinstance(first, Distance) and isinstance(second, Uniform):
        return _within(name, first.of, second.value, shape)
    if isinstance(first, Uniform) and isinstance(second, Distance):
        return _within(_SWAPPED.get(name, name), second.of, first.value, shape)
    if name in ("eq", "ne") and isinstance(first, Data) and isinstance(second, Data):
        alike = name == "eq"
        return Region(frozenset({Same(first, second)}), np.bool_(alike), np.bool_(not alike))
    return None


def _converted(form: Form | None, dtype: Any) -> Form | None:
    match form:
        case Uniform():
            return Uniform(np.asarray(form.value).astype(dtype)[()])
        case Region():
            inside, outside = (np.asarray(n).astype(dtype)[()] for n in (form.inside, form.outside))
            return replace(form, inside=inside, outside=outside)
        case Counting() | Distance():
            return form if counts_exactly(dtype) else None
        case Data():
            # Other numbers may be the same once they are narrower.
            return form if np.can_cast(form.base.aval.dtype, dtype) else None
    return form


def counts_exactly(dtype: Any) -> bool:
    """Whether numbers of a dtype count tokens, and are subtracted, without wrapping or rounding.

    Args:
        dtype: the dtype.
    """
    return np.dtype(dtype) in _COUNTING


def _by_regions(operation: Callable[..., Any], operands: Sequence[Any]) -> Form | None:
    regions = list(dict.fromkeys(each for each in operands if isinstance(each, Region)))
    if len(regions) > 2:
        return None

    def at(*inside: bool) -> Any:
        found = dict(zip(regions, inside, strict=True))
        numbers = (
            each.value
            if isinstance(each, Uniform)
            else (each.inside if found[each] else each.outside)
            for each in operands
        )
        with np.errstate(all="ignore"):
            return operation(*numbers)

    values = [at(*which) for which in itertools.product((True, False), repeat=len(regions))]
    if all(value == values[0] for value in values):
        return Uniform(values[0])
    if len(regions) == 1:
        return Region(regions[0].conditions, *values)
    both, first, second, neither = values
    if both == first and second == neither:
        return Region(regions[0].conditions, both, neither)
    if both == second and first == neither:
        return Region(regions[1].conditions, both, neither)
    return _where_two_hold(regions, values)


def _where_two_hold(regions: Sequence[Region], values: Sequence[Any]) -> Region | None:
    """A number where two regions' conditions hold, or do not, beside another elsewhere.

    Args:
        regions: both regions.
        values: the number where both hold, where the first alone, the second alone, and neither.
    """
    for place, holds in enumerate(itertools.product((True, False), repeat=2)):
        others = [*values[:place], *values[place + 1 :]]
        sides = [
            each if holding else reversed_region(each)
            for each, holding in zip(regions, holds, strict=True)
        ]
        if all(other == others[0] for other in others) and None not in sides:
            conditions = frozenset[Near | Same]().union(*(s.conditions for s in sides if s))
            return Region(conditions, values[place], others[0])
    return None


def _counted(name: str, operands: Sequence[Any], shape: Sequence[int]) -> Form | None:
    sides = [
        ({}, float(each.value))
        if isinstance(each, Uniform)
        else (dict(each.factors), each.constant)
        for each in operands
    ]
    match name:
        case "copy" | "name" | "stop_gradient":
            return operands[0]
        case "abs":
            return Distance(operands[0])
        case "neg":
            return _sum(({}, 0.0), sides[0], -1)
        case "add":
            return _sum(sides[0], sides[1], 1)
        case "sub":
            return _sum(sides[0], sides[1], -1)
    if name not in _ORDERS:
        return None
    difference = _sum(sides[0], sides[1], -1)
    assert isinstance(difference, Counting)
    return _ordered(name, difference, shape)


def _within(name: str, of: Counting, most: Any, shape: Sequence[int]) -> Region | None:
    """Where a sum of indices is at most so far from 0, or farther."""
    order = _REVERSED.get(name, name)
    if order not in ("le", "lt"):
        return None
    limit, itself = ({}, float(most)), (dict(of.factors), of.constant)
    above, below = _sum(itself, limit, -1), _sum(({}, -float(most)), itself, -1)
    conditions = frozenset[Near | Same]()
    for side in (above, below):
        found = _ordered(order, side, shape)
        if isinstance(found, Region):
            conditions |= found.conditions
        elif found is None or not found.value:
            return None
    holds = np.bool_(order == name)
    return Region(conditions, holds, ~holds)


def _sum(first: Any, second: Any, sign: int) -> Counting:
    factors = dict(first[0])
    for dim, factor in second[0].items():
        factors[dim] = factors.get(dim, 0) + sign * factor
    kept = tuple(sorted((dim, factor) for dim, factor in factors.items() if factor))
    return Counting(kept, first[1] + sign * second[1])


def _ordered(name: str, difference: Counting, shape: Sequence[int]) -> Uniform | Region | None:
    """Where a difference of indices is at least, or at most, 0."""
    ends = [(0, factor * (shape[dim] - 1)) for dim, factor in difference.factors]
    low, high = (difference.constant + sum(pick(end) for end in ends) for pick in (min, max))
    compare = _OPERATIONS[name]
    if name not in ("eq", "ne") and compare(low, 0) == compare(high, 0):
        return Uniform(np.bool_(compare(low, 0)))
    if sorted(factor for _, factor in difference.factors) != [-1, 1]:
        return None
    plus, minus = (next(d for d, f in difference.factors if f == sign) for sign in (1, -1))
    above = {"ge": math.floor(difference.constant), "gt": math.ceil(difference.constant) - 1}
    below = {"le": math.floor(-difference.constant), "lt": math.ceil(-difference.constant) - 1}
    if name in above:
        conditions = {Near(minus, plus, above[name])}
    elif name in below:
        conditions = {Near(plus, minus, below[name])}
    else:
        conditions = {Near(minus, plus, above["ge"]), Near(plus, minus, below["le"])}
    holds = name != "ne"
    return Region(frozenset(conditions), np.bool_(holds), np.bool_(not holds))
