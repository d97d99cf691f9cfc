"""Ring attention over unlike members: tokens become heads, keys go round, heads become tokens.

Members are in groups. Each has some tokens of the sequence; in a group they give each other what it
takes that each has some heads of all the group's tokens. Then the keys and values go round from one
group to the next, and each member attends to what it has, turn by turn.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.annotation.rules import TENSOR
from hetjax.sharding.annotation.subgroup import Subgroup
from hetjax.sharding.attention.block_backward import delta_of
from hetjax.sharding.attention.equation import AttentionEquation
from hetjax.sharding.attention.mask import Mask, Spans
from hetjax.sharding.context.attention_blocks import ATTEND, ATTEND_BACKWARD, Block
from hetjax.sharding.context.context_split import ContextSplit, HeadRange
from hetjax.sharding.context.sub_rings import sub_rings
from hetjax.sharding.deduction.reshard import reshard

TOKENS, HEADS = 1, 2
"""The dimensions of queries, keys and values: [batch, tokens, heads, size]."""


@dataclass(frozen=True)
class ContextRing:
    """How the tokens and heads of a sequence lie among the members of a stage.

    Args:
        union: the members.
        split: which tokens and heads each has; its devices are the members' places, in order.
        order: the positions of all tokens, member by member.
    """

    union: tuple[Subgroup, ...]
    split: ContextSplit
    order: Spans

    @property
    def num_turns(self) -> int:
        """How many groups of keys each member sees, its own the first."""
        return len(self.split.groups)

    @functools.cached_property
    def slots(self) -> tuple[tuple[HeadRange, int], ...]:
        """The query heads that see a head of keys and values, and which head that is.

        A head that query heads of several sub-rings see has a slot in each of them.
        """
        found = []
        for ring in sub_rings(self.split):
            for head in range(*ring.key_value_heads):
                first = max(head * self.split.heads_per_key_value, ring.heads[0])
                last = min((head + 1) * self.split.heads_per_key_value, ring.heads[1])
                found.append(((first, last), head))
        return tuple(found)

    def brought(self, array: Any, annotation: Callable[..., HSharding], *which: int) -> Any:
        """An array that comes to lie as one of the ring's annotations says; of one member, itself.

        Args:
            array: the array.
            annotation: a method of the ring.
            *which: its arguments.
        """
        return array if len(self.union) == 1 else reshard(array, annotation(*which))

    def by_tokens(self, dimension: int = TOKENS, heads: int = 0) -> HSharding:
        """Each member has its tokens, of all heads.

        Args:
            dimension: the dimension of tokens.
            heads: how many heads there are; 0 where there is no dimension of heads.
        """
        several = len(self.union) > 1
        members = [
            _by_heads(group) if heads and heads % _tensor_axis(group) == 0 else group
            for group in self.union
        ]
        return HSharding(tuple(members), dimension, self.split.tokens if several else ())

    def queries(self) -> HSharding:
        """Each member has its heads of its group's tokens."""
        members = enumerate(self.split.groups)
        ranges = [(self._ends[g], heads) for g, group in members for heads in group.heads]
        return HSharding(self._heads_inside, (TOKENS, HEADS), ranges=tuple(ranges))

    def keys(self, turn: int = 0) -> HSharding:
        """Each member has its slots of the tokens of the group that is so many before its own."""
        ranges = [
            (self._ends[(g - turn) % self.num_turns], self._slots_of(heads))
            for g, group in enumerate(self.split.groups)
            for heads in group.heads
        ]
        return HSharding(self._heads_inside, (TOKENS, HEADS), ranges=tuple(ranges))

    def key_tokens(self, turn: int = 0) -> HSharding:
        """The same of what has no heads."""
        ranges = [
            (self._ends[(g - turn) % self.num_turns],)
            for g, group in enumerate(self.split.groups)
            for _ in group.devices
        ]
        return HSharding(self.union, (TOKENS,), ranges=tuple(ranges))

    def divides_heads(self, place: int) -> bool:
        """Whether a member divides its heads over its tensor axis.

        Args:
            place: the member's place.
        """
        return self._heads_inside[place] != self.union[place]

    @functools.cached_property
    def _heads_inside(self) -> tuple[Subgroup, ...]:
        """The members, of which those with a tensor axis divide their heads over it.

        Each device has whole slots, with as many query heads as the next one.
        """
        owned = [self._slots_of(heads) for group in self.split.groups for heads in group.heads]
        found = []
        for group, (first, last) in zip(self.union, owned, strict=True):
            each = {end - start for (start, end), _ in self.slots[first:last]}
            is_even = len(each) == 1 and (last - first) % _tensor_axis(group) == 0
            found.append(_by_heads(group) if is_even else group)
        return tuple(found)

    @functools.cached_property
    def _ends(self) -> tuple[tuple[int, int], ...]:
        """The places of each group's tokens in the order."""
        ends = itertools.accumulate(self.split.group_lengths, initial=0)
        return tuple(itertools.pairwise(ends))

    def _slots_of(self, heads: HeadRange) -> tuple[int, int]:
        """The slots that query heads see."""
        seen = [
            place
            for place, ((first, last), _) in enumerate(self.slots)
            if heads[0] <= first and last <= heads[1]
        ]
        return (seen[0], seen[-1] + 1) if seen else (0, 0)


def _tensor_axis(group: Subgroup) -> int:
    """How many devices of a member divide heads."""
    return dict(group.axes).get(TENSOR, 1)


