"""Context splits: positions and heads are covered, causal work balances, bytes are counted."""

from collections import Counter
from random import Random
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_contexts import random_context

from hetjax.errors import InputError
from hetjax.sharding.context.context_split import ContextGroup, ContextSplit
from hetjax.sharding.context.context_transfers import (
    ContextTransfer,
    HeadBytes,
    heads_to_tokens,
    ring_gradient_step,
    ring_step,
    tokens_to_heads,
)
from hetjax.sharding.context.positions import (
    device_positions,
    group_positions,
    seen_pairs,
    seen_rectangle,
)
from hetjax.sharding.context.sub_rings import sub_rings

NUMBERS = st.integers(0, 2**32 - 1)
HEAD = HeadBytes(3, 2)


def listed(runs) -> list[int]:
    return [position for run in runs for position in range(*run)]


@given(number=NUMBERS, is_mirrored=st.booleans())
def test_each_position_has_one_device_in_its_groups_order(number: int, is_mirrored: bool):
    split = random_context(Random(number), is_mirrored=is_mirrored)
    covered = []
    for g, group in enumerate(split.groups):
        own = listed(group_positions(split, g))
        assert own == sorted(own)
        parts = [listed(device_positions(split, g, place)) for place in range(len(group.devices))]
        assert [len(part) for part in parts] == list(group.tokens)
        assert [position for part in parts for position in part] == own
        covered += own
    assert sorted(covered) == list(range(split.length))


@given(number=NUMBERS)
def test_what_a_causal_mask_leaves_of_a_block_is_one_rectangle(number: int):
    split = random_context(Random(number))
    seen = np.tril(np.ones((split.length, split.length), bool))
    for g in range(len(split.groups)):
        queries = listed(group_positions(split, g))
        for source in range(len(split.groups)):
            block = seen[np.ix_(queries, listed(group_positions(split, source)))]
            assert seen_pairs(split, g, source) == block.sum()
            if source != g:
                first, last, start, stop = seen_rectangle(split, g, source)
                expected = np.zeros_like(block)
                expected[first:last, start:stop] = True
                assert (block == expected).all()
                if split.group_lengths[g] % 2 == split.group_lengths[source] % 2 == 0:
                    assert 2 * block.sum() == block.size


def test_mirrored_halves_balance_causal_work():
    groups = tuple(ContextGroup((d,), (2 * n,), ((0, 1),)) for d, n in enumerate((20, 14, 9, 5)))
    split = ContextSplit(96, 1, 1, groups)
    for g, group in enumerate(groups):
        pairs = sum(seen_pairs(split, g, source) for source in range(4))
        assert pairs == pytest.approx(group.length * split.length / 2, rel=0.011)


