"""Losses that change with the number of microbatches are found, and all others left alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import examples, random_model, trace_model
from hypothesis import given
from hypothesis import strategies as st

from hetjax.models import model_of, recipe
from hetjax.pipeline.program.traced_program import Program, evaluate_steps
from hetjax.pipeline.program.tracing import trace
from hetjax.planner.work.coupled_examples import NUMBER, OTHERS, PLACE, Coupling, coupling_of

Batch = Mapping[str, jax.Array]
Loss = Callable[[jax.Array, Batch], Any]
EXAMPLES, FEATURES, CLASSES = 12, 6, 5
WEIGHT = jax.ShapeDtypeStruct((FEATURES, CLASSES), jnp.float32)


def shapes(count: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        "x": jax.ShapeDtypeStruct((count, FEATURES), jnp.float32),
        "y": jax.ShapeDtypeStruct((count,), jnp.int32),
        "valid": jax.ShapeDtypeStruct((count,), jnp.bool_),
        "key": jax.ShapeDtypeStruct((count, 2), jnp.uint32),
    }


def values(seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {
        "x": jnp.asarray(rng.normal(size=(EXAMPLES, FEATURES)), jnp.float32),
        "y": jnp.asarray(rng.integers(0, CLASSES, EXAMPLES), jnp.int32),
        "valid": jnp.asarray(rng.random(EXAMPLES) < 0.7),
        "key": jnp.asarray(rng.integers(0, 2**32, (EXAMPLES, 2)), jnp.uint32),
    }


def of(loss: Loss, count: int = EXAMPLES) -> Program:
    return trace(loss, WEIGHT, shapes(count))


def found(loss: Loss) -> Coupling | None:
    return coupling_of(of(loss), of(loss, EXAMPLES // 2))


def divided(program: Program, weight: jax.Array, batch: Batch, parts: int) -> float:
    """The loss of a batch in some microbatches, by the program of one of them."""
    totals = np.zeros(2)
    for part in range(parts):
        rows = slice(part * EXAMPLES // parts, (part + 1) * EXAMPLES // parts)
        environment = {program.parameters[0]: weight}
        leaves = [batch[name][rows] for name in program.batch_names]
        environment.update(zip(program.batch, leaves, strict=True))
        sums = (program.total, program.count)
        totals += [float(x) for x in evaluate_steps(program.steps, environment, sums)]
    return totals[0] / totals[1]


def differs(loss: Loss, seed: int = 0) -> bool:
    """Whether the loss of a batch in microbatches is another one than that of the whole."""
    weight = jax.random.normal(jax.random.key(seed), WEIGHT.shape)
    batch = values(seed)
    whole, *others = (
        divided(of(loss, EXAMPLES // parts), weight, batch, parts) for parts in (1, 2, 4)
    )
    return not np.allclose(whole, others, rtol=1e-4, atol=1e-5)


def scores(w: jax.Array, batch: Batch) -> jax.Array:
    return jnp.tanh(batch["x"] @ w)


def losses(w: jax.Array, batch: Batch) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(scores(w, batch), batch["y"])


def normalised(x: jax.Array) -> jax.Array:
    return (x - jnp.mean(x, 0)) * jax.lax.rsqrt(jnp.var(x, 0) + 1e-5)


def of_scores(change: Callable[[jax.Array], jax.Array]) -> Loss:
    return lambda w, batch: jnp.mean(jnp.exp(change(scores(w, batch))))


def in_scan(change: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jax.lax.scan(lambda c, _: (change(jnp.sin(c)), None), x, None, length=3)[0]


def in_branch(change: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jax.lax.cond(jnp.asarray(True), change, jnp.zeros_like, x)


def in_loop(change: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    def goes_on(state: tuple[Any, jax.Array]) -> jax.Array:
        return state[0] < 3

    return lambda x: jax.lax.while_loop(goes_on, lambda s: (s[0] + 1, change(s[1])), (0, x))[1]


def with_own_gradient(change: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    function = jax.custom_vjp(lambda x: change(x))
    function.defvjp(lambda x: (change(x), None), lambda _, cotangent: (cotangent,))
    return function


def with_own_tangent(change: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    function = jax.custom_jvp(lambda x: change(x))
    function.defjvp(lambda primals, tangents: (change(*primals), tangents[0]))
    return function


WRAPPED: dict[str, Callable[..., Any]] = {
    "plain": lambda change: change,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": in_scan,
    "cond": in_branch,
    "while": in_loop,
    "custom_vjp": with_own_gradient,
    "custom_jvp": with_own_tangent,
    "scan of checkpoint": lambda change: in_scan(jax.checkpoint(change)),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_batch_normalisation_is_found_wherever_it_stands(wrapped: str):
    loss = of_scores(WRAPPED[wrapped](normalised))
    coupling = found(loss)
    assert coupling is not None
    assert (coupling.cause, coupling.equation) == (OTHERS, "sub")
    line = normalised.__code__.co_firstlineno + 1
    assert coupling.line == f"{__file__}:{line}"
    assert differs(loss)


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_what_is_made_of_each_example_by_itself_is_left_alone(wrapped: str):
    loss = of_scores(WRAPPED[wrapped](jax.nn.softmax))
    assert found(loss) is None
    assert not differs(loss)


def recurrent(w: jax.Array, batch: Batch) -> jax.Array:
    """Begins with zeros of every example, and goes over its features."""
    start = jnp.zeros((batch["x"].shape[0], CLASSES))
    state, seen = jax.lax.scan(
        lambda h, x: ((h := jnp.tanh(h + x[:, None] * w[0])), jnp.sum(h)), start, batch["x"].T
    )
    return (jnp.sum(state) + jnp.sum(seen)) / batch["x"].shape[0]


def dropped_out(w: jax.Array, batch: Batch) -> jax.Array:
    def of_one(x: jax.Array, key: jax.Array) -> jax.Array:
        kept = jax.random.bernoulli(jax.random.wrap_key_data(key), 0.5, (CLASSES,))
        return jnp.sum(jnp.where(kept, x @ w, 0))

    return jnp.mean(jax.vmap(of_one)(batch["x"], batch["key"]))


def masked(w: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    return jnp.sum(losses(w, batch) * batch["valid"].astype(jnp.float32)), jnp.sum(batch["valid"])


FREE: dict[str, Loss] = {
    "a mean": lambda w, batch: jnp.mean(losses(w, batch)),
    "a sum and a number": lambda w, batch: (jnp.sum(losses(w, batch)), batch["y"].size),
    "a sum and a sum of ones": lambda w, batch: (
        jnp.sum(losses(w, batch)),
        jnp.sum(jnp.ones_like(batch["y"])),
    ),
    "a sum and a count": masked,
    "a choice and a count": lambda w, batch: (
        jnp.sum(jnp.where(batch["valid"], losses(w, batch), 0)),
        jnp.sum(batch["valid"]),
    ),
    "a mean for one": lambda w, batch: (jnp.mean(losses(w, batch)), 1.0),
    "a mean and a penalty": lambda w, batch: jnp.mean(losses(w, batch)) + 0.1 * jnp.sum(w**2),
    "a sum and a penalty for each": lambda w, batch: (
        jnp.sum(losses(w, batch)) + batch["y"].size * jnp.sum(w**2),
        batch["y"].size,
    ),
    "a penalty alone": lambda w, batch: jnp.sum(w**2),
    "over classes": lambda w, batch: jnp.mean(
        normalised(scores(w, batch).T) * jax.nn.one_hot(batch["y"], CLASSES).T
    ),
    "a recurrence": recurrent,
    "a key for each": dropped_out,
    "merged dimensions": lambda w, batch: jnp.mean(
        jnp.sin(scores(w, batch).reshape(-1)).reshape(batch["y"].size, CLASSES)
    ),
    "a histogram": lambda w, batch: (
        jnp.sum(jnp.zeros(CLASSES).at[batch["y"]].add(losses(w, batch)) * w[0]),
        batch["y"].size,
    ),
    "a product over examples": lambda w, batch: (
        jnp.sum(jnp.ones(batch["y"].size) @ scores(w, batch)),
        batch["y"].size,
    ),
}


@pytest.mark.parametrize("name", FREE)
def test_losses_that_add_up_are_left_alone(name: str):
    assert found(FREE[name]) is None
    assert not differs(FREE[name])


def drawn_by_place(w: jax.Array, batch: Batch) -> jax.Array:
    x = scores(w, batch)
    return jnp.mean((x + jax.random.normal(jax.random.key(7), x.shape)) ** 2)


def contrasted(w: jax.Array, batch: Batch) -> jax.Array:
    x = scores(w, batch)
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(x @ x.T)))


COUPLED: dict[str, tuple[str, Loss]] = {
    "a contrast": (OTHERS, contrasted),
    "the worst": (OTHERS, lambda w, batch: jnp.max(losses(w, batch))),
    "a root of a mean": (OTHERS, lambda w, batch: jnp.sqrt(jnp.mean(scores(w, batch) ** 2))),
    "a mean of valid ones": (
        OTHERS,
        lambda w, batch: jnp.mean(losses(w, batch), where=batch["valid"]),
    ),
    "ranks": (OTHERS, lambda w, batch: jnp.sort(losses(w, batch))[0]),
    "pairs": (
        OTHERS,
        lambda w, batch: jnp.mean(scores(w, batch).reshape(3, -1, CLASSES).max(1)),
    ),
    "a key for all": (PLACE, drawn_by_place),
    "weights by place": (
        PLACE,
        lambda w, batch: jnp.mean(
            losses(w, batch) * jnp.arange(batch["y"].size, dtype=jnp.float32)
        ),
    ),
    "a sum": (NUMBER, lambda w, batch: jnp.sum(losses(w, batch))),
    "a sum for one": (NUMBER, lambda w, batch: (jnp.sum(losses(w, batch)), 1.0)),
    "a sum and a penalty": (
        NUMBER,
        lambda w, batch: (jnp.sum(losses(w, batch)) + jnp.sum(w**2), batch["y"].size),
    ),
    "a sum of ones": (
        NUMBER,
        lambda w, batch: (
            jnp.sum(losses(w, batch)) * jnp.sum(jnp.ones(batch["y"].size)),
            batch["y"].size,
        ),
    ),
    "a histogram from one on": (
        NUMBER,
        lambda w, batch: (
            jnp.sum(jnp.ones(CLASSES).at[batch["y"]].add(losses(w, batch))),
            batch["y"].size,
        ),
    ),
}


@pytest.mark.parametrize("name", COUPLED)
def test_losses_that_do_not_add_up_are_found(name: str):
    cause, loss = COUPLED[name]
    coupling = found(loss)
    assert coupling is not None
    assert coupling.cause == cause
    assert differs(loss)


def test_figures_beside_the_loss_may_be_of_all_examples():
    def loss(w: jax.Array, batch: Batch) -> Any:
        return masked(w, batch), {"worst": jnp.max(losses(w, batch))}

    programs = [trace(loss, WEIGHT, shapes(count), has_aux=True) for count in (12, 6)]
    assert coupling_of(*programs) is None


def test_without_a_second_trace_the_number_of_examples_is_not_asked_for():
    for cause, loss in COUPLED.values():
        coupling = coupling_of(of(loss))
        assert (coupling is None) == (cause == NUMBER)
        # Of a program that looks at its shapes there is none that is alike.
        other = of(lambda w, batch, loss=loss: loss(jnp.sin(w), batch), EXAMPLES // 2)
        assert (coupling_of(of(loss), other) is None) == (cause == NUMBER)


MODELS: dict[str, dict[str, Any]] = {
    "gpt-quickstart": {},
    "gpt-quickstart, scanned, dropout": {"scan_blocks": True, "dropout": 0.1},
    "moe-quickstart": {},
    "llama-tiny": {},
    "vit-quickstart": {},
    "resnet-quickstart": {},
}


@pytest.mark.parametrize("name", MODELS)
def test_of_the_models_here_resnets_alone_are_coupled(name: str):
    model = model_of(replace(recipe(name.partition(",")[0]), **MODELS[name]))
    programs = [
        trace(model.loss, model.parameter_shapes(), model.batch_shapes(count)) for count in (8, 2)
    ]
    is_coupled = name.startswith("resnet")
    assert (coupling_of(*programs) is not None) == is_coupled
    # One example in a microbatch tells as well whether it would depend on others.
    alone = trace(model.loss, model.parameter_shapes(), model.batch_shapes(1))
    assert (coupling_of(alone) is not None) == is_coupled


@examples(usual=5)
@given(number=st.integers(0, 2**32 - 1))
def test_random_models_are_left_alone(number: int):
    model = random_model(Random(number))
    assert coupling_of(trace_model(model, 8), trace_model(model, 2)) is None


CHANGES: tuple[Callable[[jax.Array, jax.Array], jax.Array], ...] = (
    lambda x, w: jnp.tanh(x @ (w @ w.T)),
    lambda x, w: x - jnp.mean(x, axis=1, keepdims=True),
    lambda x, w: x - jnp.mean(x, axis=0),
    lambda x, w: x + jnp.sum(w),
    lambda x, w: x * jnp.arange(x.shape[0], dtype=x.dtype)[:, None],
    lambda x, w: jnp.cumsum(x, axis=1),
    lambda x, w: jnp.cumsum(x, axis=0),
    lambda x, w: x.reshape(-1, 2).sum(1).repeat(2).reshape(x.shape),
    lambda x, w: x.reshape(-1).reshape(x.shape[1], -1).T,
    lambda x, w: jnp.where(x > 0, x, jnp.zeros_like(x)),
    lambda x, w: jnp.flip(x, axis=1),
    lambda x, w: jnp.roll(x, 1, axis=0),
    lambda x, w: jnp.sort(x, axis=1),
    lambda x, w: x / x.shape[0],
    lambda x, w: x + jnp.ones_like(x).sum() * w[0, 0],
    lambda x, w: x[:, jnp.argsort(w[:, 0])],
    lambda x, w: jax.lax.scan(lambda c, v: (c + v * w[0, 0], c), x, w[:2, 0])[1].mean(0),
    lambda x, w: jax.lax.scan(lambda c, v: (c + v, c), w[:, 1], x)[1],
    lambda x, w: jax.lax.cond(w[0, 0] > 9, jnp.zeros_like, jnp.sin, x),
    lambda x, w: jnp.einsum("bi,bj,j->bi", x, x, w[:, 0]),
    lambda x, w: jnp.einsum("bi,cj,j->bi", x, x, w[:, 0]),
)
ENDS: tuple[Callable[[jax.Array, jax.Array, Batch], Any], ...] = (
    lambda x, w, batch: jnp.mean(x),
    lambda x, w, batch: jnp.mean(x) + jnp.sum(w**2),
    lambda x, w, batch: jnp.mean(x) * jnp.mean(x),
    lambda x, w, batch: jnp.sum(x),
    lambda x, w, batch: (jnp.sum(x), x.shape[0]),
    lambda x, w, batch: (jnp.sum(x, where=batch["valid"][:, None]), jnp.sum(batch["valid"])),
    lambda x, w, batch: (jnp.sum(x) + jnp.sum(w**2), x.size),
    lambda x, w, batch: (jnp.sum(x.sum(0)) + x.shape[0] * jnp.sum(w), x.size),
)


@examples(usual=40, full=1000)
@given(number=st.integers(0, 2**32 - 1))
def test_what_is_left_alone_is_the_same_for_every_number_of_microbatches(number: int):
    rng = Random(number)
    changes, end = rng.choices(CHANGES, k=rng.randint(0, 3)), rng.choice(ENDS)

    def loss(w: jax.Array, batch: Batch) -> Any:
        x = batch["x"]
        for change in changes:
            x = change(x, w)
        return end(x, w, batch)

    assert found(loss) is not None or not differs(loss, seed=number % 1000)
