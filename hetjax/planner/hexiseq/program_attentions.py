"""The attentions of a traced program, which members that share its context all divide alike."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetjax import _compat
from hetjax.errors import InputError
from hetjax.pipeline.program.traced_program import Program, Step
from hetjax.sharding.attention.equation import attends_to_itself, attention_of
from hetjax.sharding.attention.primitive import ATTENTION

STATISTIC_BYTES = 4
"""Bytes of the log-sum-exp that attention keeps of each query and head."""


@dataclass(frozen=True)
class AttentionShape:
    """One attention of a program.

    Args:
        line: where it stands in the user's program.
        position: where it stands in the traced program.
        batch: sequences that attend side by side, each to itself.
        length: tokens of a sequence.
        query_heads: query heads.
        key_value_heads: heads of keys and values.
        head_size: numbers of a head of queries and keys.
        value_size: numbers of a head of values.
        item_bytes: bytes of a number.
        is_causal: whether a token sees only those before it.
    """

    line: str
    position: int
    batch: int
    length: int
    query_heads: int
    key_value_heads: int
    head_size: int
    value_size: int
    item_bytes: int
    is_causal: bool

    @property
    def kept_bytes(self) -> int:
        """Bytes of queries, keys, values and statistics, which are kept for its backward pass."""
        keys = self.key_value_heads * (self.head_size + self.value_size)
        numbers = self.query_heads * self.head_size + keys
        of_token = numbers * self.item_bytes + self.query_heads * STATISTIC_BYTES
        return self.batch * self.length * of_token


def program_attentions(program: Program) -> tuple[AttentionShape, ...]:
    """The attentions of a program.

    Args:
        program: the loss function, traced with `divides_sequences`.

    Returns:
        All of them, in order; they are alike in what a context split divides.

    Raises:
        InputError: one is of a sequence to another, or two have unlike lengths or heads; the
            message has their lines.
    """
    found = tuple(
        _shape_of(program, step, position)
        for position, step in enumerate(program.steps)
        if step.name == ATTENTION.name and step.equation is not None
    )
    for each in found[1:]:
        for field in ("batch", "length", "query_heads", "key_value_heads"):
            here, first = getattr(each, field), getattr(found[0], field)
            if here != first:
                raise InputError(
                    f"loss: {field} of the attention at {each.line} is {here}, and {first} of the "
                    f"one at {found[0].line}; members divide all attentions alike: allowed is the "
                    f"same in all of them"
                )
    return found


def _shape_of(program: Program, step: Step, position: int) -> AttentionShape:
    assert step.equation is not None
    line = _compat.source_line(step.equation)
    if not attends_to_itself(step.equation):
        raise InputError(
            f"loss: the attention at {line} is not of a sequence to itself (cross attention), so "
            "members cannot share its tokens; allowed: queries and keys of the same tokens, with a "
            "mask by their own positions"
        )
    attention = attention_of(step.equation, step.inputs)
    operands = attention.query, attention.key, attention.value
    query, key, value = (program.avals[each] for each in operands)
    return AttentionShape(
        line=line,
        position=position,
        batch=math.prod(query.shape[:-3]),
        length=query.shape[-3],
        query_heads=query.shape[-2],
        key_value_heads=key.shape[-2],
        head_size=query.shape[-1],
        value_size=value.shape[-1],
        item_bytes=query.dtype.itemsize,
        is_causal=attention.mask.after == 0,
    )
