"""What the image models share: convolutions, batch normalisation, pooling.

As in `hetjax.models.layers`, everything traces to single equations. Shapes: B examples, H height,
W width, C channels.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hetjax.models.layers import projection


class Convolution(nnx.Module):
    """A convolution with a square window, padded alike on both sides.

    Args:
        channels: of the input, and of the output.
        window: its height and width.
        stride: pixels from one window to the next.
        padding: zeros on each side.
        bias: whether a bias is added.
        std: standard deviation of the initial weights; None for `he_std` of the window.
        dtype: what it computes in; its weights are float32.
        rngs: where the initial weights come from; a bias starts at zero.
    """

    def __init__(
        self,
        channels: tuple[int, int],
        window: int,
        *,
        stride: int = 1,
        padding: int = 0,
        bias: bool = False,
        std: float | None = None,
        dtype: str,
        rngs: nnx.Rngs,
    ):
        shape = (window, window, *channels)
        std = he_std(window * window * channels[0]) if std is None else std
        initial = nnx.initializers.normal(std)(rngs.params(), shape, jnp.float32)
        self.kernel = nnx.Param(initial)
        if bias:
            self.bias = nnx.Param(jnp.zeros((channels[1],), jnp.float32))
        self.has_bias, self.stride, self.padding, self.dtype = bias, stride, padding, dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """``x`` [B, H, W, C] to [B, H', W', C']."""
        found = jax.lax.conv_general_dilated(
            x.astype(self.dtype),
            self.kernel[...].astype(self.dtype),
            (self.stride, self.stride),
            ((self.padding, self.padding),) * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return found + self.bias[...].astype(self.dtype) if self.has_bias else found


class BatchNorm(nnx.Module):
    """Batch normalisation by the statistics of the examples at hand, with a scale and a bias.

    The loss is a pure function of parameters and batch, so there are no running statistics:
    training and evaluation alike normalise by the mean and the variance of the microbatch. What a
    network says of an image therefore depends on the images beside it and on the microbatch's size,
    as in gradient accumulation on one device: a plan with other microbatches trains another
    network, and a loss of few images is a noisy one. Wherever a stage divides a microbatch over its
    devices, the statistics are those of the whole.

    Args:
        channels: size of the last axis.
        scale: initial scale of each.
        rngs: unused; taken so that every layer is made the same way.
        epsilon: added to the variance.

    Source: Ioffe and Szegedy, 2015, arXiv:1502.03167, algorithm 1.
    """

    def __init__(self, channels: int, *, scale: float = 1.0, rngs: nnx.Rngs, epsilon: float = 1e-5):
        del rngs
        self.scale = nnx.Param(jnp.full((channels,), scale, jnp.float32))
        self.bias = nnx.Param(jnp.zeros((channels,), jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise ``x`` [B, H, W, C]; shape and dtype are kept."""
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=(0, 1, 2), keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=(0, 1, 2), keepdims=True)
        normal = centred * jax.lax.rsqrt(variance + self.epsilon)
        return (normal * self.scale[...] + self.bias[...]).astype(x.dtype)


def dense(inputs: int, outputs: int, *, std: float, dtype: str, rngs: nnx.Rngs) -> nnx.Einsum:
    """A dense layer of [B, inputs] to [B, outputs], with a bias.

    Args:
        inputs: size of what it takes.
        outputs: size of what it gives.
        std: standard deviation of the initial weights.
        dtype: what it computes in.
        rngs: where the initial weights come from.

    Returns:
        The Flax module.
    """
    return projection("bf,fd->bd", (inputs, outputs), (outputs,), std=std, dtype=dtype, rngs=rngs)


def he_std(inputs: int) -> float:
    """Initial standard deviation of weights before a rectifier, each sum of so many inputs.

    Source: He et al., 2015, arXiv:1502.01852, eq. 10.
    """
    return math.sqrt(2.0 / inputs)


def relu(x: jax.Array) -> jax.Array:
    """The rectifier; its slope at 0 is 0."""
    return jax.lax.select(x > 0, x, jnp.zeros_like(x))


def max_pool(x: jax.Array, window: int, *, stride: int, padding: int = 0) -> jax.Array:
    """The largest number of every window.

    Args:
        x: [B, H, W, C].
        window: height and width.
        stride: pixels from one window to the next.
        padding: pixels on each side, smaller than any number.

    Returns:
        [B, H', W', C].

    Example:
        >>> max_pool(jnp.arange(16.0).reshape(1, 4, 4, 1), 2, stride=2).ravel().tolist()
        [5.0, 7.0, 13.0, 15.0]
    """
    return jax.lax.reduce_window(
        x,
        np.asarray(-np.inf, x.dtype),
        jax.lax.max,
        (1, window, window, 1),
        (1, stride, stride, 1),
        ((0, 0), (padding, padding), (padding, padding), (0, 0)),
    )


def pixels(images: jax.Array, dtype: str) -> jax.Array:
    """Bytes as numbers from -1 to 1.

    Args:
        images: uint8 [B, H, W, C].
        dtype: of the result.

    Returns:
        Like ``images``.
    """
    return (images.astype(jnp.float32) * (2.0 / 255.0) - 1.0).astype(dtype)
