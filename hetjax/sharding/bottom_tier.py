"""The bottom tier: equations inside one submesh, on arrays whose types say how they are sharded.

JAX's explicit sharding deduces the results' shardings. Where a contraction is over a divided
dimension its results become partial sums; where JAX asks for a decision (a gather, a scatter), the
labels of the equation's signature make it, and JAX's compiler does the rest.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from hetjax import _compat
from hetjax.sharding.annotation import axes_of
from hetjax.sharding.signature import Label, Labels, Signature


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


ELSEWHERE = -1
"""In place of an operand: what is wrong is inside a body, or with all operands together."""


def spec_of(array: Any) -> PartitionSpec:
    """The sharding in the type of an array; of one that is whole on every device, none."""
    sharding = getattr(jax.typeof(array), "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def apply(
    equation: _compat.JaxprEqn,
    params: Mapping[str, Any],
    signature: Signature,
    operands: Sequence[Any],
) -> list[Any]:
    """Evaluate an equation on arrays of one submesh, inside a trace under its mesh.

    Args:
        equation: the equation.
        params: its parameters, for the sizes that the submesh has.
        signature: its signature.
        operands: traced arrays.

    Returns:
        The results, whose types say how they are sharded.

    Raises:
        OperandError: the operands' shardings cannot be taken together.
    """
    contracted = _contracted_axes(signature, operands)
    if equation.primitive.name == "dot_general" and contracted:
        params = {**params, "out_sharding": _result_specs(signature, operands, contracted)[0]}
        params["out_sharding"] = _on_mesh(params["out_sharding"])
    # The shapes are right: whatever JAX raises here, of many types, is about shardings.
    with contextlib.suppress(Exception):
        return _compat.bind_with(equation, params, operands)
    specs = _result_specs(signature, operands, frozenset())
    run: Any = jax.sharding.auto_axes(
        lambda *arrays: tuple(_compat.bind_with(equation, params, arrays)),
        out_sharding=tuple(_on_mesh(spec) for spec in specs),
    )
    return list(run(*operands))


def _on_mesh(spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(jax.sharding.get_abstract_mesh(), spec)


def _contracted_axes(signature: Signature, operands: Sequence[Any]) -> frozenset[str]:
    """The axes that divide a dimension which is added up, in all operands that have it."""
    divided: dict[int, list[frozenset[str]]] = {}
    for labels, operand in zip(signature.operands, operands, strict=True):
        for label, axes in _divisions(labels, spec_of(operand)):
            if label is not None and label.name in signature.summed:
                divided.setdefault(label.name, []).append(frozenset(axes))
    return frozenset().union(*(frozenset.intersection(*sets) for sets in divided.values()))


def _divisions(labels: Labels, spec: PartitionSpec) -> list[tuple[Label | None, tuple[str, ...]]]:
    entries = [*spec.partitions, *[None] * (len(labels) - len(spec.partitions))]
    return [(label, axes_of(entry)) for label, entry in zip(labels, entries, strict=True)]


def _result_specs(
    signature: Signature, operands: Sequence[Any], unreduced: frozenset[str]
) -> list[PartitionSpec]:
    """How labels carry the operands' divisions to the results."""
    chosen: dict[int, tuple[str, ...]] = {}
    taken: dict[str, int] = {}
    for place, (labels, operand) in enumerate(zip(signature.operands, operands, strict=True)):
        spec = spec_of(operand)
        entries: list[tuple[str, ...]] = []
        problem = "it is a partial sum" if spec.unreduced else ""
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
            raise OperandError(place, problem, _spec(entries))
    return [
        _spec([chosen.get(label.name, ()) if label else () for label in labels], unreduced)
        for labels in signature.results
    ]


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


def _spec(
    entries: Sequence[tuple[str, ...]], unreduced: frozenset[str] = frozenset()
) -> PartitionSpec:
    partitions = [None if not e else e[0] if len(e) == 1 else e for e in entries]
    return PartitionSpec(*partitions, unreduced=unreduced)
