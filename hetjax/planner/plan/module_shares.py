"""What a stage's modules do among its members: the moves of a synthesised program, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hetjax.file_content import LEFT_OUT_EMPTY
from hetjax.limits import Index


@dataclass(frozen=True)
class Share:
    """How a value lies among the members of a stage, along one of its dimensions.

    Args:
        dimension: the dimension, counted from 0.
        sizes: how much of it each member has, in order; a member may have nothing.
    """

    dimension: Index
    sizes: tuple[Index, ...]


@dataclass(frozen=True)
class OperandShare:
    """How an operand lies when an equation is computed: where it lies otherwise, it is moved.

    Args:
        equation: the number of the equation, in the module's forward and backward pass.
        operand: which of its operands.
        share: what each member has of it; None where each has all of it.
        through: even parts that it is brought to before: where parts are uneven, what one member
            would give or take alone is so given or taken by all. None to move it at once.
    """

    equation: Index
    operand: Index
    share: Share | None = None
    through: Annotated[Share | None, LEFT_OUT_EMPTY] = None

    @property
    def ways(self) -> tuple[Share | None, ...]:
        """How it is brought to lie, in turn."""
        return (self.share,) if self.through is None else (self.through, self.share)


@dataclass(frozen=True)
class ModuleShares:
    """What the members of a stage do of a module, and where the module stands.

    Args:
        runs: first position in the program and the one after the last, of each module that is
            computed so.
        operands: the operands that are moved. What is not told is computed as it lies.

    Example:
        >>> columns = OperandShare(4, 1, Share(1, (6, 2)))
        >>> ModuleShares(((0, 9), (9, 18)), (columns,)).runs
        ((0, 9), (9, 18))
    """

    runs: tuple[tuple[Index, Index], ...]
    operands: Annotated[tuple[OperandShare, ...], LEFT_OUT_EMPTY] = ()
