"""The top tier: what submeshes share a value along, and how that passes through an equation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jax.sharding import PartitionSpec

from hetjax import _compat
from hetjax.sharding.annotation.annotation import DUPLICATE, PARTIAL, HDim, HSharding
from hetjax.sharding.annotation.bounds import Bounds, extent
from hetjax.sharding.annotation.subgroup import Subgroup, axes_of, spec_from
from hetjax.sharding.deduction.annotated_program import Compute, Taken, Union, union_of
from hetjax.sharding.deduction.bottom_tier import OperandError
from hetjax.sharding.deduction.signature import Label, Labels, Signature, shapes_of


@dataclass(frozen=True)
class TopTier:
    """What the submeshes of a union share a value along.

    Args:
        hdim: a dimension, several, duplicate or partial.
        widths: for a dimension, how much of it each submesh has.
        ranges: for several, the range of each that each submesh has.
    """

    hdim: HDim = DUPLICATE
    widths: tuple[int, ...] = ()
    ranges: tuple[Bounds, ...] = ()


WHOLE = TopTier()
"""Each submesh has the whole value."""


def top_tier_of(annotation: HSharding | None, shape: Sequence[int]) -> TopTier:
    """The top tier of an annotation, with sizes in numbers."""
    if annotation is None or isinstance(annotation.hdim, str):
        return WHOLE if annotation is None else TopTier(annotation.hdim)
    if isinstance(annotation.hdim, tuple):
        return TopTier(annotation.hdim, ranges=annotation.ranges)
    regions = annotation.regions(shape)
    return TopTier(annotation.hdim, tuple(extent(each)[annotation.hdim] for each in regions))


def sized(annotation: HSharding, shape: Sequence[int]) -> HSharding:
    """An annotation with sizes in numbers, so that those that say the same are equal."""
    if annotation.ranges:
        return annotation
    top = top_tier_of(annotation, shape)
    return replace(annotation, sizes=top.widths) if len(annotation.subgroups) > 1 else annotation


def without_idle_axes(annotation: HSharding) -> HSharding:
    """An annotation that names no axes of one device, which neither divide nor add up anything.

    Example:
        >>> one = Subgroup((3,), (("data", 1),), PartitionSpec("data"))
        >>> print(without_idle_axes(HSharding((one,))))
        HSharding(devices [3]: P())
    """
    found = []
    for group in annotation.subgroups:
        idle = {name for name, size in group.axes if size == 1}
        spec = group.spec
        used = {axis for entry in spec.partitions for axis in axes_of(entry)} | spec.unreduced
        if not idle.isdisjoint(used):
            entries = [tuple(a for a in axes_of(e) if a not in idle) for e in spec.partitions]
            group = group.with_spec(spec_from(entries, spec.unreduced - idle))
        found.append(group)
    return replace(annotation, subgroups=tuple(found))


@dataclass(frozen=True)
class Passed:
    """How members share the results of an equation.

    Args:
        results: the top tier of each result.
        taken: what each member takes of operands that all have whole.
        label: what the operands are divided along; None where nothing is.
        widths: how much of it each member has.
        located: where operands are divided along several labels, the range of each label that each
            member has.
    """

    results: list[TopTier]
    taken: Mapping[int, Taken] = field(default_factory=dict)
    label: int | None = None
    widths: tuple[int, ...] = ()
    located: tuple[Mapping[int, tuple[int, int]], ...] = ()


def pass_through(node: Compute, tops: Sequence[TopTier]) -> tuple[Compute, list[TopTier]]:
    """How an equation's results are shared, given how its operands are.

    Args:
        node: the equation, on the union of its operands.
        tops: how each operand is shared.

    Returns:
        The equation with what each submesh takes of its operands, and the top tier of each result.

    Raises:
        OperandError: the operands cannot be taken so.

    Source: Hetu v2, section 5.2 (figure 11).
    """
    passed = shares_passed(node.equation, node.signature, tops)
    if passed.located:
        params = node.equation.params
        resized = tuple(node.signature.located_params(each, params) for each in passed.located)
        return replace(node, resized=resized), passed.results
    if passed.label is None:
        return replace(node, taken=passed.taken) if passed.taken else node, passed.results
    resized = tuple(node.signature.resized(passed.label, width) for width in passed.widths)
    return replace(node, taken=passed.taken, resized=resized), passed.results


def shares_passed(
    equation: _compat.JaxprEqn, signature: Signature, tops: Sequence[TopTier]
) -> Passed:
    """How an equation's results are shared, by its signature alone.

    Args:
        equation: the equation.
        signature: its signature.
        tops: how each operand is shared.

    Returns:
        How the results are, and what each submesh takes of the operands.

    Raises:
        OperandError: the operands cannot be taken so.
    """
    if not signature.is_known:
        for place, top in enumerate(tops):
            if top != WHOLE:
                name = equation.primitive.name
                raise OperandError(place, f"submeshes share it, and {name} has no rule for that")
    if signature.is_apart:
        return Passed(list(tops))
    if any(isinstance(top.hdim, tuple) for top in tops):
        return _ranges_passed(signature, tops)
    partial = {place for place, top in enumerate(tops) if top.hdim == PARTIAL}
    if partial:
        return _sum_of_parts(equation, signature, tops, partial)
    label, widths = _label(signature, tops)
    if label is None:
        return Passed([WHOLE] * len(equation.outvars))
    taken = {}
    for place, (top, labels) in enumerate(zip(tops, signature.operands, strict=True)):
        found = _place_of(label, labels)
        if top.hdim == DUPLICATE and found is not None:
            taken[place] = take(TopTier(found, _scaled(widths, labels[found])))
        if place in signature.base and label in signature.summed:
            taken[place] = Taken(None)
    results = []
    for labels in signature.results:
        found = _place_of(label, labels)
        if found is not None:
            results.append(TopTier(found, _scaled(widths, labels[found])))
        elif label in signature.summed:
            results.append(TopTier(PARTIAL))
        else:
            first = next(place for place, top in enumerate(tops) if top.hdim != DUPLICATE)
            raise OperandError(first, "its division does not pass to the result")
    return Passed(results, taken, label, widths)


def _sum_of_parts(
    equation: _compat.JaxprEqn, signature: Signature, tops: Sequence[TopTier], partial: set[int]
) -> Passed:
    """An equation of operands that submeshes have summands of."""
    together = next((each for each in signature.linear if partial <= each), None)
    if together is None:
        raise OperandError(
            min(partial), "submeshes have summands of it, and this is no linear function of it"
        )
    for place, top in enumerate(tops):
        if place not in partial and top.hdim != DUPLICATE:
            raise OperandError(place, "it is divided among submeshes that have summands")
    taken = {place: Taken(None) for place in together - partial}
    return Passed([TopTier(PARTIAL)] * len(equation.outvars), taken)


def _ranges_passed(signature: Signature, tops: Sequence[TopTier]) -> Passed:
    """An equation of operands of which each member has ranges of several dimensions."""
    found: dict[int, tuple[tuple[int, int], ...]] = {}
    for place, (top, labels) in enumerate(zip(tops, signature.operands, strict=True)):
        if not isinstance(top.hdim, tuple):
            continue
        for at, dimension in enumerate(top.hdim):
            label = labels[dimension]
            ranges = tuple(each[at] for each in top.ranges)
            if label is None or label.scale != 1 or label.name in signature.summed:
                raise OperandError(place, f"submeshes have ranges of its dimension {dimension}")
            if found.setdefault(label.name, ranges) != ranges:
                raise OperandError(place, "submeshes have other ranges of it than of the others")
    for place, (top, labels) in enumerate(zip(tops, signature.operands, strict=True)):
        own = {label.name for label in labels if label is not None}
        if not isinstance(top.hdim, tuple) and not (top == WHOLE and own.isdisjoint(found)):
            raise OperandError(place, "submeshes have no ranges of it, as they have of the others")
    results = [_with_ranges(labels, found) for labels in signature.results]
    members = range(len(next(iter(found.values()))))
    located = tuple({name: each[member] for name, each in found.items()} for member in members)
    return Passed(results, located=located)


def _with_ranges(labels: Labels, found: Mapping[int, tuple[tuple[int, int], ...]]) -> TopTier:
    """How members have a result, by the ranges that they have of labels."""
    dimensions = tuple(
        i for i, each in enumerate(labels) if each is not None and each.name in found
    )
    if not dimensions:
        return WHOLE
    columns = [found[label.name] for i in dimensions if (label := labels[i]) is not None]
    return TopTier(dimensions, ranges=tuple(zip(*columns, strict=True)))


def _label(signature: Signature, tops: Sequence[TopTier]) -> tuple[int | None, tuple[int, ...]]:
    """The label that the operands are divided along, and how much of it each submesh has."""
    found: tuple[int | None, tuple[int, ...]] = (None, ())
    for place, (top, labels) in enumerate(zip(tops, signature.operands, strict=True)):
        if not isinstance(top.hdim, int):
            continue
        label = labels[top.hdim]
        if label is None:
            raise OperandError(place, f"its dimension {top.hdim} is divided among submeshes")
        if any(width % label.scale for width in top.widths):
            raise OperandError(
                place, f"its dimension {top.hdim} is divided inside units of {label.scale}"
            )
        widths = tuple(width // label.scale for width in top.widths)
        if found[0] is not None and found != (label.name, widths):
            raise OperandError(place, "submeshes share it along another dimension or unlike")
        found = (label.name, widths)
    return found


def _place_of(name: int, labels: Labels) -> int | None:
    places = [i for i, label in enumerate(labels) if label is not None and label.name == name]
    return places[0] if places else None


def _scaled(widths: Sequence[int], label: Label | None) -> tuple[int, ...]:
    assert label is not None
    return tuple(width * label.scale for width in widths)


def take(top: TopTier) -> Taken:
    """What each submesh takes of a whole value, so that they share it."""
    if not isinstance(top.hdim, int):
        return Taken(None)
    ends = itertools.accumulate(top.widths, initial=0)
    return Taken(top.hdim, tuple(itertools.pairwise(ends)))


def shared(annotation: HSharding, top: TopTier) -> HSharding:
    """An annotation of a whole value, after each submesh has taken its part."""
    if not isinstance(top.hdim, int):
        return replace(annotation, hdim=top.hdim)
    groups = []
    for group in annotation.subgroups:
        entries = list(group.spec.partitions)
        if top.hdim < len(entries):
            entries[top.hdim] = None
        groups.append(group.with_spec(PartitionSpec(*entries, unreduced=group.spec.unreduced)))
    return HSharding(tuple(groups), top.hdim, top.widths)


def row_of(annotation: HSharding) -> HSharding:
    """The annotation of one row of an array, whose rows are not divided."""
    groups = tuple(
        group.with_spec(PartitionSpec(*group.spec.partitions[1:], unreduced=group.spec.unreduced))
        for group in annotation.subgroups
    )
    hdim = annotation.hdim
    return HSharding(groups, hdim - 1 if isinstance(hdim, int) else hdim, annotation.sizes)


def cotangent_of(annotation: HSharding) -> HSharding:
    """How the cotangent of a value comes back: as the value lies, and whole to each summand.

    Args:
        annotation: how the value lies.

    Returns:
        The same division, without partial sums at either tier.

    Example:
        >>> two = Subgroup((0, 1), (("tensor", 2),), PartitionSpec(unreduced={"tensor"}))
        >>> one = Subgroup((2,), (), PartitionSpec())
        >>> print(cotangent_of(HSharding((two, one), hdim=0, sizes=(4, 2))))
        HSharding(split on dimension 0 among 2 submeshes:
          devices [0-1] as tensor=2: P(), 4 of it
          devices [2]: P(), 2 of it)
    """
    groups = (
        group.with_spec(PartitionSpec(*group.spec.partitions)) for group in annotation.subgroups
    )
    hdim = DUPLICATE if annotation.hdim == PARTIAL else annotation.hdim
    return HSharding(tuple(groups), hdim, annotation.sizes, annotation.ranges)


def whole_on(annotation: HSharding, union: Union, shape: Sequence[int]) -> HSharding:
    """The nearest annotation on a union by which each submesh has the whole value.

    Where the union has as many submeshes, what they share stays, as far as it can.
    """
    alike = len(union) == len(annotation.subgroups)
    specs = [group.spec for group in annotation.subgroups] if alike else [PartitionSpec()]
    if alike and top_tier_of(annotation, shape) not in (WHOLE, TopTier(PARTIAL)):
        regions = annotation.regions(shape)
        groups = tuple(
            group.with_spec(_fitting(group, spec, extent(region)))
            for group, spec, region in zip(union, specs, regions, strict=True)
        )
        if union != union_of(annotation):
            return HSharding(groups, *annotation.top_tier)
    specs = specs if alike else specs * len(union)
    groups = tuple(
        group.with_spec(_fitting(group, spec, shape))
        for group, spec in zip(union, specs, strict=True)
    )
    return HSharding(groups)


def _fitting(group: Subgroup, spec: PartitionSpec, shape: Sequence[int]) -> PartitionSpec:
    """A specification without sums, and without what does not divide a shape on a submesh."""
    sizes = dict(group.axes)
    entries = []
    for entry, size in zip(spec.partitions, shape, strict=False):
        axes = axes_of(entry)
        known = all(axis in sizes for axis in axes)
        fits = known and size % math.prod(sizes[axis] for axis in axes) == 0
        entries.append(entry if fits else None)
    return PartitionSpec(*entries)


def indivisible(equation: _compat.JaxprEqn) -> Signature:
    """The signature of a primitive of which nothing is known: nothing may be divided."""
    operands, results = (
        tuple((None,) * len(shape) for shape in shapes_of(variables))
        for variables in (equation.invars, equation.outvars)
    )
    return Signature(operands, results, is_known=False)
