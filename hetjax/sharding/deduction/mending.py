"""Mending: how the operands of an equation could lie so that it can be computed.

Each proposal has the operands agree at both tiers: on a union, on what its submeshes share, and on
the axes that divide dimensions inside each submesh. What the proposals' moves cost decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from hetjax.sharding.annotation.annotation import DUPLICATE, PARTIAL, HDim, HSharding
from hetjax.sharding.annotation.bounds import overlap, volume
from hetjax.sharding.annotation.subgroup import Shard, Subgroup, axes_of, entries_of, spec_from
from hetjax.sharding.deduction.annotated_program import Union, union_of
from hetjax.sharding.deduction.bottom_tier import OperandError
from hetjax.sharding.deduction.computing import Annotations, anchor
from hetjax.sharding.deduction.refinement import layout_of, spec_over, written_over
from hetjax.sharding.deduction.signature import Labels, Signature
from hetjax.sharding.deduction.top_tier import WHOLE, TopTier, top_tier_of, whole_on

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
    signature: Signature,
    shapes: Sequence[Any],
    held: Annotations,
    widths: Widths,
    *,
    holds_jaxprs: bool = False,
) -> Iterator[Proposal]:
    """Ways in which the operands of an equation could lie.

    Args:
        signature: the equation's signature, of which only its `form` counts.
        shapes: shape and dtype of its operands, whole.
        held: how each lies; None for one that is known everywhere.
        widths: how dimensions of some sizes are shared elsewhere in the program.
        holds_jaxprs: whether it is one of JAX's loops and branches.

    Yields:
        Proposals, some of which may turn out not to do; first those by which devices lack little.
    """
    if any(annotation is not None and annotation.ranges for annotation in held):
        return
    unions = {union_of(annotation): None for annotation in held if annotation is not None}
    found: dict[_Agreed, int] = {}
    for union in unions:
        written = tuple(_over(union, *pair) for pair in zip(held, shapes, strict=True))
        operands = _Operands(signature, union, tuple(s.shape for s in shapes), written)
        if holds_jaxprs:
            tops = [_all_whole(held), _as_now(operands)]
        else:
            tops = [_all_whole(held), *_shared(operands, widths), *_summands(operands)]
        for each in dict.fromkeys(tops):
            for lacking, specs in _with_specs(operands, each):
                found.setdefault(_Agreed(union, each, specs), lacking)
    # Of many only the first few are asked for.
    made: set[Proposal] = set()
    for agreed in sorted(found, key=lambda agreed: found[agreed]):
        proposal = agreed.proposal()
        if proposal not in made:
            made.add(proposal)
            yield proposal


def _over(union: Union, annotation: HSharding | None, shape: Any) -> HSharding | None:
    """An annotation over a union, where that says the same; else as it is."""
    if annotation is None or union_of(annotation) == union:
        return annotation
    if set(annotation.devices) != {device for group in union for device in group.devices}:
        return annotation
    layout = layout_of(annotation, shape.shape)
    return written_over(layout, union, shape.shape) or annotation


@lru_cache(maxsize=2**12)
def _by_device(annotation: HSharding | None, shape: tuple[int, ...]) -> Mapping[int, Shard]:
    """What each device holds of an array; nothing of one that is known everywhere."""
    return {s.device: s for s in annotation.shards(shape)} if annotation else {}


@dataclass(frozen=True)
class _Operands:
    signature: Signature
    union: Union
    shapes: tuple[tuple[int, ...], ...]
    held: Proposal

    @cached_property
    def labels(self) -> dict[int, int]:
        """The labels of all operands, and how many units each has."""
        return {
            label.name: shape[dimension] // label.scale
            for labels, shape in zip(self.signature.operands, self.shapes, strict=True)
            for dimension, label in enumerate(labels)
            if label is not None
        }

    @cached_property
    def layouts(self) -> list[Mapping[int, Shard]]:
        """What each device holds of each operand now."""
        return [_by_device(*pair) for pair in zip(self.held, self.shapes, strict=True)]

    def top(self, place: int) -> TopTier:
        """What submeshes share an operand along now; where these are others, nothing."""
        annotation = self.held[place]
        if annotation is None or union_of(annotation) != self.union:
            return WHOLE
        return top_tier_of(annotation, self.shapes[place])

    def spec(self, place: int, group: Subgroup) -> PartitionSpec:
        """How a submesh's devices divide an operand now; nothing where they do not have it so."""
        annotation, layout = self.held[place], self.layouts[place]
        for each in annotation.subgroups if annotation is not None else ():
            if each.bare == group:
                return each.spec
        if not set(group.devices) <= set(layout):
            return PartitionSpec()
        return spec_over(group, layout) or PartitionSpec()

    @cached_property
    def specs_now(self) -> list[tuple[PartitionSpec, ...]]:
        """How each submesh divides each operand now."""
        places = range(len(self.shapes))
        return [tuple(self.spec(place, group) for place in places) for group in self.union]

    @cached_property
    def is_divided(self) -> list[bool]:
        """Of each submesh, whether it divides an operand now, or has summands of one."""
        return [any(spec != PartitionSpec() for spec in specs) for specs in self.specs_now]

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
    for name, units in operands.labels.items():
        passes = all(
            name in signature.summed or any(label and label.name == name for label in labels)
            for labels in signature.results
        )
        if not passes:
            continue
        for each in _unit_widths(operands, name, units, widths):
            for is_kept in (True, False):
                yield tuple(
                    None if a is None else _divided(operands, i, name, each, is_kept=is_kept)
                    for i, a in enumerate(operands.held)
                )


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


