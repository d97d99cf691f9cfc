"""Problems that follow from two traces are those that a trace at their own size gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import examples
from hypothesis import given
from hypothesis import strategies as st
from small_models import BLOCKS, Model, make_batch

from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster
from hetjax.pipeline.program.traced_program import with_examples
from hetjax.pipeline.stages.resized import Between, UnlikeError, is_alike
from hetjax.planner.problem.problem import PlanningProblem, make_problem
from hetjax.planner.problem.resized_problem import ResizedProblems
from hetjax.planner.work.stage_work import measure

EXAMPLES = 64
KIND = DeviceKind("test", {"float32": 1e12}, 10**9, 1e11, source="made up")
LINK = Link(1e9, 1e-5)
CLUSTER = Cluster("test", (Subcluster("only", KIND, 1, 4, LINK, LINK),))


def problem_of(
    loss: Callable[..., Any], parameters: Any, batch: Any, examples: int
) -> PlanningProblem:
    return make_problem(
        loss,
        parameters,
        with_examples(batch, examples),
        cluster=CLUSTER,
        optimizer=optax.sgd(1e-2),
        num_microbatches=1,
    )


def check_resized(
    loss: Callable[..., Any], parameters: Any, batch: Any, sizes: tuple[int, int, int]
) -> None:
    """Check everything that a search asks of a problem, and the work of other stages."""
    first, size, second = sizes
    least, most = (problem_of(loss, parameters, batch, each) for each in (first, second))
    resized = ResizedProblems(least, most).at(1, size)
    traced = problem_of(loss, parameters, batch, size)
    for field in ("works", "layers", "sections", "dtype", "microbatch_size", "optimizer_bytes"):
        assert getattr(resized, field) == getattr(traced, field), field
    assert is_alike(resized.program, traced.program)
    assert resized.program.fingerprint == traced.program.fingerprint
    for devices in (2, 4):
        costs = resized.tensor_costs(devices), traced.tensor_costs(devices)
        assert (costs[0] is None) == (costs[1] is None)
        for name, values in vars(costs[0]).items() if costs[0] else ():
            np.testing.assert_array_equal(values, getattr(costs[1], name), err_msg=name)
    halves = traced.layers[:1] + traced.layers[len(traced.layers) // 2 :]
    options: Any = {"recompute": [True] * (len(halves) - 1), "split": True}
    again = measure(resized.program, halves, traces=resized.traces, **options)
    assert again == measure(traced.program, halves, **options)


def three_sizes() -> st.SearchStrategy[tuple[int, int, int]]:
    several = st.sets(st.integers(2, 12), min_size=3, max_size=3)
    return several.map(lambda sizes: tuple(sorted(sizes)))  # type: ignore[return-value]


RESIZED = sorted(set(BLOCKS) - {"custom_rules"})
"""Blocks without a backward pass of the user's own, which may look at sizes itself."""


@pytest.mark.parametrize("name", RESIZED)
def test_every_block_is_resized(name: str):
    model = Model((name, name))
    parameters = jax.eval_shape(model.init)
    check_resized(model.loss, parameters, make_batch(EXAMPLES), (2, 6, 8))


@examples(usual=4, full=100)
@given(
    blocks=st.lists(st.sampled_from(RESIZED), min_size=1, max_size=3),
    tied=st.booleans(),
    counted=st.booleans(),
    half_parameters=st.booleans(),
    sizes=three_sizes(),
)
def test_any_model_is_resized_as_it_would_be_traced(
    blocks: list[str],
    tied: bool,
    counted: bool,
    half_parameters: bool,
    sizes: tuple[int, int, int],
):
    model = Model(tuple(blocks), tied, counted, half_parameters)
    parameters = jax.eval_shape(model.init)
    check_resized(model.loss, parameters, make_batch(EXAMPLES), sizes)


def test_a_backward_pass_of_the_users_own_is_traced():
    model = Model(("custom_rules",))
    parameters = jax.eval_shape(model.init)
    with pytest.raises(UnlikeError):
        check_resized(model.loss, parameters, make_batch(EXAMPLES), (2, 6, 8))


WEIGHT = jax.ShapeDtypeStruct((8, 8), jnp.float32)
ROWS = jax.ShapeDtypeStruct((EXAMPLES, 8), jnp.float32)


def looks_at_its_size(w: jax.Array, x: jax.Array) -> jax.Array:
    x = jnp.tanh(x @ w)
    return jnp.mean((x @ w if x.shape[0] > 4 else x) ** 2)


def compares_all_pairs(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(((x @ w) @ x.T).reshape(-1) ** 2)


def pairs_examples(w: jax.Array, x: jax.Array) -> jax.Array:
    halves = x.reshape(x.shape[0] // 2, 2, 8) if x.shape[0] % 2 == 0 else x[:, None]
    return jnp.mean((halves @ w) ** 2)


@pytest.mark.parametrize("loss", [looks_at_its_size, compares_all_pairs, pairs_examples])
def test_what_does_not_grow_evenly_is_not_guessed(loss: Callable[..., Any]):
    least, most = (problem_of(loss, WEIGHT, ROWS, each) for each in (2, 9))
    with pytest.raises(UnlikeError):
        ResizedProblems(least, most).at(1, 6)


def test_sizes_that_grow_evenly():
    between = Between(2, 8, 4)
    assert between.size(2 * 6 - 1, 8 * 6 - 1) == 4 * 6 - 1
    for sizes in ((4, 64), (1, 2), (8, 512), (2 * 3, 8 * 9)):
        with pytest.raises(UnlikeError):
            between.size(*sizes)
