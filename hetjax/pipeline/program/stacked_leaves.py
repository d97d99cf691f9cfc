"""Leaves that stand for rows: of a pytree some leaves count as as many as they have rows.

A model whose blocks are scanned over stacks their parameters. Where a loop was opened, each row is
a parameter like any other, and its leaf is put together only for who asks for the pytree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class StackedLeaves:
    """Which leaves of a pytree are rows.

    Args:
        rows: for each leaf how many rows it counts as; None where it is whole.

    Example:
        >>> leaves = StackedLeaves((None, 2))
        >>> leaves.split(["bias", ["first", "second"]])
        ['bias', 'first', 'second']
        >>> leaves.join(["bias", "first", "second"], stack=list)
        ['bias', ['first', 'second']]
    """

    rows: tuple[int | None, ...]

    @functools.cached_property
    def places(self) -> tuple[tuple[int, int | None], ...]:
        """For each of what they count as its leaf, and which row of it; None for all of it."""
        return tuple(
            (leaf, row)
            for leaf, count in enumerate(self.rows)
            for row in ([None] if count is None else range(count))
        )

    def split(self, leaves: Sequence[Any]) -> list[Any]:
        """What leaves count as: the rows of some, and all of others."""
        return [leaves[leaf] if row is None else leaves[leaf][row] for leaf, row in self.places]

    def split_shapes(self, leaves: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """The shapes of what leaves of some shapes count as."""
        return [
            jax.ShapeDtypeStruct(leaves[leaf].shape[row is not None :], leaves[leaf].dtype)
            for leaf, row in self.places
        ]

    def split_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """The names of what leaves of some names count as.

        Example:
            >>> StackedLeaves((None, 2)).split_names(["bias", "blocks/w"])
            ('bias', 'blocks/w[0]', 'blocks/w[1]')
        """
        return tuple(
            names[leaf] if row is None else f"{names[leaf]}[{row}]" for leaf, row in self.places
        )

    def split_places(self, leaves: Collection[int]) -> frozenset[int]:
        """The places of all that some leaves count as."""
        return frozenset(place for place, (leaf, _) in enumerate(self.places) if leaf in leaves)

    def joined_places(self, places: Collection[int]) -> frozenset[int]:
        """The leaves that some of what they count as are of."""
        return frozenset(self.places[place][0] for place in places)

    def join(self, parts: Sequence[Any], stack: Callable[[Sequence[Any]], Any]) -> list[Any]:
        """The leaves of what they count as.

        Args:
            parts: the rows, and what is whole.
            stack: makes a leaf of its rows.
        """
        given = iter(parts)
        return [
            next(given) if count is None else stack([next(given) for _ in range(count)])
            for count in self.rows
        ]


def whole_leaves(count: int) -> StackedLeaves:
    """So many leaves, none of which is rows."""
    return StackedLeaves((None,) * count)