def _divided(
    operands: _Operands, place: int, name: int, widths: tuple[int, ...], *, is_kept: bool
) -> TopTier:
    """What an operand is shared along where a label is divided.

    What each submesh has whole may be kept so, and each takes its part when it computes.
    """
    labels = operands.signature.operands[place]
    for dimension, label in enumerate(labels):
        if label is not None and label.name == name:
            if is_kept and operands.is_here(place) and operands.top(place) == WHOLE:
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


class _Variant(NamedTuple):
    """A way to agree on the axes that divide labels inside a submesh.

    Args:
        order: which operand has its way first.
        sums_stay: whether partial sums stay so.
        target: the label whose dimension takes axes that can no longer divide what they did; none.
        wholly: whether it takes all axes that are left, and those of all operands but the first.
    """

    order: tuple[int, ...]
    sums_stay: bool = False
    target: int | None = None
    wholly: bool = False


Specs = tuple[PartitionSpec | None, ...]
"""The sharding of each operand inside a submesh."""


def _with_specs(operands: _Operands, tops: Tops) -> Iterator[tuple[int, tuple[Specs, ...]]]:
    """The shardings inside each submesh, with how much devices would lack.

    The first takes for each submesh what suits it best.
    """
    variants = list(_variants(operands, tops))
    places = range(len(operands.union))
    found = [_specs_of_all(operands, tops, place, variants) for place in places]
    choices = [
        {each: _lacking(operands, tops, place, each) for each in dict.fromkeys(specs)}
        for place, specs in enumerate(found)
    ]
    best = tuple(min(each, key=lambda specs: each[specs]) for each in choices)
    for specs in dict.fromkeys((best, *zip(*found, strict=True))):
        yield sum(each[own] for each, own in zip(choices, specs, strict=True)), specs


def _variants(operands: _Operands, tops: Tops) -> Iterator[_Variant]:
    places = [place for place, top in enumerate(tops) if top is not None]
    by_size = sorted(places, key=lambda place: -math.prod(operands.shapes[place]))
    for order in dict.fromkeys((tuple(by_size), tuple(reversed(by_size)))):
        yield _Variant(order, sums_stay=True)
        yield _Variant(order)
        for target in operands.labels:
            yield _Variant(order, target=target)
            yield _Variant(order, target=target, wholly=True)


def _specs_of_all(
    operands: _Operands, tops: Tops, at: int, variants: Sequence[_Variant]
) -> list[Specs]:
    """The shardings inside a submesh, by each way to agree."""
    group = operands.union[at]
    whole: Specs = tuple(None if top is None else _WHOLE_SPEC for top in tops)
    if group.num_devices == 1:
        return [whole] * len(variants)
    regions = tuple(
        None if top is None else _extent(shape, top, at)
        for shape, top in zip(operands.shapes, tops, strict=True)
    )
    rest = regions, operands.specs_now[at], operands.signature.operands
    return [
        _agreed_on(group.axes, each, *rest) if each.wholly or operands.is_divided[at] else whole
        for each in variants
    ]


_WHOLE_SPEC = PartitionSpec()


@lru_cache(maxsize=2**15)  # Most equations are like others before.
def _agreed_on(
    axes: tuple[tuple[str, int], ...],
    variant: _Variant,
    regions: tuple[tuple[int, ...] | None, ...],
    specs: tuple[PartitionSpec, ...],
    labels: tuple[Labels, ...],
) -> Specs:
    agreed = _Agreement(axes, {}, variant)
    found: list[PartitionSpec | None] = [None] * len(regions)
    for place in variant.order:
        region = regions[place]
        assert region is not None
        is_first = place == variant.order[0]
        found[place] = agreed.spec(specs[place], labels[place], region, is_first=is_first)
    return tuple(found)


def _lacking(operands: _Operands, tops: Tops, at: int, specs: Specs) -> int:
    """How many elements the devices of a submesh would lack: what others must send them."""
    total = 0
    for place, (top, spec) in enumerate(zip(tops, specs, strict=True)):
        if top is None or spec is None:
            continue
        held, shape = operands.held[place], operands.shapes[place]
        total += _lack(held, shape, operands.union[at].with_spec(spec), top, at)
    return total


