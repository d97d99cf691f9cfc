"""Runs of layers that are made again: they keep their inputs alone, and are there one at a time."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from backward_passes import take
from cases import trace_model
from opened_loops import iteration_starts
from small_models import DEPTH, LENGTH, WIDTH, Model, make_batch

from hetjax.pipeline.program.fences import fenced
from hetjax.pipeline.program.traced_program import Program, num_bytes
from hetjax.pipeline.stages.backward import StagePrograms, differentiate
from hetjax.pipeline.stages.cutting import cut
from hetjax.pipeline.stages.recomputing import Run

EXAMPLES = 2


def one_stage(program: Program, runs: Sequence[Run] = ()) -> StagePrograms:
    (stage,) = cut(program, (0, program.num_positions))
    return differentiate(
        stage,
        [program.avals[value] for value in program.parameters],
        [program.avals[program.batch[leaf]] for leaf in stage.batch],
        [],
        is_last=True,
        cotangents_in=(),
        recompute_runs=runs,
    )


def scan_runs(program: Program, lengths: Sequence[int]) -> list[Run]:
    """Runs of some iterations of the program's scan, one after another."""
    starts = iteration_starts(program, DEPTH)
    ends = itertools.accumulate(lengths, initial=0)
    return [(starts[first], starts[end]) for first, end in itertools.pairwise(ends)]


def test_an_iteration_that_is_made_again_keeps_its_carry_alone():
    model = Model(("scan",), tied=False)
    program = trace_model(model, EXAMPLES)
    whole = one_stage(program)
    each = one_stage(program, scan_runs(program, [1] * DEPTH))
    halves = one_stage(program, scan_runs(program, [DEPTH // 2] * 2))
    carry = EXAMPLES * LENGTH * WIDTH * 4
    kept = [programs.residual_bytes for programs in (whole, each, halves)]
    # The scan's last carry is what comes after it begins with.
    assert kept[1] - kept[2] == (DEPTH - 2) * carry
    assert kept[1] < kept[0]


def test_what_is_made_again_is_counted():
    model = Model(("dense", "dense", "dense"), tied=False)
    program = trace_model(model, EXAMPLES)
    products = [s for s in program.steps if s.name == "dot_general"]
    first, end = (program.steps.index(products[place]) for place in (0, -1))
    whole, again = one_stage(program), one_stage(program, [(first, end)])
    assert again.forward_cost == whole.forward_cost
    assert again.backward_cost.matmul_flops > whole.backward_cost.matmul_flops
    split = again.split
    halves = split.input_gradient_cost + split.weight_gradient_cost
    assert halves.matmul_flops == again.backward_cost.matmul_flops


def test_runs_are_made_again_one_after_another():
    """The compiler's own count: all of them at once would take as much as to keep everything."""
    model = Model(("attention",) * 6, tied=False)
    program = trace_model(model, 16)
    count = program.num_positions
    runs = [(i * count // 6, (i + 1) * count // 6) for i in range(6)]
    needs = []
    for programs in (one_stage(program), one_stage(program, runs)):
        reads = programs.backward_reads
        groups = (programs.batch, (), programs.residuals, [jax.ShapeDtypeStruct((), "float32")])
        sums = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in programs.parameters]

        def backward(predicate: Any, *arrays: Any, programs: StagePrograms = programs) -> Any:
            with fenced(predicate):
                return programs.backward(*arrays)

        arguments = (programs.parameters, *take(reads, groups), sums)
        lowered = jax.jit(backward, donate_argnums=6).lower(jnp.array(True), *arguments)
        analysis: Any = lowered.compile().memory_analysis()
        kept = sum(num_bytes(shape) for shape in programs.residuals)
        needs.append(kept + analysis.temp_size_in_bytes)
    assert needs[1] < 0.6 * needs[0]


@pytest.mark.parametrize("block", ["scan", "reverse_scan", "stacked_scan", "dropout_scan"])
@pytest.mark.parametrize("lengths", [(2, 1), (3,), (1, 1, 1, 1)])
def test_some_iterations_give_the_gradients_of_all(block: str, lengths: tuple[int, ...]):
    model = Model((block,), tied=False)
    program = trace_model(model, EXAMPLES)
    runs = scan_runs(program, lengths)
    found = [gradients(program, each, model) for each in ((), runs)]
    for kept, again in zip(*found, strict=True):
        assert jnp.max(jnp.abs(kept - again)) <= 1e-6 * jnp.max(jnp.abs(kept))


def gradients(program: Program, runs: Sequence[Run], model: Model) -> list[jax.Array]:
    programs = one_stage(program, runs)
    (stage,) = cut(program, (0, program.num_positions))
    parameters = program.leaves.split(jax.tree.leaves(model.init()))
    leaves = jax.tree.leaves(make_batch(EXAMPLES))

    @jax.jit
    def both(parameters: Any, batch: Any) -> Any:
        sent, residuals = programs.forward(parameters, batch, [])
        groups = (batch, [], residuals, [jnp.ones((), sent[0].dtype)])
        sums = [jnp.zeros_like(parameter) for parameter in parameters]
        return programs.backward(parameters, *take(programs.backward_reads, groups), sums)[1]

    return both(parameters, [leaves[leaf] for leaf in stage.batch])
