"""Ring attention over members: equal to dense attention, for any split; and what it sends."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import examples
from context_splits import context_splits, order_of
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from one_device import float64

from hetjax import _compat
from hetjax.runtime.local.local_program import LocalProgram
from hetjax.runtime.moves.union_array import HArray
from hetjax.sharding import Network, Subgroup, deduce, specialize
from hetjax.sharding.annotation.bounds import volume
from hetjax.sharding.attention.equation import AttentionEquation
from hetjax.sharding.attention.mask import Mask
from hetjax.sharding.context.context_split import ContextGroup, ContextSplit
from hetjax.sharding.context.context_transfers import (
    HeadBytes,
    heads_to_tokens,
    ring_gradient_step,
    ring_step,
    tokens_to_heads,
)
from hetjax.sharding.context.ring_attention import ContextRing, ring_attention
from hetjax.sharding.deduction.annotated_program import AnnotatedProgram
from hetjax.sharding.resolution.crossing import crossing
from hetjax.sharding.resolution.senders import BestLink

SIZE, SCALE = 3, 0.6
MASKS = (Mask(), Mask(after=0), Mask(before=3, after=0), Mask(before=2, after=1))


ALONE = ()
"""All members are single devices."""


def make_ring(split: ContextSplit, tensor: Sequence[int] = ALONE) -> ContextRing:
    """A ring whose members are devices of their own, or several with a tensor axis of so many."""
    union = [Subgroup((device,), (), P()) for device in split.devices]
    if tensor:
        ends = itertools.pairwise(itertools.accumulate(tensor, initial=0))
        union = [
            Subgroup(tuple(range(*each)), (("data", 1), ("tensor", each[1] - each[0])), P())
            for each in ends
        ]
    return ContextRing(tuple(union), split, order_of(split))


def draw_arrays(split: ContextSplit, dtype: str = "float64") -> list[np.ndarray]:
    """Queries, keys, values, and the cotangent of the result."""
    rng = np.random.default_rng(0)
    heads = split.query_heads, split.key_value_heads, split.key_value_heads, split.query_heads
    return [rng.normal(size=(2, split.length, each, SIZE)).astype(dtype) for each in heads]


def dense(q, k, v, mask: Mask, segments):
    repeated = (jnp.repeat(each, q.shape[2] // k.shape[2], axis=2) for each in (k, v))
    key, value = repeated
    positions = np.arange(q.shape[1])
    seen = np.broadcast_to(mask.sees(positions[:, None], positions), (q.shape[1],) * 2)
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    scores = jnp.where(seen, SCALE * jnp.einsum("bthd,bshd->bhts", q, key), -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), value)


def ring_program(
    split: ContextSplit, mask: Mask, segments, arrays, tensor: Sequence[int] = ALONE
) -> AnnotatedProgram:
    """The loss and the gradients of a ring's attention, deduced."""
    ring = make_ring(split, tensor)

    def total(q, k, v, w, *segments):
        of_both = (*segments, *segments)
        asked = AttentionEquation(q, k, v, of_both, mask, SCALE, None, None, 1)
        return jnp.sum(ring_attention(asked, ring)[0] * w)

    given = [*arrays, *([] if segments is None else [segments])]
    closed = jax.make_jaxpr(jax.value_and_grad(total, (0, 1, 2)))(*given)
    return deduce(closed, [ring.by_tokens()] * len(given))


def check(split: ContextSplit, mask: Mask, segments=None, tensor: Sequence[int] = ALONE) -> None:
    """Check a split's output and gradients against dense attention."""
    arrays, spans = draw_arrays(split), order_of(split)
    places = np.concatenate([np.arange(span.start, span.stop) for span in spans])

    def loss(q, k, v, w):
        return jnp.sum(dense(q, k, v, mask, segments) * w)

    want = jax.value_and_grad(loss, (0, 1, 2))(*arrays)
    program = ring_program(split, mask, segments, arrays, tensor)
    lies = make_ring(split, tensor).by_tokens()
    given = [*arrays, *([] if segments is None else [segments])]
    devices = jax.devices() if tensor else jax.devices()[:1] * 8
    found = LocalProgram(specialize(program), devices)(
        *(HArray.of(each[:, places], lies, devices) for each in given)
    )
    assert float(found[0].numpy()) == pytest.approx(float(want[0]), rel=1e-12, abs=1e-12)
    for gradient, other in zip(found[1:], want[1], strict=True):
        np.testing.assert_allclose(gradient.numpy(), other[:, places], rtol=1e-10, atol=1e-12)


