"""Mending: how the operands of an equation could lie so that it can be computed.

Each proposal has the operands agree at both tiers: on a union, on what its submeshes share, and on
the axes that divide dimensions inside each submesh. What the proposals' moves cost decides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import PartitionSpec

from hetjax import _compat
from hetjax.sharding.annotation.annotation import (
    DUPLICATE,
    PARTIAL,
    HSharding,
    Subgroup,
    axes_of,
    entries_of,
    spec_from,
)
from hetjax.sharding.deduction.annotated_program import Union, union_of
from hetjax.sharding.deduction.bottom_tier import OperandError
from hetjax.sharding.deduction.computing import Annotations, anchor
from hetjax.sharding.deduction.evaluation import holds_jaxprs
from hetjax.sharding.deduction.signature import Labels, Signature
from hetjax.sharding.deduction.signatures import signature_of
from hetjax.sharding.deduction.top_tier import WHOLE, TopTier, indivisible, top_tier_of, whole_on

Widths = Mapping[tuple[int, int], Sequence[tuple[int, ...]]]
"""By number of submeshes and size of a dimension, how programs share such dimensions."""

Proposal = tuple[HSharding | None, ...]
"""How each operand of an equation should lie."""


def widths_of(annotations: Annotations, shapes: Sequence[Any]) -> Widths:
    """How some values are shared among submeshes, for others of such dimensions.

    Example:
        >>> import numpy as np
        >>> groups = tuple(Subgroup((device,), (), PartitionSpec()) for device in range(2))
        >>> widths_of([HSharding(groups, 0, (4, 2))], [np.ones((6, 3))])
        {(2, 6): ((4, 2),)}
    """
    found: dict[tuple[int, int], dict[tuple[int, ...], None]] = {}
    for annotation, shape in zip(annotations, shapes, strict=True):
        top = top_tier_of(annotation, shape.shape)
        if isinstance(top.hdim, int):
            key = len(top.widths), shape.shape[top.hdim]
            found.setdefault(key, {})[top.widths] = None
    return {key: tuple(each) for key, each in found.items()}


def proposals(
    equation: _compat.JaxprEqn, shapes: Sequence[Any], held: Annotations, widths: Widths
) -> Iterator[Proposal]:
    """Ways in which the operands of an equation could lie.

    Args:
        equation: the equation.
        shapes: shape and dtype of its operands, whole.
        held: how each lies; None for one that is known everywhere.
        widths: how dimensions of some sizes are shared elsewhere in the program.

    Yields:
        Proposals, some of which may turn out not to do.
    """
    signature = signature_of(equation) or indivisible(equation)
    sizes = {union_of(annotation): 0 for annotation in held if annotation is not None}
    for annotation, shape in zip(held, shapes, strict=True):
        if annotation is not None:
            sizes[union_of(annotation)] += shape.size
    seen: set[Proposal] = set()
    for union in sorted(sizes, key=lambda union: -sizes[union]):
        operands = _Operands(signature, union, tuple(s.shape for s in shapes), tuple(held))
        if holds_jaxprs(equation):
            tops = [_all_whole(held), _as_now(operands)]
        else:
            tops = [_all_whole(held), *_shared(operands, widths), *_summands(operands)]
        for each in tops:
            for proposal in _with_specs(operands, each):
                if proposal not in seen:
                    seen.add(proposal)
                    yield proposal


@dataclass(frozen=True)
class _Operands:
    signature: Signature
    union: Union
    shapes: tuple[tuple[int, ...], ...]
    held: Proposal

    def top(self, place: int) -> TopTier:
        """What submeshes share an operand along now; where these are others, nothing."""
        annotation = self.held[place]
        if annotation is None or union_of(annotation) != self.union:
            return WHOLE
        return top_tier_of(annotation, self.shapes[place])

    def is_here(self, place: int) -> bool:
        """Whether an operand lies on the union."""
        annotation = self.held[place]
        return annotation is not None and union_of(annotation) == self.union


Tops = tuple[TopTier | None, ...]
"""What each operand is shared along; None for one that is known everywhere."""


def _all_whole(held: Annotations) -> Tops:
    return tuple(None if annotation is None else WHOLE for annotation in held)


def _as_now(operands: _Operands) -> Tops:
    return tuple(
        None if annotation is None else operands.top(place)
        for place, annotation in enumerate(operands.held)
    )


def _shared(operands: _Operands, widths: Widths) -> Iterator[Tops]:
    """All operands that have a label are divided along it; the others are whole."""
    signature, count = operands.signature, len(operands.union)
    if count == 1:
        return
    for name, units in _labels(operands).items():
        passes = all(
            name in signature.summed or any(label and label.name == name for label in labels)
            for labels in signature.results
        )
        if not passes:
            continue
        for each in _unit_widths(operands, name, units, widths):
            yield tuple(
                None if annotation is None else _divided(operands, place, name, each)
                for place, annotation in enumerate(operands.held)
            )


def _labels(operands: _Operands) -> dict[int, int]:
    """The labels of all operands, and how many units each has."""
    return {
        label.name: shape[dimension] // label.scale
        for labels, shape in zip(operands.signature.operands, operands.shapes, strict=True)
        for dimension, label in enumerate(labels)
        if label is not None
    }


def _unit_widths(
    operands: _Operands, name: int, units: int, widths: Widths
) -> list[tuple[int, ...]]:
    """How many units of a label each submesh could have."""
    count = len(operands.union)
    found: dict[tuple[int, ...], None] = {}
    for place, (labels, shape) in enumerate(
        zip(operands.signature.operands, operands.shapes, strict=True)
    ):
        for dimension, label in enumerate(labels):
            if label is None or label.name != name:
                continue
            top = operands.top(place)
            choices = [top.widths] if top.hdim == dimension else []
            for each in (*choices, *widths.get((count, shape[dimension]), ())):
                if not any(width % label.scale for width in each):
                    found[tuple(width // label.scale for width in each)] = None
    if not found and units and units % count == 0:
        found[(units // count,) * count] = None
    return list(found)


def _divided(operands: _Operands, place: int, name: int, widths: tuple[int, ...]) -> TopTier:
    """What an operand is shared along where a label is divided."""
    labels = operands.signature.operands[place]
    for dimension, label in enumerate(labels):
        if label is not None and label.name == name:
            if operands.is_here(place) and operands.top(place) == WHOLE:
                # Each submesh takes its part of what it has whole, and nothing moves.
                return WHOLE
            return TopTier(dimension, tuple(width * label.scale for width in widths))
    return WHOLE


def _summands(operands: _Operands) -> Iterator[Tops]:
    """What submeshes have summands of stays so, where the equation is linear in all of it."""
    partial = {i for i in range(len(operands.held)) if operands.top(i).hdim == PARTIAL}
    for together in operands.signature.linear:
        for kept in (partial, partial & together):
            if kept and kept <= together:
                yield tuple(
                    None if annotation is None else TopTier(PARTIAL) if place in kept else WHOLE
                    for place, annotation in enumerate(operands.held)
                )


def _with_specs(operands: _Operands, tops: Tops) -> Iterator[Proposal]:
    """Proposals for the shardings inside submeshes, beside one for what these share."""
    places = [place for place, top in enumerate(tops) if top is not None]
    by_size = sorted(places, key=lambda place: -math.prod(operands.shapes[place]))
    labels = [*_labels(operands), None]
    for order in dict.fromkeys((tuple(by_size), tuple(reversed(by_size)))):
        for sums_stay, scattered in itertools.product((False, True), labels):
            if sums_stay and scattered is not None:
                continue
            yield _proposal(operands, tops, order, sums_stay=sums_stay, scattered=scattered)


def _proposal(
    operands: _Operands,
    tops: Tops,
    order: Sequence[int],
    *,
    sums_stay: bool,
    scattered: int | None,
) -> Proposal:
    groups: dict[int, list[Subgroup]] = {place: [] for place in order}
    for at, group in enumerate(operands.union):
        agreed = _Agreement(group, {}, sums_stay=sums_stay, scattered=scattered)
        for place in order:
            top = tops[place]
            assert top is not None
            region = _extent(operands.shapes[place], top, at)
            spec = _spec_now(operands.held[place], group)
            labels = operands.signature.operands[place]
            groups[place].append(group.with_spec(agreed.spec(spec, labels, region)))
    found: list[HSharding | None] = []
    for place, top in enumerate(tops):
        if top is None:
            found.append(None)
            continue
        hdim = top.hdim if len(operands.union) > 1 else DUPLICATE
        sizes = top.widths if isinstance(hdim, int) else ()
        found.append(HSharding(tuple(groups[place]), hdim, sizes))
    return tuple(found)


def _extent(shape: tuple[int, ...], top: TopTier, at: int) -> tuple[int, ...]:
    """The shape of what a submesh has."""
    if not isinstance(top.hdim, int):
        return shape
    return (*shape[: top.hdim], top.widths[at], *shape[top.hdim + 1 :])


def _spec_now(annotation: HSharding | None, group: Subgroup) -> Any:
    """The sharding of a value inside a submesh; nothing is divided where it is not there."""
    for each in annotation.subgroups if annotation is not None else ():
        if each.bare == group:
            return each.spec
    return group.spec


@dataclass
class _Agreement:
    """Which axes of a submesh divide which labels, as the operands before have it."""

    group: Subgroup
    chosen: dict[int, tuple[str, ...]]
    sums_stay: bool
    scattered: int | None

    def spec(self, spec: Any, labels: Labels, region: Sequence[int]) -> Any:
        """The sharding of the next operand, by its own and by what has been agreed on."""
        sizes = dict(self.group.axes)
        sums = tuple(name for name, _ in self.group.axes if name in spec.unreduced)
        unreduced = spec.unreduced if self.sums_stay else frozenset[str]()
        used = set(unreduced)
        entries: list[tuple[str, ...]] = []
        for dimension, (label, entry) in enumerate(
            zip(labels, entries_of(spec, len(region)), strict=True)
        ):
            axes = axes_of(entry)
            if label is None:
                axes = ()
            elif label.name in self.chosen:
                axes = self.chosen[label.name]
            else:
                taken = {axis for each in self.chosen.values() for axis in each}
                axes = tuple(axis for axis in axes if axis not in taken)
                if label.name == self.scattered and sums and taken.isdisjoint(sums):
                    axes = (*axes, *(axis for axis in sums if axis not in axes))
            units = region[dimension] // label.scale if label else 1
            fits = units % math.prod(sizes[axis] for axis in axes) == 0
            axes = axes if fits and used.isdisjoint(axes) else ()
            used.update(axes)
            entries.append(axes)
        for label, axes in zip(labels, entries, strict=True):
            if label is not None and axes:
                self.chosen.setdefault(label.name, axes)
        return spec_from(entries, unreduced)


def mended_operand(shapes: Sequence[Any], held: Annotations, problem: OperandError) -> HSharding:
    """How one operand should lie, so that an equation may take it: the plainest way.

    Args:
        shapes: shape and dtype of the equation's operands, whole.
        held: how each lies.
        problem: what is wrong with one of them.

    Returns:
        The annotation.
    """
    annotation = held[problem.operand]
    assert annotation is not None, "what is known everywhere can be taken by any submesh"
    if problem.spec is None:
        return whole_on(annotation, anchor(held, shapes), shapes[problem.operand].shape)
    groups = list(annotation.subgroups)
    at_fault = groups[problem.place]
    if at_fault.spec.unreduced and not problem.spec.unreduced:
        # What cannot be a partial sum on one submesh cannot be one on any.
        groups = [group.with_spec(PartitionSpec(*group.spec.partitions)) for group in groups]
    groups[problem.place] = at_fault.with_spec(problem.spec)
    return replace(annotation, subgroups=tuple(groups))
