"""VGG: groups of 3x3 convolutions between poolings, then three dense layers.

Source: Simonyan and Zisserman, 2015, arXiv:1409.1556, table 1; initial weights after He et al.,
2015, arXiv:1502.01852, which train without the shallower networks to begin with.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from flax import nnx

from hetjax.errors import InputError
from hetjax.models import checks
from hetjax.models.vision_layers import Convolution, dense, he_std, max_pool, pixels, relu

_WIDEST = 8
_HEAD_STD = 0.01


@dataclass(frozen=True)
class VGGConfig:
    """The shape of a VGG.

    Args:
        classes: number of classes.
        image_size: height and width of the images, in pixels; every group halves them.
        groups: convolutions of each group, after which the largest number of every 2x2 pixels is
            taken; each group is twice as wide as the one before, up to eight times the first.
        width: channels of the first group.
        dense_width: size of the two hidden dense layers.
        compute_dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; parameters are float32 in any
            case.

    Raises:
        InputError: naming the field, its value and what is allowed.

    Example:
        >>> VGGConfig(classes=1000, image_size=224).name
        'vgg-19'
    """

    classes: int
    image_size: int
    groups: tuple[int, ...] = (2, 2, 4, 4, 4)
    width: int = 64
    dense_width: int = 4096
    compute_dtype: str = "float32"

    def __post_init__(self):
        checks.positive_integers(self, "classes", "image_size", "width", "dense_width")
        checks.several_positive_integers(self, "groups")
        checks.compute_dtype(self)
        if self.image_size % 2 ** len(self.groups):
            raise InputError(
                f"VGGConfig.image_size is {self.image_size}; {len(self.groups)} groups halve it, "
                f"so it must be a multiple of {2 ** len(self.groups)}"
            )

    @property
    def name(self) -> str:
        """For people: its layers of weights, e.g. ``"vgg-19"``."""
        return f"vgg-{sum(self.groups) + 3}"


class VGG(nnx.Module):
    """The model: images in, logits out.

    Args:
        config: its shape.
        rngs: where the initial parameters come from.
    """

    def __init__(self, config: VGGConfig, *, rngs: nnx.Rngs):
        self.config = config
        dtype, hidden = config.compute_dtype, config.dense_width
        groups, channels = [], 3
        for place, count in enumerate(config.groups):
            width = config.width * min(2**place, _WIDEST)
            steps = [(channels, width), *[(width, width)] * (count - 1)]
            groups.append(
                nnx.List(
                    [
                        Convolution(step, 3, padding=1, bias=True, dtype=dtype, rngs=rngs)
                        for step in steps
                    ]
                )
            )
            channels = width
        self.groups = nnx.List(groups)
        left = (config.image_size // 2 ** len(config.groups)) ** 2 * channels
        self.first = dense(left, hidden, std=he_std(left), dtype=dtype, rngs=rngs)
        self.second = dense(hidden, hidden, std=he_std(hidden), dtype=dtype, rngs=rngs)
        self.head = dense(hidden, config.classes, std=_HEAD_STD, dtype="float32", rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits of each image's class.

        Args:
            images: uint8 [B, H, W, 3].

        Returns:
            [B, classes] float32.
        """
        x = pixels(images, self.config.compute_dtype)
        for group in self.groups:
            for convolution in group:
                x = relu(convolution(x))
            x = max_pool(x, 2, stride=2)
        x = relu(self.first(x.reshape(x.shape[0], -1)))
        return self.head(relu(self.second(x)))
