"""What is found of a program's runs is found once."""

import jax
import jax.numpy as jnp
import pytest

from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.program.tracing import trace
from hetjax.planner.work import run_structure
from hetjax.planner.work import stage_work as work
from hetjax.planner.work.stage_work import Known, SplitWork, StagePrograms, measure


def blocks(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


def traced() -> Program:
    weights = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 6
    return trace(blocks, weights, jax.ShapeDtypeStruct((4, 8), jnp.float32))


def test_halves_are_found_once_whether_a_run_recomputes_or_not(monkeypatch: pytest.MonkeyPatch):
    program = traced()
    boundaries, found = (0, 4, 8, program.num_positions), []
    expected = measure(program, boundaries, [True] * 3, split=True)
    halves_of = work._measure_halves

    def counting(programs: StagePrograms) -> SplitWork:
        found.append(programs)
        return halves_of(programs)

    monkeypatch.setattr(work, "_measure_halves", counting)
    known = Known()
    kept = measure(program, boundaries, split=True, known=known)
    once = len(found)
    assert once > 0
    again = measure(program, boundaries, [True] * 3, split=True, known=known)
    assert len(found) == once
    assert again == expected
    assert [each.split for each in again] == [each.split for each in kept]
    # A run whose halves were not asked for says nothing of them.
    assert all(each.split is None for each in measure(program, boundaries, known=known))


def test_the_structure_of_runs_is_found_once(monkeypatch: pytest.MonkeyPatch):
    program = traced()
    boundaries, known = (0, 4, 8, program.num_positions), Known()
    expected = measure(program, boundaries, known=known)
    monkeypatch.setattr(run_structure, "form_of", None)
    assert measure(program, boundaries, known=known) == expected
