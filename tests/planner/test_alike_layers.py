"""Runs of layers that are alike are costed once, and cost what each of them does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.mesh import Cluster, Link, Subcluster, kind
from hetjax.models import LlamaConfig, language_model
from hetjax.planner import PlanningProblem, make_problem, solve
from hetjax.planner.costs.cost_model import estimate
from hetjax.planner.harp.table_making import execution_options, listed_runs
from hetjax.planner.work.alike_runs import unlike_runs
from hetjax.planner.work.repeating_layers import runs_by_repetition

LINK = Link(25e9, 1e-5)
CLUSTER = Cluster("two", (Subcluster("fast", kind("RTX4090"), 1, 2, LINK, LINK),), ())


def llama(*, scanned: bool, tied: bool = False) -> PlanningProblem:
    """A small Llama of four blocks."""
    config = LlamaConfig(8192, 4, 1024, 8, 8, 2816, 512, tied_embeddings=tied, scan_blocks=scanned)
    model = language_model(config)
    return make_problem(
        model.loss,
        model.parameter_shapes,
        {"tokens": jax.ShapeDtypeStruct((64, config.sequence + 1), jnp.int32)},
        cluster=CLUSTER,
        optimizer=optax.adamw(1e-3),
        num_microbatches=8,
    )


@given(st.lists(st.integers(0, 2), min_size=1, max_size=8))
def test_runs_that_share_a_place_are_of_the_same_kinds(kinds: list[int]):
    firsts, ends, places = unlike_runs(np.array([*kinds, -1]))
    size = len(kinds) + 1
    told = {}
    for i in range(size):
        for j in range(i + 1, size):
            run = (i == 0, tuple([*kinds, -1][i : j + 1]))
            told.setdefault(run, (i, j))
            place = places[i, j]
            assert (firsts[place], ends[place]) == told[run]
    assert len(firsts) == len(told) + 1
    assert (places[np.tri(size, dtype=bool)] == 0).all()


@pytest.mark.parametrize("tied", [False, True])
def test_each_run_takes_what_the_one_takes_that_it_is_like(tied: bool):
    problem = llama(scanned=False, tied=tied)
    listed = listed_runs(problem, problem.runs)
    squares = runs_by_repetition(problem.runs, problem.repeatable_layers)
    shared = listed["nothing"].places
    assert shared is not None
    size = problem.num_layers + 1
    runs, num_listed = np.triu_indices(size, 1), listed["nothing"].boundary_bytes.shape
    assert len(np.unique(shared[runs])) < 0.6 * len(runs[0])
    for option in execution_options(problem, CLUSTER.subclusters[0], (1, 2)):
        one = estimate(problem, listed[option.repeats], option)
        every = estimate(problem, squares[option.repeats], option)
        for name, values in vars(one).items():
            found = listed["nothing"].on_square(np.broadcast_to(values, num_listed))
            expected = np.broadcast_to(vars(every)[name], (size, size))
            np.testing.assert_allclose(found[runs], expected[runs], rtol=1e-9, err_msg=name)


def test_a_llama_is_planned_the_same_scanned_and_not():
    unscanned, scanned = llama(scanned=False), llama(scanned=True)
    kept = [each.runs.residual_bytes[0, -1] for each in (unscanned, scanned)]
    assert kept[1] == pytest.approx(kept[0], rel=0.01)
    times = [solve(each).prediction for each in (unscanned, scanned)]
    assert times[0] is not None
    assert times[1] is not None
    assert times[1].step_time == pytest.approx(times[0].step_time, rel=0.02)