@examples(usual=3, full=200)
@given(context_splits(), st.sampled_from(MASKS))
def test_any_split_gives_dense_attention_and_its_gradients(split: ContextSplit, mask: Mask):
    with float64():
        check(split, mask)


def test_packed_sequences_see_themselves_alone():
    groups = (
        ContextGroup((0, 1), (5, 0), ((0, 1), (1, 4))),
        ContextGroup((2,), (4,), ((0, 4),)),
    )
    segments = np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1]], np.int32)
    with float64():
        check(ContextSplit(9, 4, 2, groups), Mask(after=0), segments)


def test_devices_of_a_member_divide_its_heads_where_these_are_alike(
    monkeypatch: pytest.MonkeyPatch,
):
    """Two devices divide two heads of keys, each of two queries; three cannot divide four."""
    computed: set[tuple[int, ...]] = set()
    bind = _compat.bind_with

    def noting(equation: Any, params: Any, operands: Any) -> Any:
        if equation.primitive.name.startswith("attention_block"):
            computed.add(tuple(each.shape[2] for each in operands[:2]))
        return bind(equation, params, operands)

    monkeypatch.setattr(_compat, "bind_with", noting)
    groups = (
        ContextGroup((0, 1), (5, 3), ((0, 4), (4, 8))),
        ContextGroup((2,), (4,), ((0, 8),)),
    )
    segments = np.array([[0] * 6 + [1] * 6, [0] * 12], np.int32)
    with float64():
        check(ContextSplit(12, 8, 4, groups), Mask(after=0), segments, tensor=(2, 1, 3))
    assert computed == {(2, 1), (4, 2), (8, 4)}


def moved(program: AnnotatedProgram) -> list[Counter[tuple[int, int]]]:
    """For each move the bytes that devices send one another."""
    found = []
    for move in program.moves:
        shape = program.shapes[move.input]
        assert move.source is not None
        devices = {device: device for device in move.source.devices}
        parts = crossing(
            move.source, move.destination, shape.shape, devices, BestLink(Network.alike())
        ).parts
        sent: Counter[tuple[int, int]] = Counter()
        for part in parts:
            for sender in part.senders:
                for receiver in part.receivers:
                    if sender != receiver:
                        sent[sender, receiver] += volume(part.bounds) * shape.dtype.itemsize
        found.append(sent)
    return found


@examples(usual=5, full=200)
@given(context_splits())
def test_what_is_sent_is_what_the_formulas_say(split: ContextSplit):
    arrays = draw_arrays(split, "float32")
    examples = arrays[0].shape[0]
    head, steps = HeadBytes(SIZE, 4), range(1, len(split.groups))
    program = ring_program(split, Mask(after=0), None, arrays)
    want: Counter[tuple[int, int]] = Counter()
    # The backward pass takes keys and values round again.
    for transfers in (
        tokens_to_heads(split, head),
        heads_to_tokens(split, head),
        tokens_to_heads(split, head, is_backward=True),
        heads_to_tokens(split, head, is_backward=True),
        *(ring_step(split, head, step) for step in steps for _ in range(2)),
        *(ring_gradient_step(split, head, step) for step in steps),
    ):
        for each in transfers:
            if each.sender != each.receiver:
                want[each.sender, each.receiver] += each.num_bytes * examples
    found: Counter[tuple[int, int]] = Counter()
    for sent in moved(program):
        found.update(sent)
    assert +found == +want
