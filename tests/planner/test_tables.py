"""Choices are minimised exactly: beside all of them, and beside the integer program."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hetjax.planner.hap.tables import EliminationOrder, as_graph
from hetjax.planner.intra_op.integer_program import solve


def random_network(rng: Random):
    """Sizes of some variables, and tables of one and two of them; some choices cannot go
    together."""
    sizes = [rng.randint(1, 4) for _ in range(rng.randint(1, 6))]
    scopes = [(variable,) for variable in range(len(sizes))]
    pairs = list(itertools.combinations(range(len(sizes)), 2))
    scopes += [pair[:: rng.choice([1, -1])] for pair in pairs if rng.random() < 0.6]
    draws = np.random.default_rng(rng.getrandbits(32))
    tables = [draws.integers(0, 50, [sizes[v] for v in scope]).astype(float) for scope in scopes]
    for scope, table in zip(scopes, tables, strict=True):
        if len(scope) == 2 and table.size > 1 and rng.random() < 0.3:
            table.flat[rng.randrange(table.size)] = np.inf
    return sizes, scopes, tables


def cost(scopes, tables, choices) -> float:
    pairs = zip(scopes, tables, strict=True)
    return float(sum(table[tuple(choices[v] for v in scope)] for scope, table in pairs))


@given(st.integers(0, 2**32 - 1))
def test_it_is_the_least_of_all(number: int):
    rng = Random(number)
    sizes, scopes, tables = random_network(rng)
    kept = sorted(rng.sample(range(len(sizes)), rng.randint(0, min(2, len(sizes)))))
    found = EliminationOrder(sizes, scopes, kept).minimum(tables)
    every = [
        (cost(scopes, tables, choices), choices)
        for choices in itertools.product(*(range(size) for size in sizes))
    ]
    for at in itertools.product(*(range(sizes[v]) for v in kept)):
        mine = [c for c, choices in every if tuple(choices[v] for v in kept) == at]
        assert found.least[at] == min(mine)
        if np.isfinite(min(mine)):
            assert cost(scopes, tables, found.choices(at)) == min(mine)


def test_variables_of_one_choice_are_in_no_table():
    """There may be more of them side by side than an array has dimensions."""
    many = 70
    scopes = [*itertools.combinations(range(many), 2), (many, 0), (many, 1)]
    tables = [np.ones((1, 1))] * (len(scopes) - 2) + [np.array([[5.0], [2.0]])] * 2
    order = EliminationOrder([1] * many + [2], scopes, kept=[0])
    found = order.minimum(tables)
    assert found.least.tolist() == [len(scopes) - 2 + 4.0]
    assert found.choices([0]) == {**dict.fromkeys(range(many), 0), many: 1}


@given(st.integers(0, 2**32 - 1))
def test_it_is_what_the_integer_program_finds(number: int):
    sizes, scopes, tables = random_network(Random(number))
    least = float(EliminationOrder(sizes, scopes, ()).minimum(tables).least)
    solution = solve(as_graph(sizes, scopes, tables, {}))
    if np.isfinite(least):
        assert solution is not None
        np.testing.assert_allclose(solution.seconds, least)
    else:
        assert solution is None
