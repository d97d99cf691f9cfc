"""Cutting: stages in a row compute the program, wherever it is cut."""

import gc
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import Case, cases, examples, trace_model
from hypothesis import given
from small_models import LENGTH, WIDTH, Model

from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.stages.cutting import (
    ParameterPart,
    Stage,
    crossing_values,
    cut,
    shared_steps,
)


def chained(program: Program, stages: Sequence[Stage], parameters: Any, batch: Any) -> list[Any]:
    """The total and the count, by way of all stages."""
    leaves = program.leaves.split(jax.tree.leaves(parameters))
    inputs = jax.tree.leaves(batch)
    received: list[Any] = []
    for stage in stages:
        received = stage.function(
            [part.take(leaves[part.leaf]) for part in stage.parameters],
            [inputs[leaf] for leaf in stage.batch],
            received,
        )
    return received


def small_loss(w: Any, x: jax.Array) -> Any:
    """Few positions, with all that is hard about a cut."""
    first = x @ w["first"]

    def body(y: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.tanh(y @ row), y[:, 0]

    y, heads = jax.lax.scan(body, first, w["rows"], reverse=True)
    y, _ = jax.lax.scan(lambda y, row: (y * row[0], None), y, w["rows"])
    y = y + first + jnp.sum(heads, axis=0)[:, None]
    return jnp.sum(y @ w["first"]) * w["scale"], jnp.sum(x)


SMALL_PARAMETERS = {
    "first": jnp.array([[1.0, 0.5], [-0.3, 0.2]]),
    "rows": jnp.array([[[0.1, 0.2], [0.3, -0.4]], [[0.5, 0.6], [-0.7, 0.8]]]),
    "scale": jnp.float32(1.5),
}
SMALL_BATCH = jnp.array([[1.0, 2.0], [3.0, 4.0], [-1.0, 0.0]])


def test_every_pair_of_cuts_computes_the_program():
    program = trace(small_loss, SMALL_PARAMETERS, SMALL_BATCH)
    expected = small_loss(SMALL_PARAMETERS, SMALL_BATCH)
    end = program.num_positions
    with jax.disable_jit():
        for a, b in itertools.combinations(range(1, end), 2):
            stages = cut(program, (0, a, b, end))
            found = chained(program, stages, SMALL_PARAMETERS, SMALL_BATCH)
            np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=f"cuts {a}, {b}")


def test_the_last_cuts_of_a_program_are_kept():
    program = trace(small_loss, SMALL_PARAMETERS, SMALL_BATCH)
    end = program.num_positions
    first = cut(program, (0, 1, end))
    assert cut(program, [0, 1, end]) is first
    for middle in range(2, end):
        cut(program, (0, middle, end))
        # What is asked for again and again stays.
        assert cut(program, (0, 1, end)) is first
    for middle in range(2, end):
        cut(program, (0, middle, end))
    assert cut(program, (0, 1, end)) is not first


def test_cuts_of_a_program_go_with_it():
    program = trace(small_loss, SMALL_PARAMETERS, SMALL_BATCH)
    kept, stages = weakref.ref(program), cut(program, (0, 1, program.num_positions))
    del program
    gc.collect()
    assert kept() is None
    assert len(stages) == 2


def test_a_cut_at_every_position_computes_the_program():
    program = trace(small_loss, SMALL_PARAMETERS, SMALL_BATCH)
    with jax.disable_jit():
        stages = cut(program, range(program.num_positions + 1))
        found = chained(program, stages, SMALL_PARAMETERS, SMALL_BATCH)
    np.testing.assert_allclose(found, small_loss(SMALL_PARAMETERS, SMALL_BATCH), rtol=1e-6)


@examples(usual=30, full=300)
@given(case=cases(max_stages=8))
def test_what_stages_hold_and_pass_on(case: Case):
    stages = cut(case.program, case.plan.layers)
    assert stages[0].receives == ()
    assert stages[-1].sends == ()
    for before, after in itertools.pairwise(stages):
        assert before.sends == after.receives
    _check_steps(case.program, stages)
    _check_parameters(case.program, stages)


def _check_steps(program: Program, stages: Sequence[Stage]) -> None:
    """Whatever is not shared is computed once; what is shared never crosses a cut."""
    shared = shared_steps(program)
    learned = [
        output
        for stage in stages
        for step in stage.steps
        for output in step.outputs
        if output not in shared
    ]
    assert len(learned) == len(set(learned))
    for stage in stages:
        assert not shared.intersection(stage.sends)
        assert not set(program.batch).intersection(stage.sends)
        assert not set(program.parameters).intersection(stage.sends)


