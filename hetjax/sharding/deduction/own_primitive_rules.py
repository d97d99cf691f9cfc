"""The signatures of hetjax's own primitives: attention, its blocks, and the chunked loss."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hetjax import _compat
from hetjax.sharding.deduction.signature import (
    Label,
    Labels,
    Signature,
    numbered,
    shapes_of,
)


def attention_rule(equation: _compat.JaxprEqn) -> Signature:
    """Examples, groups of heads, and queries are independent; each query needs all keys."""
    operands, labels = _attention_labels(equation)
    rows = operands[0][:-1]
    return Signature(tuple(operands), ((*rows, None), rows), resized=_without_spans(labels))


def attention_backward_rule(equation: _compat.JaxprEqn) -> Signature:
    """Over queries the gradients of keys and values are sums, over keys those of queries."""
    operands, labels = _attention_labels(equation)
    q, k, v = operands[:3]
    keys = [
        tuple(labels.keys if i == len(each) - 3 else label for i, label in enumerate(each))
        for each in (k, v)
    ]
    operands[1:3] = keys
    place = 3
    if not equation.params["mask"].is_full:
        operands[4], place = (labels.keys,), 5
    if equation.params["has_segments"]:
        operands[place + 1] = (*q[:-3], labels.keys)
    rows = q[:-1]
    operands += [(*rows, None), rows, (*rows, None)]
    return Signature(
        tuple(operands),
        (q, *keys),
        summed=frozenset({labels.queries.name, labels.keys.name}),
        linear=(frozenset({len(operands) - 1}),),
        resized=_without_spans(labels),
    )


def linear_cross_entropy_rule(equation: _compat.JaxprEqn) -> Signature:
    """Tokens are independent, and over them the gradient of the weights is a sum."""
    hidden, weights, *others = shapes_of(equation.invars)
    tokens = numbered(len(hidden) - 1)
    # Of what `jax.vmap` maps, each has weights of its own.
    mapped = tokens[: len(weights) - 2]
    of_weights = (*mapped, None, None)
    operands = ((*tokens, None), of_weights, *[tokens] * len(others))
    if not equation.primitive.name.endswith("backward"):
        return Signature(operands, (tokens, tokens))
    return Signature(
        operands,
        ((*tokens, None), of_weights),
        summed=frozenset(label.name for label in tokens[len(mapped) :] if label is not None),
        linear=(frozenset({len(operands) - 1}),),
    )


class _AttentionLabels(NamedTuple):
    """What the dimensions of an attention belong to, beside its examples."""

    queries: Label
    keys: Label
    groups: Label


def _attention_labels(equation: _compat.JaxprEqn) -> tuple[list[Labels], _AttentionLabels]:
    """Labels of an attention's operands, but for its residuals; keys are not divided."""
    q, k, _, *_ = shapes_of(equation.invars)
    batch = numbered(len(q) - 3)
    labels = _AttentionLabels(*(Label(len(batch) + i) for i in range(3)))
    heads = Label(labels.groups.name, max(1, q[-2] // k[-2]))
    side = (*batch, None, labels.groups, None)
    operands: list[Labels] = [(*batch, labels.queries, heads, None), side, side]
    if not equation.params["mask"].is_full:
        operands += [(labels.queries,), (None,)]
    if equation.params["has_segments"]:
        operands += [(*batch, labels.queries), (*batch, None)]
    return operands, labels


def _without_spans(labels: _AttentionLabels) -> Callable[[int, int], Mapping[str, Any]]:
    """Of some of the tokens, positions are known as data alone."""
    spans = {labels.queries.name: "query_spans", labels.keys.name: "key_spans"}

    def resized(name: int, size: int) -> Mapping[str, Any]:
        return {spans[name]: None} if name in spans else {}

    return resized


class BlockLabel(enum.IntEnum):
    """The labels of a block of an attention; queries and keys have labels of their own."""

    BATCH = 0
    QUERIES = 1
    QUERY_HEADS = 2
    KEYS = 3
    KEY_SLOTS = 4


def attention_block_inside_rule(equation: _compat.JaxprEqn) -> Signature:
    """A block that one member computes: its devices can each have some of its slots.

    All slots have as many query heads as the next one; else heads are not divided.
    """
    block = equation.params["block"]
    counts = block.heads_of_slots
    signature = attention_block_rule(equation)
    slots = Label(BlockLabel.KEY_SLOTS)
    heads = Label(BlockLabel.KEY_SLOTS, counts[0]) if len(set(counts)) == 1 else None
    names: dict[int, Label | None] = {
        BlockLabel.QUERY_HEADS: heads,
        BlockLabel.KEY_SLOTS: slots if heads else None,
    }

    def inside(many: Sequence[Labels]) -> tuple[Labels, ...]:
        return tuple(
            tuple(names.get(label.name, label) if label else None for label in labels)
            for labels in many
        )

    def resized(name: int, size: int) -> Mapping[str, Any]:
        if name != BlockLabel.KEY_SLOTS:
            return {}
        return {"block": dataclasses.replace(block, slots=block.slots[:size])}

    return Signature(inside(signature.operands), inside(signature.results), resized=resized)


def attention_block_rule(equation: _compat.JaxprEqn) -> Signature:
    """Each member computes a block of its own: of the queries and of the keys that it has."""
    batch, *of_queries = BlockLabel.BATCH, BlockLabel.QUERIES, BlockLabel.QUERY_HEADS
    query = (batch, *of_queries, None)
    key = (batch, BlockLabel.KEYS, BlockLabel.KEY_SLOTS, None)
    row, block = query[:3], equation.params["block"]
    segments = [row[:2], key[:2]] if block.has_segments else []
    is_backward = equation.primitive.name.endswith("backward")
    results = [query, key, key] if is_backward else [query, row]
    continued = ([query] if is_backward else results) if block.is_continued else []
    operands = [query, key, key, *segments, *([query, row, row] * is_backward), *continued]

    def located(ranges: Mapping[int, tuple[int, int]]) -> Mapping[str, Any]:
        return {"block": block.located(ranges)}

    def labels(names: Sequence[BlockLabel | None]) -> Labels:
        return tuple(None if name is None else Label(name) for name in names)

    return Signature(tuple(map(labels, operands)), tuple(map(labels, results)), located=located)
