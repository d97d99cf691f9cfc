"""Stage III: better tokens and heads for a partition, by descent.

First by weights of groups and devices that are alike, all at once: where eight groups are as slow
as each other, a head less for one of them wins nothing. Then by single heads and a few tokens from
one device to another, which finds what weights cannot say.

Source: HexiSeq, section 4.3, stage III, which has the second alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetjax.planner.hexiseq.costs_of_rows import Candidates, ContextCosts
from hetjax.planner.hexiseq.group_layout import GroupLayout
from hetjax.planner.hexiseq.typed_layout import TypedLayout, Weights

STEPS = (1.5, 1.2, 1.07, 1.02, 1.005)
"""By what a weight is multiplied or divided, from coarse to fine."""

MOST_MOVES = 256
"""How many single moves are costed at once."""

PARTS = (4, 16, 64, 256, 2048, 16384)
"""Which parts of all tokens a single move takes."""

FEW = 12
"""Up to how many unlike devices all may give and take; of more only the most and least loaded."""

MOST_PAIRED = 96
"""How many single moves are tried together with each other."""

_LEAST_GAIN = 1e-9


@dataclass(frozen=True)
class RefinedSplit:
    """Tokens and heads of a layout.

    Args:
        layout: the groups.
        tokens: of each device, int64 [devices].
        heads: query heads of each device, int64 [devices].
        score: seconds of a step; more than that where it does not fit (`RowCosts.scores`).
    """

    layout: GroupLayout
    tokens: NDArray[np.int64]
    heads: NDArray[np.int64]
    score: float


def best_weights(
    model: ContextCosts, typed: TypedLayout, start: Weights, score: float, iterations: int
) -> tuple[Weights, float]:
    """Descend by weights.

    Args:
        model: the cost model.
        typed: the layout.
        start: where to begin.
        score: the score of that.
        iterations: how many moves at most.

    Returns:
        Better weights, and their score.
    """
    step = 0
    for _ in range(iterations):
        moves = list(_weight_moves(typed, start, STEPS[step]))
        best, found = model.best(typed.layout, typed.fill(moves), score)
        if found < score * (1 - _LEAST_GAIN):
            start, score = moves[best], found
        elif step + 1 < len(STEPS):
            step += 1
        else:
            break
    return start, score


def _weight_moves(typed: TypedLayout, at: Weights, factor: float) -> Iterator[Weights]:
    """A weight multiplied or divided, where it says anything: some other is beside it."""
    of_type = np.bincount(typed.class_type)[typed.class_type]
    for field, has_others in (
        ("groups", np.full(typed.num_types, typed.num_types > 1)),
        ("tokens", of_type > 1),
        ("heads", of_type > 1),
    ):
        weights = getattr(at, field)
        for place in np.flatnonzero(has_others):
            for by in (factor, 1 / factor):
                moved = weights.copy()
                moved[place] *= by
                yield at._replace(**{field: moved})
    yield at


def best_single_moves(model: ContextCosts, start: RefinedSplit, iterations: int) -> RefinedSplit:
    """Descend by heads and tokens that go from one device to another.

    Args:
        model: the cost model.
        start: where to begin.
        iterations: how many moves at most.

    Returns:
        Something better, or the same.
    """
    layout, at = start.layout, start
    amounts = _amounts(start)
    for _ in range(iterations):
        tokens, heads = _single_moves(at, amounts, model.work.heads_together)
        if not len(tokens):
            break
        moves = Candidates(tokens, heads, np.arange(len(heads)))
        best, found = model.best(layout, moves, at.score)
        if not found < at.score * (1 - _LEAST_GAIN):
            break
        at = RefinedSplit(layout, tokens[best], heads[best], found)
    return at


def best_double_moves(model: ContextCosts, start: RefinedSplit, iterations: int) -> RefinedSplit:
    """Descend by two moves at once where no single one is better, for few devices.

    Args:
        model: the cost model.
        start: where to begin.
        iterations: how many times at most.

    Returns:
        Something better, or the same.
    """
    at = start
    for _ in range(iterations):
        moves = _double_moves(at, model.work.heads_together)
        best, score = model.best(at.layout, moves, at.score)
        if not score < at.score * (1 - _LEAST_GAIN):
            break
        at = RefinedSplit(at.layout, moves.tokens[best], moves.heads[best], score)
        at = best_single_moves(model, at, iterations)
    return at


def _amounts(at: RefinedSplit) -> list[int]:
    """How many tokens a move takes: large parts of all, smaller ones, and a single one."""
    length = int(at.tokens.sum())
    return sorted({max(1, length // part) for part in PARTS} | {1})


def _double_moves(at: RefinedSplit, together: int) -> Candidates:
    """Any two single moves together, of so many heads."""
    length = int(at.tokens.sum())
    amounts = sorted({max(1, length // part) for part in (4, 32)})
    tokens, heads = _single_moves(at, amounts, together, asks_all=True)
    some = slice(None, None, max(1, -(-len(tokens) // MOST_PAIRED)))
    tokens, heads = tokens[some], heads[some]
    first, second = np.triu_indices(len(tokens), 1)
    tokens = tokens[first] + tokens[second] - at.tokens
    heads = heads[first] + heads[second] - at.heads
    is_legal = (tokens >= 0).all(axis=1) & (heads >= 0).all(axis=1)
    is_legal &= (at.layout.group_sum(tokens) > 0).all(axis=1)
    tokens, heads = (
        np.concatenate((each[is_legal], own[None]))
        for each, own in ((tokens, at.tokens), (heads, at.heads))
    )
    return Candidates(tokens, heads, np.arange(len(heads)))


def _single_moves(
    at: RefinedSplit, amounts: list[int], together: int, *, asks_all: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens, heads that are never divided, or both, from one device to another.

    The other one is of its group, or of the next one. Devices of one group may also change places,
    in tokens, heads or both.
    """
    layout = at.layout
    lengths = layout.group_sum(at.tokens[None])[0][layout.group]
    moves: list[tuple[int, int, int, int]] = []
    for a, b in _pairs(at, lengths, asks_all):
        is_one_group = layout.group[a] == layout.group[b]
        # A group keeps a token.
        most = min(at.tokens[a], lengths[a] - (0 if is_one_group else 1))
        able = [amount for amount in amounts if amount <= most]
        moves += [(a, b, amount, 0) for amount in able]
        if is_one_group and at.heads[a]:
            moves += [(a, b, amount, together) for amount in [0, *able]]
        if is_one_group and at.heads[b]:
            moves += [(a, b, amount, -together) for amount in able]
        if is_one_group:
            more = int(at.tokens[a] - at.tokens[b]), int(at.heads[a] - at.heads[b])
            moves += [(a, b, more[0], more[1]), (a, b, more[0], 0), (a, b, 0, more[1])]
    moves = moves[:: max(1, -(-len(moves) // MOST_MOVES))]
    tokens, heads = (np.repeat(each[None], len(moves), axis=0) for each in (at.tokens, at.heads))
    for row, (a, b, num_tokens, num_heads) in enumerate(moves):
        tokens[row, [a, b]] += [-num_tokens, num_tokens]
        heads[row, [a, b]] += [-num_heads, num_heads]
    return tokens, heads


def _pairs(
    at: RefinedSplit, lengths: NDArray[np.int64], asks_all: bool
) -> Iterator[tuple[int, int]]:
    """Devices that may give, and those that may take from each.

    Of devices that are alike in group, node, tokens and heads, one is asked, unless all are: two
    moves may go to two of them. Where many are left,
    those give that have the most to do, and those take that have the least.
    """
    layout = at.layout
    columns = np.stack([layout.group, layout.node, at.tokens, at.heads])
    if asks_all:
        columns = np.arange(len(at.tokens))[None]
    some = np.unique(columns, axis=1, return_index=True)[1]
    rates = layout.of(layout.devices.flops)[some]
    attending, others = at.heads[some] * lengths[some] / rates, at.tokens[some] / rates
    load = attending / max(attending.max(), 1e-300) + others / max(others.max(), 1e-300)
    ranked = some[np.argsort(-load, kind="stable")]
    givers = ranked if len(some) <= FEW else ranked[: FEW // 2]
    for a in givers.tolist():
        takers = [b for b in ranked[::-1].tolist() if a != b and _are_near(layout, a, b)]
        yield from ((a, b) for b in takers[:FEW])


def _are_near(layout: GroupLayout, a: int, b: int) -> bool:
    """Whether devices are of one group, or of neighbours on the ring."""
    apart = abs(int(layout.group[a]) - int(layout.group[b]))
    return apart <= 1 or apart == layout.num_groups - 1
