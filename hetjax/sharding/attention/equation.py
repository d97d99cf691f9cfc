"""An attention in a traced program: its operands by their roles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetjax import _compat
from hetjax.sharding.attention.mask import Mask, Spans, TokenSpan


@dataclass(frozen=True, eq=False)
class AttentionEquation:
    """The operands of an attention, by their roles.

    Args:
        query: queries [..., T, N, H].
        key: keys [..., S, G, H].
        value: values [..., S, G, V].
        segments: the segments of the queries and of the keys, [..., T] and [..., S]; or nothing.
        mask: which keys a query sees.
        scale: what scores are multiplied by.
        query_spans: the queries' positions; None where they are data, or there is no mask.
        key_spans: the keys' positions.
        token_dimension: the dimension of tokens, the same in all of them.
    """

    query: Any
    key: Any
    value: Any
    segments: tuple[Any, ...]
    mask: Mask
    scale: float
    query_spans: Spans | None
    key_spans: Spans | None
    token_dimension: int


def attention_of(equation: _compat.JaxprEqn, operands: Sequence[Any]) -> AttentionEquation:
    """The operands of an attention.

    Args:
        equation: the equation.
        operands: its operands, in any form.
    """
    params: Any = equation.params
    first: Any = equation.invars[0].aval
    query, key, value, *rest = operands
    if not params["mask"].is_full:
        _, _, *rest = rest
    return AttentionEquation(
        query,
        key,
        value,
        tuple(rest) if params["has_segments"] else (),
        params["mask"],
        params["scale"],
        params["query_spans"],
        params["key_spans"],
        first.ndim - 3,
    )


def attends_to_itself(equation: _compat.JaxprEqn) -> bool:
    """Whether an attention is of one sequence to itself, as members that share it need.

    Args:
        equation: the equation.
    """
    avals: list[Any] = [atom.aval for atom in equation.invars]
    query, key, *_ = avals
    attention = attention_of(equation, avals)
    whole = (TokenSpan(0, query.shape[attention.token_dimension]),)
    spans = {attention.query_spans, attention.key_spans}
    return query.shape[:-2] == key.shape[:-2] and (attention.mask.is_full or spans == {whole})
