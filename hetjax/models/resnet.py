"""ResNet: residual blocks of three convolutions, each normalised over the batch.

Source: He et al., 2016, arXiv:1512.03385, section 3.3 and table 1, with the strides and the initial
scales of Goyal et al., 2017, arXiv:1706.02677, section 5.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.models import checks
from hetjax.models.vision_layers import BatchNorm, Convolution, dense, max_pool, pixels, relu

_EXPANSION = 4
_HEAD_STD = 0.01


@dataclass(frozen=True)
class ResNetConfig:
    """The shape of a ResNet of bottleneck blocks.

    Args:
        classes: number of classes.
        image_size: height and width of the images, in pixels.
        groups: blocks of each group; every group but the first halves height and width, and is
            twice as wide.
        width: channels inside the blocks of the first group; the stream has four times as many.
        compute_dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; parameters and the statistics
            of batches are float32 in any case.

    Raises:
        InputError: naming the field, its value and what is allowed.

    Example:
        >>> ResNetConfig(classes=1000, image_size=224).features
        2048
    """

    classes: int
    image_size: int
    groups: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    compute_dtype: str = "float32"

    def __post_init__(self):
        checks.positive_integers(self, "classes", "image_size", "width")
        checks.several_positive_integers(self, "groups")
        checks.compute_dtype(self)

    @property
    def features(self) -> int:
        """Channels of the last group's stream."""
        return _EXPANSION * self.width * 2 ** (len(self.groups) - 1)

    @property
    def name(self) -> str:
        """For people: its layers of weights, e.g. ``"resnet-50"``."""
        return f"resnet-{3 * sum(self.groups) + 2}"


class ResNet(nnx.Module):
    """The model: images in, logits out.

    Args:
        config: its shape.
        rngs: where the initial parameters come from.
    """

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs):
        self.config = config
        dtype = config.compute_dtype
        self.stem = Convolution((3, config.width), 7, stride=2, padding=3, dtype=dtype, rngs=rngs)
        self.stem_norm = BatchNorm(config.width, rngs=rngs)
        blocks, channels = [], config.width
        for group, count in enumerate(config.groups):
            width = config.width * 2**group
            for place in range(count):
                stride = 2 if group and not place else 1
                blocks.append(Bottleneck(channels, width, stride, dtype, rngs=rngs))
                channels = _EXPANSION * width
        self.blocks = nnx.List(blocks)
        self.head = dense(channels, config.classes, std=_HEAD_STD, dtype="float32", rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits of each image's class.

        Args:
            images: uint8 [B, H, W, 3].

        Returns:
            [B, classes] float32.
        """
        x = self.stem(pixels(images, self.config.compute_dtype))
        x = max_pool(relu(self.stem_norm(x)), 3, stride=2, padding=1)
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x.astype(jnp.float32), axis=(1, 2)))


class Bottleneck(nnx.Module):
    """A narrow convolution between two of single pixels, added to the stream.

    Where the stream changes its shape, it goes through a convolution of single pixels itself.

    Args:
        channels: of the stream before.
        width: channels inside; the stream has four times as many after it.
        stride: pixels from one window of the middle convolution to the next.
        dtype: what it computes in.
        rngs: where the initial parameters come from.
    """

    def __init__(self, channels: int, width: int, stride: int, dtype: str, *, rngs: nnx.Rngs):
        after = _EXPANSION * width
        self.narrow = Convolution((channels, width), 1, dtype=dtype, rngs=rngs)
        self.narrow_norm = BatchNorm(width, rngs=rngs)
        self.middle = Convolution(
            (width, width), 3, stride=stride, padding=1, dtype=dtype, rngs=rngs
        )
        self.middle_norm = BatchNorm(width, rngs=rngs)
        self.widen = Convolution((width, after), 1, dtype=dtype, rngs=rngs)
        # At first every block passes the stream on as it is.
        self.widen_norm = BatchNorm(after, scale=0.0, rngs=rngs)
        self.changes = channels != after or stride != 1
        if self.changes:
            self.shortcut = Convolution((channels, after), 1, stride=stride, dtype=dtype, rngs=rngs)
            self.shortcut_norm = BatchNorm(after, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``x`` [B, H, W, C] to [B, H', W', C']."""
        inside = relu(self.narrow_norm(self.narrow(x)))
        inside = relu(self.middle_norm(self.middle(inside)))
        inside = self.widen_norm(self.widen(inside))
        stream = self.shortcut_norm(self.shortcut(x)) if self.changes else x
        return relu(stream + inside)