def _by_heads(group: Subgroup) -> Subgroup:
    """A member that divides heads over its tensor axis."""
    return group.with_spec(PartitionSpec(None, None, TENSOR)) if _tensor_axis(group) > 1 else group


def ring_attention(attention: AttentionEquation, ring: ContextRing) -> tuple[Any, Any]:
    """Attention whose tokens and heads members share.

    Args:
        attention: its operands, divided by tokens among members.
        ring: how members share them.

    Returns:
        What the attention makes: its result, divided by tokens; and the log-sum-exp, by heads.

    Source: HexiSeq, section 3.2.
    """
    query, key, value = (
        _with_batch(each) for each in (attention.query, attention.key, attention.value)
    )
    segments = [each.reshape(-1, each.shape[-1]) for each in attention.segments]
    places = [head for _, head in ring.slots]
    if places != [*range(key.shape[HEADS])]:
        key, value = (jnp.take(each, np.array(places), axis=HEADS) for each in (key, value))
    asked = Asked(ring, attention.mask, attention.scale, bool(segments))
    results: Any = _ring(query, key, value, segments, asked)
    out, total = results
    shape = attention.query.shape[:-1]
    return out.reshape(*shape, out.shape[-1]), total.reshape(shape)


def _with_batch(array: Any) -> Any:
    """[batch, tokens, heads, size] of any leading axes."""
    return array.reshape(-1, *array.shape[-3:])


@dataclass(frozen=True)
class Asked:
    """What an attention asks of a ring.

    Args:
        ring: how members share tokens and heads.
        mask: which keys a query sees.
        scale: what scores are multiplied by.
        has_segments: whether tokens are of segments.
    """

    ring: ContextRing
    mask: Mask
    scale: float
    has_segments: bool

    def block(self, turn: int) -> Block:
        """The block of a turn, all members' together."""
        ring = self.ring
        slots = tuple(heads for heads, _ in ring.slots)
        return Block(
            self.mask, self.scale, slots, ring.order, ring.order, turn > 0, self.has_segments
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _ring(query: Any, key: Any, value: Any, segments: list[Any], asked: Asked) -> tuple[Any, Any]:
    return _forward(query, key, value, segments, asked)[0]


def _forward(
    query: Any, key: Any, value: Any, segments: list[Any], asked: Asked
) -> tuple[tuple[Any, Any], tuple[Any, ...]]:
    ring = asked.ring
    own = ring.brought(query, ring.queries)
    arrays = first = tuple(ring.brought(each, ring.keys) for each in (key, value))
    results: Sequence[Any] = ()
    for turn in range(ring.num_turns):
        following = _next(ring, turn, *arrays)
        of_tokens = _segments_at(ring, segments, turn)
        results = ATTEND.bind(own, *arrays, *of_tokens, *results, block=asked.block(turn))
        arrays = following
    out, total = cast(tuple[Any, Any], results)
    mixed = out.astype(value.dtype)
    # The log-sum-exp stays where it is made: nothing else reads it.
    whole = ring.brought(mixed, ring.by_tokens, TOKENS, mixed.shape[HEADS])
    return (whole, total), (own, *first, segments, mixed, total)


def _next(ring: ContextRing, turn: int, *arrays: Any) -> tuple[Any, ...]:
    """Keys and values as members have them at the next turn; after the last one, none."""
    if turn + 1 == ring.num_turns:
        return ()
    return tuple(reshard(each, ring.keys(turn + 1), is_early=True) for each in arrays)


def _backward(asked: Asked, kept: tuple[Any, ...], cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    ring = asked.ring
    own, *arrays, segments, mixed, total = kept
    # The log-sum-exp has no derivative: nothing that is trained depends on it.
    cotangent = ring.brought(cotangents[0], ring.queries)
    delta = delta_of(mixed, cotangent)
    gradient: list[Any] = []
    own_sums: list[Any] = []
    travelled: list[Any] = []
    for turn in range(ring.num_turns):
        following = _next(ring, turn, *arrays)
        of_tokens = _segments_at(ring, segments, turn)
        operands = (own, *arrays, *of_tokens, cotangent, total, delta, *gradient)
        *gradient, d_keys, d_values = ATTEND_BACKWARD.bind(*operands, block=asked.block(turn))
        if turn == 0:
            own_sums = [d_keys, d_values]
        else:
            # Added here and not in the block, which so need not wait for what is still on its way.
            sums = _added(travelled, [d_keys, d_values])
            home = ring.keys((turn + 1) % ring.num_turns)
            travelled = [reshard(each, home, is_early=True) for each in sums]
        arrays = following
    pairs = zip((*gradient, *_added(travelled, own_sums)), (own, *kept[1:3]), strict=True)
    found = [sums.astype(like.dtype) for sums, like in pairs]
    whole_numbers = [None for _ in segments]
    home = (ring.brought(each, ring.by_tokens, TOKENS, each.shape[HEADS]) for each in found)
    return (*home, whole_numbers)


def _added(travelled: Sequence[Any], own: Sequence[Any]) -> list[Any]:
    """Gradients that came along, with a member's own; at first there are none."""
    if not travelled:
        return list(own)
    return [before + each for before, each in zip(travelled, own, strict=True)]


_ring.defvjp(_forward, _backward)


def _segments_at(ring: ContextRing, segments: Sequence[Any], turn: int) -> list[Any]:
    """The segments of the queries and of the keys of a turn."""
    turns = (0, turn)
    return [ring.brought(s, ring.key_tokens, at) for s, at in zip(segments, turns, strict=False)]
