"""Parameters that several modules have: how they are stored where the ways are many."""

from collections.abc import Mapping
from random import Random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import examples
from hypothesis import given
from hypothesis import strategies as st
from random_programs import chain_of_program

from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.planner.hap import held_parameters
from hetjax.planner.hap.chain_search import ChainSearch
from hetjax.planner.hap.held_parameters import descended, used_alike
from hetjax.planner.module_programs.program import Stored
from hetjax.planner.module_programs.rates import DirectNetwork, MemberSpeed, Rates

WIDTH, ROWS, EXAMPLES = 8, 3, 12


def chain_search(rows: int = ROWS) -> ChainSearch:
    """Blocks that are gone through twice: all modules share their parameters."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def twice(x: jax.Array) -> jax.Array:
            return jax.lax.scan(lambda x, row: (jnp.tanh(x @ row), None), x, w)[0]

        return jnp.mean(twice(twice(x)) ** 2)

    shapes = (jnp.zeros((rows, WIDTH, WIDTH)), jnp.zeros((EXAMPLES, WIDTH)))
    return ChainSearch(chain_of_program(trace(loss, *shapes), EXAMPLES), 8.0)


@pytest.fixture(scope="module")
def search() -> ChainSearch:
    return chain_search()


@examples(5, 50)
@given(number=st.integers(0, 2**32 - 1))
def test_the_bound_is_under_what_all_ways_give_and_that_under_a_descent(
    search: ChainSearch, number: int
):
    rng = Random(number)
    speeds = tuple(
        MemberSpeed(10 ** rng.uniform(9, 12), 10 ** rng.uniform(8, 11), 1e9) for _ in range(2)
    )
    bandwidths = tuple(10 ** rng.uniform(6, 10) for _ in range(2))
    rates = Rates(speeds, DirectNetwork(bandwidths, 10 ** rng.uniform(-6, -3)))
    shares = np.tile(rates.proportional, (len(search.dimensions.units), 1))
    ratios, weights = [shares] * len(search.networks), np.array([0.25, 0.75])
    exact = search.best(rates, ratios, weights)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(held_parameters, "MOST_HELD", 0)
        found = search.best(rates, ratios, weights)
    assert found.bound <= exact.bound * (1 + 1e-9)
    assert exact.bound <= found.seconds * (1 + 1e-9)


def test_blocks_of_many_rows_are_solved():
    """All ways would be 5 to the 32nd."""
    search = chain_search(rows=32)
    rates = Rates((MemberSpeed(1e9, 1e9, 1e9),) * 2, DirectNetwork((1e8, 1e8), 1e-5))
    shares = np.tile(rates.proportional, (len(search.dimensions.units), 1))
    found = search.best(rates, [shares] * len(search.networks), np.array([0.5, 0.5]))
    assert 0 < found.bound <= found.seconds


@examples(20, 200)
@given(number=st.integers(0, 2**32 - 1))
def test_a_descent_ends_where_no_single_change_is_cheaper(number: int):
    rng = Random(number)
    parts = [ParameterPart(leaf) for leaf in range(4)]
    alike = [parts[:2], parts[2:3], parts[3:]]
    options = {part: [Stored(-1, -1), Stored(-1, 0), Stored(0, 0)] for part in parts}
    costs: dict[tuple[Stored, ...], float] = {}

    def solve(held: Mapping[ParameterPart, Stored]) -> tuple[float, tuple[Stored, ...]]:
        key = tuple(held[part] for part in parts)
        return costs.setdefault(key, rng.random()), key

    seconds, found = descended(alike, options, dict.fromkeys(parts, Stored(-1, -1)), solve)
    assert found[0] == found[1]
    held = dict(zip(parts, found, strict=True))
    for together in alike:
        for stored in options[together[0]]:
            assert solve({**held, **dict.fromkeys(together, stored)})[0] >= seconds


def test_rows_that_modules_use_at_the_same_place_are_used_alike():
    """Modules have two rows each; those of the first and the last one are like no others."""
    search = chain_search(rows=32)
    assert sorted(map(len, used_alike(search.chain))) == [1, 1, 15, 15]