@given(number=NUMBERS)
def test_sub_rings_have_one_owner_in_each_group(number: int):
    split = random_context(Random(number))
    rings = sub_rings(split)
    assert [head for ring in rings for head in range(*ring.heads)] == list(range(split.query_heads))
    for ring in rings:
        served = {head // split.heads_per_key_value for head in range(*ring.heads)}
        assert list(range(*ring.key_value_heads)) == sorted(served)
        for owner, group in zip(ring.owners, split.groups, strict=True):
            start, stop = group.heads[group.devices.index(owner)]
            assert start <= ring.heads[0] < ring.heads[1] <= stop


def bytes_of(transfers: tuple[ContextTransfer, ...]) -> Counter[tuple[int, int]]:
    found: Counter[tuple[int, int]] = Counter()
    for each in transfers:
        assert each.num_bytes > 0
        assert each.sender != each.receiver
        found[each.sender, each.receiver] += each.num_bytes
    return found


def carried(split: ContextSplit, *, only_queries: bool) -> Counter[tuple[int, int]]:
    """An exchange token by token and head by head: a head's copies go to each that needs it."""
    found: Counter[tuple[int, int]] = Counter()
    for group in split.groups:
        for sender, tokens in zip(group.devices, group.tokens, strict=True):
            for receiver, heads in zip(group.devices, group.heads, strict=True):
                wanted = [("q", head) for head in range(*heads)]
                if not only_queries:
                    own = [ring for ring in sub_rings(split) if receiver in ring.owners]
                    seen = [head for ring in own for head in range(*ring.key_value_heads)]
                    wanted += [(name, head) for name in "kv" for head in seen]
                if sender != receiver:
                    found[sender, receiver] += tokens * len(wanted) * HEAD.item
    return +found


def swapped(transfers: Counter[tuple[int, int]]) -> Counter[tuple[int, int]]:
    return Counter({(b, a): count for (a, b), count in transfers.items()})


@given(number=NUMBERS)
def test_an_exchange_carries_what_walking_over_tokens_and_heads_counts(number: int):
    split = random_context(Random(number))
    inputs, outputs = carried(split, only_queries=False), carried(split, only_queries=True)
    assert bytes_of(tokens_to_heads(split, HEAD)) == inputs
    assert bytes_of(heads_to_tokens(split, HEAD)) == swapped(outputs)
    assert bytes_of(tokens_to_heads(split, HEAD, is_backward=True)) == outputs
    assert bytes_of(heads_to_tokens(split, HEAD, is_backward=True)) == swapped(inputs)


@given(number=NUMBERS)
def test_a_ring_brings_each_group_all_keys_and_their_gradients_home(number: int):
    split = random_context(Random(number))
    count = len(split.groups)
    group_of = {device: g for g, group in enumerate(split.groups) for device in group.devices}
    lengths = split.group_lengths
    for ring in sub_rings(split):
        first, last = ring.key_value_heads
        # What the owner in each group has at the moment: whose keys, and how often added to.
        held, added = list(range(count)), [0] * count
        for step in range(1, count):
            sent = [each for each in ring_step(split, HEAD, step) if each.heads == ring.heads]
            assert sorted(group_of[each.receiver] for each in sent) == list(range(count))
            moved = {group_of[each.sender]: each for each in sent}
            for giver, each in moved.items():
                taker = group_of[each.receiver]
                assert (each.sender, each.receiver) == (ring.owners[giver], ring.owners[taker])
                source = lengths[held[giver]]
                assert each.num_bytes == 2 * source * (last - first) * HEAD.item
            held = [held[group_of[moved[(g - 1) % count].sender]] for g in range(count)]
            assert held == [(g - step) % count for g in range(count)]
            returned = [
                each for each in ring_gradient_step(split, HEAD, step) if each.heads == ring.heads
            ]
            for each in returned:
                giver, taker = group_of[each.sender], group_of[each.receiver]
                added[held[giver]] += 1
                assert taker == (giver + 1) % count
                assert each.num_bytes == 2 * lengths[held[giver]] * (last - first) * HEAD.gradient
                assert step < count - 1 or taker == held[giver]
        assert added == [count - 1] * count


def group(devices=(0, 1), tokens=(3, 1), heads=((0, 3), (3, 4))) -> ContextGroup:
    return ContextGroup(devices, tokens, heads)


def split(length: Any = 4, **options: Any) -> ContextSplit:
    return ContextSplit(length, 4, 2, **{"groups": (group(),), **options})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: group(tokens=(3,)), r"tokens: 1 given for 2 devices"),
        (lambda: group(tokens=(5, -1)), r"tokens\[1\]: -1 is not allowed"),
        (lambda: group(heads=((0, 3), (4, 3))), r"heads\[1\]: \(4, 3\) is not allowed"),
        (lambda: group(devices=(1, 1)), "devices: 1 is given twice"),
        (lambda: group((), (), ()), "devices: none is given"),
        (lambda: ContextSplit(5, 4, 2, (group(),)), "add up to 4, the length is 5"),
        (lambda: ContextSplit(4, 4, 3, (group(),)), "key_value_heads: 3 .*divide the 4"),
        (lambda: ContextSplit(4, 4, 0, (group(),)), "key_value_heads: 0 is not allowed"),
        (lambda: ContextSplit(8, 4, 2, (group(), group())), "devices: 0 is given twice"),
        (
            lambda: ContextSplit(1, 4, 2, (group(), group((2, 3)))),
            "groups: 2 are not allowed for a length of 1: from 1 to 1",
        ),
        (lambda: ContextSplit(4, 4, 2, ()), "groups: 0 are not allowed"),
        (
            lambda: ContextSplit(4, 4, 2, (group(), group((2, 3), (0, 0)))),
            r"groups\[1\].tokens: \(0, 0\) are none",
        ),
        (
            lambda: ContextSplit(4, 9, 3, (group(heads=((0, 2), (5, 8))),)),
            r"groups\[0\].heads: no device has each of heads 2 to 4 and head 8 of 9",
        ),
        (
            lambda: ContextSplit(4, 10**15, 1, (group(),)),
            r"groups\[0\].heads: no device has each of heads 4 to 999999999999999 of 10{15}:",
        ),
        (
            lambda: ContextSplit(4, 4, 2, (group(heads=((0, 3), (2, 4))),)),
            r"groups\[0\].heads: head 2 is given twice",
        ),
        (
            lambda: ContextSplit(4, 4, 2, (group(heads=((0, 3), (3, 6))),)),
            r"groups\[0\].heads: each of heads 4 to 5 is not allowed: there are 4 heads",
        ),
        (lambda: group(tokens=(5.9, 6.2)), r"tokens\[0\]: 5.9 is not allowed: .* whole number"),
        (lambda: group(tokens=(3, float("nan"))), r"tokens\[1\]: nan is not allowed"),
        (lambda: group(tokens=(None, 1)), r"tokens\[0\]: None is not allowed"),
        (lambda: group(tokens="56"), "tokens: '56' is not allowed: a whole number for each"),
        (lambda: group(devices=(True, False)), r"devices\[0\]: True is not allowed"),
        (lambda: group(devices=0), "devices: 0 is not allowed: a whole number for each"),
        (lambda: group(heads=((0, 2.7), (2.7, 4))), r"heads\[0\]: \(0, 2.7\) is not allowed"),
        (lambda: group(heads=((0, 3), (3, 4, 5))), r"heads\[1\]: \(3, 4, 5\) is not allowed"),
        (lambda: group(heads=(3, 4)), r"heads\[0\]: 3 is not allowed: two whole numbers"),
        (lambda: group(heads=None), "heads: None is not allowed: a range for each device"),
        (lambda: split("4"), "length: '4' is not allowed"),
        (lambda: split(4.0), "length: 4.0 is not allowed"),
        (lambda: split(groups=None), "groups: None is not allowed"),
        (lambda: split(groups=((0,),)), r"groups\[0\]: \(0,\) is not allowed"),
        (
            lambda: split(is_mirrored="no"),
            "is_mirrored is 'no'; it must be True or False",
        ),
        (lambda: group_positions(split(), 9), "group: 9 is not allowed: a number from 0 to 0"),
        (lambda: group_positions(split(), -1), "group: -1 is not allowed"),
        (lambda: device_positions(split(), 0, 2), "place: 2 is not allowed: a number from 0 to 1"),
        (lambda: device_positions(split(), 1, 0), "group: 1 is not allowed"),
        (lambda: seen_rectangle(split(), 0, 1), "source: 1 is not allowed: a number from 0 to 0"),
        (lambda: seen_rectangle(split(), 0, 0), "source: 0 is not allowed: another group"),
        (lambda: seen_pairs(split(), 3, 3), "group: 3 is not allowed"),
        (
            lambda: seen_rectangle(split(is_mirrored=False), 0, 0),
            "split: is_mirrored=False is not allowed",
        ),
        (lambda: HeadBytes(0, 2), "size: 0 is not allowed"),
        (
            lambda: HeadBytes(cast(Any, 8.5), 2),
            "size: 8.5 is not allowed: .* whole number",
        ),
        (
            lambda: ring_step(ContextSplit(4, 4, 2, (group(),)), HEAD, 1),
            "step: 1 is not allowed: one group has no ring",
        ),
    ],
)
def test_what_is_wrong_is_named(make, said: str):
    with pytest.raises(InputError, match=said):
        make()