@lru_cache(maxsize=2**15)  # Most equations are like others before.
def _lack(
    held: HSharding | None, shape: tuple[int, ...], group: Subgroup, top: TopTier, at: int
) -> int:
    """How many elements of an operand the devices of a submesh would lack.

    Args:
        held: how it lies.
        shape: its shape.
        group: how the submesh shall divide what it has.
        top: what submeshes shall share it along.
        at: which of them this is.
    """
    start = sum(top.widths[:at]) if isinstance(top.hdim, int) else 0
    region = tuple(
        (start, start + size) if dimension == top.hdim else (0, size)
        for dimension, size in enumerate(_extent(shape, top, at))
    )
    total, known = 0, _by_device(held, shape)
    for shard in group.shards(region):
        before = known.get(shard.device)
        same = before is not None and (before.summand is None or shard.summand is not None)
        common = overlap(before.bounds, shard.bounds) if before and same else None
        total += volume(shard.bounds) - (volume(common) if common else 0)
    return total


class _Agreed(NamedTuple):
    """How operands agree at both tiers.

    Args:
        union: the submeshes.
        tops: what they share each operand along.
        specs: for each submesh, the shardings inside it.
    """

    union: Union
    tops: Tops
    specs: tuple[Specs, ...]

    def proposal(self) -> Proposal:
        """The same, as annotations."""
        return tuple(
            None if top is None else self._annotation(place, top)
            for place, top in enumerate(self.tops)
        )

    def _annotation(self, place: int, top: TopTier) -> HSharding:
        hdim = top.hdim if len(self.union) > 1 else DUPLICATE
        sizes = top.widths if isinstance(hdim, int) else ()
        pairs = zip(self.union, (each[place] for each in self.specs), strict=True)
        return _made(
            tuple(group.with_spec(spec or _WHOLE_SPEC) for group, spec in pairs), hdim, sizes
        )


@lru_cache(maxsize=2**14)
def _made(groups: tuple[Subgroup, ...], hdim: HDim, sizes: tuple[int, ...]) -> HSharding:
    """An annotation; the same ones are proposed again and again."""
    return HSharding(groups, hdim, sizes)


def _extent(shape: tuple[int, ...], top: TopTier, at: int) -> tuple[int, ...]:
    """The shape of what a submesh has."""
    if not isinstance(top.hdim, int):
        return shape
    return (*shape[: top.hdim], top.widths[at], *shape[top.hdim + 1 :])


@dataclass
class _Agreement:
    """Which axes of a submesh divide which labels, as the operands before have it."""

    axes: tuple[tuple[str, int], ...]
    chosen: dict[int, tuple[str, ...]]
    variant: _Variant

    def spec(
        self, spec: PartitionSpec, labels: Labels, region: Sequence[int], *, is_first: bool
    ) -> PartitionSpec:
        """The sharding of the next operand, by its own and by what has been agreed on."""
        unreduced = spec.unreduced if self.variant.sums_stay else frozenset[str]()
        taken = {axis for each in self.chosen.values() for axis in each} | unreduced
        leaves = self.variant.wholly and not is_first
        wanted: list[tuple[str, ...]] = []
        for label, entry in zip(labels, entries_of(spec, len(region)), strict=True):
            if label is not None and label.name in self.chosen:
                wanted.append(self.chosen[label.name])
            elif label is None or leaves:
                wanted.append(())
            else:
                wanted.append(tuple(axis for axis in axes_of(entry) if axis not in taken))
        kept = {axis for axes in wanted for axis in axes} | taken
        used = [axis for entry in spec.partitions for axis in axes_of(entry)]
        if self.variant.wholly:
            used = [name for name, size in self.axes if size > 1]
        names = dict.fromkeys((*sorted(spec.unreduced), *used))
        free = tuple(axis for axis in names if axis not in kept)
        entries: list[tuple[str, ...]] = []
        settled = set(unreduced)
        for dimension, (label, axes) in enumerate(zip(labels, wanted, strict=True)):
            if label is not None and label.name == self.variant.target:
                axes = axes if label.name in self.chosen else (*axes, *free)
            fits = label is None or self._divides(axes, region[dimension] // label.scale)
            axes = axes if fits and settled.isdisjoint(axes) else ()
            settled.update(axes)
            entries.append(axes)
        for label, axes in zip(labels, entries, strict=True):
            if label is not None and axes:
                self.chosen.setdefault(label.name, axes)
        return spec_from(entries, unreduced)

    def _divides(self, axes: Sequence[str], units: int) -> bool:
        sizes = dict(self.axes)
        return units % math.prod(sizes[axis] for axis in axes) == 0


def mended_operand(shapes: Sequence[Any], held: Annotations, problem: OperandError) -> HSharding:
    """How one operand should lie, so that an equation may take it: the plainest way.

    Args:
        shapes: shape and dtype of the equation's operands, whole.
        held: how each lies.
        problem: what is wrong with one of them.

    Returns:
        The annotation.
    """
    annotation = held[problem.operand] or HSharding(anchor(held, shapes))
    if problem.spec is None:
        return whole_on(annotation, anchor(held, shapes), shapes[problem.operand].shape)
    groups = list(annotation.subgroups)
    at_fault = groups[problem.place]
    if at_fault.spec.unreduced and not problem.spec.unreduced:
        # What cannot be a partial sum on one submesh cannot be one on any.
        groups = [group.with_spec(PartitionSpec(*group.spec.partitions)) for group in groups]
    groups[problem.place] = at_fault.with_spec(problem.spec)
    return replace(annotation, subgroups=tuple(groups))
