import dataclasses
import functools
import itertools
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.errors import InputError
from hetjax.models import GPTConfig, LlamaConfig, language_model

GPT = GPTConfig(vocabulary=13, blocks=2, width=16, heads=2, sequence=8)
LLAMA = LlamaConfig(
    vocabulary=13, blocks=2, width=16, heads=4, key_value_heads=2, ffn_width=24, sequence=8
)
MODELS = {
    "gpt": GPT,
    "gpt untied": dataclasses.replace(GPT, tied_embeddings=False),
    "gpt scanned": dataclasses.replace(GPT, scan_blocks=True),
    "gpt bfloat16": dataclasses.replace(GPT, compute_dtype="bfloat16"),
    "gpt float16": dataclasses.replace(GPT, compute_dtype="float16"),
    # Their loss of balance is over a whole example, so that later tokens would change it.
    "gpt experts": dataclasses.replace(GPT, experts=4, expert_balance=0.0),
    "llama": LLAMA,
    "llama tied": dataclasses.replace(LLAMA, tied_embeddings=True),
    "llama scanned": dataclasses.replace(LLAMA, scan_blocks=True),
    "llama bfloat16": dataclasses.replace(LLAMA, compute_dtype="bfloat16"),
    "llama float16": dataclasses.replace(LLAMA, compute_dtype="float16"),
}
DROPPING = dataclasses.replace(GPT, dropout=0.3)


def batch_of(size: int, *, keys: bool = False) -> dict[str, jax.Array]:
    token_key, drop_key = jax.random.split(jax.random.key(7))
    batch = {"tokens": jax.random.randint(token_key, (size, 9), 0, 13, jnp.int32)}
    if keys:
        batch["keys"] = jax.random.bits(drop_key, (size, 2), jnp.uint32)
    return batch


def stack_blocks(params):
    blocks = [params["blocks"][str(index)] for index in range(len(params["blocks"]))]
    return params | {"blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}


class Program:
    """A model with its parameters; its loss and gradients are compiled once for all the tests."""

    def __init__(self, config: GPTConfig | LlamaConfig):
        self.model = language_model(config)
        self.params = self.model.init(jax.random.key(0))
        self._loss = jax.jit(jax.value_and_grad(self.model.loss, has_aux=True))

    def loss(self, tokens, weights=None, params=None):
        weights = jnp.ones((4, 8)) if weights is None else weights
        batch = {"tokens": tokens, "weights": weights}
        return self._loss(self.params if params is None else params, batch)


PROGRAMS = {name: functools.cache(functools.partial(Program, MODELS[name])) for name in MODELS}
TOKENS = batch_of(4)["tokens"]


@pytest.fixture(params=MODELS)
def program(request):
    return PROGRAMS[request.param]()


def test_loss_starts_near_that_of_chance(program):
    (total, count), _ = program.loss(TOKENS)
    assert total.shape == count.shape == ()
    assert total.dtype == count.dtype == jnp.float32
    assert count == 32
    assert abs(float(total / count) - math.log(13)) < 0.3


@pytest.mark.parametrize("name", ["gpt", "llama bfloat16"])
def test_logits_in_chunks_give_the_same_losses_and_gradients(name: str):
    program = PROGRAMS[name]()
    chunked = Program(dataclasses.replace(MODELS[name], logit_chunk=3))
    exact = name == "gpt"
    for found, expected in zip(
        jax.tree.leaves(chunked.loss(TOKENS, params=program.params)),
        jax.tree.leaves(program.loss(TOKENS)),
        strict=True,
    ):
        most = np.max(np.abs(expected))
        np.testing.assert_allclose(found, expected, atol=most * (1e-5 if exact else 0.02))


def test_what_is_no_number_of_tokens_is_refused():
    for value in (-1, True, 2.5):
        with pytest.raises(InputError, match=rf"GPTConfig.logit_chunk is {value}; it must be an"):
            dataclasses.replace(GPT, logit_chunk=value)


def test_parameters_are_float32_under_string_keys(program):
    for path, leaf in jax.tree.leaves_with_path(program.params):
        assert leaf.dtype == jnp.float32
        assert all(isinstance(entry.key, str) for entry in path)
    leaves = jax.tree.leaves(program.params)
    assert program.model.num_parameters() == sum(leaf.size for leaf in leaves)


def test_gradient_flows_to_every_parameter(program):
    _, gradients = program.loss(TOKENS)
    for path, leaf in jax.tree.leaves_with_path(gradients):
        assert leaf.dtype == jnp.float32
        assert jnp.isfinite(leaf).all(), path
        assert jnp.abs(leaf).max() > 1e-6, path


def test_a_few_steps_lower_the_loss(program):
    params, losses = program.params, []
    for _ in range(10):
        (total, count), gradients = program.loss(TOKENS, params=params)
        params = jax.tree.map(lambda value, slope: value - 0.005 * slope, params, gradients)
        losses.append(float(total / count))
    assert losses[-1] < losses[0] - 0.1


def test_later_tokens_do_not_change_earlier_losses(program):
    other = TOKENS.at[0, 6].set((TOKENS[0, 6] + 1) % 13)
    early = jnp.broadcast_to((jnp.arange(8) < 5).astype(jnp.float32), (4, 8))
    late = 1.0 - early
    assert program.loss(TOKENS, early)[0][0] == program.loss(other, early)[0][0]
    assert program.loss(TOKENS, late)[0][0] != program.loss(other, late)[0][0]


def test_weights_choose_the_tokens(program):
    one, two = jnp.zeros((4, 8)).at[1].set(0.5), jnp.zeros((4, 8)).at[2].set(0.5)
    rest = jnp.ones((4, 8)) - one - two
    parts = [program.loss(TOKENS, weights)[0] for weights in (one, two, rest)]
    assert [float(count) for _, count in parts] == [4.0, 4.0, 24.0]
    whole, _ = program.loss(TOKENS)[0]
    np.testing.assert_allclose(sum(total for total, _ in parts), whole, rtol=1e-5)


def test_without_weights_every_token_counts_once():
    program = PROGRAMS["gpt"]()
    bare = jax.jit(program.model.loss)(program.params, {"tokens": TOKENS})
    np.testing.assert_allclose(bare, program.loss(TOKENS)[0], rtol=1e-6)


@pytest.mark.parametrize("config", [GPT, LLAMA, DROPPING], ids=["gpt", "llama", "dropout"])
def test_scanned_equals_unrolled(config):
    unrolled = language_model(config)
    scanned = language_model(dataclasses.replace(config, scan_blocks=True))
    params, batch = unrolled.init(jax.random.key(3)), batch_of(3, keys=config is DROPPING)
    restacked = stack_blocks(params)

    made_stacked = scanned.init(jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, restacked, made_stacked)

    loss, gradients = jax.jit(jax.value_and_grad(unrolled.loss, has_aux=True))(params, batch)
    scanned_loss, scanned_gradients = jax.jit(jax.value_and_grad(scanned.loss, has_aux=True))(
        restacked, batch
    )
    np.testing.assert_allclose(loss, scanned_loss, rtol=1e-6)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6),
        stack_blocks(gradients),
        scanned_gradients,
    )


