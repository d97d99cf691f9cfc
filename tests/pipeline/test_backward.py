"""Differentiated stages: right, nothing expensive twice, nothing kept or sent without need."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from backward_passes import recomputed, split_backward, take, whole_backward
from cases import Case, cases, examples, trace_model
from hypothesis import given
from one_pipeline import one_pipeline
from small_models import Model, make_batch

from hetjax.pipeline.build import PipelinePrograms
from hetjax.pipeline.program.loss import accumulator_dtype
from hetjax.pipeline.program.traced_program import Program, num_bytes
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.stages.recomputing import Run


def build(
    model: Model,
    size: int,
    boundaries: Sequence[int],
    *,
    recompute: bool = False,
    recompute_runs: Sequence[Sequence[Run]] = (),
    num_microbatches: int = 2,
) -> PipelinePrograms:
    return one_pipeline(
        trace_model(model, size),
        jax.eval_shape(model.init),
        optax.identity(),
        boundaries=boundaries,
        recompute=[recompute] * (len(boundaries) - 1),
        recompute_runs=recompute_runs,
        num_microbatches=num_microbatches,
    )


def evenly(program: Program, num_stages: int) -> tuple[int, ...]:
    return tuple(i * program.num_positions // num_stages for i in range(num_stages + 1))


def run(pipeline: PipelinePrograms, parameters: Any, batch: Any, *, split: bool) -> tuple[Any, Any]:
    """Loss and gradients of one microbatch through all stages' programs, without a device mesh."""
    counted, batch_leaves = pipeline.program.leaves, jax.tree.leaves(batch)
    leaves = counted.split(jax.tree.leaves(parameters))
    gradients = [jnp.zeros(leaf.shape, accumulator_dtype(leaf.dtype)) for leaf in leaves]
    parts = [[p.take(leaves[p.leaf]) for p in stage.parameters] for stage in pipeline.stages]
    batches = [[batch_leaves[leaf] for leaf in stage.batch] for stage in pipeline.stages]
    received: list[list[Any]] = [[]]
    kept: list[list[Any]] = []
    for programs, held, inputs in zip(pipeline.programs, parts, batches, strict=True):
        sent, residuals = programs.forward(held, inputs, received[-1])
        kept.append(residuals)
        received.append(sent)
    total = received[-1][0]
    cotangents: list[Any] = [jnp.ones((), total.dtype)]
    for i in reversed(range(pipeline.num_stages)):
        programs = pipeline.programs[i]
        sums = [jnp.zeros(a.shape, accumulator_dtype(a.dtype)) for a in parts[i]]
        residuals = kept[i]
        if programs.recompute is not None:
            assert not residuals
            residuals = recomputed(programs, parts[i], batches[i], received[i])
        groups = (batches[i], received[i], residuals, cotangents)
        backward = split_backward if split else whole_backward
        cotangents, sums = backward(programs, parts[i], groups, sums)
        for part, found in zip(pipeline.stages[i].parameters, sums, strict=True):
            rows = slice(part.start, part.stop) if part.stop is not None else ...
            gradients[part.leaf] = gradients[part.leaf].at[rows].add(found)
    return total, counted.join(gradients, jnp.stack)


def test_cotangents_are_sent_where_they_are_awaited_and_nothing_else_is():
    model = Model(("discrete", "stop_gradient", "skip"))
    pipeline = build(model, 2, evenly(trace_model(model, 2), 6))
    for before, after in itertools.pairwise(pipeline.programs):
        assert before.cotangents_in == after.cotangents_out
        assert before.sent == after.received
        kinds = [after.received[place].dtype for place in after.cotangents_out]
        assert all(jnp.issubdtype(kind, jnp.inexact) for kind in kinds)


@examples(usual=4, full=40)
@given(case=cases(max_microbatches=1))
def test_the_programs_of_all_stages_give_the_gradients(case: Case):
    """Traced as one function, so that each case compiles once."""
    recompute = case.plan.pipeline.stages[0].recompute
    size = case.plan.pipeline.microbatch_size
    stages = case.plan.pipeline.stages
    runs = [() if recompute else case.plan.recompute_positions(stage) for stage in stages]
    pipeline = build(
        case.model,
        size,
        case.plan.boundaries(case.plan.pipeline),
        recompute=recompute,
        recompute_runs=runs,
    )
    parameters, batch = case.model.init(), make_batch(size)

    @jax.jit
    def both(parameters: Any, batch: Any) -> Any:
        def total(parameters: Any) -> jax.Array:
            result = case.model.loss(parameters, batch)
            return result[0] if case.model.counted else size * result

        expected = jax.value_and_grad(total)(parameters)
        return expected, [run(pipeline, parameters, batch, split=s) for s in (False, True)]

    (loss, gradients), found = both(parameters, batch)
    tolerance = 1e-5 if case.model.exact else 0.05
    for total, sums in found:
        np.testing.assert_allclose(total, loss, rtol=tolerance)
        for ours, theirs in zip(sums, jax.tree.leaves(gradients), strict=True):
            scale = float(jnp.max(jnp.abs(theirs)))
            assert float(jnp.max(jnp.abs(ours - theirs.astype(ours.dtype)))) <= tolerance * scale


