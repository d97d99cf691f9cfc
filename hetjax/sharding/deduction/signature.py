"""Signatures: how the dimensions of an equation's operands and results belong together.

Two dimensions that are divided alike have the same label. From that follows how a division of an
operand passes to the results, at either tier: a label that is in a result divides it; one that is
added up makes the result a sum of parts; any other one must not be divided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hetjax import _compat


class Label(NamedTuple):
    """What a dimension belongs to.

    Args:
        name: the label; the same in all dimensions that are divided together.
        scale: how many elements of the dimension there are for one of the label.
    """

    name: int
    scale: int = 1


Labels = tuple[Label | None, ...]
"""The labels of an array's dimensions; None where a dimension cannot be divided."""


@dataclass(frozen=True)
class Signature:
    """What a primitive does with the dimensions of its operands.

    Args:
        operands: labels of each operand's dimensions.
        results: labels of each result's dimensions.
        summed: labels over which results are sums: of parts of them they are partial sums.
        linear: sets of operands in which the results are linear together: where these are partial
            sums, so are the results.
        base: operands to which such a sum is added; they count once.
        is_apart: whether each result is the operand at its place, however that lies.
        is_known: whether there is a rule for the primitive; else nothing may be divided.
        resized: parameters that say sizes: from the label's name and its size to what replaces
            them.
        located: parameters that say which part is computed: from the ranges of labels to what
            replaces them; None where sizes say all.
    """

    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    summed: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    base: frozenset[int] = frozenset()
    is_apart: bool = False
    is_known: bool = True
    resized: Callable[[int, int], Mapping[str, Any]] = field(default=lambda name, size: {})
    located: Callable[[Mapping[int, tuple[int, int]]], Mapping[str, Any]] | None = None

    @property
    def form(self) -> tuple[Any, ...]:
        """What says which dimensions may be divided and what is linear, without parameters."""
        return self.operands, self.results, self.summed, self.linear

    def located_params(
        self, ranges: Mapping[int, tuple[int, int]], params: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """What replaces parameters where ranges of labels are computed.

        Args:
            ranges: by label, its start and its end.
            params: the parameters of the equation.
        """
        if self.located is not None:
            return self.located(ranges)
        found: dict[str, Any] = {}
        for name, (start, stop) in ranges.items():
            for each, value in self.resized(name, stop - start).items():
                before, whole = found.get(each), params[each]
                # Of sizes, each label changes its own.
                found[each] = value if before is None else _merged(whole, before, value)
        return found


def _merged(whole: Sequence[Any], before: Sequence[Any], after: Sequence[Any]) -> tuple[Any, ...]:
    """Sizes of which some were changed before, and others are changed now."""
    sizes = zip(whole, before, after, strict=True)
    return tuple(old if new == unchanged else new for unchanged, old, new in sizes)


Rule = Callable[[_compat.JaxprEqn], Signature]


def shapes_of(variables: Sequence[Any]) -> list[tuple[int, ...]]:
    """The shapes of variables of a jaxpr."""
    return [tuple(variable.aval.shape) for variable in variables]


def dtypes_of(variables: Sequence[Any]) -> list[Any]:
    """The types of the elements of variables of a jaxpr."""
    return [variable.aval.dtype for variable in variables]


def unlabelled(shape: Sequence[int]) -> list[Label | None]:
    """Labels of an array none of whose dimensions may be divided.

    Args:
        shape: its shape.
    """
    return [None] * len(shape)


def numbered(rank: int, first: int = 0) -> Labels:
    """Labels of an array whose dimensions are all independent.

    Args:
        rank: how many dimensions it has.
        first: the label of its first one.
    """
    return tuple(Label(first + dimension) for dimension in range(rank))


def with_value(values: Sequence[int], place: int, value: int) -> tuple[int, ...]:
    """Some values with another one in a place.

    Args:
        values: the values.
        place: of the one that changes.
        value: what it becomes.
    """
    return (*values[:place], value, *values[place + 1 :])
