"""Teacher-forced comparison: an error is named where it is made, and only there."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import examples
from h2_alignment import adding_backwards
from hypothesis import given
from hypothesis import strategies as st
from one_device import float64

import hetjax
from hetjax.alignment import (
    AlignedKind,
    Injection,
    KindDevice,
    bind_kind,
    compare_kinds,
    mean_relative_error,
    parse_kinds,
    trace_operators,
    train_kind,
)
from hetjax.alignment.comparison import Comparison
from hetjax.alignment.kinds import check_dtypes
from hetjax.alignment.result import Alignment, named_kind
from hetjax.alignment.training import KindTraining, Overflow
from hetjax.errors import InputError
from hetjax.mesh import kind
from hetjax.models import model_of, recipe

MASK = np.where(np.tril(np.ones((5, 5), bool)), np.float32(0), np.float32(-1e9))


def loss_function(parameters: Any, batch: Any) -> jax.Array:
    """Attention in a scan, and a product: small, since each operator is compiled by itself."""

    def body(x: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        scores = jnp.einsum("btd,de,bse->bts", x, row, x) + MASK
        weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
        weights = weights / weights.sum(-1, keepdims=True)
        return x + jnp.einsum("bts,bsd->btd", weights, x), None

    x = jax.lax.scan(body, parameters["embedding"][batch["tokens"]], parameters["rows"])[0]
    return jnp.mean(jnp.tanh(x @ parameters["head"]) ** 2)


def batch_of(step: int) -> dict[str, np.ndarray]:
    return {"tokens": np.random.default_rng(step).integers(0, 7, (2, 5), dtype=np.int32)}


RNG = np.random.default_rng(0)
SHAPES = {"embedding": (7, 8), "rows": (2, 8, 8), "head": (8, 8)}
PARAMETERS = {name: RNG.normal(size=s).astype(np.float32) for name, s in SHAPES.items()}
INPUTS = [*jax.tree.leaves(PARAMETERS), *jax.tree.leaves(batch_of(0))]
PROGRAM = trace_operators(loss_function, PARAMETERS, batch_of(0))
FULL, SAME, HALF = map(bind_kind, parse_kinds(["cpu:float32", "same=cpu", "cpu:bfloat16"]))
FLOATS = [
    each.number for each in PROGRAM.operators if jnp.issubdtype(each.given[0].dtype, jnp.floating)
]


def with_error(number: int, size: float):
    named = replace(SAME.kind, name="wrong")
    return replace(SAME, kind=named, replacements={number: Injection(number, size).replacement()})


@examples(usual=4, full=100)
@given(st.sampled_from(FLOATS))
def test_an_error_in_one_operator_is_named_first_and_alone(number: int):
    seen: list[Any] = []

    def off(operands: list[Any], results: list[Any]) -> list[Any]:
        seen.extend(results)
        return Injection(number, 1e-2).replacement()(operands, results)

    wrong = replace(with_error(number, 1e-2), replacements={number: off})
    found = compare_kinds(PROGRAM, INPUTS, FULL, [SAME, wrong], wanted={number, *FLOATS[::20]})
    assert found.named(SAME.kind.name) == []
    # A result that is 0 everywhere has no relative error.
    zero = not any(map(np.any, seen))
    assert [each.operator.number for each in found.named()] == ([] if zero else [number])
    if not zero:
        assert found.ranked()[0].operator.number == number
        assert found.ranked()[0].error == pytest.approx(1e-2, rel=1e-2)


def test_a_kind_that_adds_in_another_order_is_clean():
    other = adding_backwards(SAME, PROGRAM)
    found = compare_kinds(PROGRAM, INPUTS, FULL, [other])
    assert 0 < found.ranked()[0].error < 1e-4
    assert found.named() == []


def test_rounded_products_are_off_and_nothing_else_is():
    found = compare_kinds(PROGRAM, INPUTS, FULL, [HALF])
    assert {each.operator.name for each in found.named()} == {"dot_general"}
    directions = {each.operator.direction for each in found.named()}
    assert directions == {"forward", "backward"}
    assert all(each.error < 2**-6 for each in found.named())
    assert {each.place for each in found.named()} >= {(0,), (1,)}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_on_processors_round_as_the_dtype_does(dtype: str):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(4096, 1)) * 10.0 ** rng.integers(-8, 4, (4096, 1))).astype(np.float32)
    program = trace_operators(lambda w, x: jnp.sum(x @ w), np.ones((1, 1), np.float32), x)
    operator = next(each for each in program.operators if each.name == "dot_general")
    narrow = bind_kind(AlignedKind("narrow", "cpu", dtype))
    (found,) = narrow.give(operator, [x, np.ones((1, 1), np.float32)])
    np.testing.assert_array_equal(found, x.astype(jnp.dtype(dtype)).astype(np.float32))


def test_products_of_float64_are_in_float32_where_a_kind_says_so():
    x, one = np.random.default_rng(0).normal(size=(64, 1)), np.ones((1, 1))
    with float64():
        program = trace_operators(lambda w, x: jnp.sum(x @ w), one, x)
        operator = next(each for each in program.operators if each.name == "dot_general")
        (found,) = FULL.give(operator, [x, one])
        (own,) = bind_kind(AlignedKind("double", "cpu")).give(operator, [x, one])
    assert found.dtype == own.dtype == np.float64
    np.testing.assert_array_equal(found, x.astype(np.float32))
    np.testing.assert_array_equal(own, x)


def test_what_is_played_on_a_processor_is_what_narrow_operands_give():
    def loss(kernel: Any, images: Any) -> Any:
        groups = jnp.array([14, 0, 10])
        ragged = jax.lax.ragged_dot(images.reshape(24, 6), kernel.reshape(3, 6, 4), groups)
        made = jax.lax.conv_general_dilated(
            images, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        dense = made.reshape(-1, 4) @ kernel[0, 0].T
        return jnp.sum(jnp.tanh(made) ** 2) + jnp.sum(dense) + jnp.sum(ragged**2)

    rng = np.random.default_rng(0)
    kernel, images = (rng.normal(size=s).astype(np.float32) for s in ((3, 3, 2, 4), (2, 6, 6, 2)))
    program = trace_operators(loss, kernel, images)
    names = {"conv_general_dilated", "dot_general", "ragged_dot_general"}
    products = [each for each in program.operators if each.name in names]
    assert {each.name for each in products} == names
    assert {each.is_backward for each in products} == {False, True}
    played = bind_kind(AlignedKind("played", "cpu", "bfloat16"))
    # What a card is given, here computed by the processor.
    card = KindDevice(AlignedKind("card", "gpu", "bfloat16"), played.device)
    numbers = {each.number for each in products}
    close = compare_kinds(program, [kernel, images], played, [card], wanted=numbers)
    assert all(each.error < 1e-5 for each in close.differences)
    far = compare_kinds(program, [kernel, images], FULL, [card], wanted=numbers)
    assert {each.operator.name for each in far.named()} == names


def test_a_result_that_is_not_finite_where_the_references_is_comes_first():
    number = next(n for n in FLOATS if PROGRAM.operators[n].name == "tanh")
    found = compare_kinds(PROGRAM, INPUTS, FULL, [with_error(number, math.nan), HALF])
    assert found.ranked()[0].operator.number == number
    assert found.ranked()[0].is_overflow
    assert found.ranked()[0].error == math.inf


SWALLOWED = next(each.number - 1 for each in PROGRAM.operators if each.name == "exp")
"""What the exponential is given: on CPUs it makes a number of NaN there."""


def test_what_is_not_finite_is_found_at_its_step_even_where_the_loss_does_not_show_it():
    optimizer = optax.sgd(1e-2)
    injection = Injection(SWALLOWED, math.nan, step=3)
    found = train_kind(PROGRAM, SAME, optimizer, PARAMETERS, batch_of, 4, injection=injection)
    assert found.overflow is not None
    assert found.overflow.step == 3
    assert found.overflow.operator is PROGRAM.operators[SWALLOWED]
    assert found.overflow.place == (0,)
    assert len(found.losses) in (2, 4)


def test_products_of_two_bytes_overflow_and_the_product_is_named():
    large = jax.tree.map(lambda leaf: leaf * np.float32(1e6), PARAMETERS)
    half = bind_kind(AlignedKind("half", "cpu", "float16"))
    found = train_kind(PROGRAM, half, optax.sgd(1.0), large, batch_of, 2)
    assert found.overflow is not None
    assert found.overflow.step == 1
    assert found.overflow.operator is not None
    assert found.overflow.operator.name == "dot_general"


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(1e-2, momentum=0.9),
        optax.polyak_sgd(1e-2),
    ],
    ids=["sgd", "by the loss"],
)
def test_training_is_that_of_plain_jax(optimizer: optax.GradientTransformation):
    extended = optax.with_extra_args_support(optimizer)
    found = train_kind(PROGRAM, FULL, optimizer, PARAMETERS, batch_of, 3)

    @jax.jit
    def step(parameters, state, batch):
        def loss(values):
            return loss_function(values, batch)

        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, state = extended.update(gradients, state, parameters, value=value)
        return optax.apply_updates(parameters, updates), state, value

    parameters, state, wanted = PARAMETERS, optimizer.init(PARAMETERS), []
    for done in range(3):
        parameters, state, loss = step(parameters, state, batch_of(done))
        wanted.append(float(loss))
    np.testing.assert_allclose(found.losses, wanted, rtol=1e-5)


def test_mean_relative_error_is_the_papers():
    assert mean_relative_error([1.1, 1.8], [1.0, 2.0]) == pytest.approx(0.1)
    assert mean_relative_error([1.1], [1.0, 2.0]) == pytest.approx(0.1)
    assert math.isnan(mean_relative_error([], [1.0]))
    assert mean_relative_error([0.0, 1.0], [0.0, 1.0]) == 0
    assert mean_relative_error([0.5, 1.0], [0.0, 1.0]) == math.inf


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["cpu"], "--kinds names 1; 2 or more are needed"),
        (["cpu", "cpu"], "names 'cpu' twice"),
        (["cpu", "cpv"], "unknown device of --kinds 'cpv': 'cpv'; did you mean 'cpu'?"),
        (["cpu", "cpu:bfloat17"], "'bfloat17'; did you mean 'bfloat16'?"),
        (["cpu", "V100:bfloat16"], "V100 has no bfloat16. Allowed: float16, float32"),
        (["cpu", "a=b=cpu"], "not of the form"),
        (["cpu", "=cpu"], "not of the form"),
        (["cpu", "cpu:"], "not of the form"),
        (["cpu", "a\0=cpu"], "name: "),
    ],
)
def test_wrong_kinds_are_refused(texts: list[str], message: str):
    with pytest.raises(InputError) as error:
        parse_kinds(texts)
    assert message in str(error.value)


def test_a_model_in_a_dtype_that_a_kind_lacks_is_refused():
    model = model_of(recipe("gpt-quickstart", blocks=1, width=8, heads=2, compute_dtype="bfloat16"))
    program = trace_operators(model.loss, model.parameter_shapes(), model.batch_shapes(2))
    old = AlignedKind("old", "gpu", None, kind("V100"))
    with pytest.raises(InputError, match=r"kind 'old': operator \d+: 'bfloat16' is not allowed"):
        bind_kind(old, dtypes=program.product_dtypes)
    check_dtypes(old, kind("H100"), program.product_dtypes)


def test_a_device_that_is_not_here_is_refused():
    with pytest.raises(InputError, match="this process has no device of 'H100'; it has: cpu"):
        bind_kind(AlignedKind("card", "gpu", None, kind("H100")))


def test_an_error_cannot_be_put_where_there_is_none():
    with pytest.raises(InputError, match="operator 99999 is not allowed: there are 0 to"):
        Injection(99999, 0.1).check(PROGRAM)
    whole = next(n for n in range(len(PROGRAM.operators)) if n not in FLOATS)
    with pytest.raises(InputError, match="does not make numbers of floating dtype"):
        Injection(whole, 0.1).check(PROGRAM)


def test_attention_of_hetjax_is_looked_into():
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        heads = (x @ w).reshape(2, 5, 2, 4)
        return jnp.mean(hetjax.attention(heads, heads, heads, causal=True) ** 2)

    program = trace_operators(loss, jnp.ones((8, 8)), jnp.ones((2, 5, 8)))
    assert not program.opaque
    products = [each for each in program.operators if each.name == "dot_general"]
    # Beside those of the model: scores and results, and what goes back from them.
    assert {each.direction for each in products} == {"forward", "backward"}
    assert len(products) > 2 + 2
    assert sum("test_comparison.py" in each.line for each in program.operators) > 100
    assert not any("sharding" in each.line for each in program.operators)
    w, x = RNG.normal(size=(8, 8)), RNG.normal(size=(2, 5, 8))
    inputs = [np.asarray(each, np.float32) for each in (w, x)]
    found = compare_kinds(program, inputs, FULL, [HALF])
    assert {each.operator.name for each in found.named()} == {"dot_general"}


def test_a_reference_that_overflows_aligns_with_nobody():
    overflow = Overflow(3, None, (), "the loss")
    reference = KindTraining("cpu:float32", (1.0, 1.0), overflow)
    other = KindTraining("same", (1.0, 1.0, 1.0), None)
    aligned = Alignment(
        "model",
        PROGRAM,
        named_kind(FULL),
        (named_kind(SAME),),
        Comparison((), 1e-3),
        (reference, other),
    )
    (verdict,) = aligned.verdicts
    assert verdict.are_losses_aligned is False
