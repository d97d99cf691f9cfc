"""Operands that wait for another array: the same bits, and a compiler that cannot know it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.sharding.attention import Mask, Tokens
from hetjax.sharding.attention.late_operands import taken_after
from hetjax.sharding.attention.primitive import bind_attention
from hetjax.sharding.attention.work import attention_bytes

BITS = np.array([0, 1, 2**7, 2**15, 2**31, 0x7FC00001, 0xFF800000, 2**32 - 1], np.uint32)
"""Zeros of both signs, the smallest numbers, numbers that are none, infinity."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8"])
@pytest.mark.parametrize("awaited", ["float32", "bfloat16", "int32"])
def test_they_keep_their_bits(dtype: str, awaited: str):
    for first in BITS:
        there = BITS.view(jnp.dtype(dtype)), np.array([[first]]).view(jnp.dtype(awaited))
        (found,) = jax.jit(lambda array, other: taken_after(other, array))(*map(jnp.array, there))
        assert np.asarray(found).tobytes() == there[0].tobytes()


def test_what_has_no_such_bits_stays():
    flags, numbers, none = jnp.array([True, False]), jnp.arange(3.0), jnp.zeros((0, 2))
    assert taken_after(numbers, flags)[0] is flags
    assert taken_after(numbers, none)[0] is none
    assert taken_after(flags, numbers)[0] is numbers
    assert taken_after(none, numbers)[0] is numbers


def test_the_compiler_does_not_see_through_it():
    def run(awaited: Any, array: Any) -> Any:
        return taken_after(awaited, array)[0] * 2.0

    text = jax.jit(run).lower(jnp.ones((2, 2)), jnp.ones(8)).compile().as_text()
    assert text is not None
    entry = text[text.index("ENTRY") :]
    names = [line.split(" = ")[0].split()[-1] for line in entry.splitlines() if "parameter" in line]
    assert all(entry.count(name) > 1 for name in names if name.startswith("%"))
    assert "shift-right-logical" in text


@pytest.mark.parametrize(("dtype", "waiting"), [("float32", 3), ("bfloat16", 1)])
def test_backward_passes_of_one_card_wait_for_the_cotangent(
    dtype: str, waiting: int, monkeypatch: pytest.MonkeyPatch
):
    """Three that tiles take in forms of their own; cuDNN's kernel takes the queries later alone."""
    plain = jax.nn.dot_product_attention

    def in_place_of_cudnn(*operands: Any, implementation: str, **options: Any) -> Any:
        assert implementation == "cudnn"
        return plain(*operands, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", in_place_of_cudnn)
    shape = jax.ShapeDtypeStruct((2, 64, 4, 64), dtype)

    def lowered(platform: str) -> str:
        traced = jax.jit(jax.grad(_loss, argnums=(0, 1, 2))).trace(shape, shape, shape)
        with jax.numpy_dtype_promotion("standard"):
            return traced.lower(lowering_platforms=(platform,)).as_text()

    assert lowered("cuda").count("stablehlo.or") == waiting
    assert lowered("cpu").count("stablehlo.or") == 0


def _loss(q: Any, k: Any, v: Any) -> Any:
    return _attended(q, k, v).astype(jnp.float32).sum()


def _attended(q: Any, k: Any, v: Any) -> Any:
    return bind_attention(q, k, v, Tokens(), Tokens(), mask=Mask(), scale=0.1)[0]


@pytest.mark.parametrize(("dtype", "on_cards"), [("float32", True), ("bfloat16", False)])
def test_what_it_holds_on_cards(dtype: str, on_cards: bool):
    """cuDNN's kernel holds nothing, and cards fuse more than processors."""
    shape = jax.ShapeDtypeStruct((2, 224, 4, 64), dtype)
    (equation,) = jax.make_jaxpr(_attended)(shape, shape, shape).eqns
    of_cards = attention_bytes(equation, on_cpu=False)
    of_processors = attention_bytes(equation, on_cpu=True)
    assert of_cards is not None
    assert of_processors is not None
    assert bool(of_cards) == on_cards
    assert of_cards < of_processors
