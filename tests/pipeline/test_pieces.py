"""Programs that repeat themselves are cut into pieces, and alike pieces are told by their keys."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from hetjax.pipeline.program.computations import computation_of, constant_of
from hetjax.pipeline.program.constraints import constrained
from hetjax.pipeline.program.pieces import Piece, pieces_of
from hetjax.pipeline.program.step_program import StepProgram
from hetjax.pipeline.program.traced_program import Step, flatten_jaxpr
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.stages import traced_stage
from hetjax.pipeline.stages.cutting import cut
from hetjax.pipeline.stages.traced_stage import called_by_pieces
from hetjax.pipeline.update import alike_leaves
from hetjax.pipeline.update.alike_leaves import leafwise_pieces, program_of
from hetjax.pipeline.update.whole_update import update_function


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces may be as small as those of small models, and updates have few leaves."""
    monkeypatch.setattr(
        traced_stage, "pieces_of", lambda program, **given: pieces_of(program, 0.0, **given)
    )
    monkeypatch.setattr(alike_leaves, "_TOGETHER", 4)
    monkeypatch.setattr(alike_leaves, "_FEWEST", 0)


def in_pieces(
    program: StepProgram, pieces: Sequence[Piece], arrays: Sequence[Sequence[Any]]
) -> list[Any]:
    """What a program's pieces make, called in order."""
    values: dict[Any, Any] = dict(
        zip(itertools.chain(*program.arguments), itertools.chain(*arrays), strict=True)
    )
    for piece in pieces:
        (made,) = piece.program([values[value] for value in piece.reads])
        values.update(zip(piece.makes, made, strict=True))
    return [values[operand] for operand in itertools.chain(*program.outputs)]


def stack(depth: int) -> tuple[Callable[..., Any], list[jax.Array], jax.Array]:
    """A loss of some blocks that are alike, their weights, and a batch."""
    draw = np.random.default_rng(0).standard_normal
    weights = [jnp.asarray(draw((4, 4)) / 2, jnp.float32) for _ in range(2 * depth)]

    def loss(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            x = x + jnp.tanh(x @ up) @ down
        return jnp.sum(x * x)

    return loss, weights, jnp.asarray(draw((3, 4)), jnp.float32)


@settings(max_examples=8)
@given(depth=st.integers(1, 9))
def test_pieces_compute_what_the_program_does(depth: int):
    loss, weights, x = stack(depth)
    gradient = jax.value_and_grad(loss)
    program, _ = program_of(lambda weights, batch: gradient(weights, *batch), [weights, [x]])
    pieces = pieces_of(program, 0.0)
    assert bool(pieces) == (depth >= 3)
    expected, gradients = gradient(weights, x)
    found = in_pieces(program, pieces, [weights, [x]]) if pieces else program(weights, [x])[0]
    for ours, theirs in zip(found, [expected, *gradients], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_deeper_model_has_no_more_unlike_pieces():
    def unlike(depth: int) -> int:
        loss, weights, x = stack(depth)
        program, _ = program_of(lambda weights, x: jax.grad(loss)(weights, *x), [weights, [x]])
        pieces = pieces_of(program, 0.0)
        assert len(pieces) >= depth
        return len({piece.key for piece in pieces})

    assert unlike(5) == unlike(20)


def test_blocks_that_differ_in_a_constant_are_not_alike():
    def loss(x: jax.Array) -> jax.Array:
        for block in range(6):
            x = jnp.tanh(x @ x) * (0.5 if block % 2 else 0.25)
        return x

    program, _ = program_of(lambda x: loss(*x), [[jnp.ones((2, 2))]])
    pieces = pieces_of(program, 0.0)
    products = [piece.key for piece in pieces if len(piece.program.steps) > 1]
    assert len(products) == 3 or len(set(products)) > 1
    (found,) = in_pieces(program, pieces, [[jnp.eye(2)]]) if pieces else program([jnp.eye(2)])[0]
    np.testing.assert_array_equal(found, loss(jnp.eye(2)))


def test_small_pieces_hold_several_blocks():
    loss, weights, x = stack(12)
    program, _ = program_of(lambda weights, x: loss(weights, *x), [weights, [x]])
    alone = len(pieces_of(program, 0.0))
    # A block's two products are 2 * 2 * 3 * 4 * 4 operations.
    assert len(pieces_of(program, 2 * 2 * 2 * 3 * 4 * 4)) == alone // 2 + 1
    assert pieces_of(program) == ()


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (lambda x: x + 1.0, lambda x: x + 1.0, True),
        (lambda x: jnp.sum(x, 0), lambda x: jnp.sum(x, 1), False),
        (lambda x: jax.lax.map(jnp.sin, x), lambda x: jax.lax.map(jnp.sin, x), True),
        (lambda x: jax.lax.map(jnp.sin, x), lambda x: jax.lax.map(jnp.cos, x), False),
        (lambda x: x.astype("bfloat16"), lambda x: x.astype("float16"), False),
    ],
)
def test_what_steps_compute_is_compared_with_all_that_they_are_told(
    first: Callable[..., Any], second: Callable[..., Any], same: bool
):
    steps = [flatten_jaxpr(jax.make_jaxpr(f)(jnp.ones((2, 2)))).steps[-1] for f in (first, second)]
    assert (computation_of(steps[0]) == computation_of(steps[1])) == same


def test_constants_are_equal_to_the_bit_and_in_dtype():
    assert constant_of(np.float32(1)) == constant_of(np.ones((), np.float32))
    assert constant_of(0.0) != constant_of(-0.0)
    assert constant_of(np.float32(1)) != constant_of(np.int32(1))
    assert constant_of(np.zeros(2**21)) != constant_of(np.zeros(2**21))


