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
    """

    without_gradient: frozenset[int] = frozenset()
    without_update: frozenset[int] = frozenset()


NONE_FROZEN = FrozenLeaves()
"""Every leaf is trained."""
