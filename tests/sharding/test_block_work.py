"""What blocks of an attention hold while they are computed, beside what XLA says of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from hetjax.sharding.attention.mask import Mask, TokenSpan
from hetjax.sharding.context.attention_blocks import ATTEND, ATTEND_BACKWARD, Block
from hetjax.sharding.context.block_work import block_bytes
from hetjax.sharding.deduction.own_primitive_rules import BlockLabel

HEADS, SIZE, BATCH = 8, 16, 2
EACH, BY_FOURS, UNLIKE = (
    tuple((head, head + 1) for head in range(HEADS)),
    ((0, 4), (4, 8)),
    ((0, 1), (1, 4), (4, 8)),
)


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "slots"),
    [
        (1024, 1024, EACH),
        (512, 1536, EACH),
        (1365, 700, EACH),
        (512, 1024, BY_FOURS),
        (512, 1536, UNLIKE),
    ],
)
def test_a_block_holds_what_xla_says(
    queries: int, keys: int, slots: tuple[tuple[int, int], ...], is_backward: bool
):
    spans = (TokenSpan(4096, 4096 + queries),), (TokenSpan(0, keys),)
    block = Block(Mask(after=0), 0.25, slots, *spans)
    primitive = ATTEND_BACKWARD if is_backward else ATTEND
    rows = [(BATCH, queries, HEADS, SIZE), *[(BATCH, keys, len(slots), SIZE)] * 2]
    sums = [(BATCH, queries, HEADS, SIZE), *[(BATCH, queries, HEADS)] * 2] * is_backward
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (*rows, *sums)]

    def run(*arrays: Any) -> Any:
        return primitive.bind(*arrays, block=block)

    analysis = jax.jit(run).lower(*shapes).compile().memory_analysis()
    (equation,) = jax.make_jaxpr(run)(*shapes).eqns
    ranges: dict[int, tuple[int, int]] = {
        BlockLabel.BATCH: (0, BATCH),
        BlockLabel.QUERIES: (0, queries),
        BlockLabel.QUERY_HEADS: (0, HEADS),
        BlockLabel.KEYS: (0, keys),
        BlockLabel.KEY_SLOTS: (0, len(slots)),
    }
    assert analysis is not None
    results = analysis.output_size_in_bytes
    predicted = block_bytes(equation, ranges) + results
    assert predicted == pytest.approx(analysis.temp_size_in_bytes + results, rel=0.1)
