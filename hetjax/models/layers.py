"""The mathematics that the models share: norms, attention, rotary positions, dropout, the loss.

Everything here is written with plain `jax.numpy` operations that trace to single equations (no
nested ``jit``), so that a model's jaxpr stays a flat list which can be cut anywhere. Masks and
position tables are made where they are used: they then belong to one block, and no pipeline stage
has to send them to another. Norms, softmax and loss compute in float32 whatever the inputs are.

Shapes: B examples, T (or S) positions, D width, H heads, G key-value heads, K head size, V
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.sharding.attention.attention import attention as one_equation

INIT_STD = 0.02
"""Standard deviation of initial weights. Source: GPT-2 (Radford et al., 2019), section 2.3."""

_MASKED = -1e30  # Finite, so that no row of scores can turn into NaN.


class LayerNorm(nnx.Module):
    """Layer normalisation over the last axis, with a scale and a bias.

    Args:
        width: size of the last axis.
        rngs: unused; taken so that every layer is made the same way.
        epsilon: added to the variance.

    Source: Ba et al., 2016, arXiv:1607.06450, eq. 3-4.
    """

    def __init__(self, width: int, *, rngs: nnx.Rngs, epsilon: float = 1e-5):
        del rngs
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((width,), jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise ``x`` [..., D]; shape and dtype are kept."""
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        normal = centred * jax.lax.rsqrt(variance + self.epsilon)
        return (normal * self.scale[...] + self.bias[...]).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last axis, with a scale.

    Args:
        width: size of the last axis.
        rngs: unused; taken so that every layer is made the same way.
        epsilon: added to the mean square.

    Source: Zhang and Sennrich, 2019, arXiv:1910.07467, eq. 4.
    """

    def __init__(self, width: int, *, rngs: nnx.Rngs, epsilon: float = 1e-5):
        del rngs
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise ``x`` [..., D]; shape and dtype are kept."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normal = wide * jax.lax.rsqrt(mean_square + self.epsilon)
        return (normal * self.scale[...]).astype(x.dtype)


def projection(
    equation: str,
    kernel_shape: tuple[int, ...],
    bias_shape: tuple[int, ...] | None,
    *,
    std: float,
    dtype: str,
    rngs: nnx.Rngs,
) -> nnx.Einsum:
    """A linear map written as an einsum, float32 weights cast to ``dtype`` at use.

    Args:
        equation: e.g. ``"btd,dhk->bthk"``.
        kernel_shape: shape of the weights, the equation's second operand.
        bias_shape: shape of the bias, or ``None`` for none.
        std: standard deviation of the initial weights; a bias starts at zero.
        dtype: what it computes in.
        rngs: where the initial weights come from.

    Returns:
        The Flax module.
    """
    return nnx.Einsum(
        equation,
        kernel_shape,
        bias_shape,
        dtype=jnp.dtype(dtype),
        param_dtype=jnp.float32,
        kernel_init=nnx.initializers.normal(std),
        rngs=rngs,
    )


def embedding(rows: int, width: int, rngs: nnx.Rngs) -> nnx.Param:
    """A float32 table [rows, width] of initial embeddings."""
    return nnx.Param(nnx.initializers.normal(INIT_STD)(rngs.params(), (rows, width), jnp.float32))


def residual_std(blocks: int) -> float:
    """Initial standard deviation of the two projections of a block that end on the residual stream.

    Each of ``blocks`` blocks adds twice to the stream; this keeps the variance of the sum.

    Source: GPT-2 (Radford et al., 2019), section 2.3.
    """
    return INIT_STD / math.sqrt(2 * blocks)


def look_up(table: jax.Array, tokens: jax.Array, dtype: str) -> jax.Array:
    """Rows of an embedding table.

    Args:
        table: [V, D] float32.
        tokens: [B, T] int32. A token outside the table reads its nearest end.
        dtype: of the result.

    Returns:
        [B, T, D].
    """
    return table.at[tokens].get(mode="clip", wrap_negative_indices=False).astype(dtype)


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    drop: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Grouped-query attention in which a position sees itself and those before it.

    Args:
        query: [B, T, H, K].
        key: [B, S, G, K], where G divides H and S equals T.
        value: [B, S, G, K].
        drop: applied to the attention weights [B, G, H/G, T, S]; dropout. These are in memory
            where there is some, and only then.

    Returns:
        [B, T, H, K], in the dtype of ``value``.

    Example:
        >>> ones = jnp.ones((2, 5, 4, 8))
        >>> causal_attention(ones, ones[:, :, :2], ones[:, :, :2]).shape
        (2, 5, 4, 8)
    """
    if drop is None:
        return one_equation(query, key, value, causal=True)
    mixed = attention(query, key, value, mask=_causal_mask(query.shape[1]), drop=drop)
    return mixed.transpose(0, 2, 1, 3)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = None,
    drop: Callable[[jax.Array], jax.Array] = lambda weights: weights,
) -> jax.Array:
    """Grouped-query attention.

    With G = H it is multi-head attention. The softmax's division comes after the product with the
    values: K numbers to divide for each position instead of S, and fewer to keep for the backward
    pass.

    Args:
        query: [B, T, H, K].
        key: [B, S, G, K], where G divides H.
        value: [B, S, G, K].
        mask: added to the scores, [1, 1, 1, T, S] float32; ``None`` where every position sees all.
        drop: applied to the attention weights [B, G, H/G, T, S]; dropout.

    Returns:
        [B, H, T, K], in the dtype of ``value``.

    Source: Vaswani et al., 2017, arXiv:1706.03762, eq. 1; Ainslie et al., 2023,
    arXiv:2305.13245, section 2.2.
    """
    batch, length, heads, size = query.shape
    groups = key.shape[2]
    grouped = (query * size**-0.5).reshape(batch, length, groups, heads // groups, size)
    grouped = grouped.transpose(0, 2, 3, 1, 4)
    scores = jnp.einsum("bgrtk,bsgk->bgrts", grouped, key, preferred_element_type=jnp.float32)
    if mask is not None:
        scores = scores + mask
    # The largest score cancels out, so no gradient flows through it.
    largest = jnp.max(jax.lax.stop_gradient(scores), axis=-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    total = jnp.sum(weights, axis=-1)[..., None]
    mixed = jnp.einsum(
        "bgrts,bsgk->bgrtk",
        drop(weights).astype(value.dtype),
        value,
        preferred_element_type=jnp.float32,
    )
    return (mixed / total).astype(value.dtype).reshape(batch, heads, length, size)


def _causal_mask(length: int) -> jax.Array:
    """What is added to the scores: [T, T], zero on and below the diagonal.

    It is added rather than selected with, because a sum leaves nothing for the backward pass.
    """
    row = jax.lax.broadcasted_iota(jnp.int32, (1, 1, 1, length, length), 3)
    column = jax.lax.broadcasted_iota(jnp.int32, (1, 1, 1, length, length), 4)
    return (column > row).astype(jnp.float32) * _MASKED


def rotary_tables(length: int, size: int, base: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotary position embedding.

    Args:
        length: number of positions, T.
        size: head size, K; even.
        base: the wavelengths run from 2 pi to 2 pi ``base``, in positions.

    Returns:
        Two arrays [1, T, 1, K/2], float32.

    Source: Su et al., 2021, arXiv:2104.09864, section 3.2.2.
    """
    half = size // 2
    pair = jax.lax.broadcasted_iota(jnp.float32, (1, length, 1, half), 3)
    position = jax.lax.broadcasted_iota(jnp.float32, (1, length, 1, half), 1)
    angle = position * jnp.exp(pair * (-math.log(base) / half))
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Turn each pair (k, k + K/2) of a head by its position's angle.

    The product of a rotated query and a rotated key then depends on their distance alone.

    Args:
        x: [B, T, H, K].
        cosine: [1, T, 1, K/2], of `rotary_tables`.
        sine: [1, T, 1, K/2].

    Returns:
        [B, T, H, K], dtype of ``x``.

    Source: Su et al., 2021, arXiv:2104.09864, eq. 34, with Llama's order of pairs.
    """
    half = x.shape[-1] // 2
    wide = x.astype(jnp.float32)
    first = jax.lax.slice_in_dim(wide, 0, half, axis=-1)
    second = jax.lax.slice_in_dim(wide, half, 2 * half, axis=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return jax.lax.concatenate(turned, dimension=3).astype(x.dtype)


def gelu(x: jax.Array) -> jax.Array:
    """The Gaussian error linear unit, by its tanh approximation.

    Source: Hendrycks and Gimpel, 2016, arXiv:1606.08415, section 2.
    """
    inner = x * (1.0 + 0.044715 * jnp.square(x)) * math.sqrt(2.0 / math.pi)
    return 0.5 * x * (1.0 + jnp.tanh(inner))


def silu(x: jax.Array) -> jax.Array:
    """The sigmoid linear unit, x * sigmoid(x)."""
    return x * jax.lax.logistic(x)


def dropout(x: jax.Array, keys: jax.Array | None, site: int | jax.Array, rate: float) -> jax.Array:
    """Zero a share of the numbers, each example drawing from its own key.

    Because an example's numbers depend on its key and the site alone, every way of cutting a batch
    into microbatches and shards drops the same ones.

    Args:
        x: [B, ...].
        keys: [B, 2] uint32, one threefry key an example; ``None`` for no dropout at all, zeros for
            none on that example, so that one program serves training and evaluation.
        site: which dropout of the model this is; each site has a number of its own.
        rate: the share to drop, in [0, 1).

    Returns:
        Like ``x``, what is kept divided by ``1 - rate``.

    Source: Srivastava et al., 2014, JMLR 15, section 4.
    """
    if keys is None or rate == 0.0:
        return x

    def draw(key: jax.Array) -> jax.Array:
        return jax.random.bits(jax.random.fold_in(key, site), x.shape[1:], jnp.uint32)

    bits = jax.vmap(draw)(jax.random.wrap_key_data(keys, impl="threefry2x32"))
    keep = bits < jnp.uint32(round((1.0 - rate) * 2**32))
    dropped = jax.lax.select(keep, x * (1.0 / (1.0 - rate)), jnp.zeros_like(x))
    trains = jax.lax.broadcast_in_dim(jax.lax.reduce_max(keys, (1,)) != 0, x.shape, (0,))
    return jax.lax.select(trains, dropped, x)


def output_logits(x: jax.Array, table: jax.Array) -> jax.Array:
    """Scores of every token of the vocabulary, in float32.

    Args:
        x: [B, T, D].
        table: [V, D] float32, cast to the dtype of ``x``; the token embedding where they are tied.

    Returns:
        [B, T, V] float32.
    """
    return jnp.einsum("btd,vd->btv", x, table.astype(x.dtype), preferred_element_type=jnp.float32)


def cross_entropies(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Cross-entropy of each token or image, in nats.

    The target's logit is picked by comparison and sum rather than by index, so that the vocabulary
    can be sharded with nothing but a sum to communicate.

    Args:
        logits: [..., V] float32.
        targets: [...] int32, each in [0, V).

    Returns:
        [...] float32.

    Example:
        >>> losses = cross_entropies(jnp.zeros((1, 3, 8)), jnp.zeros((1, 3), jnp.int32))
        >>> bool(jnp.allclose(losses, math.log(8)))
        True
    """
    shifted = logits - jnp.max(jax.lax.stop_gradient(logits), axis=-1, keepdims=True)
    normaliser = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    vocabulary = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    is_target = vocabulary == targets[..., None]
    picked = jnp.sum(jax.lax.select(is_target, shifted, jnp.zeros_like(shifted)), axis=-1)
    return normaliser - picked
