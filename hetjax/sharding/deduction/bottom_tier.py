"""The bottom tier: equations inside one submesh, on arrays whose types say how they are sharded.

JAX's explicit sharding deduces the results' shardings. Where a contraction is over a divided
dimension its results become partial sums; where JAX asks for a decision (a gather, a scatter), the
labels of the equation's signature make it, and JAX's compiler does the rest.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from hetjax import _compat
from hetjax.sharding.annotation.subgroup import axes_of, entries_of, spec_from
from hetjax.sharding.deduction.clamped_starts import with_clamped_starts
from hetjax.sharding.deduction.own_primitive_rules import attention_block_inside_rule
from hetjax.sharding.deduction.signature import Label, Labels, Signature

_WHOLE = frozenset({"pad", "reduce_xor"})
"""XLA's process may end where these are divided, or says that it cannot."""

_TILED = frozenset(
    {
        "attention",
        "attention_backward",
        "linear_cross_entropy",
        "linear_cross_entropy_backward",
        "attention_block",
        "attention_block_backward",
    }
)
"""Equations that are compiled to loops over tiles, which compilers gather what is divided for."""

_BLOCKS = frozenset({"attention_block", "attention_block_backward"})


class OperandError(Exception):
    """An operand lies in a way that an equation cannot take.

    Args:
        operand: its place, or `ELSEWHERE`.
        reason: what is wrong, as the end of a sentence.
        spec: how it should be sharded inside a submesh; None where the top tier is at fault.

    Attributes:
        place: the submesh whose sharding is at fault.
    """

    def __init__(self, operand: int, reason: str, spec: PartitionSpec | None = None):
        super().__init__(reason)
        self.operand, self.reason, self.spec = operand, reason, spec
        self.place = 0

    def at(self, place: int) -> OperandError:
        """The same of a submesh: another object, for what is raised may be kept."""
        found = OperandError(self.operand, self.reason, self.spec)
        found.place = place
        return found


ELSEWHERE = -1
"""In place of an operand: what is wrong is inside a body, or with all operands together."""


