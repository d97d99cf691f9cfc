"""Annotations of parameters and batch, given as pytrees: for each leaf its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import PyTree

from hetjax.errors import InputError, shown
from hetjax.pipeline.program.loss import path_names
from hetjax.pipeline.program.reshards import FoundReshard
from hetjax.pipeline.program.stacked_leaves import StackedLeaves
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.annotation.symbol_numbers import numbers_of
from hetjax.sharding.deduction.top_tier import row_of


@dataclass(frozen=True)
class InputAnnotations:
    """How the inputs of a loss lie, as far as it is said.

    Args:
        parameters: by the place of a parameter.
        batch: by the place of a leaf of the batch, at the size of a whole step.
    """

    parameters: Mapping[int, HSharding]
    batch: Mapping[int, HSharding]

    def meant(self, found: FoundReshard) -> HSharding:
        """Which annotation of a reshard is meant, that has one for each of several strategies.

        Args:
            found: the reshard.

        Returns:
            The first one on the devices of a parameter; where none is, the first one.
        """
        known = {frozenset(annotation.devices) for annotation in self.parameters.values()}
        fitting = (each for each in found.annotations if frozenset(each.devices) in known)
        return next(fitting, found.annotations[0])


def input_annotations(
    annotations: Any, parameters: PyTree, batch: PyTree, leaves: StackedLeaves
) -> InputAnnotations:
    """The annotation of each leaf, with sizes in numbers.

    Args:
        annotations: a pair of pytrees, of the parameters and of the batch, as `jax.jit` takes
            `in_shardings`: an annotation may stand for a whole part of the tree, and None says
            nothing.
        parameters: shapes of the parameters.
        batch: shapes of the batch of a whole step.
        leaves: which leaves of the parameters count as a parameter for each row.

    Returns:
        The annotations of parameters and of leaves of the batch.

    Raises:
        InputError: the trees do not fit, an annotation does not fit its leaf, or it is of a sum.

    Example:
        >>> from jax.sharding import PartitionSpec
        >>> from hetjax.sharding import Subgroup
        >>> one = HSharding((Subgroup((0,), (), PartitionSpec()),))
        >>> shape = jax.ShapeDtypeStruct((4, 4), "float32")
        >>> parameters = {"a": [shape] * 2, "b": shape}
        >>> leaves = StackedLeaves((None, None, None))
        >>> found = input_annotations(({"a": one, "b": None}, one), parameters, shape, leaves)
        >>> sorted(found.parameters), sorted(found.batch)
        ([0, 1], [0])
    """
    if not isinstance(annotations, tuple | list) or len(annotations) != 2:
        raise InputError(
            f"annotations: {shown(annotations)} is not allowed: a pair of pytrees of HSharding, "
            f"of the parameters and of the batch"
        )
    given = _of_leaves(annotations[0], parameters, "parameter")
    names, shapes = path_names(parameters), jax.tree.leaves(parameters)
    return InputAnnotations(
        {
            place: (
                given[leaf]
                if row is None
                else _of_row(given[leaf], row, shapes[leaf].shape, names[leaf])
            )
            for place, (leaf, row) in enumerate(leaves.places)
            if leaf in given
        },
        _of_leaves(annotations[1], batch, "batch leaf"),
    )


def _of_row(annotation: HSharding, row: int, shape: Sequence[int], name: str) -> HSharding:
    """How a row of a leaf lies that counts as as many parameters as it has rows."""
    if any(group.divisions(len(shape))[0] > 1 for group in annotation.subgroups):
        raise InputError(
            f"annotations: parameter {name!r} is divided along its first dimension, which a loop "
            f"goes over row by row; allowed: divisions of its other dimensions"
        )
    if annotation.hdim != 0:
        return row_of(annotation)
    rows = [region[0] for region in annotation.regions(shape)]
    (holder,) = (i for i, (first, end) in enumerate(rows) if first <= row < end)
    return row_of(HSharding((annotation.subgroups[holder],)))


def _of_leaves(prefix: Any, tree: PyTree, what: str) -> dict[int, HSharding]:
    leaves, names = jax.tree.leaves(tree), path_names(tree)
    try:
        given = jax.tree.leaves(
            jax.tree.broadcast(prefix, tree, is_leaf=lambda each: each is None),
            is_leaf=lambda each: each is None,
        )
    except ValueError as error:
        raise InputError(
            f"annotations: the tree with one for each {what} must be that of what they are of, or "
            f"the beginning of it: {' '.join(str(error).split())}"
        ) from None
    found = {}
    for place, (annotation, leaf, name) in enumerate(zip(given, leaves, names, strict=True)):
        if annotation is not None:
            found[place] = _checked(annotation, leaf.shape, f"annotations: {what} {name!r}")
    return found


def _checked(annotation: Any, shape: tuple[int, ...], what: str) -> HSharding:
    if not isinstance(annotation, HSharding):
        raise InputError(f"{what}: {shown(annotation)} is not allowed: an HSharding, or None")
    if annotation.is_partial:
        raise InputError(f"{what} is to be a sum of parts; allowed: whole, or divided")
    try:
        bound = annotation.bind(numbers_of([annotation], [shape], {}))
        bound.shards(shape)
    except InputError as error:
        raise InputError(f"{what}: {error}") from None
    return bound
