"""Groups of an optimizer's state that are on a stage's devices one after another."""

from __future__ import annotations

from collections.abc import Sequence

STATE_GROUPS = 16
"""About into how many groups a stage's state is divided that is not on its devices between steps.

Two of them are there at once. More would save little, and each is a program of its own.
"""


def state_groups(sizes: Sequence[float]) -> list[range]:
    """Divide a stage's state into groups of leaves that follow each other.

    Args:
        sizes: bytes of the state of each parameter, or of those that are updated together.

    Returns:
        The places of each group, in order; none is larger than the largest leaf, or than
        1 / `STATE_GROUPS` of all.

    Example:
        >>> state_groups([4, 1, 1, 1, 1, 3, 2])
        [range(0, 1), range(1, 5), range(5, 6), range(6, 7)]
    """
    most = max(max(sizes, default=0.0), sum(sizes) / STATE_GROUPS)
    groups: list[range] = []
    first, held = 0, 0.0
    for place, size in enumerate(sizes):
        if place > first and held + size > most:
            groups.append(range(first, place))
            first, held = place, 0.0
        held += size
    return [*groups, range(first, len(sizes))] if sizes else []
