"""A layer of experts: every token at its own, none but so many at one, and one loss for all."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hetjax.errors import InputError
from hetjax.models import GPTConfig, language_model
from hetjax.models.experts import Experts

CONFIG = GPTConfig(vocabulary=13, blocks=2, width=16, heads=2, sequence=8, experts=4)


def layer(capacity: float) -> Experts:
    return Experts(16, 4, capacity, 2, "float32", rngs=nnx.Rngs(0))


def by_hand(experts: Experts, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Token after token, in NumPy."""
    kernels = {
        name: np.asarray(getattr(experts, name).kernel[...]) for name in ("router", "up", "down")
    }
    out, balance = np.zeros_like(x), np.zeros(len(x))
    seats = max(1, int(np.ceil(experts.capacity * x.shape[1] / experts.count)))
    for b, example in enumerate(x):
        scores = np.exp(example @ kernels["router"])
        likes = scores / scores.sum(-1, keepdims=True)
        taken = np.zeros(experts.count, int)
        for t, token in enumerate(example):
            e = int(likes[t].argmax())
            taken[e] += 1
            if taken[e] <= seats:
                hidden = np.asarray(jax.nn.gelu(token @ kernels["up"][e]))
                out[b, t] = likes[t, e] * (hidden @ kernels["down"][e])
        balance[b] = experts.count * np.sum(taken / len(example) * likes.mean(0))
    return out, balance


@pytest.mark.parametrize("capacity", [0.5, 1.25, 4.0])
def test_every_token_goes_to_its_expert_while_there_is_room(capacity: float):
    experts = layer(capacity)
    x = np.asarray(jax.random.normal(jax.random.key(1), (3, 8, 16)))
    found, balance = experts(jnp.asarray(x))
    expected, expected_balance = by_hand(experts, x)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(balance, expected_balance, rtol=1e-6)
    passed_by = np.all(np.asarray(found) == 0, axis=-1).sum()
    assert passed_by == np.all(expected == 0, axis=-1).sum()
    assert (passed_by == 0) == (capacity == 4.0)


def test_an_even_share_has_the_least_loss_of_balance():
    experts = layer(1.25)
    experts.router.kernel[...] = jnp.eye(16)[:, :4] * 40.0
    even = jnp.eye(16)[jnp.arange(8) % 4][None]
    uneven = jnp.eye(16)[jnp.zeros(8, int)][None]
    assert float(experts(even)[1][0]) == pytest.approx(1.0)
    assert float(experts(uneven)[1][0]) == pytest.approx(4.0)


def test_the_loss_of_balance_is_part_of_the_loss():
    tokens = jax.random.randint(jax.random.key(7), (4, 9), 0, 13, jnp.int32)
    totals = {}
    for weight in (0.0, 1.0):
        model = language_model(dataclasses.replace(CONFIG, expert_balance=weight))
        params = model.init(jax.random.key(0))
        total, count = model.loss(params, {"tokens": tokens})
        totals[weight] = float(total / count)
        # However a batch is cut, the sums are the same.
        halves = [model.loss(params, {"tokens": half})[0] for half in jnp.split(tokens, 2)]
        assert float(sum(halves)) == pytest.approx(float(total), rel=1e-6)
    assert 1.0 - 1e-6 <= totals[1.0] - totals[0.0] < 4.0


def test_stacked_blocks_are_of_one_kind():
    with pytest.raises(InputError, match=r"GPTConfig\.scan_blocks is True.*allowed: False"):
        dataclasses.replace(CONFIG, scan_blocks=True)
    with pytest.raises(InputError, match=r"GPTConfig\.experts is -1"):
        dataclasses.replace(CONFIG, experts=-1)
