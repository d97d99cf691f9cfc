"""Problems of all numbers of microbatches: what is traced for them, and what when that misleads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from hetjax.collecting import seldom_collected
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster
from hetjax.planner import (
    DynamicProgram,
    PlanningProblem,
    PlanOptions,
    choose_microbatches,
    make_problem,
)
from hetjax.planner.hap.hap_planner import chain_of_problem
from hetjax.planner.harp.microbatches import Choice, divisors
from hetjax.planner.problem.options import DEFAULTS
from hetjax.planner.problem.problem import trace_microbatch
from hetjax.planner.problem.problems import Problems
from hetjax.planner.work import stage_traces as traces_module

BATCH, WIDTH, BLOCKS = 64, 64, 6
KIND = DeviceKind("test", {"float32": 1e12}, 10**9, 1e11, source="made up")
LINK = Link(1e9, 1e-5)
CLUSTER = Cluster("test", (Subcluster("only", KIND, 1, 2, LINK, LINK),))
WEIGHTS = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * BLOCKS
ROWS = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
COUNTS = divisors(BATCH)


def plain(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


class Traced:
    """A loss function that knows for which numbers of examples it was traced."""

    def __init__(self, loss: Callable[..., jax.Array]):
        self.loss, self.sizes = loss, list[int]()

    def __call__(self, weights: Any, x: jax.Array) -> jax.Array:
        self.sizes.append(x.shape[0])
        return self.loss(weights, x)


def problems_of(
    loss: Callable[..., Any],
    counts: tuple[int, ...] = COUNTS,
    options: PlanOptions = DEFAULTS,
) -> Problems:
    def state(count: int) -> PlanningProblem:
        optimizer = optax.adam(1e-3)
        return make_problem(
            loss,
            WEIGHTS,
            ROWS,
            cluster=CLUSTER,
            optimizer=optimizer,
            num_microbatches=count,
            options=options,
        )

    return Problems(
        state, lambda count: trace_microbatch(loss, WEIGHTS, ROWS, count)[0], BATCH, counts
    )


def chosen(problems: Problems) -> Choice:
    planner = DynamicProgram()
    return choose_microbatches(problems.of, BATCH, planner, COUNTS, traced=problems.traced)


def test_few_sizes_are_traced_and_their_layers_once(monkeypatch: pytest.MonkeyPatch):
    """Seven sizes: one example, the ends of the others, and what was chosen."""
    passes: list[int] = []
    trace_stage = traces_module.trace_stage

    def counting(*arguments: Any) -> Any:
        passes.append(1)
        return trace_stage(*arguments)

    monkeypatch.setattr(traces_module, "trace_stage", counting)
    loss = Traced(plain)
    alone = problems_of(plain, ()).of(1)
    assert alone.num_layers == BLOCKS
    of_one_size = len(passes)
    choice = chosen(problems_of(loss))
    assert set(choice.step_times) == set(COUNTS)
    assert set(loss.sizes) <= {1, 2, BATCH, choice.problem.microbatch_size}
    assert len(loss.sizes) <= 4
    assert len(passes) <= 4 * of_one_size


def test_the_choice_is_that_of_traces_at_all_sizes():
    choice, expected = chosen(problems_of(plain)), chosen(problems_of(plain, ()))
    assert choice.step_times == expected.step_times
    assert choice.found.plan == expected.found.plan
    assert choice.problem.works == expected.problem.works


def test_a_problem_that_was_chosen_can_be_computed():
    problem = problems_of(plain).traced(8)
    step = problem.program.steps[0]
    assert step.evaluate(jnp.ones((8, WIDTH)), jnp.ones((WIDTH, WIDTH)))[0].shape == (8, WIDTH)


def test_all_problems_can_be_computed_where_stages_are_synthesised():
    problems = problems_of(plain, options=PlanOptions(synthesised_stages=True))
    for count in COUNTS:
        assert chain_of_problem(problems.of(count)).modules


def larger_for_many(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    return plain(weights if x.shape[0] > 8 else weights[:-1], x)


def test_a_program_that_looks_at_its_size_is_traced_at_all():
    problems = problems_of(larger_for_many)
    for count in COUNTS:
        problem = problems.of(count)
        assert problem.num_layers == (BLOCKS if BATCH // count > 8 else BLOCKS - 1)
    assert not problems.is_misled


def test_a_program_that_is_another_at_one_size_is_found_out_where_it_is_chosen():

    def quick_at_eight(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        return plain(weights[:1] if x.shape[0] == 8 else weights, x)

    problems = problems_of(quick_at_eight)
    before = problems.of(8)
    assert before.num_layers == BLOCKS
    problem = problems.traced(8)
    assert problems.is_misled
    assert problem.num_layers < BLOCKS
    # From now on nothing is taken from other sizes.
    loss = Traced(quick_at_eight)
    problems = problems_of(loss)
    problems.of(8)
    problems.traced(8)
    loss.sizes.clear()
    problems.of(16)
    assert loss.sizes == [4]


def test_python_collects_as_before_once_planning_is_done():
    import gc

    before = gc.get_threshold()
    with seldom_collected():
        assert gc.get_threshold() > before
    assert gc.get_threshold() == before
