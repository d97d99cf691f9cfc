"""Tests of what programs hold beside their arguments and results."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hetjax
from hetjax.pipeline.program.temporaries import Temporaries
from hetjax.pipeline.update.alike_leaves import program_of

SIDE = 256
ONE = 4 * SIDE * SIDE
"""Bytes of a matrix."""

x = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)


def held(function: Any, count: int = 1, *, on_cpu: bool = False) -> int:
    """What a function of matrices holds."""
    program, _ = program_of(lambda arrays: [function(*arrays)], [[x] * count])
    return Temporaries(program, on_cpu=on_cpu).most_bytes()


def chain(a: jax.Array) -> jax.Array:
    for _ in range(5):
        a = a @ a
    return a


@pytest.mark.parametrize(
    ("function", "matrices"),
    [
        (lambda a: a @ a, 0),
        (lambda a: jnp.tanh(a) * 2 + 1, 0),
        (lambda a: (a @ a) @ a, 1),
        # The product, and its hyperbolic tangent, which the next product reads from memory.
        (lambda a: jnp.tanh(a @ a) @ a, 2),
        # What is made, and what it is made of.
        (chain, 2),
        # The first product waits for the last one, which is there beside its two factors.
        (lambda a: (a @ a) + ((a @ a.T) @ (a.T @ a)), 4),
        # The last factor is made right before it is read.
        (lambda a: (((a @ a) @ a) @ a) @ (a * 2), 2),
    ],
)
def test_what_is_held(function: Any, matrices: int):
    assert held(function) == matrices * ONE


def test_a_turn_of_a_scan_holds_what_its_body_does():
    def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        return chain(carry), None

    assert held(lambda a: jax.lax.scan(body, a, length=3)[0]) == 2 * ONE


@pytest.mark.parametrize("tokens", [128, 1024])
def test_losses_of_tokens_hold_the_logits_of_a_chunk(tokens: int):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, tokens, 32), (512, 32))]

    def gradients(hidden: jax.Array, weights: jax.Array) -> tuple[jax.Array, ...]:
        def total(hidden: jax.Array, weights: jax.Array) -> jax.Array:
            labels = jnp.zeros((2, tokens), jnp.int32)
            return jnp.sum(hetjax.linear_cross_entropy(hidden, weights, labels, chunk=128))

        return jax.grad(total, argnums=(0, 1))(hidden, weights)

    program, _ = program_of(lambda of: [*gradients(*of)], [arrays])
    logits, weights = 4 * 2 * 128 * 512, 4 * 512 * 32
    small = 4 * 4 * 2 * tokens
    assert 0 <= Temporaries(program).most_bytes() - (2 * logits + weights) < small


@pytest.mark.parametrize(
    ("function", "matrices"),
    [
        # Each product waits for one before it: there is no other order.
        (chain, 2),
        # The last factor is made of an argument alone, and waits from the start.
        (lambda a: (((a @ a) @ a) @ a) @ (a * 2), 3),
        # What a transcendental function gives to several is stored beside what is made of it.
        (lambda a: (lambda t: (t * 2) @ (t + 1))(jnp.tanh(a @ a)), 3),
    ],
)
def test_what_is_held_where_all_runs_as_soon_as_it_can(function: Any, matrices: int):
    assert held(function, on_cpu=True) == matrices * ONE


@pytest.mark.parametrize(("dtype", "scores"), [("float32", 2), ("bfloat16", 0)])
def test_cards_hold_the_scores_of_an_attention(dtype: str, scores: int):
    """Of numbers that cuDNN has no kernel for, and without what a tensor axis divides."""
    heads, tokens = 4, 128
    shape = jax.ShapeDtypeStruct((2, tokens, heads, 8), dtype)

    def gradients(arrays: Any) -> Any:
        def loss(*operands: Any) -> jax.Array:
            return hetjax.attention(*operands).astype(jnp.float32).sum()

        return list(jax.grad(loss, argnums=(0, 1, 2))(*arrays))

    program, _ = program_of(gradients, [[shape] * 3])
    temporaries = Temporaries(program)
    tiles = temporaries.most_bytes() - temporaries.untiled_bytes()
    expected = scores * 4 * 2 * heads * tokens**2
    assert expected <= tiles <= 1.2 * expected
