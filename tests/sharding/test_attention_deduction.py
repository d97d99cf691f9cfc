"""Attention on unions: what may be divided, and what submeshes exchange where it may not."""

from random import Random
from typing import Any

import jax
import pytest
from cases import examples
from deducing import check, drawn, random_annotation, random_union, run
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import hetjax
from hetjax import InputError
from hetjax.sharding import PARTIAL, HSharding, Subgroup

TWO = Subgroup((0, 1), (("tensor", 2),), P())
ONE = Subgroup((2,), (), P())
WHOLE = HSharding((TWO, ONE))
HEADS = TWO.with_spec(P(None, None, "tensor"))
INPUTS = drawn((3, 20, 4, 8), (3, 20, 2, 8), (3, 20, 2, 8), (3, 20, 4, 8))


def causal(q: Any, k: Any, v: Any, d_out: Any) -> Any:
    out, back = jax.vjp(lambda q, k, v: hetjax.attention(q, k, v, causal=True, window=9), q, k, v)
    return (out, *back(d_out))


def shared(dimension: int, *sizes: int, first: Subgroup = TWO) -> HSharding:
    return HSharding((first, ONE), dimension, sizes)


DIVIDED: dict[str, list[HSharding]] = {
    "examples": [shared(0, 2, 1)] * 4,
    "heads": [shared(2, 2, 2), shared(2, 1, 1), shared(2, 1, 1), shared(2, 2, 2)],
    "queries": [shared(1, 13, 7), WHOLE, WHOLE, shared(1, 13, 7)],
    "heads inside": [HSharding((HEADS, ONE))] * 4,
    "queries, and heads inside": [
        shared(1, 13, 7, first=HEADS),
        *[HSharding((HEADS, ONE))] * 2,
        shared(1, 13, 7, first=HEADS),
    ],
    "queries inside": [
        HSharding((TWO.with_spec(P(None, "tensor")), ONE)),
        *[WHOLE] * 2,
        HSharding((TWO.with_spec(P(None, "tensor")), ONE)),
    ],
}


EXPECTED = jax.jit(causal)(*INPUTS)


@pytest.mark.parametrize("name", DIVIDED)
def test_nothing_moves_where_it_is_divided_along_what_it_may_be(name: str):
    found, specialized = run(causal, INPUTS, DIVIDED[name], sums_stay=True)
    check(found, EXPECTED)
    assert not list(specialized.program.moves)


def test_over_shared_queries_gradients_of_keys_are_partial_sums():
    found, _ = run(causal, INPUTS, DIVIDED["queries"])
    out, d_q, d_k, d_v = (each.annotation for each in found)
    assert (out.hdim, d_q.hdim) == (1, 1)
    assert (d_k.hdim, d_v.hdim) == (PARTIAL, PARTIAL)


def test_shared_keys_are_refused_with_the_users_line():
    keys = [WHOLE, shared(1, 13, 7), shared(1, 13, 7), WHOLE]
    with pytest.raises(InputError) as refused:
        run(causal, INPUTS, keys)
    assert str(refused.value).startswith(f"attention at {__file__}:")
    assert "operand 1 as it lies: its dimension 1 is divided" in str(refused.value)


@examples(usual=2)
@given(st.integers(0, 2**32 - 1))
def test_any_annotations_give_the_same(number: int):
    rng = Random(number)
    union = random_union(rng)
    annotations = [random_annotation(rng, union, each.shape) for each in INPUTS]
    found, _ = run(causal, INPUTS, annotations, mend=True, sums_stay=rng.random() < 0.5)
    check(found, EXPECTED)
