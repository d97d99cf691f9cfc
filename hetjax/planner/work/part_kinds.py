"""What a part of a parameter is to a step: with a gradient, updated, with how much state."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax

from hetjax.pipeline.program.frozen_leaves import FrozenLeaves


class PartKind(NamedTuple):
    """What a parameter part is to a step.

    Args:
        shape: its shape and dtype.
        has_gradient: whether its gradient is computed.
        is_updated: whether it is updated, and has a part of the optimizer's state.
        state_share: how many times as much of that an element of it has as one of all parameters.
    """

    shape: jax.ShapeDtypeStruct
    has_gradient: bool = True
    is_updated: bool = True
    state_share: float = 1.0

    def state_bytes(self, optimizer_bytes: float) -> int:
        """Bytes of its part of the optimizer's state.

        Args:
            optimizer_bytes: of the state, for each element of all parameters that are updated.
        """
        elements = math.prod(self.shape.shape) * self.is_updated
        return round(elements * optimizer_bytes * self.state_share)


def part_kind(shape: jax.ShapeDtypeStruct, leaf: int, frozen: FrozenLeaves) -> PartKind:
    """What a part of a leaf is to a step.

    Args:
        shape: the part's shape and dtype.
        leaf: the place of the leaf.
        frozen: which leaves have no gradient, which no update, and which more state than others.
    """
    return PartKind(
        shape,
        leaf not in frozen.without_gradient,
        leaf not in frozen.without_update,
        frozen.state_shares[leaf] if frozen.state_shares else 1.0,
    )
