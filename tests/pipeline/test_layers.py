"""Layers: what crosses a cut, and where the cuts are."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.errors import InputError
from hetjax.pipeline.layers.cost_layers import cluster_layers, crossing_bytes, position_flops
from hetjax.pipeline.program.traced_program import Program, num_bytes
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.stages.cutting import crossing_values, cut


def chain(widths: list[int], batch: int = 4) -> Program:
    """A chain of matrix products, from each width to the next."""
    weights = [jnp.ones(pair) for pair in itertools.pairwise(widths)]

    def loss(weights, x):
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    return trace(loss, weights, jnp.ones((batch, widths[0])))


def scanned(length: int, *, stacked_outputs: bool) -> Program:
    """A scan over blocks, with a mask, a value that skips it, and outputs of every iteration."""

    def loss(params, x):
        mask = jnp.arange(8) < 5
        start = x @ params["first"]

        def body(carry, weight):
            carry = jnp.where(mask, jnp.tanh(carry @ weight), 0.0)
            return carry, jnp.sum(carry, axis=1)

        x, sums = jax.lax.scan(body, start, params["blocks"])
        total = jnp.mean(x * start)
        return total + jnp.mean(sums) if stacked_outputs else total

    params = {"first": jnp.ones((8, 8)), "blocks": jnp.ones((length, 8, 8))}
    return trace(loss, params, jnp.ones((4, 8)))


PROGRAMS = {
    "chain": chain([8, 16, 4, 8, 8]),
    "scan": scanned(5, stacked_outputs=False),
    "scan with outputs": scanned(5, stacked_outputs=True),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_sweep_finds_the_bytes_of_every_cut(name):
    program = PROGRAMS[name]
    one_by_one = [
        sum(num_bytes(value) for value in crossing_values(program, boundary))
        for boundary in range(1, program.num_positions)
    ]
    np.testing.assert_allclose(crossing_bytes(program), [0, *one_by_one, 0])


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("num_layers", [1, 2, 3, 100])
def test_layers_cover_the_program_and_none_is_empty(name, num_layers):
    program = PROGRAMS[name]
    layers = cluster_layers(program, num_layers)
    assert layers[0] == 0
    assert layers[-1] == program.num_positions
    assert 1 <= len(layers) - 1 <= num_layers
    assert (np.add.reduceat(position_flops(program), layers[:-1]) > 0).all()
    assert len(cut(program, layers)) == len(layers) - 1


@settings(max_examples=20)
@given(widths=st.lists(st.sampled_from([4, 8, 16, 32]), min_size=3, max_size=9))
def test_more_layers_are_not_larger(widths):
    program = chain(widths)
    flops = position_flops(program)
    largest = [
        np.add.reduceat(flops, cluster_layers(program, num_layers)[:-1]).max()
        for num_layers in (1, 4, 16)
    ]
    assert largest[0] >= largest[1] >= largest[2]


def test_equal_blocks_make_equal_layers():
    program = chain([32] * 9)
    flops = np.add.reduceat(position_flops(program), cluster_layers(program, 4)[:-1])
    assert flops.max() <= 1.1 * flops.mean()


def test_a_scan_is_cut_between_its_iterations():
    program = scanned(8, stacked_outputs=False)
    layers = cluster_layers(program, 4)
    products = [place for place, step in enumerate(program.steps) if step.name == "dot_general"]
    assert len([edge for edge in layers if products[1] < edge <= products[-1]]) >= 2


def test_cuts_are_where_few_bytes_cross():
    program = chain([8, 64, 8, 64, 8, 64, 8, 64, 8], batch=16)
    crossing = crossing_bytes(program)
    assert {crossing[edge] for edge in cluster_layers(program, 4)[1:-1]} == {16 * 8 * 4}


def test_no_layers():
    with pytest.raises(InputError, match="num_layers is 0; it must be 1 or more"):
        cluster_layers(PROGRAMS["chain"], 0)


def test_a_program_without_arithmetic_is_one_layer():
    program = trace(lambda w, x: (w.reshape(()), 1.0), jnp.ones(1), jnp.ones((4, 8)))
    assert cluster_layers(program, 4) == (0, 1)
