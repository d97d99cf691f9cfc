"""Sums among submeshes: who gets summands adds them, and large sums go in two phases."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import examples
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from hetjax import HArray, reshard
from hetjax.runtime.local.local_program import LocalProgram
from hetjax.sharding import PARTIAL, HSharding, Subgroup, deduce, specialize
from hetjax.sharding.deduction import local_additions
from hetjax.sharding.deduction.annotated_program import (
    Addition,
    AnnotatedProgram,
    Move,
    elements_between,
)
from hetjax.sharding.deduction.local_additions import with_local_additions

MESHES = (
    Subgroup((0, 1), (("t", 2),), P()),
    Subgroup((2,), (("t", 1),), P()),
    Subgroup((3, 4), (("t", 2),), P()),
    Subgroup((5,), (("t", 1),), P()),
)


def summed(x: jax.Array, w: jax.Array, destination: HSharding) -> jax.Array:
    return jnp.sin(reshard(x @ w, destination))


def specialized(groups: tuple[Subgroup, ...], sizes: tuple[int, ...], destination: HSharding):
    """The product over a dimension that submeshes share; its inputs, and what it gives."""
    columns, rows = (HSharding(groups, dimension, sizes) for dimension in (1, 0))
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=s).astype(np.float32) for s in ((6, sum(sizes)), (sum(sizes), 8)))
    traced = jax.make_jaxpr(lambda x, w: summed(x, w, destination))(x, w)
    program = specialize(deduce(traced, [columns, rows]))
    return program, (HArray.of(x, columns), HArray.of(w, rows)), np.sin(x @ w)


@examples(usual=10, full=100)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4).map(tuple),
    spec=st.sampled_from([P(), P("t"), P(None, "t")]),
    is_whole=st.booleans(),
    is_large=st.booleans(),
)
def test_every_submesh_has_the_same_bits_of_the_sum(sizes, spec, is_whole, is_large):
    groups = MESHES[: len(sizes)]
    inside = tuple(group.with_spec(spec) for group in groups)
    uneven = {2: (2, 4), 3: (2, 2, 2), 4: (2, 0, 4, 0)}[len(sizes)]
    destination = HSharding(inside) if is_whole else HSharding(inside, 0, uneven)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_additions, "LARGE_BYTES", 0 if is_large else 2**40)
        program, inputs, expected = specialized(groups, sizes, destination)
        (found,) = LocalProgram(program)(*inputs)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert any(isinstance(node, Addition) for node in program.program.nodes)
    if is_whole and spec == P():
        first, *others = (np.asarray(found[device]) for device in destination.devices)
        for other in others:
            np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("is_large", [False, True])
def test_a_large_sum_sends_less(monkeypatch, is_large):
    """Of four submeshes each sends three sums, or two times three quarters of one."""
    alone = tuple(Subgroup((device,), (), P()) for device in range(4))
    monkeypatch.setattr(local_additions, "LARGE_BYTES", 0 if is_large else 2**40)
    program, _, _ = specialized(alone, (1, 2, 3, 4), HSharding(alone))
    moves = [step for step in program.steps if isinstance(step, Move)]
    sent = sum(elements_between(move.source, move.destination, (6, 8)) or 0 for move in moves)
    assert sent == (4 * 2 * 36 if is_large else 4 * 3 * 48)


def test_sums_that_follow_each_other_are_moved_together(monkeypatch):
    """Additions come after the last move, and second phases after the additions."""
    monkeypatch.setattr(local_additions, "LARGE_BYTES", 0)
    groups = MESHES[:3]
    source, whole = HSharding(groups, PARTIAL), HSharding(groups)
    shape = jax.ShapeDtypeStruct((6, 8), np.float32)
    moves = (Move(0, 2, source, whole), Move(1, 3, source, whole))
    lies = (source, source, whole, whole)
    program = AnnotatedProgram((0, 1), (2, 3), (shape,) * 4, lies, {}, moves)
    kinds = [type(node) for node in with_local_additions(program).nodes]
    assert kinds == [Move] * 6 + [Addition] * 2 + [Move] * 2
