"""Loops over parameters: opened they are the program of blocks that are written one by one."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetjax.pipeline.program.forms import form_of
from hetjax.pipeline.program.frozen_leaves import NONE_FROZEN
from hetjax.pipeline.program.stacked_leaves import StackedLeaves
from hetjax.pipeline.program.traced_program import Program, evaluate_steps
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.update.traced_update import trace_update
from hetjax.pipeline.update.update_by_rows import update_by_rows

WIDTH, BLOCKS, EXAMPLES = 4, 3, 5
RNG = np.random.default_rng(0)
STACKED = {
    "bias": RNG.normal(size=(BLOCKS, WIDTH)).astype(np.float32),
    "w": RNG.normal(size=(BLOCKS, WIDTH, WIDTH)).astype(np.float32),
}
X = RNG.normal(size=(EXAMPLES, WIDTH)).astype(np.float32)


def block(x: jax.Array, row: Any) -> jax.Array:
    return jnp.tanh(x @ row["w"]) + row["bias"]


def scanned(parameters: Any, x: jax.Array, *, reverse: bool = False) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, row: (block(x, row), None), x, parameters, reverse=reverse)
    return jnp.mean(x**2)


def one_by_one(parameters: Any, x: jax.Array, *, reverse: bool = False) -> jax.Array:
    for row in reversed(parameters) if reverse else parameters:
        x = block(x, row)
    return jnp.mean(x**2)


def rows_of(stacked: Any) -> list[Any]:
    return [jax.tree.map(lambda leaf, row=row: leaf[row], stacked) for row in range(BLOCKS)]


def check_computes(program: Program, loss: Callable[..., Any], parameters: Any, x: Any) -> None:
    leaves = program.leaves.split(jax.tree.leaves(parameters))
    known = dict(zip((*program.parameters, *program.batch), (*leaves, x), strict=True))
    with jax.disable_jit():
        total, count = evaluate_steps(program.steps, known, (program.total, program.count))
    np.testing.assert_allclose(total / count, loss(parameters, x), rtol=1e-6)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_over_blocks_is_the_program_of_these_blocks(reverse: bool):
    ours = trace(functools.partial(scanned, reverse=reverse), STACKED, X)
    theirs = trace(functools.partial(one_by_one, reverse=reverse), rows_of(STACKED), X)
    assert [form_of(step) for step in ours.steps] == [form_of(step) for step in theirs.steps]
    assert ours.leaves.rows == (BLOCKS, BLOCKS)
    assert ours.parameter_names == ("bias[0]", "bias[1]", "bias[2]", "w[0]", "w[1]", "w[2]")
    check_computes(ours, functools.partial(scanned, reverse=reverse), STACKED, X)


def test_training_states_are_saved_under_the_loss_as_it_is_written():
    """So those from before loops were opened can be read."""
    program, other = trace(scanned, STACKED, X), trace(one_by_one, rows_of(STACKED), X)
    assert program.model == "acde3f4e2d605b3f"
    assert program.model != program.fingerprint
    assert other.model == other.fingerprint


def with_casts(parameters: Any, x: jax.Array) -> jax.Array:
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) * 2, parameters)
    return scanned(half, x.astype(jnp.bfloat16)).astype(jnp.float32)


def with_penalty(parameters: Any, x: jax.Array) -> jax.Array:
    return scanned(parameters, x) + 1e-2 * jnp.sum(parameters["w"] ** 2)


def with_slices(parameters: Any, x: jax.Array) -> jax.Array:
    first, rest = (
        jax.tree.map(lambda leaf, part=part: leaf[part], parameters)
        for part in (slice(1), slice(1, None))
    )
    return scanned(first, x) + scanned(rest, block(x, jax.tree.map(lambda leaf: leaf[1], rest)))


def with_empty_slices(parameters: Any, x: jax.Array) -> jax.Array:
    def body(x: jax.Array, row: Any) -> tuple[jax.Array, jax.Array]:
        return block(x, row), jnp.mean(x)

    frozen, all_of = (
        jax.tree.map(lambda leaf, part=part: leaf[part] * 2, parameters)
        for part in (slice(0), slice(0, None))
    )
    x, none = jax.lax.scan(body, x, frozen)
    x, means = jax.lax.scan(body, x, all_of)
    x, last = jax.lax.scan(body, x, jax.tree.map(lambda leaf: leaf[BLOCKS:], parameters))
    return jnp.mean(x) + jnp.sum(none) + jnp.sum(means) + jnp.sum(last)


def with_mixed_rows(parameters: Any, x: jax.Array) -> jax.Array:
    return scanned(parameters, x) * jnp.mean(jnp.cumsum(parameters["bias"], axis=0))


def with_bits(parameters: Any, x: jax.Array) -> jax.Array:
    whole = (100 * parameters["bias"]).astype(jnp.int32)
    common, any_of = (reduce(whole, (0,)) for reduce in (jax.lax.reduce_and, jax.lax.reduce_or))
    return scanned(parameters, x) * jnp.mean((common + any_of).astype(x.dtype))


def with_outputs(parameters: Any, x: jax.Array) -> jax.Array:
    def body(x: jax.Array, row: Any) -> tuple[jax.Array, Any]:
        x = block(x, row[0]) * row[1]
        return x, (x[:, 0], jnp.sum(x))

    x, (heads, sums) = jax.lax.scan(body, x, (parameters, jnp.arange(1.0, BLOCKS + 1)))
    return jnp.mean(x) + jnp.sum(heads @ jnp.ones((EXAMPLES, 2))) + jnp.max(sums)


@pytest.mark.parametrize(
    "loss",
    [
        with_casts,
        with_penalty,
        with_slices,
        with_empty_slices,
        with_mixed_rows,
        with_bits,
        with_outputs,
    ],
)
def test_what_else_reads_rows_computes_the_same(loss: Callable[..., Any]):
    program = trace(loss, STACKED, X)
    assert program.leaves.rows == (BLOCKS, BLOCKS)
    loops = [step for step in program.steps if step.name == "scan"]
    assert not any(loop.iterations for loop in loops)
    check_computes(program, loss, STACKED, X)


def test_a_penalty_of_the_whole_stack_is_of_each_row_alone():
    program = trace(with_penalty, STACKED, X)
    assert "concatenate" not in [step.name for step in program.steps]


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("extremum", [jnp.max, jnp.min])
def test_equal_extrema_of_a_stack_share_its_gradient(
    extremum: Callable[..., jax.Array], axis: int | None
):
    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        return scanned(parameters, x) + jnp.sum(extremum(parameters["bias"], axis=axis) ** 2)

    ones = STACKED | {"bias": np.ones_like(STACKED["bias"])}
    program = trace(loss, ones, X)

    def total(leaves: Any) -> jax.Array:
        known = dict(zip((*program.parameters, *program.batch), (*leaves, X), strict=True))
        return evaluate_steps(program.steps, known, [program.total])[0] / EXAMPLES

    found = jax.grad(total)(program.leaves.split(jax.tree.leaves(ones)))
    expected = program.leaves.split(jax.tree.leaves(jax.grad(loss)(ones, X)))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def over_time(parameters: Any, x: jax.Array) -> jax.Array:
    """A recurrent network: a loop over what the batch gives, with the same weights each time."""
    weights = parameters["w"][0]
    state, _ = jax.lax.scan(
        lambda h, row: (jnp.tanh(h @ weights + row), None), jnp.zeros(WIDTH), x.T[:, :WIDTH]
    )
    return jnp.mean(state) + jnp.mean(x)


def without_products(parameters: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.lax.scan(lambda x, row: (x * row, None), x, parameters["bias"])[0])


def with_nothing_to_go_over(parameters: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.lax.fori_loop(0, 5, lambda _, x: x @ parameters["w"][0], x))


def long_one(parameters: Any, x: jax.Array) -> jax.Array:
    many = jnp.tile(parameters["w"], (5000, 1, 1))
    return scanned({"w": many, "bias": many[:, 0]}, x)


@pytest.mark.parametrize("loss", [over_time, without_products, with_nothing_to_go_over, long_one])
def test_other_loops_stay_one_step(loss: Callable[..., Any]):
    program = trace(loss, STACKED, X)
    assert [step.name for step in program.steps].count("scan") == 1
    assert program.leaves.rows == (None, None)


def test_a_long_loop_over_parameters_stays_one_step():
    shape = jax.ShapeDtypeStruct
    parameters = {"w": shape((9000, 2, 2), "float32"), "bias": shape((9000, 2), "float32")}
    program = trace(scanned, parameters, shape((3, 2), "float32"))
    assert [step.name for step in program.steps].count("scan") == 1


def test_a_stack_of_no_blocks_stays_whole():
    none = jax.tree.map(lambda leaf: leaf[:0], STACKED)
    program = trace(scanned, none, X)
    assert program.leaves.rows == (None, None)
    check_computes(program, scanned, none, X)


def test_of_nested_loops_the_outer_one_is_opened():
    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, rows: Any) -> tuple[jax.Array, None]:
            return jax.lax.scan(lambda x, row: (block(x, row), None), x, rows)[0], None

        return jnp.mean(jax.lax.scan(body, x, parameters)[0])

    nested = jax.tree.map(lambda leaf: np.stack([leaf, leaf + 1]), STACKED)
    program = trace(loss, nested, X)
    assert [step.name for step in program.steps].count("scan") == 2
    assert program.leaves.rows == (2, 2)
    check_computes(program, loss, nested, X)


OPTIMIZERS = {
    "adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, mu_dtype=jnp.bfloat16)),
    "factored": optax.adafactor(1e-2, min_dim_size_to_factor=WIDTH),
    "trust ratios": optax.lamb(1e-2),
    "slow weights": optax.chain(optax.sgd(1e-2, momentum=0.9), optax.ema(0.9)),
    "every few steps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "unless infinite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "a conditional": optax.chain(
        optax.conditionally_mask(optax.scale(2.0), lambda step, **_: jnp.mod(step, 2) == 0),
        optax.sgd(0.1),
    ),
    "layerwise moments": optax.novograd(1e-2),
    "mixed rows": optax.chain(
        optax.stateless(lambda g, _: jax.tree.map(lambda x: jnp.cumsum(x, axis=0), g)),
        optax.adam(1e-2),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_by_rows_is_the_update(name: str):
    optimizer = OPTIMIZERS[name]
    parameters = {"head": X[:2], **STACKED}
    shapes, tree = jax.tree.flatten(jax.eval_shape(lambda: jax.tree.map(jnp.asarray, parameters)))
    flat = trace_update(optimizer, shapes, functools.partial(jax.tree.unflatten, tree))
    leaves = StackedLeaves((BLOCKS, None, BLOCKS))
    found = update_by_rows(flat, leaves, NONE_FROZEN)

    def arrays(seed: int) -> list[Any]:
        rng = np.random.default_rng(seed)
        return [rng.normal(size=shape.shape).astype(shape.dtype) for shape in shapes]

    with jax.numpy_dtype_promotion("standard"):
        state = jax.tree.leaves(optimizer.init(jax.tree.unflatten(tree, arrays(2))))
    given = [jnp.asarray(x) for x in (*arrays(2), *arrays(1), *state)]
    loss = [jnp.float32(6.0), jnp.float32(2.0)]
    n = len(shapes)

    @jax.jit
    def expected(values: Any) -> Any:
        return evaluate_steps(flat.steps, dict(zip(flat.inputs, values, strict=True)), flat.outputs)

    @jax.jit
    def by_rows(values: Any) -> Any:
        known = [*leaves.split(values[:n]), *leaves.split(values[n : 2 * n])]
        known += [*found.state.split(values[2 * n : -2]), *values[-2:]]
        results = evaluate_steps(
            found.flat.steps,
            dict(zip(found.flat.inputs, known, strict=True)),
            found.flat.outputs,
        )
        end = len(leaves.places)
        return [
            *leaves.join(results[:end], jnp.stack),
            *found.state.join(results[end:-3], jnp.stack),
            *results[-3:],
        ]

    for ours, theirs in zip(by_rows([*given, *loss]), expected([*given, *loss]), strict=True):
        np.testing.assert_allclose(
            np.asarray(ours, np.float32), np.asarray(theirs, np.float32), rtol=1e-5, atol=1e-7
        )
    stacked = any(
        found.flat.avals[output].shape[:1] == (BLOCKS,) and step.name in ("concatenate", "stack")
        for step in found.flat.steps
        for output in step.outputs
        if len(found.flat.avals[output].shape) > 1
    )
    assert stacked == (name == "mixed rows")
