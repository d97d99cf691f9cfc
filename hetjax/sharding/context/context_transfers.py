"""What devices send one another for one attention, to the byte.

In a group, queries, keys and values go from those that have the tokens to those that have the
heads, and outputs back; the backward pass sends the gradients the same ways. A head of keys and
values goes to a device once for each of its sub-rings that see it: each has a copy to hand on, and
gradients of its own. Around the ring, each
group hands the keys and values that it had to the next: step t brings a group those of the group t
before it. The backward pass sends them round again, and behind them go their gradients, to which
each group adds its part; the last step brings them home.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from hetjax.errors import InputError
from hetjax.sharding.context.context_split import (
    ContextGroup,
    ContextSplit,
    HeadRange,
    checked_count,
)
from hetjax.sharding.context.sub_rings import SubRing, sub_rings


@dataclass(frozen=True)
class HeadBytes:
    """What one token of one head takes.

    Args:
        size: numbers of a head.
        item_bytes: bytes of a number of queries, keys, values, outputs and what is sent of their
            gradients in a group.
        gradient_bytes: bytes of a number of the gradients of keys and values that go round.

    Raises:
        InputError: one of them is no whole number of 1 or more.

    Example:
        >>> HeadBytes(128, 2).item
        256
    """

    size: int
    item_bytes: int
    gradient_bytes: int = 4

    def __post_init__(self) -> None:
        for field in ("size", "item_bytes", "gradient_bytes"):
            object.__setattr__(self, field, checked_count(field, getattr(self, field)))

    @property
    def item(self) -> int:
        """Bytes of a token's query, key, value or output."""
        return self.size * self.item_bytes

    @property
    def gradient(self) -> int:
        """Bytes of the gradient of a token's key or value on its way round."""
        return self.size * self.gradient_bytes


@dataclass(frozen=True)
class ContextTransfer:
    """What one device sends another.

    Args:
        sender: the number of the device that has it.
        receiver: the number of the device that gets it.
        num_bytes: how much it is.
        heads: the query heads that it is for.
    """

    sender: int
    receiver: int
    num_bytes: int
    heads: tuple[int, int]


def tokens_to_heads(
    split: ContextSplit, head: HeadBytes, *, is_backward: bool = False
) -> tuple[ContextTransfer, ...]:
    """What goes, in all groups, from those that have the tokens to those that have the heads.

    Args:
        split: the context split.
        head: what a token of a head takes.
        is_backward: whether it is the gradients of outputs, instead of queries, keys and values.

    Returns:
        A transfer for every two devices that exchange anything.

    Source: HexiSeq, equation 8, for grouped heads.

    Example:
        >>> group = ContextGroup((0, 1), (6, 2), ((0, 3), (3, 4)))
        >>> split = ContextSplit(8, 4, 2, (group,))
        >>> [(t.sender, t.receiver, t.num_bytes) for t in tokens_to_heads(split, HeadBytes(1, 2))]
        [(0, 1, 36), (1, 0, 28)]
    """
    return tuple(
        ContextTransfer(sender, receiver, num_bytes, heads)
        for sender, receiver, num_bytes, heads in _exchanged(split, head, only_queries=is_backward)
    )


def heads_to_tokens(
    split: ContextSplit, head: HeadBytes, *, is_backward: bool = False
) -> tuple[ContextTransfer, ...]:
    """What goes, in all groups, from those that have the heads to those that have the tokens.

    Args:
        split: the context split.
        head: what a token of a head takes.
        is_backward: whether it is the gradients of queries, keys and values, instead of outputs.
            Those of keys and values that several devices needed are added up where they arrive.

    Returns:
        A transfer for every two devices that exchange anything.

    Example:
        >>> group = ContextGroup((0, 1), (6, 2), ((0, 3), (3, 4)))
        >>> split = ContextSplit(8, 4, 2, (group,))
        >>> [(t.sender, t.receiver, t.num_bytes) for t in heads_to_tokens(split, HeadBytes(1, 2))]
        [(1, 0, 12), (0, 1, 12)]
    """
    only_queries = not is_backward
    return tuple(
        ContextTransfer(receiver, sender, num_bytes, heads)
        for sender, receiver, num_bytes, heads in _exchanged(split, head, only_queries=only_queries)
    )


def ring_step(split: ContextSplit, head: HeadBytes, step: int) -> tuple[ContextTransfer, ...]:
    """The keys and values that go from each group to the next in one step of the ring.

    Args:
        split: the context split.
        head: what a token of a head takes.
        step: the step's number, from 1 to the number of groups less one. It brings each group the
            keys and values of the group that is so many before it.

    Returns:
        A transfer for each group and sub-ring.

    Raises:
        InputError: there is no such step.

    Example:
        >>> groups = tuple(ContextGroup((d,), (n,), ((0, 4),)) for d, n in enumerate((6, 2)))
        >>> split = ContextSplit(8, 4, 2, groups)
        >>> [(t.sender, t.receiver, t.num_bytes) for t in ring_step(split, HeadBytes(1, 2), 1)]
        [(1, 0, 16), (0, 1, 48)]
    """
    return _round(split, step, 0, 2 * head.item)


def ring_gradient_step(
    split: ContextSplit, head: HeadBytes, step: int
) -> tuple[ContextTransfer, ...]:
    """The gradients of keys and values that each group hands on, after it has added its own part.

    Args:
        split: the context split.
        head: what a token of a head takes.
        step: the step whose keys and values they are of, from 1 to the number of groups less one;
            the last brings them home, where the group's own part is added.

    Returns:
        A transfer for each group and sub-ring.

    Raises:
        InputError: there is no such step.
    """
    return _round(split, step, 1, 2 * head.gradient)


def _exchanged(
    split: ContextSplit, head: HeadBytes, *, only_queries: bool
) -> Iterator[tuple[int, int, int, HeadRange]]:
    """Of each group: who has tokens, who has heads, the bytes between them, which heads."""
    copies = Counter[int]()
    for ring in sub_rings(split):
        first, last = ring.key_value_heads
        copies.update(dict.fromkeys(ring.owners, last - first))
    for group in split.groups:
        pairs = zip(group.devices, group.heads, strict=True)
        columns = [
            stop - start + (0 if only_queries else 2 * copies[device])
            for device, (start, stop) in pairs
        ]
        for sender, tokens in zip(group.devices, group.tokens, strict=True):
            for receiver, heads, count in zip(group.devices, group.heads, columns, strict=True):
                if sender != receiver and tokens and count:
                    yield sender, receiver, tokens * count * head.item, heads


def _round(
    split: ContextSplit, step: int, ahead: int, token_bytes: int
) -> tuple[ContextTransfer, ...]:
    """What groups get in a step, or, ahead of it, hand on after it."""
    count = len(split.groups)
    if not 1 <= step < count:
        raise InputError(
            f"step: {step} is not allowed: {count} groups have the steps 1 to {count - 1}"
            if count > 1
            else f"step: {step} is not allowed: one group has no ring"
        )
    rings = sub_rings(split)
    return tuple(
        _handed_on(
            ring, (number - 1 + ahead) % count, (number + ahead) % count, source, token_bytes
        )
        for number in range(count)
        for source in [split.groups[(number - step) % count]]
        for ring in rings
    )


def _handed_on(
    ring: SubRing, giver: int, taker: int, source: ContextGroup, token_bytes: int
) -> ContextTransfer:
    first, last = ring.key_value_heads
    num_bytes = source.length * (last - first) * token_bytes
    return ContextTransfer(ring.owners[giver], ring.owners[taker], num_bytes, ring.heads)