def test_grouped_queries_with_repeated_weights_are_multi_head():
    grouped = language_model(LLAMA)
    full = language_model(dataclasses.replace(LLAMA, key_value_heads=4))
    params, batch = grouped.init(jax.random.key(0)), batch_of(2)
    repeated = jax.tree.map(lambda leaf: leaf, params)
    for block in repeated["blocks"].values():
        for name in ("key", "value"):
            kernel = block["attention"][name]["kernel"]
            block["attention"][name]["kernel"] = jnp.repeat(kernel, 2, axis=1)
    one, other = jax.jit(grouped.loss)(params, batch), jax.jit(full.loss)(repeated, batch)
    np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.fixture(scope="module")
def dropping():
    """A model with dropout: its compiled loss, its parameters and a batch with keys."""
    model = language_model(dataclasses.replace(DROPPING, blocks=1))
    return jax.jit(model.loss), model.init(jax.random.key(0)), batch_of(6, keys=True)


@pytest.mark.parametrize("sizes", [(1, 1, 4), (2, 4), (1, 1, 1, 1, 1, 1)], ids=str)
def test_dropout_is_the_same_however_the_batch_is_cut(dropping, sizes):
    loss, params, whole = dropping
    parts = [
        loss(params, {name: leaf[low:high] for name, leaf in whole.items()})
        for low, high in itertools.pairwise(np.cumsum((0, *sizes)))
    ]
    np.testing.assert_allclose(loss(params, whole), np.sum(parts, axis=0), rtol=1e-6)


def test_dropout_happens_only_where_there_are_keys():
    model, plain = language_model(DROPPING), language_model(GPT)
    params, batch = model.init(jax.random.key(0)), batch_of(3, keys=True)
    tokens = {"tokens": batch["tokens"]}
    assert model.needs_keys
    assert not plain.needs_keys
    expected = jax.jit(plain.loss)(params, tokens)[0]
    assert jax.jit(model.loss)(params, tokens)[0] == expected
    assert jax.jit(model.loss)(params, batch)[0] != expected
    zeros = {**tokens, "keys": jnp.zeros_like(batch["keys"])}
    np.testing.assert_allclose(jax.jit(model.loss)(params, zeros)[0], expected, rtol=1e-6)


@pytest.mark.parametrize("config", [GPT, LLAMA, DROPPING], ids=["gpt", "llama", "dropout"])
def test_the_jaxpr_is_flat_and_holds_no_constants(config):
    model = language_model(dataclasses.replace(config, blocks=12))
    params = jax.eval_shape(model.init, jax.random.key(0))
    jaxpr = jax.make_jaxpr(model.loss)(params, batch_of(2, keys=model.needs_keys))
    assert jaxpr.consts == []
    assert len(jaxpr.eqns) < 1500
    names = {equation.primitive.name for equation in jaxpr.eqns}
    assert not names & {"jit", "pjit", "custom_jvp_call", "custom_vjp_call", "while", "cond"}


def test_the_program_can_be_sent_to_another_process():
    model = pickle.loads(pickle.dumps(language_model(GPT)))
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert jax.eval_shape(model.loss, shapes, batch_of(2))[0].shape == ()


def test_a_batch_of_another_length_is_refused():
    model = language_model(GPT)
    params = model.init(jax.random.key(0))
    with pytest.raises(InputError, match=r"shape \(2, 20\).*at most 8"):
        model.loss(params, {"tokens": jnp.zeros((2, 20), jnp.int32)})
