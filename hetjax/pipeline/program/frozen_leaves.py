"""Frozen parameters: the leaves of which a training step leaves something out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FrozenLeaves:
    """The parameter leaves that a step does not treat like all others, by their place.

    Args:
        without_gradient: those whose gradient the update does not read; it need not be computed.
        without_update: those of them that the update gives back as they came, and reads for nothing
            else; a step only reads them.
        state_shares: for each leaf, how many times as much of the optimizer's state an element of
            it has as one of all that are updated, on average; empty where all have as much.
    """

    without_gradient: frozenset[int] = frozenset()
    without_update: frozenset[int] = frozenset()
    state_shares: tuple[float, ...] = ()


NONE_FROZEN = FrozenLeaves()
"""Every leaf is trained."""
