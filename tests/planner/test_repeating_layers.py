"""Runs of layers that make their modules again: arrays over all runs, against one run at a time."""

import itertools
from random import Random

import numpy as np
import pytest
from cases import trace_model
from hypothesis import given
from hypothesis import strategies as st
from small_models import Model

from hetjax.planner.work.layer_runs import Runs, all_runs
from hetjax.planner.work.repeating_layers import (
    repeatable_layers,
    repeated_by,
    repeated_in,
    repeating_layers,
    runs_by_repetition,
)
from hetjax.planner.work.stage_work import measure, measure_layers


@pytest.fixture(scope="module")
def runs() -> Runs:
    program = trace_model(Model(("dense", "attention", "dense", "dense"), tied=False), 2)
    count = program.num_positions
    layers = tuple(i * count // 9 for i in range(10))
    return all_runs(program, measure_layers(program, layers))


@given(number=st.integers(0, 2**32 - 1))
def test_all_runs_have_what_each_has_alone(runs: Runs, number: int):
    rng = Random(number)
    edges = sorted(rng.sample(range(10), rng.randint(2, 6)))
    pieces = [(a, b) for a, b in itertools.pairwise(edges) if rng.random() < 0.7]
    found = repeating_layers(runs, pieces)
    for first in range(9):
        for end in range(first + 1, 10):
            inside = repeated_in(pieces, (first, end))
            saved = sum(runs.residual_bytes[run] - runs.input_bytes[run] for run in inside)
            again = sum(runs.forward_traffic[run] for run in inside)
            at_once = max((runs.residual_bytes[run] for run in inside), default=0)
            place = (first, end)
            edges_inside = {edge for run in inside for edge in run if first < edge < end}
            saved -= sum(kept_by_both(runs, edge) for edge in edges_inside)
            assert found.residual_bytes[place] == pytest.approx(runs.residual_bytes[place] - saved)
            assert found.again_bytes[place] == at_once
            whole = runs.backward_traffic[place] + again
            assert found.backward_traffic[place] == pytest.approx(whole)


def kept_by_both(runs: Runs, edge: int) -> float:
    """What the layers on both sides of an edge would keep twice, were they apart."""
    kept = runs.residual_bytes
    return kept[edge - 1, edge] + kept[edge, edge + 1] - kept[edge - 1, edge + 1]


def test_a_stage_that_makes_everything_again_has_the_work_of_its_trace():
    program = trace_model(Model(("dense",) * 4, tied=False), 2)
    count = program.num_positions
    layers = (0, *(i * count // 4 for i in range(1, 4)), count)
    pieces = [(1, 2), (2, 3)]
    runs = all_runs(program, measure_layers(program, layers))
    found = runs_by_repetition(runs, pieces)["layers"].of((0, 4))
    places = [(layers[a], layers[b]) for a, b in pieces]
    (work,) = measure(program, (0, count), recompute_runs=[places])
    assert found.again_bytes == work.again_bytes
    assert found.again_share == pytest.approx(
        work.recompute.matmul_flops / work.forward.matmul_flops
    )
    # A layer's own trace does not know what its neighbours keep anyway.
    assert 1.0 <= float(found.residual_bytes) / work.residual_bytes < 1.5


def test_layers_without_structure_are_made_again_each_by_itself():
    assert repeatable_layers((0, 4, 9), ()) == ((0, 1), (1, 2))


def test_what_is_made_again_costs_a_part_of_the_forward_pass(runs: Runs):
    layers = runs_by_repetition(runs, [(2, 5)])["layers"]
    assert layers.again_share[2, 5] == pytest.approx(1.0)
    assert 0 < layers.again_share[0, 9] < 1
    assert layers.again_share[5, 9] == 0
    assert np.all(layers.again_bytes[5:, :] == 0)


@pytest.mark.parametrize("pieces", [[(0, 3), (3, 6), (6, 9)], [(1, 4), (5, 8)], [(2, 3)], []])
def test_half_of_the_pieces_are_those_of_a_plan(runs: Runs, pieces: list[tuple[int, int]]):
    half = runs_by_repetition(runs, pieces)["half"]
    for place in itertools.combinations(range(10), 2):
        last = repeated_by("half", pieces, place)
        assert len(last) == (len(repeated_in(pieces, place)) + 1) // 2
        alone = runs_by_repetition(runs, last)["layers"] if last else runs
        for name in ("backward_flops", "residual_bytes", "again_bytes", "again_share"):
            found, expected = getattr(half, name)[place], getattr(alone, name)[place]
            assert found == pytest.approx(expected), (place, name)
