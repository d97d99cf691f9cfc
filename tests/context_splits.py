"""Random context splits."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import strategies as st
from random_annotations import sizes_of

from hetjax.sharding.attention.mask import Spans, TokenSpan
from hetjax.sharding.context.context_split import ContextGroup, ContextSplit
from hetjax.sharding.context.positions import positions_in_order


@st.composite
def context_splits(draw) -> ContextSplit:
    """A split of up to six members in up to four groups, each in its place."""
    key_heads = draw(st.sampled_from((1, 2, 3)))
    each = draw(st.sampled_from((1, 2, 3)))
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4).filter(lambda n: sum(n) < 7))
    lengths = [1 + size for size in draw(sizes_of(draw(st.integers(0, 12)), len(counts)))]
    groups, places = [], itertools.count()
    for count, length in zip(counts, lengths, strict=True):
        ends = itertools.pairwise(np.cumsum([0, *draw(sizes_of(key_heads * each, count))]))
        heads = draw(st.permutations([(int(start), int(stop)) for start, stop in ends]))
        devices = tuple(itertools.islice(places, count))
        groups.append(ContextGroup(devices, draw(sizes_of(length, count)), tuple(heads)))
    mirrored = draw(st.booleans())
    return ContextSplit(sum(lengths), key_heads * each, key_heads, tuple(groups), mirrored)


def order_of(split: ContextSplit) -> Spans:
    """The positions of the tokens, member by member."""
    return tuple(TokenSpan(*run) for run in positions_in_order(split))