OPTIMIZERS = {
    "clip, adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "clip twice": optax.chain(
        optax.clip_by_global_norm(0.5), optax.scale_by_adam(), optax.clip_by_global_norm(0.1)
    ),
    "lamb": optax.lamb(1e-2),
    "normalized": optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(1e-2)),
    "momentum": optax.sgd(1e-1, momentum=0.9),
}


@pytest.mark.parametrize("set_back", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_by_leaves_is_the_whole_update(name: str, set_back: bool):
    optimizer = OPTIMIZERS[name]
    draw = np.random.default_rng(0).standard_normal
    shapes = [*[(4, 3)] * 9, *[(3,)] * 10, (5, 3), ()]
    leaves, gradients = ([jnp.asarray(draw(s), jnp.float32) for s in shapes] for _ in range(2))
    state, structure = jax.tree.flatten(optimizer.init(leaves))
    update = update_function(optimizer, list)

    def run(leaves: Any, gradients: Any, state: Any, loss: Any) -> Any:
        held = jax.tree.unflatten(structure, state)
        return update(leaves, gradients, held, *loss, set_back=set_back)

    for total in (3.0, np.nan):
        arrays = [leaves, gradients, state, [jnp.float32(total), jnp.float32(7.0)]]
        with jax.numpy_dtype_promotion("standard"):
            program, _ = program_of(run, arrays)
            expected = jax.tree.leaves(jax.jit(run)(*arrays))
        whole, pieces = leafwise_pieces(program)
        assert len({piece.key for piece in pieces}) < len(pieces)
        for ours, theirs in zip(in_pieces(whole, pieces, arrays), expected, strict=True):
            if jnp.issubdtype(theirs.dtype, jax.dtypes.prng_key):
                ours, theirs = map(jax.random.key_data, (ours, theirs))
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


def test_leaves_over_and_gradients_set_back_are_no_programs_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(alike_leaves, "_TOGETHER", 96)
    optimizer = optax.sgd(1e-1, momentum=0.9)
    leaves = [jnp.ones(shape) for shape in [*[(4, 3)] * 241, *[(3,)] * 122]]
    state, structure = jax.tree.flatten(optimizer.init(leaves))
    update = update_function(optimizer, list)

    def run(leaves: Any, gradients: Any, state: Any, loss: Any) -> Any:
        held = jax.tree.unflatten(structure, state)
        return update(leaves, gradients, held, *loss, set_back=True)

    program, _ = program_of(run, [leaves, leaves, state, [jnp.float32(1.0)] * 2])
    _, pieces = leafwise_pieces(program)
    # Norms of most and of the rest, their sum and the loss, updates with zeros of most and of the
    # rest.
    assert len({piece.key for piece in pieces}) <= 6
    assert max(len(piece.makes) for piece in pieces) < len(leaves)


def scaled_backward(x: jax.Array, factor: float) -> jax.Array:
    """The values as they are; their cotangents times a factor."""

    @jax.custom_vjp
    def same(x: jax.Array) -> jax.Array:
        return x * 1.0

    same.defvjp(lambda x: (x * 1.0, None), lambda _, cotangent: (cotangent * factor,))
    return same(x)


def test_blocks_that_differ_in_a_derivative_rule_are_not_alike_before_they_are_differentiated():
    weights = [jnp.eye(4) * (1 + 0.1 * block) for block in range(6)]

    def loss(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        for block, weight in enumerate(weights):
            x = jnp.tanh(scaled_backward(x, 0.5**block) @ weight)
        return jnp.sum(x)

    x = jnp.full((3, 4), 0.3)
    program = trace(loss, weights, x)
    (stage,) = cut(program, (0, program.num_positions))

    def by_pieces(weights: Sequence[jax.Array]) -> jax.Array:
        return called_by_pieces(stage)(weights, [x], [])[0]

    # The stage's loss is the sum of the three examples' means.
    found, expected = (jax.jit(jax.grad(f))(weights) for f in (by_pieces, lambda w: loss(w, x)))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs * 3, rtol=1e-6)


def test_steps_that_are_told_how_their_results_lie_are_not_alike():
    program = trace(lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w))), jnp.eye(4), jnp.ones((2, 4)))
    first, second = (step for step in program.steps if step.name == "tanh")
    assert computation_of(first) == computation_of(second)
    columns = NamedSharding(AbstractMesh((2,), ("tensor",)), PartitionSpec(None, "tensor"))
    told = constrained(program, {first.outputs[0]: columns})
    first, second = (step for step in told.steps if step.name == "tanh")
    assert computation_of(first) != computation_of(second)


def test_nothing_keeps_a_step_whose_computation_was_asked_for():
    step = Step("concatenate", (0, 1), (2,), lambda *arrays: [jnp.concatenate(arrays)], None)
    assert computation_of(step) == computation_of(step)
    alive = weakref.ref(step)
    del step
    gc.collect()
    assert alive() is None


def test_zeros_of_either_sign_are_told_apart():
    def rounded(x: jax.Array, zero: float) -> jax.Array:
        return jax.lax.scan(lambda c, _: (c * zero, None), x, None, 2)[0]

    first, second = (
        flatten_jaxpr(jax.make_jaxpr(lambda x, zero=zero: rounded(x, zero))(1.0)).steps[-1]
        for zero in (0.0, -0.0)
    )
    assert computation_of(first) != computation_of(second)
