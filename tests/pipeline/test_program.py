"""Tracing: the flat program computes the loss, and refuses what it cannot take."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import trace_model
from small_models import BLOCKS, Model, make_batch

from hetjax.errors import InputError
from hetjax.pipeline.program.loss import abstract, path_names
from hetjax.pipeline.program.traced_program import (
    Constant,
    Program,
    evaluate_steps,
    flatten_jaxpr,
    num_bytes,
    read_operand,
)
from hetjax.pipeline.program.tracing import trace


def evaluate(program: Program, parameters: Any, batch: Any) -> tuple[Any, Any]:
    environment = dict(
        zip(program.parameters, program.leaves.split(jax.tree.leaves(parameters)), strict=True)
    )
    environment.update(zip(program.batch, jax.tree.leaves(batch), strict=True))
    total, count = evaluate_steps(program.steps, environment, [program.total, program.count])
    return total, count


@pytest.mark.parametrize("block", sorted(BLOCKS))
def test_a_program_computes_the_loss(block: str):
    model = Model((block,))
    program, batch = trace_model(model, 3), make_batch(3)
    found = jax.jit(lambda p, b: evaluate(program, p, b))(model.init(), batch)
    expected = jax.jit(model.loss)(model.init(), batch)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_calls_are_inlined():
    inner = jax.jit(lambda w, x: jax.jit(jnp.tanh)(x @ w))
    program = trace(
        lambda w, x: jnp.mean(inner(w, inner(w, x))), jnp.ones((2, 2)), jnp.ones((4, 2))
    )
    names = [step.name for step in program.steps]
    assert not {"jit", "pjit", "closed_call"}.intersection(names)
    assert names.count("tanh") == 2
    assert program.num_positions == len(names)


def test_steps_without_use_are_dropped():
    def loss(w: jax.Array, x: jax.Array) -> tuple[jax.Array, float]:
        _ = jnp.sin(x @ w)
        return jnp.sum(w), 1.0

    program = trace(loss, jnp.ones((2, 2)), jnp.ones((4, 2)))
    assert [step.name for step in program.steps] == ["reduce_sum"]


def test_a_scalar_loss_is_the_mean_of_its_examples():
    program = trace(lambda w, x: jnp.mean(x @ w), jnp.ones((2, 2)), jnp.ones((4, 2)))
    assert isinstance(program.count, Constant)
    assert float(program.count.value) == 4.0
    assert [step.name for step in program.steps][-1] == "mul"


def test_the_fingerprint_tells_models_but_not_batch_sizes_apart():
    model = Model(("dense",))
    same = trace_model(model, 3).fingerprint
    assert trace_model(model, 5).fingerprint == same
    assert trace_model(Model(("dense",), tied=False), 3).fingerprint != same
    assert trace_model(Model(("checkpointed",)), 3).fingerprint != same
    assert trace_model(Model(("dense",), half_parameters=True), 3).fingerprint != same


def test_a_literal_operand_is_its_value():
    closed = jax.make_jaxpr(lambda x: (x, 2.5))(1.0)
    assert float(read_operand({}, flatten_jaxpr(closed).outputs[1])) == 2.5


@pytest.mark.parametrize("gate", [-1.0, 1.0])
def test_an_inlined_conditional_selects_its_branch(gate: float):
    def function(gate: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.cond(gate > 0, lambda x: (x + 1, 0.0), lambda x: (x * 2, 1.0), x)

    x = jnp.arange(3.0)
    closed = jax.make_jaxpr(function)(gate, x)
    flat = flatten_jaxpr(closed, inline_conditionals=True)
    assert "cond" not in [step.name for step in flat.steps]
    environment = dict(zip(flat.inputs, (jnp.float32(gate), x), strict=True))
    found = evaluate_steps(flat.steps, environment, flat.outputs)
    expected = function(jnp.float32(gate), x)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_names_and_bytes():
    assert path_names({"a": [1, {"b": 2}]}) == ("a/0", "a/1/b")
    assert num_bytes(jax.ShapeDtypeStruct((3, 4), jnp.bfloat16)) == 24
    assert num_bytes(abstract(jax.random.split(jax.random.key(0), 3))) == 24


def _scalar_loss(parameters: Any, batch: Any) -> jax.Array:
    return sum((jnp.sum(leaf) for leaf in jax.tree.leaves((parameters, batch))), jnp.zeros(()))


@pytest.mark.parametrize(
    ("parameters", "batch", "message"),
    [
        ({"w": np.ones(3, np.int32)}, np.ones(4, np.float32), "'w' has dtype int32: .* or complex"),
        (np.ones(3, np.float32), {"x": np.float32(1)}, "batch leaf 'x' is a scalar"),
        (
            np.ones(3, np.float32),
            {"x": np.ones(4, np.float32), "y": np.ones(5, np.float32)},
            "differ in their number of examples: {'x': 4, 'y': 5}",
        ),
    ],
)
def test_leaves_that_are_refused(parameters: Any, batch: Any, message: str):
    with pytest.raises(InputError, match=message):
        trace(_scalar_loss, parameters, batch)


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (lambda x: x, r"float32\[4\]"),
        (lambda x: (jnp.sum(x), {"accuracy": 0.5}), r"\('float32\[\]', {'accuracy': 0.5}\)"),
        (lambda x: (jnp.sum(x), 1.0, 2.0), r"\('float32\[\]', 1.0, 2.0\)"),
        (lambda x: jnp.sum(x > 0), r"int32\[\]"),
        (lambda x: None, "None"),
    ],
)
def test_a_loss_that_is_no_scalar_is_refused(result: Callable[[Any], Any], found: str):
    with pytest.raises(InputError, match=f"it returned {found}"):
        trace(lambda w, x: result(x * w), jnp.ones(()), jnp.ones(4))
