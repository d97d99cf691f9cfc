"""Attention by blocks: any division of the tokens gives what dense attention does."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import examples
from dense_attention import dense_attention, numbers_of, seen_by
from hypothesis import given
from hypothesis import strategies as st

from hetjax.sharding.attention.block import attend_block, merge
from hetjax.sharding.attention.block_backward import attend_block_backward, delta_of
from hetjax.sharding.attention.mask import Mask, Tokens, TokenSpan, num_tokens
from hetjax.sharding.attention.tiles import tiling

SCALE = 0.3
HEADS = 6


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@dataclass(frozen=True)
class Drawn:
    """Queries, keys, values and a cotangent, and which keys a query sees."""

    mask: Mask
    spans: tuple[tuple[TokenSpan, ...], tuple[TokenSpan, ...]]
    segments: Any
    arrays: Any

    def tokens(self, side: int, *, known: bool, part: slice = slice(None)) -> Tokens:
        """Of the queries or the keys, or of some of them."""
        segments = None if self.segments is None else self.segments[side]
        positions = numbers_of(self.spans[side])[part]
        known_spans = self.spans[side] if part == slice(None) else single_spans(positions)
        return Tokens(
            known_spans if known else None,
            None if known else positions,
            None if segments is None else segments[:, part],
        )

    def dense(self) -> tuple[np.ndarray, ...]:
        queries, keys = map(numbers_of, self.spans)
        seen = seen_by(self.mask, queries, keys, self.segments)
        q, k, v, d_out = self.arrays
        return dense_attention(q, k, v, seen, SCALE, d_out)


def single_spans(positions: np.ndarray) -> tuple[TokenSpan, ...]:
    return tuple(TokenSpan(int(p), int(p) + 1) for p in positions) or (TokenSpan(0, 0),)


def drawn(rng: Random) -> Drawn:
    lengths = [rng.choice((0, 1, 2, 9, 17, 23, 40)) for _ in range(2)]
    masks = [Mask(), Mask(after=0), Mask(4, 0), Mask(3, 3), Mask(0, 0), Mask(2, 7), Mask(5)]
    spans = []
    for length in lengths:
        early, start = rng.randint(0, length), rng.randint(0, 20)
        late = rng.randint(start + early, 60)
        spans.append((TokenSpan(start, start + early), TokenSpan(late, late + length - early)))
    numbers = np.random.default_rng(rng.getrandbits(32))
    groups, size, wide = rng.choice((1, 2, 3, 6)), rng.randint(1, 5), rng.randint(1, 5)
    (t, s), packed = lengths, rng.random() < 0.4
    shapes = (2, t, HEADS, size), (2, s, groups, size), (2, s, groups, wide), (2, t, HEADS, wide)
    return Drawn(
        rng.choice(masks),
        (spans[0], spans[1]),
        [np.sort(numbers.integers(0, 4, (2, n))) for n in lengths] if packed else None,
        [numbers.normal(size=shape) for shape in shapes],
    )


def check(found: Any, expected: Any) -> None:
    for array, whole in zip(found, expected, strict=True):
        assert array.shape == whole.shape
        np.testing.assert_allclose(array, whole, rtol=1e-12, atol=1e-12)


@examples(usual=10)
@given(st.integers(0, 2**32 - 1))
def test_a_block_is_dense_attention(number: int):
    rng = Random(number)
    case = drawn(rng)
    q, k, v, d_out = case.arrays
    tokens = [case.tokens(side, known=rng.random() < 0.5) for side in (0, 1)]
    options = {"mask": case.mask, "scale": SCALE, "largest_tile": 8}

    @jax.jit
    def both(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        out, lse = attend_block(q, k, v, *tokens, **options)
        delta = delta_of(out, d_out)
        return out, *attend_block_backward(q, k, v, lse, d_out, delta, *tokens, **options)

    check(both(q, k, v, d_out), case.dense())


@examples(usual=5)
@given(st.integers(0, 2**32 - 1))
def test_blocks_add_up_to_the_whole(number: int):
    """Queries and keys each divided anywhere, the blocks merged in any order."""
    rng = Random(number)
    case = drawn(rng)
    q, k, v, d_out = case.arrays
    options = {"mask": case.mask, "scale": SCALE, "largest_tile": 16}
    parts = [parts_of(rng, num_tokens(spans)) for spans in case.spans]

    @jax.jit
    def by_blocks(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        outs = []
        d_q, d_k, d_v = (jnp.zeros_like(each) for each in (q, k, v))
        for rows in parts[0]:
            queries = case.tokens(0, known=True, part=rows)
            blocks = [(each, case.tokens(1, known=True, part=each)) for each in parts[1]]
            rng.shuffle(blocks)
            found = [
                attend_block(q[:, rows], k[:, c], v[:, c], queries, keys, **options)
                for c, keys in blocks
            ]
            out, lse = found[0]
            for other in found[1:]:
                out, lse = merge(out, lse, *other)
            delta = delta_of(out, d_out[:, rows])
            for c, keys in blocks:
                given = q[:, rows], k[:, c], v[:, c], lse, d_out[:, rows], delta
                summands = attend_block_backward(*given, queries, keys, **options)
                d_q = d_q.at[:, rows].add(summands[0])
                d_k, d_v = d_k.at[:, c].add(summands[1]), d_v.at[:, c].add(summands[2])
            outs.append(out)
        return jnp.concatenate(outs, axis=1), d_q, d_k, d_v

    check(by_blocks(q, k, v, d_out), case.dense())


def parts_of(rng: Random, length: int) -> list[slice]:
    cuts = sorted(rng.randint(0, length) for _ in range(rng.randint(0, 2)))
    return [slice(a, b) for a, b in zip([0, *cuts], [*cuts, length], strict=True)]


@given(st.integers(0, 2**32 - 1))
def test_tiles_leave_out_what_nobody_sees_and_mask_what_some_do(number: int):
    rng = Random(number)
    spans = [
        tuple(
            TokenSpan(start, start + rng.randint(0, 20))
            for start in sorted(rng.sample(range(60), 2))
        )
        for _ in range(2)
    ]
    mask = Mask(rng.choice((None, 0, 5)), rng.choice((None, 0, 5)))
    queries, keys = map(numbers_of, spans)
    found = tiling(len(queries), len(keys), mask, *spans, False, 8)
    seen = np.broadcast_to(mask.sees(queries[:, None], keys), (len(queries), len(keys)))
    kinds = {tuple(pair): kind for kind in ("whole", "partly") for pair in getattr(found, kind)}
    for i in range(0, len(queries), found.query_tile or 1):
        for j in range(0, len(keys), found.key_tile or 1):
            tile = seen[i : i + found.query_tile, j : j + found.key_tile]
            kind = kinds.pop((i // found.query_tile, j // found.key_tile), "none")
            is_short = j + found.key_tile > len(keys)
            assert kind == ("none" if not tile.any() else "partly" if is_short else kind)
            assert kind != "whole" or tile.all()
            assert kind != "partly" or is_short or not tile.all()
    assert not kinds


def test_a_causal_sequence_takes_half_and_a_remote_mirrored_block_no_mask():
    whole, length = (TokenSpan(0, 8192),), 8192
    found = tiling(length, length, Mask(after=0), whole, whole, False, 256)
    assert found.num_pairs == length * (length + 256) // 2
    # The second pair of mirrored shards of a sequence, seen from the first.
    outer, inner = (
        (TokenSpan(0, 512), TokenSpan(7680, 8192)),
        (TokenSpan(512, 1024), TokenSpan(7168, 7680)),
    )
    found = tiling(1024, 1024, Mask(after=0), outer, inner, False, 256)
    assert found.num_pairs == 1024 * 1024 // 2
    assert not len(found.partly)
