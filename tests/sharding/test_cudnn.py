"""What cards compute by cuDNN's kernel: the same function, here with JAX's own in its place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.sharding.attention import Mask, Tokens, TokenSpan, cudnn
from hetjax.sharding.attention.mask import positions_of
from hetjax.sharding.attention.primitive import bind_attention

CAUSAL, FULL = Mask(None, 0), Mask()


def _operands(dtype=jnp.bfloat16, tokens=12, size=16):
    shapes = [(2, 3, tokens, heads, size) for heads in (4, 2, 2, 4)]
    return [jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate(shapes)]


@pytest.fixture
def plain_kernel(monkeypatch):
    """JAX's kernel for all devices in the place of cuDNN's, whose arguments it takes."""
    plain = jax.nn.dot_product_attention

    def called(*operands, implementation, **options):
        assert implementation == "cudnn"
        return plain(*operands, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", called)


@pytest.mark.parametrize("mask", [CAUSAL, FULL])
def test_it_is_the_attention_and_its_gradients(plain_kernel, mask):
    q, k, v, d_out = (each.astype(jnp.float32) for each in _operands())
    tokens = _tokens(q.shape[-3])

    def attend(q, k, v):
        return bind_attention(q, k, v, tokens, tokens, mask=mask, scale=0.3)

    out, lse = attend(q, k, v)
    found, sums = jax.jit(lambda q, k, v: cudnn.attention_by_cudnn(q, k, v, mask, 0.3))(q, k, v)
    np.testing.assert_allclose(found, out, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(sums, lse, rtol=2e-5, atol=2e-5)
    expected = jax.vjp(lambda q, k, v: attend(q, k, v)[0], q, k, v)[1](d_out)
    gradients = jax.jit(
        lambda q, k, v, d: cudnn.attention_backward_by_cudnn(q, k, v, d, mask, 0.3)
    )(q, k, v, d_out)
    for one, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


def _tokens(count):
    spans = (TokenSpan(0, count),)
    return Tokens(spans, positions_of(spans))


@pytest.mark.parametrize(
    ("what", "is_for_it"),
    [
        ({}, True),
        ({"dtype": jnp.float32}, False),
        ({"size": 12}, False),
        ({"size": 256}, False),
        ({"mask": FULL}, True),
        ({"mask": Mask(4, 0)}, False),
        ({"has_segments": True}, False),
        ({"key_spans": (TokenSpan(2, 14),)}, False),
    ],
)
def test_what_it_is_for(what, is_for_it):
    shape = {name: what[name] for name in ("dtype", "size") if name in what}
    q, k, v, _ = _operands(**shape)
    spans = (TokenSpan(0, 12),)
    params = {"mask": CAUSAL, "query_spans": spans, "key_spans": spans, "has_segments": False}
    assert cudnn.is_for_cudnn(q, k, v, params | what) is is_for_it


def test_other_devices_do_without():
    q, k, v, _ = _operands()
    attend = functools.partial(_attend, tokens=_tokens(12))
    text = jax.jit(attend).lower(q, k, v).as_text()
    assert "cudnn" not in text


def _attend(q, k, v, tokens):
    return bind_attention(q, k, v, tokens, tokens, mask=CAUSAL, scale=0.3)[0]