def _check_parameters(program: Program, stages: Sequence[Stage]) -> None:
    """Every row of every leaf is held, and of a leaf that is cut each row only once."""
    for leaf, value in enumerate(program.parameters):
        parts = [part for stage in stages for part in stage.parameters if part.leaf == leaf]
        assert parts
        if parts[0].stop is None:
            assert set(parts) == {ParameterPart(leaf)}
        else:
            spans = sorted((part.start, part.stop) for part in parts)
            ends = [0, *(stop for _, stop in spans)]
            assert [start for start, _ in spans] == ends[:-1]
            assert ends[-1] == program.avals[value].shape[0]


def test_what_crosses_a_cut_is_what_two_stages_exchange():
    program = trace(small_loss, SMALL_PARAMETERS, SMALL_BATCH)
    for boundary in range(1, program.num_positions):
        first, _ = cut(program, (0, boundary, program.num_positions))
        assert len(crossing_values(program, boundary)) == len(first.sends)


def test_a_value_used_later_passes_through_the_stages_between():
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        early = x @ w
        return jnp.sum(jnp.exp(jnp.cos(jnp.sin(early))) * early)

    program = trace(loss, jnp.ones((2, 2)), jnp.ones((3, 2)))
    names = [step.name for step in program.steps]
    assert names[:4] == ["dot_general", "sin", "cos", "exp"]
    stages = cut(program, (0, 1, 2, 3, program.num_positions))
    early = program.steps[0].outputs[0]
    assert [early in stage.sends for stage in stages] == [True, True, True, False]
    assert [len(stage.receives) for stage in stages] == [0, 1, 2, 2]


def test_masks_and_random_keys_are_computed_where_they_are_used():
    program = trace_model(Model(("attention", "dropout")), 3)
    names = {output: step.name for step in program.steps for output in step.outputs}
    shared = {names[output] for output in shared_steps(program)}
    assert {"iota", "random_wrap", "random_fold_in", "random_bits"} <= shared
    assert "dot_general" not in shared


def test_between_blocks_only_the_features_cross():
    program = trace_model(Model(("attention", "dense"), tied=False, counted=False), 3)
    features = jax.ShapeDtypeStruct((3, LENGTH, WIDTH), jnp.float32)
    crossing = [crossing_values(program, cut) for cut in range(1, program.num_positions)]
    assert crossing.count((features,)) >= 3


def test_unused_parameters_belong_to_the_first_stage():
    program = trace_model(Model(("unused",)), 3)
    stages = cut(program, (0, 10, program.num_positions))
    unused = program.parameter_names.index("blocks/0/never")
    assert ParameterPart(unused) in stages[0].parameters
    assert ParameterPart(unused) not in stages[1].parameters


def test_a_row_that_two_loops_read_is_held_by_both_stages():
    program = trace_model(Model(("two_scans",), tied=False), 3)
    places = [
        place for place, name in enumerate(program.parameter_names) if name == "blocks/0/in[0]"
    ]
    row = program.parameters[places[0]]
    first, *_, last = (p for p, step in enumerate(program.steps) if row in step.values())
    stages = cut(program, (0, first + 1, last, program.num_positions))
    assert [ParameterPart(places[0]) in stage.parameters for stage in stages] == [True, False, True]


def test_weights_cast_at_the_top_are_cast_where_they_are_used():
    def loss(parameters, x):
        first, second = (w.astype(jnp.bfloat16) for w in parameters)
        hidden = jnp.tanh(x.astype(jnp.bfloat16) @ first)
        return jnp.mean((hidden @ second.T).astype(jnp.float32) ** 2)

    weights = [jnp.ones((4, 8)), jnp.ones((2, 8))]
    program = trace(loss, weights, jnp.ones((3, 4)))
    for boundary in range(1, program.num_positions):
        first, second = cut(program, (0, boundary, program.num_positions))
        shapes = {program.avals[value].shape for value in first.sends if value < len(program.avals)}
        assert not shapes & {(4, 8), (2, 8), (8, 2)}
        leaves = {part.leaf for part in (*first.parameters, *second.parameters)}
        assert leaves == {0, 1}
