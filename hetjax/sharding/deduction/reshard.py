"""`reshard`: the communication operator, inside a traced function or outside."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hetjax import _compat
from hetjax.errors import InputError, shown
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.resolution.union_array import HArray, as_array

_numbers = itertools.count()


@dataclass(frozen=True)
class Resharding:
    """What a reshard in a traced function says.

    Args:
        annotations: how the value shall lie, one for each strategy; or one for all.
        number: tells reshards of a program apart.
        is_reverse: whether it brings a cotangent back to where the value came from.
    """

    annotations: tuple[HSharding, ...]
    number: int
    is_reverse: bool = False

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


RESHARD = _compat.linear_identity("hetjax_reshard", _transpose)
"""The primitive: as a computation it is the identity; its gradient lies as its operand does."""


def reshard(x: Any, annotations: HSharding | Sequence[HSharding]) -> Any:
    """Say how a value shall lie from here on.

    Inside a function that is traced, this is the one operation that changes the submeshes of a
    value; `hetjax.sharding.deduce` finds the communication that it implies, and its gradient is
    brought back to where the value came from; where `jax.jit` compiles the function for one device
    it is the identity. Outside, it lays an array out, or moves it.

    Args:
        x: a traced value, an array, or a `HArray`.
        annotations: how it shall lie; for a traced value also several, one for each strategy.

    Returns:
        The traced value; or a `HArray`.

    Raises:
        InputError: the annotation does not fit the shape, or names devices that are not there.

    Source: Hetu v2, sections 5.1 and 6.1.

    Example:
        >>> import jax
        >>> from jax.sharding import PartitionSpec as P
        >>> from hetjax.sharding import HSharding, Subgroup
        >>> halves = HSharding((Subgroup((0,), (), P()), Subgroup((1,), (), P())), hdim=0)
        >>> jax.make_jaxpr(lambda x: reshard(x, halves))(np.ones(4)).eqns[0].primitive
        hetjax_reshard
    """
    several: tuple[HSharding, ...] = (
        tuple(annotations) if isinstance(annotations, Sequence) else (annotations,)
    )
    if not several:
        raise InputError("annotations: none is given: a reshard has one or more")
    x = x if isinstance(x, HArray) or _compat.is_traced(x) else as_array(x)
    for annotation in several:
        if not isinstance(annotation, HSharding):
            raise InputError(f"annotations: {shown(annotation)} is not allowed: an HSharding")
        if not annotation.symbols:
            annotation.shards(np.shape(x))
    if _compat.is_traced(x):
        return RESHARD.bind(x, resharding=Resharding(several, next(_numbers)))
    annotation, *others = several
    if others:
        raise InputError(f"annotations: {len(several)} are given; outside of a trace there is one")
    return x.reshard(annotation) if isinstance(x, HArray) else HArray.of(x, annotation)
