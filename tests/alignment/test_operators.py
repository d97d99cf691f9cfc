"""The operators of forward and backward passes: evaluated they are the loss and its gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import DEPTH, LENGTH, Model

from hetjax.alignment.devices import bind_kind
from hetjax.alignment.evaluation import evaluate, evaluate_whole
from hetjax.alignment.kinds import AlignedKind
from hetjax.alignment.operators import OperatorProgram, occurrences
from hetjax.alignment.tracing import trace_operators
from hetjax.errors import InputError
from hetjax.models import model_of, recipe

KIND = bind_kind(AlignedKind("cpu", "cpu"))
BATCH = {
    "tokens": np.random.default_rng(0).integers(0, 11, (4, LENGTH + 1)).astype(np.int32),
    "weights": np.ones((4, LENGTH), np.float32),
    "keys": np.arange(8, dtype=np.uint32).reshape(4, 2),
}


def give(operator, operands, _):
    return KIND.give(operator, operands)


def oracle(model: Model, parameters: Any) -> list[np.ndarray]:
    """The loss and the gradients by plain JAX."""

    def loss(values):
        found = model.loss(values, BATCH)
        return found[0] / found[1] if isinstance(found, tuple) else found

    return jax.tree.leaves(jax.jit(jax.value_and_grad(loss))(parameters))


def test_operators_compute_the_loss_and_its_gradients():
    model = Model(("loops", "conditional", "custom_rules", "dropout_scan", "checkpointed"))
    parameters = model.init()
    program = trace_operators(model.loss, parameters, BATCH)
    inputs = [*jax.tree.leaves(parameters), *jax.tree.leaves(BATCH)]
    wanted = oracle(model, parameters)
    whole, wrong = jax.jit(
        lambda *values: evaluate_whole(program.block, values, give, lambda *_: None)
    )(*inputs)
    for found in (whole, evaluate(program.block, inputs, give)):
        for a, b in zip(wanted, found, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    assert not wrong
    assert program.opaque == ()


def test_examples_of_a_batched_loop_go_on_by_themselves():
    """`jax.vmap` leaves a loop with a condition for each example, which no loop can be made of."""

    def halved(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) > 1.0, lambda x: x * 0.5, x)

    def loss(w, x):
        return jnp.mean(jax.lax.stop_gradient(jax.vmap(halved)(x)) @ w)

    w, x = np.ones((3,), np.float32), np.array([[0.1] * 3, [1.0] * 3, [9.0] * 3], np.float32)
    program = trace_operators(loss, w, x)
    whole, _ = evaluate_whole(program.block, [w, x], give, lambda *_: None)
    wanted = jax.tree.leaves(jax.value_and_grad(loss)(w, x))
    for found in (whole, evaluate(program.block, [w, x], give)):
        for a, b in zip(wanted, found, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_an_operator_in_a_loop_runs_as_often_as_the_loop():
    model = Model(("scan",))
    program = trace_operators(model.loss, model.init(), BATCH)
    times = {operator.number: count for operator, count in occurrences(program.block)}
    loops = {each.number for each in program.operators if each.loops == ("scan",)}
    assert loops == {number for number, count in times.items() if count == DEPTH}


@pytest.fixture(scope="module")
def gpt() -> OperatorProgram:
    model = model_of(recipe("gpt-quickstart", blocks=3, width=16, heads=2, sequence=8))
    return trace_operators(model.loss, model.parameter_shapes(), model.batch_shapes(2))


def test_backward_products_name_the_forward_product_of_their_own_block(gpt: OperatorProgram):
    attending = set[str]()
    for operator in gpt.operators:
        assert bool(operator.primal) <= operator.is_backward
        if operator.name == "dot_general" and operator.is_backward:
            forward, *others = (gpt.operators[primal] for primal in operator.primal)
            for each in (forward, *others):
                assert each.name == "dot_general"
                assert not each.is_backward
                assert each.line == operator.line
            if others:
                # Attention has two, which its backward pass makes again.
                attending.add(operator.line)
                continue
            # Its operands' shapes are those of its primal's operands and result.
            shapes = {each.shape for each in (*forward.taken, *forward.given)}
            assert {each.shape for each in operator.taken} <= shapes
            assert operator.near == forward.near
    assert len(attending) == 1
    products = [
        each for each in gpt.operators if each.name == "dot_general" and each.line not in attending
    ]
    assert sum(each.is_backward for each in products) == 2 * len(products) // 3


@pytest.mark.parametrize("blocks", [2, 4, 6])
def test_backward_products_of_a_line_that_has_two_name_those_of_their_own_block(blocks: int):
    """The first block's input needs no gradient, so fewer products go backward there."""

    def loss(parameters: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for block in parameters:
            x = (x @ block["w"]) * jnp.tanh(x @ block["u"])
        return jnp.mean(jnp.square(x))

    weights = [{name: np.ones((4, 4), np.float32) for name in "uw"} for _ in range(blocks)]
    program = trace_operators(loss, weights, {"x": np.ones((3, 4), np.float32)})
    products = [each for each in program.operators if each.name == "dot_general"]
    backward = [each for each in products if each.is_backward]
    of_blocks = [
        {program.operators[n].near.split("/")[0] for n in each.primal} for each in backward
    ]
    expected = [str(block) for block in range(blocks) for _ in range(4 if block else 2)]
    assert of_blocks == [{each} for each in reversed(expected)]


def test_operators_name_the_parameter_that_they_read(gpt: OperatorProgram):
    named = {each.near for each in gpt.operators if each.name == "dot_general"}
    for block in range(3):
        for part in ("attention/query", "attention/output", "mlp/up", "mlp/down"):
            assert f"blocks/{block}/{part}/kernel" in named


def test_lines_are_those_of_the_user_in_functions_of_libraries_and_of_its_own():
    def own(x):
        return jnp.tanh(x) * 2

    once = jax.jit(own)

    def loss(w, x):
        hidden = once(jax.nn.gelu(x @ w))
        again = jax.nn.gelu(once(hidden))
        return jnp.mean(again)

    program = trace_operators(loss, jnp.eye(3), jnp.ones((2, 3)))
    first = own.__code__.co_firstlineno
    start = loss.__code__.co_firstlineno
    lines: dict[str, set[int]] = {"tanh": set(), "integer_pow": set()}
    for operator in program.operators:
        if operator.name in lines and not operator.is_backward:
            path, line = operator.line.rsplit(":", 1)
            assert path == __file__
            lines[operator.name].add(int(line))
    assert lines["tanh"] == {first + 1, start + 1, start + 2}
    assert lines["integer_pow"] == {start + 1, start + 2}


def test_what_is_not_looked_into_is_told():
    def loss(w, x):
        kept = jax.lax.custom_root(
            lambda y: y**2 - 2.0 * jnp.ones_like(y),
            x[0],
            lambda f, y: jax.lax.fori_loop(0, 5, lambda _, z: z - f(z) / (2 * z), y),
            lambda f, y: y / f(jnp.ones_like(y)),
        )
        return jnp.sum(w * kept)

    program = trace_operators(loss, jnp.ones(3), jnp.ones((2, 3)))
    assert {each.name for each in program.opaque} <= {"custom_linear_solve", "custom_root"}


def test_a_loss_with_figures_beside_it_is_refused_with_what_to_return():
    with pytest.raises(InputError, match=r"for a pair \(loss, aux\), return the loss alone"):
        trace_operators(lambda w, x: (jnp.sum(x * w), {"size": w}), np.ones(2), np.ones((3, 2)))


def test_fingerprints_tell_models_apart():
    model = Model(("dense",))
    other = Model(("dense", "dense"))
    first, second = (
        trace_operators(each.loss, each.init(), BATCH).fingerprint for each in (model, other)
    )
    assert first != second
    assert first == trace_operators(model.loss, model.init(), BATCH).fingerprint
