"""Blocks of an attention: what one member computes of its queries and the keys that it has now.

A block is one equation of the whole program. The queries of each member are a range of tokens and
of heads, and so are the keys that it has at this turn; deduction tells each member which ones.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from hetjax import _compat
from hetjax.sharding.attention.block import attend_block, merge
from hetjax.sharding.attention.block_backward import attend_block_backward
from hetjax.sharding.attention.mask import Mask, Spans, Tokens, TokenSpan
from hetjax.sharding.attention.primitive import by_platform
from hetjax.sharding.attention.tile_views import accumulator
from hetjax.sharding.context.positions import places_of
from hetjax.sharding.deduction.own_primitive_rules import BlockLabel


@dataclass(frozen=True)
class Block:
    """Which queries and keys a block has, and how they see each other.

    Args:
        mask: which keys a query sees.
        scale: what scores are multiplied by.
        slots: for each slot of keys and values the query heads that see it, as a range.
        query_spans: the positions of the queries.
        key_spans: the positions of the keys.
        is_continued: whether what queries get is added to that of the blocks before it.
        has_segments: whether the segments of tokens are given.
    """

    mask: Mask
    scale: float
    slots: tuple[tuple[int, int], ...]
    query_spans: Spans
    key_spans: Spans
    is_continued: bool = False
    has_segments: bool = False

    def located(self, ranges: Mapping[int, tuple[int, int]]) -> Block:
        """The part of it that one member computes.

        Args:
            ranges: by label, what the member has.
        """
        heads, slots = ranges[BlockLabel.QUERY_HEADS], ranges[BlockLabel.KEY_SLOTS]
        return replace(
            self,
            slots=tuple(
                (max(first, heads[0]) - heads[0], min(last, heads[1]) - heads[0])
                for first, last in self.slots[slice(*slots)]
            ),
            query_spans=spans_between(self.query_spans, *ranges[BlockLabel.QUERIES]),
            key_spans=spans_between(self.key_spans, *ranges[BlockLabel.KEYS]),
        )

    @property
    def heads_of_slots(self) -> tuple[int, ...]:
        """How many query heads see each slot."""
        return tuple(last - first for first, last in self.slots)


def spans_between(spans: Spans, start: int, stop: int) -> Spans:
    """The positions of some tokens, by their places in an order of all.

    Args:
        spans: the positions of all, in order.
        start: the first place.
        stop: the place after the last.

    Example:
        >>> spans_between((TokenSpan(0, 4), TokenSpan(8, 12)), 2, 6)
        (TokenSpan(start=2, stop=4), TokenSpan(start=8, stop=10))
    """
    runs = tuple((span.start, span.stop) for span in spans)
    return tuple(TokenSpan(*run) for run in places_of(runs, start, stop))


def _by_heads(array: Any, block: Block) -> Any:
    """Keys or values of slots, once for each run of query heads of one size."""
    counts = block.heads_of_slots
    if len(set(counts)) < 2:
        return array
    return jnp.repeat(array, jnp.asarray(counts), axis=2, total_repeat_length=sum(counts))


def _by_slots(array: Any, block: Block) -> Any:
    """Gradients of query heads' keys or values, added up for each slot."""
    counts = block.heads_of_slots
    if len(set(counts)) < 2:
        return array
    ends = jnp.repeat(jnp.arange(len(counts)), jnp.asarray(counts), total_repeat_length=sum(counts))
    summed = jax.ops.segment_sum(jnp.moveaxis(array, 2, 0), ends, len(counts))
    return jnp.moveaxis(summed, 0, 2)


def _tokens(block: Block, segments: Sequence[Any]) -> tuple[Tokens, Tokens]:
    queries, keys = segments if segments else (None, None)
    return Tokens(block.query_spans, segments=queries), Tokens(block.key_spans, segments=keys)


@functools.partial(jax.jit, static_argnames=("block", "largest_tile"))
def _forward(*operands: Any, block: Block, largest_tile: int) -> tuple[Any, ...]:
    rest = iter(operands)
    query, key, value = next(rest), next(rest), next(rest)
    segments = [next(rest), next(rest)] if block.has_segments else []
    if 0 in query.shape or 0 in key.shape:
        wide = accumulator(query.dtype)
        out = jnp.zeros((*query.shape[:3], value.shape[3]), wide)
        total = jnp.full(query.shape[:3], -jnp.inf, wide)
    else:
        out, total = attend_block(
            query,
            _by_heads(key, block),
            _by_heads(value, block),
            *_tokens(block, segments),
            mask=block.mask,
            scale=block.scale,
            largest_tile=largest_tile,
        )
    return merge(next(rest), next(rest), out, total) if block.is_continued else (out, total)


@functools.partial(jax.jit, static_argnames=("block", "largest_tile"))
def _backward(*operands: Any, block: Block, largest_tile: int) -> tuple[Any, ...]:
    rest = iter(operands)
    query, key, value = next(rest), next(rest), next(rest)
    segments = [next(rest), next(rest)] if block.has_segments else []
    cotangent, total, delta = next(rest), next(rest), next(rest)
    if 0 in query.shape or 0 in key.shape:
        wide = accumulator(query.dtype)
        gradients = [jnp.zeros(each.shape, wide) for each in (query, key, value)]
    else:
        found = attend_block_backward(
            query,
            _by_heads(key, block),
            _by_heads(value, block),
            total,
            cotangent,
            delta,
            *_tokens(block, segments),
            mask=block.mask,
            scale=block.scale,
            largest_tile=largest_tile,
        )
        gradients = [found[0], *(_by_slots(each, block) for each in found[1:])]
    first = next(rest) + gradients[0] if block.is_continued else gradients[0]
    return (first, *gradients[1:])


def _forward_shapes(*avals: Any, block: Block) -> list[Any]:
    query, _, value, *_ = avals
    rows, wide = query.shape[:3], accumulator(query.dtype)
    shapes = (*rows, value.shape[3]), rows
    return [_compat.abstract_like(avals, shape, wide) for shape in shapes]


def _backward_shapes(*avals: Any, block: Block) -> list[Any]:
    wide = accumulator(avals[0].dtype)
    return [_compat.abstract_like(avals, each.shape, wide) for each in avals[:3]]


ATTEND = _compat.compiled_primitive(
    "attention_block",
    _forward_shapes,
    by_platform(_forward),
    _compat.leading_axis(lambda params: ()),
)
"""Queries, keys, values, maybe both segments, maybe the results so far -> output, log-sum-exp."""

ATTEND_BACKWARD = _compat.compiled_primitive(
    "attention_block_backward",
    _backward_shapes,
    by_platform(_backward),
    _compat.leading_axis(lambda params: ()),
)
"""Queries, keys and values, maybe both segments, the output's cotangent, log-sum-exp, delta, maybe
the queries' gradient so far -> the gradients."""
