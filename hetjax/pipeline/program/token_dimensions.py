"""Token dimensions: where a program has the tokens of a sequence in an order that may be chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TokenDimensions:
    """Where a program has tokens in an order that may be chosen, and where in the model's own.

    Args:
        values: by value, the dimension of its tokens; what is not in it is in the model's order.
        made: by a step's place, by its result: the dimension of tokens that it makes in the
            model's order, as an iota does.
        taken: by a step's place, by its operand: the dimensions of tokens that come to it in the
            model's order; of what mixes tokens two.
    """

    values: Mapping[int, int] = field(default_factory=dict)
    made: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    taken: Mapping[int, Mapping[int, tuple[int, ...]]] = field(default_factory=dict)


NO_TOKENS = TokenDimensions()
