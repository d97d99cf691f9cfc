"""`reshard`: the communication operator, as it stands in a traced function."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from hetjax import _compat
from hetjax.errors import InputError, shown
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.annotation.subgroup import entries_of

_numbers = itertools.count()


@dataclass(frozen=True)
class Resharding:
    """What a reshard in a traced function says.

    Args:
        annotations: how the value shall lie, one for each strategy; or one for all.
        number: tells reshards of a program apart.
        is_reverse: whether it brings a cotangent back to where the value came from.
        is_early: whether the value leaves as soon as it is there, in a message of its own; else it
            waits until something needs it, for others that go the same way.
    """

    annotations: tuple[HSharding, ...]
    number: int
    is_reverse: bool = False
    is_early: bool = False

    def annotation(self, strategy: int) -> HSharding:
        """The annotation of a strategy.

        Raises:
            InputError: there is none.
        """
        if len(self.annotations) == 1:
            return self.annotations[0]
        if not 0 <= strategy < len(self.annotations):
            raise InputError(
                f"strategy: {strategy} is not allowed: a reshard carries the annotations of "
                f"{len(self.annotations)} strategies, from 0"
            )
        return self.annotations[strategy]


def _transpose(cotangent: Any, resharding: Resharding) -> Any:
    return RESHARD.bind(
        cotangent, resharding=replace(resharding, is_reverse=not resharding.is_reverse)
    )


def _mapped(axis: int, resharding: Resharding) -> dict[str, Any]:
    several = tuple(_with_whole(each, axis) for each in resharding.annotations)
    return {"resharding": replace(resharding, annotations=several)}


def _with_whole(annotation: HSharding, axis: int) -> HSharding:
    """How values lie that are stacked along a new axis, where each lies as annotated."""

    def shifted(dimension: int) -> int:
        return dimension + (dimension >= axis)

    groups = []
    for group in annotation.subgroups:
        entries = entries_of(group.spec, max(axis, len(group.spec.partitions)))
        entries.insert(axis, None)
        spec = PartitionSpec(*entries, unreduced=group.spec.unreduced)
        groups.append(group.with_spec(spec))
    hdim = annotation.hdim
    if isinstance(hdim, int):
        hdim = shifted(hdim)
    elif isinstance(hdim, tuple):
        hdim = tuple(map(shifted, hdim))
    return replace(annotation, subgroups=tuple(groups), hdim=hdim)


RESHARD = _compat.linear_identity("hetjax_reshard", _transpose, mapped=_mapped)
"""The primitive: as a computation it is the identity; its gradient lies as its operand does.

Under `jax.vmap` every value lies as annotated, so that the new axis is divided nowhere."""


EARLY = "early"
"""What tells a step that is an early reshard without an equation of its own."""


def leaves_early(equation: _compat.JaxprEqn | None, beside: Hashable = ()) -> bool:
    """Whether a step is a reshard whose value leaves as soon as it is there.

    Args:
        equation: its equation; None where it has none.
        beside: what is told of it beside.
    """
    if equation is None:
        return beside == EARLY
    return equation.primitive is RESHARD and equation.params["resharding"].is_early


def reshard(x: Any, annotations: HSharding | Sequence[HSharding], *, is_early: bool = False) -> Any:
    """Say how a value of a traced function shall lie from here on; see `hetjax.reshard`.

    Args:
        x: the value.
        annotations: how it shall lie; several are one for each strategy.
        is_early: see `Resharding`.

    Returns:
        The value.

    Raises:
        InputError: an annotation does not fit the shape.

    Example:
        >>> import jax
        >>> from jax.sharding import PartitionSpec as P
        >>> from hetjax.sharding import HSharding, Subgroup
        >>> halves = HSharding((Subgroup((0,), (), P()), Subgroup((1,), (), P())), hdim=0)
        >>> jax.make_jaxpr(lambda x: reshard(x, halves))(np.ones(4)).eqns[0].primitive
        hetjax_reshard
    """
    several = checked_annotations(annotations, np.shape(x))
    return RESHARD.bind(x, resharding=Resharding(several, next(_numbers), is_early=is_early))


def checked_annotations(
    annotations: HSharding | Sequence[HSharding], shape: Sequence[int]
) -> tuple[HSharding, ...]:
    """The annotations of a reshard, one or several.

    Args:
        annotations: what was given.
        shape: the shape of what is to lie so.

    Raises:
        InputError: none is given, one is none, or does not fit the shape.
    """
    several: tuple[Any, ...] = (
        tuple(annotations) if isinstance(annotations, Sequence) else (annotations,)
    )
    if not several:
        raise InputError("annotations: none is given: a reshard has one or more")
    for annotation in several:
        if not isinstance(annotation, HSharding):
            raise InputError(f"annotations: {shown(annotation)} is not allowed: an HSharding")
        if not annotation.symbols:
            annotation.shards(shape)
    return several