@pytest.mark.parametrize("block", ["dense", "attention", "scan", "two_scans", "custom_rules"])
def test_weights_are_not_among_the_residuals(block: str):
    """All that a microbatch keeps grows with its examples, so no weight can be among it."""
    model = Model((block, block), tied=False)
    one, three = (
        build(model, size, evenly(trace_model(model, size), 2)).programs for size in (1, 3)
    )
    for small, large in zip(one, three, strict=True):
        assert large.residual_bytes == 3 * small.residual_bytes


@pytest.mark.parametrize("block", ["dense", "attention", "scan", "dropout_scan"])
def test_a_stage_that_recomputes_keeps_only_its_inputs(block: str):
    model = Model((block, block))
    positions = evenly(trace_model(model, 2), 2)
    for programs in build(model, 2, positions, recompute=True).programs:
        inputs = (*programs.batch, *programs.received)
        assert (
            jax.eval_shape(
                programs.forward, programs.parameters, programs.batch, programs.received
            )[1]
            == []
        )
        assert programs.kept_bytes <= sum(num_bytes(shape) for shape in inputs)


@pytest.mark.parametrize(("recompute", "products"), [(False, 7), (True, 7 + 4)])
def test_no_product_is_computed_twice_unless_it_is_asked_for(recompute: bool, products: int):
    """Four layers have four products forward, and eight less one backward: the batch has none."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    weights = [jnp.ones((4, 4)) for _ in range(4)]
    program = trace(loss, weights, jnp.ones((3, 4)))
    assert [step.name for step in program.steps[:4]] == ["dot_general", "tanh"] * 2
    pipeline = one_pipeline(
        program,
        weights,
        optax.identity(),
        boundaries=(0, 4, program.num_positions),
        recompute=[recompute] * 2,
    )
    product = 2 * 3 * 4 * 4
    assert sum(p.forward_cost.matmul_flops for p in pipeline.programs) == 4 * product
    again = sum(p.recompute_cost.matmul_flops for p in pipeline.programs)
    once = sum(p.backward_cost.matmul_flops for p in pipeline.programs)
    assert again + once == products * product


def test_what_no_gradient_flows_to_has_no_cotangent():
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        y = x @ w
        fixed, sign = jax.lax.stop_gradient(jnp.cos(y)), y > 0.1
        return jnp.mean(jnp.where(sign, jnp.sin(y), 0.0) * fixed)

    program = trace(loss, jnp.ones((4, 4)), jnp.ones((3, 4)))
    assert [step.name for step in program.steps[:3]] == ["dot_general", "cos", "stop_gradient"]
    pipeline = one_pipeline(
        program,
        jnp.ones((4, 4)),
        optax.identity(),
        boundaries=(0, 2, program.num_positions),
        recompute=[False, False],
    )
    before, after = pipeline.programs
    assert len(after.received) == 2
    assert after.cotangents_out == before.cotangents_in == (0,)


def test_without_accumulation_gradients_come_back_alone():
    model = Model(("dense",))
    pipeline = build(model, 2, (0, trace_model(model, 2).num_positions), num_microbatches=1)
    (programs,) = pipeline.programs
    groups = [programs.batch, programs.received, programs.residuals, [programs.sent[0]]]
    reads = take(programs.backward_reads, groups)
    shapes = jax.eval_shape(programs.backward, programs.parameters, *reads, [])
    assert [s.shape for s in shapes[1]] == [s.shape for s in programs.parameters]


def test_gradients_of_half_precision_are_summed_in_float32():
    assert accumulator_dtype(jnp.bfloat16) == jnp.float32
    assert accumulator_dtype(jnp.float16) == jnp.float32
    assert accumulator_dtype(jnp.float32) == jnp.float32
