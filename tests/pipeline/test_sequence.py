"""The tokens of a program: which dimensions they are, and what is refused along them."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetjax
from hetjax.errors import InputError
from hetjax.pipeline.program.sequence import token_dimensions
from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.program.tracing import trace

LENGTH, WIDTH, HEADS, VOCABULARY = 6, 8, 2, 11


def attend(x: jax.Array) -> jax.Array:
    heads = x.reshape(*x.shape[:2], HEADS, WIDTH // HEADS)
    return hetjax.attention(heads, heads, heads, causal=True).reshape(x.shape)


def program_of(inner: Any, *, divides_sequences: bool = False, **more: np.ndarray) -> Program:
    """A model that embeds tokens, computes something, attends, and predicts the next token."""

    def loss(parameters: Any, batch: Any) -> jax.Array:
        tokens = batch["tokens"]
        x = parameters["embedding"][tokens[:, :-1]]
        x = attend(inner(x, parameters))
        scores = jax.nn.log_softmax(x @ parameters["embedding"].T)
        return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], -1))

    parameters = {"embedding": np.ones((VOCABULARY, WIDTH), np.float32), **more}
    batch = {"tokens": jax.ShapeDtypeStruct((3, LENGTH + 1), np.dtype(np.int32))}
    return trace(loss, parameters, batch, divides_sequences=divides_sequences)


def names_of(program: Program, places: Any) -> list[str]:
    return [program.steps[place].name for place in places]


def test_tokens_and_labels_are_put_in_order_where_they_are_cut_out_of_the_batch():
    program = program_of(lambda x, parameters: x)
    found = token_dimensions(program)
    # The batch has a token more than there are queries, so it stays in its own order.
    assert not set(program.batch) & set(found.values)
    assert names_of(program, found.made).count("slice") == 2
    assert all(set(places.values()) == {1} for places in found.made.values())
    attention = next(step for step in program.steps if step.name == "attention")
    assert found.values[attention.outputs[0]] == 1


def test_positions_are_put_in_order_where_they_are_made_or_taken():
    table = np.ones((LENGTH + 3, WIDTH), np.float32)

    def with_positions(x: jax.Array, parameters: Any) -> jax.Array:
        angles = jnp.arange(LENGTH, dtype=jnp.float32)[:, None] * jnp.ones(WIDTH)
        return x + jnp.sin(angles) + parameters["table"][:LENGTH] + parameters["whole"]

    program = program_of(with_positions, table=table, whole=table[:LENGTH])
    found = token_dimensions(program)
    assert "iota" in names_of(program, found.made)
    # The rows of one table are cut out, which makes tokens; those of the other come as they are.
    assert names_of(program, found.made).count("slice") == 3
    whole = program.parameters[program.parameter_names.index("whole")]
    assert any(
        program.steps[place].inputs[operand] == whole and dimensions == (0,)
        for place, taken in found.taken.items()
        for operand, dimensions in taken.items()
    )


def test_what_is_the_same_of_every_token_is_not_put_in_order():
    def lower_half(x: jax.Array, parameters: Any) -> jax.Array:
        return jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, 2) < WIDTH // 2, x, 0.0)

    program = program_of(lower_half)
    assert "iota" in [step.name for step in program.steps]
    assert "iota" not in names_of(program, token_dimensions(program).made)


@pytest.mark.parametrize(
    ("inner", "name"),
    [
        (lambda x, _: jnp.cumsum(x, axis=1), "cumsum"),
        (lambda x, _: jnp.flip(x, 1), "rev"),
        (lambda x, _: jax.lax.approx_max_k(x, LENGTH, 1)[0], "approx_top_k"),
        (lambda x, _: x + jnp.linalg.svd(x, compute_uv=False)[:, :1, None], "svd"),
        (lambda x, _: jnp.sort(x, axis=1), "sort"),
        (lambda x, _: jnp.concatenate([x[:, 1:], x[:, :1]], axis=1), "concatenate"),
        (lambda x, _: x + jnp.concatenate([x[:, 1:], x[:, :1]], axis=1), "slice|concatenate"),
        (
            lambda x, _: jax.lax.conv_general_dilated(
                x,
                jnp.ones((3, WIDTH, WIDTH)),
                (1,),
                "SAME",
                dimension_numbers=("NHC", "HIO", "NHC"),
            ),
            "conv_general_dilated",
        ),
        (
            lambda x, _: jnp.moveaxis(
                jax.lax.scan(lambda c, row: (c + row, c), x[:, 0] * 0, jnp.moveaxis(x, 1, 0))[1],
                0,
                1,
            ),
            "slice|scan",
        ),
    ],
)
def test_what_goes_along_the_tokens_is_refused_by_name_and_line(inner: Any, name: str):
    with pytest.raises(InputError, match=rf"loss: ({name}) at .*test_sequence.py:\d+ .*them"):
        token_dimensions(program_of(inner))


def test_what_has_no_rule_is_named_as_such():
    def by_experts(x: jax.Array, parameters: Any) -> jax.Array:
        sizes = jnp.array([2, LENGTH - 2], jnp.int32)
        experts = jnp.ones((2, WIDTH, WIDTH), x.dtype)
        return x + jax.lax.ragged_dot(x[0], experts, sizes)

    with pytest.raises(InputError, match=r"ragged_dot\w* at .* has no sharding rule, so it goes"):
        token_dimensions(program_of(by_experts))


def test_tokens_that_are_made_of_several_frames_are_refused_by_line():
    def loss(w: jax.Array, frames: jax.Array) -> jax.Array:
        tokens = frames.reshape(frames.shape[0], LENGTH, -1) @ w
        return jnp.mean(attend(tokens) ** 2)

    frames = np.ones((2, 2 * LENGTH, WIDTH), np.float32)
    program = trace(loss, np.ones((2 * WIDTH, WIDTH), np.float32), frames)
    with pytest.raises(InputError, match=r"reshape at .* makes one of several of them"):
        token_dimensions(program)


def rotated_in_pairs(x: jax.Array) -> jax.Array:
    """Rotary positions of neighbours, which are put side by side again."""
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * jnp.ones(x.shape[2] // 2)
    even, odd, cosine, sine = x[..., ::2], x[..., 1::2], jnp.cos(angles), jnp.sin(angles)
    pairs = jnp.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1)
    return pairs.reshape(x.shape)


def rotated_as_complex(x: jax.Array) -> jax.Array:
    """The same by complex numbers."""
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * jnp.ones(x.shape[2] // 2)
    turned = jax.lax.complex(x[..., ::2], x[..., 1::2])
    turned *= jax.lax.complex(jnp.cos(angles), jnp.sin(angles))
    return jnp.stack([turned.real, turned.imag], -1).reshape(x.shape)


@pytest.mark.parametrize("rotated", [rotated_in_pairs, rotated_as_complex])
def test_tokens_are_followed_through_positions_that_rotate_neighbours(rotated: Any):
    program = program_of(lambda x, _: rotated(x))
    found = token_dimensions(program)
    stack = next(step for step in program.steps if step.name == "stack")
    assert found.values[stack.outputs[0]] == 1


def test_a_model_without_attention_is_refused():
    program = trace(lambda w, x: jnp.mean((x @ w) ** 2), jnp.ones((4, 2)), jnp.ones((8, 4)))
    with pytest.raises(InputError, match="loss: it has no attention"):
        token_dimensions(program)


def test_attention_in_a_loop_that_is_one_step_is_refused_with_its_line():
    """The same weights in each turn: there is no parameter for each."""

    def inner(x: jax.Array, parameters: Any) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(attend(x)), x)

    with pytest.raises(InputError, match=r"test_sequence.py:\d+ stands in a scan at .*test_seq"):
        token_dimensions(program_of(inner))


def test_attention_that_is_written_out_in_a_scan_over_blocks_is_found():
    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            heads = (x @ w).reshape(*x.shape[:2], HEADS, WIDTH // HEADS)
            return x + jax.nn.dot_product_attention(heads, heads, heads).reshape(x.shape), None

        return jnp.mean(jax.lax.scan(body, x, parameters)[0])

    shapes = np.ones((3, WIDTH, WIDTH), np.float32), np.ones((2, LENGTH, WIDTH), np.float32)
    program = trace(loss, *shapes, divides_sequences=True)
    assert names_of(program, range(len(program.steps))).count("attention") == 3
    found = token_dimensions(program).values
    attentions = [step for step in program.steps if step.name == "attention"]
    assert [found[step.outputs[0]] for step in attentions] == [1, 1, 1]


def block_names(program: Program) -> list[str]:
    return [step.name for step in program.steps]


@pytest.mark.parametrize("is_scanned", [False, True])
def test_an_attention_in_a_checkpointed_region_is_a_step_of_its_own(is_scanned: bool):
    """A plan says itself what is made again."""

    def block(x: jax.Array, weight: jax.Array) -> jax.Array:
        return x + attend(jnp.tanh(x @ weight))

    def inner(x: jax.Array, parameters: Any) -> jax.Array:
        again = jax.checkpoint(block)
        if is_scanned:
            return jax.lax.scan(lambda h, w: (again(h, w), None), x, parameters["blocks"])[0]
        for weight in parameters["blocks"]:
            x = again(x, weight)
        return x

    blocks = np.ones((3, WIDTH, WIDTH), np.float32)
    program = program_of(inner, divides_sequences=True, blocks=blocks)
    assert block_names(program).count("attention") == 4
    token_dimensions(program)


def test_a_checkpointed_region_without_attention_stays():
    def inner(x: jax.Array, parameters: Any) -> jax.Array:
        return jax.checkpoint(lambda x: jnp.tanh(jnp.sin(x)))(x)

    program = program_of(inner, divides_sequences=True)
    assert [name for name in block_names(program) if name in ("checkpoint", "remat2", "remat")]
    token_dimensions(program)


def test_an_attention_in_a_function_with_a_rule_of_its_own_is_refused():
    @jax.custom_vjp
    def own(x: jax.Array) -> jax.Array:
        return attend(x)

    own.defvjp(lambda x: (attend(x), None), lambda _, given: (given,))
    program = program_of(lambda x, parameters: own(x), divides_sequences=True)
    with pytest.raises(InputError, match=r"stands in a custom_vjp_call at .*test_sequence"):
        token_dimensions(program)


def test_what_mixes_tokens_has_them_along_two_dimensions():
    """A learned matrix, of which rows and columns are tokens."""
    mix = np.ones((LENGTH, LENGTH), np.float32)
    program = program_of(lambda x, p: x + jnp.einsum("btw,ts->bsw", x, p["mix"]), mix=mix)
    number = program.parameters[program.parameter_names.index("mix")]
    places = [
        dimensions
        for place, taken in token_dimensions(program).taken.items()
        for operand, dimensions in taken.items()
        if program.steps[place].inputs[operand] == number
    ]
    assert [sorted(each) for each in places] == [[0, 1]]


def test_attention_that_is_not_known_is_refused_beside_one_that_is():
    """With its line, and the reason why it is not known."""

    def capped(x: jax.Array, parameters: Any) -> jax.Array:
        return jax.nn.softmax(jnp.tanh(x @ x.swapaxes(1, 2))) @ x

    program = program_of(capped, divides_sequences=True)
    told = rf"at {re.escape(__file__)}:\d+"
    with pytest.raises(InputError) as refused:
        token_dimensions(program)
    message = str(refused.value)
    assert re.match(rf"loss: \w+ {told} has tokens along dimensions 1 and 2", message), message
    assert re.search(rf"dot_general {told}: tanh is between the scores", message)


@pytest.mark.parametrize("is_masked", [False, True])
def test_a_memory_of_as_many_rows_as_tokens_is_not_of_tokens(is_masked: bool):
    def remembering(x: jax.Array, parameters: Any) -> jax.Array:
        table = parameters["table"]
        scores = x @ table.T
        if is_masked:
            scores = jnp.where(np.tri(LENGTH, dtype=bool), scores, -1e9)
        return x + jax.nn.softmax(scores) @ table

    table = np.ones((LENGTH, WIDTH), np.float32)
    program = program_of(remembering, divides_sequences=True, table=table)
    found = token_dimensions(program)
    assert block_names(program).count("attention") == 1
    number = program.parameters[program.parameter_names.index("table")]
    assert not any(
        program.steps[place].inputs[operand] == number
        for place, taken in found.taken.items()
        for operand in taken
    )


def reversed_sums(g: jax.Array) -> jax.Array:
    return jnp.flip(jnp.cumsum(jnp.flip(g, 1), 1), 1)


@jax.custom_jvp
def twice(x: jax.Array, table: jax.Array) -> jax.Array:
    return x + table - table[-1]


@twice.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return twice(*primals), tangents[0] + tangents[1]


def with_derivative(backward: Any) -> Any:
    @jax.custom_vjp
    def same(x: jax.Array) -> jax.Array:
        return x

    same.defvjp(lambda x: (x, x), lambda x, g: (backward(x, g),))
    return same


@jax.custom_gradient
def summed_backward(x: jax.Array) -> Any:
    return jnp.tanh(x), reversed_sums


summed_tangent = jax.custom_jvp(jnp.tanh)
summed_tangent.defjvps(lambda t, ans, x: jnp.cumsum(t, 1))


@pytest.mark.parametrize(
    ("inner", "problem"),
    [
        (
            jax.checkpoint(lambda x, p: x + p["table"] - p["table"][-1]),
            "slice at .* takes them in two orders inside a call",
        ),
        (lambda x, p: twice(x, p["table"]), "slice at .* along them"),
        (
            lambda x, _: with_derivative(lambda _, g: reversed_sums(g))(x),
            "(rev|cumsum) at .* along",
        ),
        (
            lambda x, _: with_derivative(lambda _, g: g * jnp.arange(1.0, 7.0)[:, None])(x),
            "takes them in two orders in a derivative of a call's own",
        ),
        (lambda x, _: summed_backward(x), "(rev|cumsum) at .* along"),
        (lambda x, _: summed_tangent(x), "cumsum at .* along"),
    ],
)
def test_calls_that_depend_on_the_order_of_tokens_are_refused(inner: Any, problem: str):
    table = np.ones((LENGTH, WIDTH), np.float32)
    with pytest.raises(InputError, match=rf"loss: .*{problem}") as refused:
        token_dimensions(program_of(inner, table=table))
    assert f" at {__file__}:" in str(refused.value)


def test_a_reshape_that_merges_examples_and_tokens_is_refused_with_what_to_do():
    with pytest.raises(InputError, match=r"reshape at .*test_sequence.* makes one dimension of"):
        token_dimensions(program_of(lambda x, _: x.reshape(-1, WIDTH).reshape(x.shape)))


def test_sequences_of_one_token_are_refused():
    def loss(parameters: Any, batch: Any) -> jax.Array:
        return jnp.mean(attend(batch @ parameters))

    shape = jax.ShapeDtypeStruct((3, 1, WIDTH), np.dtype(np.float32))
    program = trace(loss, np.eye(WIDTH, dtype=np.float32), shape)
    with pytest.raises(InputError, match=r"attention at .*test_sequence.* sequences of 1 token"):
        token_dimensions(program)


@pytest.mark.parametrize(
    "backward", [lambda _, g: g, lambda x, g: g * x / jnp.sum(jnp.square(g)), lambda _, g: 0 * g]
)
def test_a_derivative_that_takes_each_token_alone_is_followed(backward: Any):
    program = program_of(lambda x, _: with_derivative(backward)(x))
    assert token_dimensions(program).values


def scaled(x: jax.Array) -> jax.Array:
    return x * np.linspace(0.5, 1, WIDTH, dtype=np.float32)


scaled_backward, scaled_tangent = jax.custom_vjp(scaled), jax.custom_jvp(scaled)
scaled_backward.defvjp(lambda x: (scaled(x), None), lambda _, g: (scaled(g),))
scaled_tangent.defjvp(lambda primals, tangents: (scaled(*primals), scaled(*tangents)))


@pytest.mark.parametrize("function", [scaled_backward, scaled_tangent])
def test_a_derivative_of_a_function_that_closes_over_numbers_is_followed(function: Any):
    assert token_dimensions(program_of(lambda x, _: function(x))).values


@pytest.mark.parametrize("function", [jax.nn.relu, jax.nn.silu, jax.nn.log_softmax])
def test_functions_of_jax_with_a_derivative_are_followed(function: Any):
    assert token_dimensions(program_of(lambda x, _: function(x))).values


def test_values_that_are_two_operands_have_tokens_in_one_alone():
    """A product of positions with themselves, summed over one of them."""

    def loss(parameters: Any, batch: Any) -> jax.Array:
        x, time = parameters["table"][batch["tokens"]], batch["time"]
        near = jnp.einsum("bt,bs->bts", time, time) * jnp.tril(jnp.ones((LENGTH, LENGTH)))
        return jnp.mean(attend(x + jnp.sum(near, -1)[..., None]))

    shapes = {
        "tokens": jax.ShapeDtypeStruct((3, LENGTH), np.dtype(np.int32)),
        "time": jax.ShapeDtypeStruct((3, LENGTH), np.dtype(np.float32)),
    }
    program = trace(loss, {"table": np.ones((VOCABULARY, WIDTH), np.float32)}, shapes)
    time = program.batch[program.batch_names.index("time")]
    taken = token_dimensions(program).taken
    places = [each for each, step in enumerate(program.steps) if step.inputs == (time, time)]
    assert [sorted(taken[place]) for place in places] == [[0]]


def test_tokens_that_a_call_hands_on_are_followed():
    """As segment numbers that go through a checkpointed block."""

    def inner(x: jax.Array, parameters: Any) -> jax.Array:
        made, same = jax.checkpoint(lambda x: (jnp.tanh(jnp.sin(x)), x))(x)
        return made + same

    program = program_of(inner, divides_sequences=True)
    region = next(s for s in program.steps if s.name in ("checkpoint", "remat2", "remat"))
    found = token_dimensions(program)
    assert {found.values[value] for value in region.outputs} == {1}
