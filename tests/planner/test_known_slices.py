"""Slices of a stage table are made once for a cluster and its parts, and no more than is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster
from hetjax.planner import DynamicProgram, PlanningProblem, make_problem
from hetjax.planner.harp import table_making as table_module
from hetjax.planner.harp.stage_table import StageTable
from hetjax.planner.harp.table_making import make_stage_table
from hetjax.planner.intra_op.tensor_axis import TensorAxis
from hetjax.planner.work import stage_work as work_module
from hetjax.planner.work.layer_runs import all_runs

NEAR, FAR = Link(1e10, 1e-6), Link(1e9, 1e-5)


def subcluster(name: str, peak: float, memory: int) -> Subcluster:
    kind = DeviceKind(name, {"float32": peak}, memory, 1e11, source="made up")
    return Subcluster(name, kind, 2, 2, NEAR, FAR)


def cluster(memory: int) -> Cluster:
    both = subcluster("fast", 1e12, memory), subcluster("slow", 5e11, memory)
    return Cluster("test", both, (("fast", "slow", FAR),))


def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


def problem_of(memory: int = 10**9) -> PlanningProblem:
    return make_problem(
        loss,
        [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 8,
        jax.ShapeDtypeStruct((64, 256), jnp.float32),
        cluster=cluster(memory),
        optimizer=optax.adam(1e-3),
        num_microbatches=4,
    )


def table_of(problem: PlanningProblem) -> StageTable:
    return make_stage_table(problem, all_runs(problem.program, problem.works))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The subclusters of the slices that are made."""
    names: list[str] = []
    make = table_module._slice

    def counting(problem: Any, runs: Any, of: Subcluster, *rest: Any) -> Any:
        names.append(of.name)
        return make(problem, runs, of, *rest)

    monkeypatch.setattr(table_module, "_slice", counting)
    return names


def check_equal(a: StageTable, b: StageTable) -> None:
    for mine, other in zip(sum(a.slices, ()), sum(b.slices, ()), strict=True):
        assert mine.shape == other.shape
        assert mine.options == other.options
        for name in ("seconds", "live_limits", "closing"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(other, name))


def test_parts_of_a_cluster_are_put_together_of_the_wholes_slices(made: list[str]):
    whole = problem_of()
    table_of(whole)
    assert sorted(set(made)) == ["fast", "slow"]
    made.clear()
    part = replace(whole, cluster=whole.cluster.part(["slow"]))
    again = table_of(part)
    assert made == []
    check_equal(again, table_of(replace(problem_of(), cluster=part.cluster)))


@pytest.mark.parametrize(
    "change",
    [
        {"num_microbatches": 8},
        {"allow_recompute": False},
        {"optimizer_bytes": 0.0},
        {"cluster": cluster(2 * 10**9)},
        {"works": ()},
    ],
)
def test_what_changes_the_costs_makes_them_anew(made: list[str], change: dict[str, Any]):
    whole = problem_of()
    table_of(whole)
    made.clear()
    if "works" in change:
        change = {"works": tuple(replace(work, product_bytes=0.0) for work in whole.works)}
    if "allow_recompute" in change:
        change = {"options": replace(whole.options, **change)}
    other = replace(whole, **change)
    found = table_of(other)
    assert made
    fresh = replace(other, slices=problem_of().slices)
    check_equal(found, table_of(fresh))


def test_a_tensor_axis_is_not_weighed_where_nothing_fits(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    find = TensorAxis._find
    monkeypatch.setattr(
        TensorAxis, "_find", lambda axis, count: asked.append(count) or find(axis, count)
    )
    assert DynamicProgram().find(problem_of(memory=10**6)) is None
    assert asked == []
    assert DynamicProgram().find(problem_of()) is not None
    assert asked


def test_a_trace_serves_with_recomputation_and_in_halves(monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []
    trace = work_module.trace_stage
    monkeypatch.setattr(
        work_module, "trace_stage", lambda *inputs: calls.append(1) or trace(*inputs)
    )
    program = problem_of().program
    known, edges = work_module.Known(), (0, program.num_positions)
    (plain,) = work_module.measure(program, edges, known=known)
    (again,) = work_module.measure(program, edges, [True], split=True, known=known)
    assert len(calls) == 1
    assert (plain.forward, plain.split) == (again.forward, None)
    (alone,) = work_module.measure(program, edges, [True], split=True)
    assert again == alone