def spec_of(array: Any) -> PartitionSpec:
    """The sharding in the type of an array; of one that is whole on every device, none."""
    sharding = getattr(jax.typeof(array), "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def resharded(array: Any, spec: PartitionSpec) -> Any:
    """An array with another sharding inside its submesh."""
    held = spec_of(array)
    if _same_spec(held, spec):
        return array
    common = held.unreduced & spec.unreduced
    if common not in (held.unreduced, spec.unreduced):
        # XLA's process ends where sums are to be made along some axes, and split along others.
        between = PartitionSpec(*held.partitions, unreduced=common)
        array = jax.sharding.reshard(array, _on_mesh(between))
    if jnp.iscomplexobj(array):
        array = _split(array, spec.unreduced - spec_of(array).unreduced)
    return jax.sharding.reshard(array, _on_mesh(spec))


def _split(array: Any, axes: frozenset[str]) -> Any:
    """An array as a partial sum along more axes: the first device of each has it, others zeros.

    XLA's process ends where it is to split complex numbers by itself.
    """
    if not axes:
        return array
    held = spec_of(array)
    entries = [tuple(a for a in axes_of(entry) if a not in axes) for entry in held.partitions]
    before = spec_from(entries, held.unreduced)
    after = spec_from(entries, held.unreduced | axes)

    def summand(part: Any) -> Any:
        is_first = sum(jax.lax.axis_index(axis) for axis in sorted(axes)) == 0
        return jnp.where(is_first, part, jnp.zeros_like(part))

    mapped = jax.shard_map(summand, in_specs=before, out_specs=after, check_vma=False)
    return mapped(resharded(array, before))


def _same_spec(a: PartitionSpec, b: PartitionSpec) -> bool:
    def entries(spec: PartitionSpec) -> list[tuple[str, ...]]:
        found = [axes_of(entry) for entry in spec.partitions]
        while found and not found[-1]:
            found.pop()
        return found

    return entries(a) == entries(b) and a.unreduced == b.unreduced


def apply(
    equation: _compat.JaxprEqn,
    params: Mapping[str, Any],
    signature: Signature,
    operands: Sequence[Any],
    *,
    sums_stay: bool = False,
) -> list[Any]:
    """Evaluate an equation on arrays of one submesh, inside a trace under its mesh.

    Args:
        equation: the equation.
        params: its parameters, for the sizes that the submesh has.
        signature: its signature.
        operands: traced arrays.
        sums_stay: whether all sums over divided dimensions stay partial, as those of contractions
            do, and linear functions are taken of them; else JAX's own rules hold.

    Returns:
        The results, whose types say how they are sharded.

    Raises:
        OperandError: the operands' shardings cannot be taken together.
    """
    name = equation.primitive.name
    if name in _BLOCKS:
        # What devices of a member share has nothing to do with what members share.
        equation = equation.replace(params=dict(params))
        signature = attention_block_inside_rule(equation)
    if name == "dot_general":
        operands = _divided_alike(signature, operands)
    elif name in _TILED:
        operands = _by_own_labels(signature, operands)
    contracted = _contracted_axes(signature, operands)
    if contracted and (name == "dot_general" or (sums_stay and name == "reduce_sum")):
        chosen = _label_axes(signature, operands)
        spec = _by_labels(signature.results[0], chosen, contracted)
        params = {**params, "out_sharding": _on_mesh(spec)}
    elif sums_stay and (axes := _partial_axes(signature, operands, contracted)):
        found = _in_parts(equation, params, signature, operands, axes)
        if found is not None:
            return found
    _check_sums(signature, operands)
    if name in _TILED and not contracted and any(_axes_used(spec_of(a)) for a in operands):
        found = _in_parts(equation, params, signature, operands, frozenset())
        if found is not None:
            return found
    if name in _WHOLE or not any(itertools.chain(*signature.operands)):
        _check_whole(signature, operands)
    params, operands = with_clamped_starts(equation, params, operands)
    # The shapes are right: whatever JAX raises here, of many types, is about shardings.
    with contextlib.suppress(Exception):
        return _compat.bind_with(equation, params, operands)
    chosen = _label_axes(signature, operands)
    specs = [_by_labels(labels, chosen) for labels in signature.results]
    run: Any = jax.sharding.auto_axes(
        lambda *arrays: tuple(_compat.bind_with(equation, params, arrays)),
        out_sharding=tuple(_on_mesh(spec) for spec in specs),
    )
    return list(run(*operands))


def _divided_alike(signature: Signature, operands: Sequence[Any]) -> list[Any]:
    """Operands of a contraction that are divided alike along what is added up.

    Where one is not, compilers gather the other without a word. What is whole is divided for
    nothing, and the result is a partial sum; but by an axis that divides it already it cannot be.
    """
    found = list(operands)
    for name in sorted(signature.summed):
        sides = [
            dict(_named(s, spec_of(a))) for s, a in zip(signature.operands, found, strict=True)
        ]
        (one, first), (other, second) = (side[name] for side in sides)
        if first == second:
            continue
        whole, dimension, axes = (1, other, first) if first else (0, one, second)
        spec, array = spec_of(found[whole]), found[whole]
        used = {*_axes_used(spec), *spec.unreduced}
        is_free = not (first and second) and used.isdisjoint(axes)
        if is_free and _divides(axes, jax.typeof(array).shape[dimension]):
            found[whole] = resharded(array, _with_entry(array, dimension, axes))
            continue
        divided, dimension = (0, one) if whole == 1 else (1, other)
        raise OperandError(
            divided,
            f"its dimension {dimension} is added up, and the other operand's is divided unlike it",
            _with_entry(found[divided], dimension, ()),
        )
    return found


def _with_entry(array: Any, dimension: int, axes: tuple[str, ...]) -> PartitionSpec:
    """An array's sharding, with other axes along one dimension."""
    spec = spec_of(array)
    entries = [axes_of(entry) for entry in entries_of(spec, array.ndim)]
    entries[dimension] = axes
    return spec_from(entries, spec.unreduced)


def _named(labels: Labels, spec: PartitionSpec) -> list[tuple[int, tuple[int, tuple[str, ...]]]]:
    """For each label the dimension that has it, and the axes that divide this."""
    sizes = jax.sharding.get_abstract_mesh().shape
    found = []
    for dimension, (label, axes) in enumerate(_divisions(labels, spec)):
        assert label is not None, "a contraction labels every dimension"
        found.append((label.name, (dimension, tuple(a for a in axes if sizes[a] > 1))))
    return found


def _check_sums(signature: Signature, operands: Sequence[Any]) -> None:
    """Check that partial sums go where results are linear in all of them together.

    JAX checks this too, but not for every primitive.
    """
    sums = {place for place, array in enumerate(operands) if spec_of(array).unreduced}
    if sums and not any(sums == together for together in signature.linear):
        place = min(sums)
        whole = PartitionSpec(*spec_of(operands[place]).partitions)
        raise OperandError(place, "it is a partial sum", whole)


def _check_whole(signature: Signature, operands: Sequence[Any]) -> None:
    """Check that dimensions without a label are whole.

    JAX lets them be divided, and not all that has no rule can then be lowered.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    for place, (labels, array) in enumerate(zip(signature.operands, operands, strict=True)):
        spec = spec_of(array)
        divisions = _divisions(labels, spec)
        for dimension, (label, axes) in enumerate(divisions):
            if label is None and any(sizes[axis] > 1 for axis in axes):
                kept = [own if each is not None else () for each, own in divisions]
                reason = f"its dimension {dimension} is divided over {list(axes)}"
                raise OperandError(place, reason, spec_from(kept, spec.unreduced))


def _partial_axes(
    signature: Signature, operands: Sequence[Any], contracted: frozenset[str]
) -> frozenset[str]:
    """The axes along which the results are partial sums; none where no rule allows it."""
    unreduced = {i: spec_of(a).unreduced for i, a in enumerate(operands) if spec_of(a).unreduced}
    if not unreduced:
        return contracted
    axes, *others = set(unreduced.values())
    linear = any(set(unreduced) <= together for together in signature.linear)
    if contracted and not signature.base.isdisjoint(unreduced):
        # All devices of the axis that is added up over would count the summands that they have.
        place = min(signature.base & unreduced.keys())
        whole = PartitionSpec(*spec_of(operands[place]).partitions)
        raise OperandError(place, "it is a partial sum, to which others are added up", whole)
    divided = {axis for array in operands for axis in _axes_used(spec_of(array))}
    # Each device adds up its own part of the summands: that is one of all parts' sums.
    return axes | contracted if linear and not others and divided.isdisjoint(axes) else frozenset()


def _axes_used(spec: PartitionSpec) -> list[str]:
    return [axis for entry in spec.partitions for axis in axes_of(entry)]


def _in_parts(
    equation: _compat.JaxprEqn,
    params: Mapping[str, Any],
    signature: Signature,
    operands: Sequence[Any],
    axes: frozenset[str],
) -> list[Any] | None:
    """Evaluate an equation on each device's own parts and summands.

    What is added to summands and is none itself counts once, on the first device of the axes.

    Returns:
        The results, partial sums along the axes; None where sizes of several parts would change.
    """
    chosen = _label_axes(signature, operands, sums_pass=True)
    operands = _by_own_labels(signature, operands)
    local = _local_params(equation, params, signature, operands)
    if local is None:
        return None
    summands = {i for i, array in enumerate(operands) if spec_of(array).unreduced}
    together = next((each for each in signature.linear if summands and summands <= each), None)
    once = signature.base if together is None else together - summands

    # An array without elements is made where it is used: compilers refuse to take one in parts.
    given = [i for i, array in enumerate(operands) if jax.typeof(array).size]

    def run(*arrays: Any) -> tuple[Any, ...]:
        first = jax.lax.axis_index(tuple(sorted(axes))) == 0 if once else True
        parts: list[Any] = [None if i in given else _empty_part(a) for i, a in enumerate(operands)]
        for i, array in zip(given, arrays, strict=True):
            parts[i] = jnp.where(first, array, jnp.zeros_like(array)) if i in once else array
        return tuple(_compat.bind_with(equation, local, parts))

    in_specs = tuple(spec_of(operands[i]) for i in given)
    out_specs = tuple(_in_summands(labels, chosen, axes) for labels in signature.results)
    mapped = jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return list(mapped(*(operands[i] for i in given)))


def _by_own_labels(signature: Signature, operands: Sequence[Any]) -> list[Any]:
    """Operands divided along each label as one of them is."""
    chosen = _label_axes(signature, operands, sums_pass=True)
    return [
        resharded(array, _by_labels(labels, chosen, spec_of(array).unreduced))
        for labels, array in zip(signature.operands, operands, strict=True)
    ]


def _in_summands(
    labels: Labels, chosen: Mapping[int, tuple[str, ...]], axes: frozenset[str]
) -> PartitionSpec:
    """The sharding of a result: a sum along axes, but for those along which it is divided."""
    divided = {axis for label in labels if label for axis in chosen.get(label.name, ())}
    return _by_labels(labels, chosen, axes - divided)


def _empty_part(array: Any) -> jax.Array:
    """What one device has of an array without elements."""
    shape, dtype = jax.typeof(array).shape, jax.typeof(array).dtype
    sizes = jax.sharding.get_abstract_mesh().shape
    entries = entries_of(spec_of(array), len(shape))
    counts = (math.prod(sizes[axis] for axis in axes_of(entry)) for entry in entries)
    return jnp.zeros([n // count for n, count in zip(shape, counts, strict=True)], dtype)


def _local_params(
    equation: _compat.JaxprEqn,
    params: Mapping[str, Any],
    signature: Signature,
    operands: Sequence[Any],
) -> dict[str, Any] | None:
    """An equation's parameters for the sizes of one device; None where several change."""
    sizes = jax.sharding.get_abstract_mesh().shape
    changed: dict[int, Mapping[str, Any]] = {}
    for labels, array in zip(signature.operands, operands, strict=True):
        for dimension, (label, axes) in enumerate(_divisions(labels, spec_of(array))):
            count = math.prod(sizes[axis] for axis in axes)
            if label is not None and count > 1:
                units = jax.typeof(array).shape[dimension] // label.scale // count
                changed[label.name] = signature.resized(label.name, units)
    found = [each for each in changed.values() if each]
    others = [name for each in found for name in each if params[name] != equation.params[name]]
    if len(found) > 1 or others:
        return None
    return {**params, **(found[0] if found else {})}


def _on_mesh(spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(jax.sharding.get_abstract_mesh(), spec)


def _contracted_axes(signature: Signature, operands: Sequence[Any]) -> frozenset[str]:
    """The axes that divide a dimension which is added up, in all operands that have it."""
    divided: dict[int, list[frozenset[str]]] = {}
    for labels, operand in zip(signature.operands, operands, strict=True):
        for label, axes in _divisions(labels, spec_of(operand)):
            if label is not None and label.name in signature.summed:
                divided.setdefault(label.name, []).append(frozenset(axes))
    sizes = jax.sharding.get_abstract_mesh().shape
    shared = frozenset().union(*(frozenset.intersection(*sets) for sets in divided.values()))
    return frozenset(axis for axis in shared if sizes[axis] > 1)


def _divisions(labels: Labels, spec: PartitionSpec) -> list[tuple[Label | None, tuple[str, ...]]]:
    entries = entries_of(spec, len(labels))
    return [(label, axes_of(entry)) for label, entry in zip(labels, entries, strict=True)]


def _label_axes(
    signature: Signature, operands: Sequence[Any], *, sums_pass: bool = False
) -> dict[int, tuple[str, ...]]:
    """The axes that divide each label, by all operands together.

    Raises:
        OperandError: two operands do not agree, or one is a partial sum where `sums_pass` is not.
    """
    chosen: dict[int, tuple[str, ...]] = {}
    taken: dict[str, int] = {}
    for place, (labels, operand) in enumerate(zip(signature.operands, operands, strict=True)):
        spec = spec_of(operand)
        entries: list[tuple[str, ...]] = []
        problem = "it is a partial sum" if spec.unreduced and not sums_pass else ""
        for dimension, (label, axes) in enumerate(_divisions(labels, spec)):
            units = jax.typeof(operand).shape[dimension] // (label.scale if label else 1)
            if axes and not (_fits(label, axes, chosen, taken) and _divides(axes, units)):
                problem = f"its dimension {dimension} is divided over {list(axes)}"
                others = {axis for entry in entries for axis in entry}
                axes = chosen.get(label.name, ()) if label is not None else ()
                axes = axes if others.isdisjoint(axes) and _divides(axes, units) else ()
            elif axes and label is not None:
                chosen[label.name] = axes
                taken.update(dict.fromkeys(axes, label.name))
            entries.append(axes)
        if problem:
            raise OperandError(place, problem, spec_from(entries))
    return chosen


def _by_labels(
    labels: Labels, chosen: Mapping[int, tuple[str, ...]], unreduced: frozenset[str] = frozenset()
) -> PartitionSpec:
    """The sharding of an array whose labels are divided over axes."""
    entries = [chosen.get(label.name, ()) if label is not None else () for label in labels]
    return spec_from(entries, unreduced)


def _fits(
    label: Label | None,
    axes: tuple[str, ...],
    chosen: Mapping[int, tuple[str, ...]],
    taken: Mapping[str, int],
) -> bool:
    """Whether a dimension may be divided over axes, beside those of the operands before."""
    if label is None or chosen.get(label.name, axes) != axes:
        return False
    return all(taken.get(axis, label.name) == label.name for axis in axes)


def _divides(axes: tuple[str, ...], units: int) -> bool:
    """Whether axes of the present mesh divide a number of units evenly."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return units % math.prod(sizes[axis] for axis in axes) == 0
