"""The planning problem: what is counted, and what bad input is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from hetjax.errors import InputError
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster
from hetjax.pipeline.program.tracing import trace
from hetjax.planner import DynamicProgram, PlanOptions, plan
from hetjax.planner.problem.problem import (
    PlanningProblem,
    make_problem,
    optimizer_bytes,
    trace_microbatch,
)
from hetjax.planner.work import stage_work as work_module
from hetjax.planner.work.products import product_dtype
from hetjax.planner.work.stage_work import measure

KIND = DeviceKind("test", {"float32": 1e12}, 10**9, 1e11, source="made up")
LINK = Link(1e9, 1e-5)
CLUSTER = Cluster("test", (Subcluster("only", KIND, 1, 2, LINK, LINK),))


def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


WEIGHTS = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 6


def problem_of(batch: Any = None, **options: Any) -> PlanningProblem:
    if batch is None:
        batch = jax.ShapeDtypeStruct((32, 16), jnp.float32)
    given = {"cluster": CLUSTER, "optimizer": optax.adam(1e-3), "num_microbatches": 4}
    given |= {name: options.pop(name) for name in given if name in options}
    return make_problem(loss, WEIGHTS, batch, **given, options=PlanOptions(**options))


def test_a_problem_is_of_the_size_of_a_microbatch():
    problem = problem_of(num_layers=3)
    assert problem.microbatch_size == 8
    assert problem.program.avals[problem.program.batch[0]].shape == (8, 16)
    assert problem.num_layers == 3
    assert problem.optimizer_bytes == 8
    assert problem.dtype == "float32"


def test_the_layers_have_all_the_work_of_the_whole():
    problem = problem_of(num_layers=6)
    (whole,) = measure(problem.program, (0, problem.program.num_positions))
    for field in ("forward", "backward"):
        parts = [getattr(work, field).matmul_flops for work in problem.works]
        assert sum(parts) == getattr(whole, field).matmul_flops
    assert sum(work.product_bytes for work in problem.works) == 6 * 8 * 16 * 4
    assert [work.received_bytes for work in problem.works] == [0, *[8 * 16 * 4] * 5]
    assert [work.returned_bytes for work in problem.works] == [0, *[8 * 16 * 4] * 5]
    assert sum(len(work.parts) for work in problem.works) == 6


def test_alike_layers_are_measured_once_and_rightly(monkeypatch):
    program = problem_of().program
    layers = problem_of(num_layers=6).layers
    known = measure(program, layers)
    calls = []
    differentiate = work_module.differentiate
    monkeypatch.setattr(
        work_module, "differentiate", lambda *a, **k: calls.append(1) or differentiate(*a, **k)
    )
    assert measure(program, layers) == known
    assert len(calls) < 6
    monkeypatch.setattr(work_module, "structure_of", lambda program, run: run.index)
    assert measure(program, layers) == known


def test_recomputation_costs_the_forward_pass_again():
    program = problem_of().program
    edges = (0, 4, program.num_positions)
    kept, again = measure(program, edges), measure(program, edges, [True, False])
    assert again[0].backward.matmul_flops > kept[0].backward.matmul_flops
    assert again[1] == kept[1]


def test_the_dtype_that_most_products_run_in():
    def mixed(weight, x):
        x = (x.astype(jnp.bfloat16) @ weight.astype(jnp.bfloat16)).astype(jnp.float32)
        return jnp.mean(x[:1] @ weight)

    assert product_dtype(trace(mixed, jnp.ones((8, 8)), jnp.ones((4, 8)))) == "bfloat16"
    assert product_dtype(trace(lambda w, x: jnp.sum(w * x), jnp.ones(8), jnp.ones((4, 8)))) == (
        "float32"
    )


def test_products_inside_a_scan_count_each_iteration():
    def scanned(weights, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (x @ w, None), x, weights)[0])

    program = trace(scanned, jnp.ones((5, 8, 8)), jnp.ones((4, 8)))
    (work,) = measure(program, (0, program.num_positions))
    assert work.product_bytes == 5 * 4 * 8 * 4


def test_optimizer_state():
    assert optimizer_bytes(optax.sgd(1e-2), WEIGHTS) == 0
    assert optimizer_bytes(optax.sgd(1e-2, momentum=0.9), WEIGHTS) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "1f2b"}, "unknown schedule '1f2b'; did you mean '1f1b'"),
        ({"num_microbatches": 2.0}, "num_microbatches is 2.0; it must be a whole number"),
        ({"optimizer": optax}, "optimizer is <module .*; it must be an Optax transformation"),
        ({"num_microbatches": 0}, "num_microbatches is 0; it must be a whole number, 1 or more"),
        ({"num_layers": 0}, "num_layers is 0; it must be a whole number, 1 or more"),
        ({"num_layers": 2.5}, "num_layers is 2.5; it must be a whole number, 1 or more"),
        (
            {"num_microbatches": 5},
            "batch_size = 32 is not divided by num_microbatches = 5; .* 1, 2, 4, 8, 16, 32",
        ),
        ({"min_stages": 3}, "min_stages is 3; it must be from 1 to 2"),
        ({"min_stages": 2, "num_layers": 1}, "min_stages is 2; it must be from 1 to 1"),
        ({"min_stages": None}, "min_stages is None; it must be a whole number, 1 or more"),
        ({"max_stages": 0}, "max_stages is 0; it must be a whole number, 1 or more"),
        ({"max_stages": 1, "min_stages": 2}, "max_stages is 1; it must be at least min_stages"),
        ({"max_pipelines": "x"}, "max_pipelines is 'x'; it must be a whole number, 1 or more"),
        ({"max_passes": 2.5}, "max_passes is 2.5; it must be a whole number, 1 or more"),
        ({"schedule": None}, "unknown schedule None. Allowed: 1f1b, "),
        ({"objective": 1}, "unknown objective 1. Allowed: cost, step_time"),
        ({"allow_recompute": "no"}, "allow_recompute is 'no'; it must be True or False"),
        ({"union_stages": None}, "union_stages is None; it must be True or False"),
        ({"batch": {}}, "batch has no arrays"),
        ({"batch": jnp.ones(())}, "is a scalar: its first axis must be the examples"),
        ({"batch": {"x": jnp.ones((8, 4)), "y": jnp.ones(4)}}, "examples: {'x': 8, 'y': 4}"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(InputError, match=message):
        problem_of(**options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"options": {"schedule": "1f1b"}}, "options is {'schedule': '1f1b'}; it must be a PlanOp"),
        ({"planner": "harp"}, r"planner is 'harp'; it must be a planner, such as DynamicProgram()"),
        ({"planner": DynamicProgram}, "planner is <class .*; it must be a planner"),
    ],
)
def test_what_is_of_another_type_is_named(given: Any, message: str):
    given = {"options": PlanOptions(), **given}
    batch = jax.ShapeDtypeStruct((32, 16), jnp.float32)
    with pytest.raises(InputError, match=message):
        plan(
            loss,
            WEIGHTS,
            batch,
            cluster=CLUSTER,
            optimizer=optax.sgd(1e-2),
            num_microbatches=4,
            **given,
        )


@pytest.mark.parametrize("no_loss", [lambda w, x: 1.0, lambda w, x: (jnp.sum(x), 32.0)])
def test_a_loss_that_no_parameter_reaches_is_refused(no_loss: Callable[..., Any]):
    with pytest.raises(InputError, match="a loss that depends on no parameter"):
        trace_microbatch(no_loss, WEIGHTS, jnp.ones((32, 16)), 4)


@pytest.mark.parametrize(
    ("optimizer", "is_mixing"),
    [
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), False),
        (optax.MultiSteps(optax.lamb(1e-3), 2).gradient_transformation(), False),
        (optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)), True),
        (optax.contrib.muon(1e-2), True),
    ],
)
@pytest.mark.parametrize("num_layers", [None, 6])
def test_rows_that_an_optimizer_mixes_are_in_one_layer(
    optimizer: Any, is_mixing: bool, num_layers: int | None
):
    """Such as those that it clips by a norm over the blocks of a scan."""

    def scanned(weights: Any, x: jax.Array) -> jax.Array:
        def block(x: jax.Array, row: Any) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ row["w"] + row["b"]), None

        x, _ = jax.lax.scan(block, x @ weights["first"], weights["blocks"])
        return jnp.mean((x @ weights["last"]) ** 2)

    square, stack = jnp.ones((16, 16)), {"w": jnp.ones((4, 16, 16)), "b": jnp.ones((4, 16))}
    problem = make_problem(
        scanned,
        {"first": square, "blocks": stack, "last": square},
        jnp.ones((32, 16)),
        cluster=CLUSTER,
        optimizer=optimizer,
        num_microbatches=4,
        options=PlanOptions(num_layers=num_layers),
    )
    program = problem.program
    products = [i for i, step in enumerate(program.steps) if step.name == "dot_general"]
    inside = [each for each in problem.layers if products[1] < each <= products[-2]]
    assert bool(inside) != is_mixing
    assert problem.num_layers > 1


def test_a_model_of_too_few_layers():
    with pytest.raises(InputError, match="the model has 1 layers, and a stage needs one"):
        make_problem(
            lambda w, x: (jnp.sum(w), 1.0),
            jnp.ones(16),
            jnp.ones((4, 16)),
            cluster=CLUSTER,
            optimizer=optax.sgd(1e-2),
            num_microbatches=1,
            options=PlanOptions(min_stages=2, num_layers=8),
        )


def test_what_passes_through_a_run_is_counted_by_its_own_size():
    """Two runs of the same steps, which skips of unlike sizes pass by."""

    def skipping(weights: list[jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, wide = batch
        long, short = wide @ weights[0], x @ weights[1]
        for weight in weights[2:]:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x**2) + jnp.mean(long**2) + jnp.mean(short**2)

    def problem_with(width: int) -> PlanningProblem:
        shape = jax.ShapeDtypeStruct
        weights = [shape((width, width), jnp.float32), *WEIGHTS[:5]]
        batch = (shape((32, 16), jnp.float32), shape((32, width), jnp.float32))
        return make_problem(
            skipping,
            weights,
            batch,
            cluster=CLUSTER,
            optimizer=optax.sgd(1e-3),
            num_microbatches=4,
            options=PlanOptions(num_layers=6),
        )

    narrow, broad = problem_with(16), problem_with(64)
    boundaries = (0, *range(2, narrow.program.num_positions, 2), narrow.program.num_positions)
    known = work_module.Known()
    first = measure(narrow.program, boundaries, known=known)
    again = measure(broad.program, boundaries, known=known)
    alone = measure(broad.program, boundaries)
    for shared, own in zip(again, alone, strict=True):
        assert shared.received_bytes == own.received_bytes
        assert shared.input_bytes == own.input_bytes
    assert any(a.received_bytes != b.received_bytes for a, b in zip(first, again, strict=True)), (
        "the skips cross no cut"
    )
