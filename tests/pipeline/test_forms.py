"""The forms of steps: one for all that look alike, found once."""

import gc

import jax
import jax.numpy as jnp
import pytest

from hetjax import _compat
from hetjax.pipeline.program import forms
from hetjax.pipeline.program.costs import step_cost
from hetjax.pipeline.program.forms import form_of, share_form
from hetjax.pipeline.program.traced_program import Program, Step
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.stages.resized import Between, SizedProgram


def blocks(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


def traced(num_examples: int, widths: tuple[int, ...] = (8, 8, 8)) -> Program:
    edges = zip((8, *widths), widths, strict=False)
    return trace(
        blocks,
        [jax.ShapeDtypeStruct(edge, jnp.float32) for edge in edges],
        jax.ShapeDtypeStruct((num_examples, 8), jnp.float32),
    )


def products(program: Program) -> list[Step]:
    return [step for step in program.steps if step.name == "dot_general"]


def test_steps_that_look_alike_have_one_form():
    first, second, third = products(traced(4, (8, 8, 16)))
    assert form_of(first) is form_of(second)
    assert form_of(first) is not form_of(third)
    assert form_of(first) is form_of(products(traced(4))[0])
    assert form_of(first) is not form_of(products(traced(5))[0])


def test_a_form_goes_with_its_last_step():
    program = traced(4, (24,))
    keys = {form_of(step).key for step in program.steps}
    assert keys <= set(forms._known)
    (key,) = {form_of(step).key for step in products(program)}
    del program
    gc.collect()
    assert key not in forms._known


def test_a_form_that_is_shared_is_not_found_again(monkeypatch: pytest.MonkeyPatch):
    step, like, _ = products(traced(4))
    share_form(step, like)
    monkeypatch.setattr(forms, "shapes_of", None)
    assert form_of(step) is form_of(like)
    assert step_cost(step) is step_cost(like)


def test_the_forms_of_another_size_are_those_of_its_trace(monkeypatch: pytest.MonkeyPatch):
    sized, expected = SizedProgram(traced(2), traced(8)), list(map(form_of, traced(4).steps))
    looked: list[_compat.JaxprEqn] = []
    shapes_of = forms.shapes_of

    def counting(equation: _compat.JaxprEqn) -> tuple[str, ...]:
        looked.append(equation)
        return shapes_of(equation)

    monkeypatch.setattr(forms, "shapes_of", counting)
    made = sized.at(Between(2, 8, 4))
    assert [form_of(step) for step in made.steps] == expected
    # Blocks that are alike are looked at once.
    assert len(looked) == len(made.steps) - 2 * 2
