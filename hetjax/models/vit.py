"""ViT: a Transformer over square patches of an image, with a token that collects its class.

Source: Dosovitskiy et al., 2021, arXiv:2010.11929, section 3.1 and table 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.models import checks
from hetjax.models.blocks import BlockForm, call_block, make_blocks, run_blocks
from hetjax.models.layers import LayerNorm, attention, embedding, gelu, projection
from hetjax.models.vision_layers import Convolution, dense, pixels

_EPSILON = 1e-6


@dataclass(frozen=True)
class ViTConfig:
    """The shape of a ViT.

    Args:
        classes: number of classes.
        image_size: height and width of the images, in pixels.
        patch_size: height and width of a patch; divides ``image_size``.
        blocks: number of Transformer blocks.
        width: size of the residual stream.
        heads: attention heads; divides ``width``.
        ffn_width: inner width of the feed-forward layer.
        scan_blocks: whether the blocks are stacked and scanned over.
        compute_dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; parameters are float32 in any
            case.

    Raises:
        InputError: naming the field, its value and what is allowed.

    Example:
        >>> small = ViTConfig(
        ...     classes=10, image_size=32, patch_size=4, blocks=2, width=64, heads=4, ffn_width=128
        ... )
        >>> small.positions
        65
    """

    classes: int
    image_size: int
    patch_size: int
    blocks: int
    width: int
    heads: int
    ffn_width: int
    scan_blocks: bool = False
    compute_dtype: str = "float32"

    def __post_init__(self):
        checks.positive_integers(self, "classes", "image_size", "patch_size", "blocks", "width")
        checks.positive_integers(self, "heads", "ffn_width")
        checks.divides(self, "patch_size", "image_size")
        checks.divides(self, "heads", "width")
        checks.compute_dtype(self)

    @property
    def positions(self) -> int:
        """Positions of the Transformer: the class's, and one a patch."""
        return 1 + (self.image_size // self.patch_size) ** 2

    @property
    def name(self) -> str:
        """For people, e.g. ``"vit-12x768/16"``."""
        return f"vit-{self.blocks}x{self.width}/{self.patch_size}"


class ViT(nnx.Module):
    """The model: images in, logits out.

    Args:
        config: its shape.
        rngs: where the initial parameters come from.
    """

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, patch = config.width, config.patch_size
        self.patch_embedding = Convolution(
            (3, width),
            patch,
            stride=patch,
            bias=True,
            std=math.sqrt(1.0 / (3 * patch * patch)),
            dtype=config.compute_dtype,
            rngs=rngs,
        )
        self.class_token = nnx.Param(jnp.zeros((width,), jnp.float32))
        self.position_embedding = embedding(config.positions, width, rngs)
        forms = [BlockForm(ViTBlock, config)] * config.blocks
        self.blocks = make_blocks(forms, stacked=config.scan_blocks, rngs=rngs)
        self.final_norm = LayerNorm(width, rngs=rngs, epsilon=_EPSILON)
        self.head = dense(width, config.classes, std=0.0, dtype="float32", rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits of each image's class.

        Args:
            images: uint8 [B, H, W, 3].

        Returns:
            [B, classes] float32.
        """
        config = self.config
        dtype, examples = config.compute_dtype, images.shape[0]
        patches = self.patch_embedding(pixels(images, dtype))
        patches = patches.reshape(examples, config.positions - 1, config.width)
        first = jnp.broadcast_to(self.class_token[...].astype(dtype), (examples, 1, config.width))
        x = jax.lax.concatenate((first, patches), dimension=1)
        x = x + self.position_embedding[...].astype(dtype)[None]
        x = run_blocks(self.blocks, x, lambda block, x, _: call_block(block, x), config.blocks)
        collected = self.final_norm(jax.lax.index_in_dim(x, 0, axis=1, keepdims=False))
        return self.head(collected.astype(jnp.float32))


class ViTBlock(nnx.Module):
    """Attention, then a feed-forward layer, each added to the residual stream.

    Args:
        config: the model's shape.
        rngs: where the initial parameters come from.

    Source: Dosovitskiy et al., 2021, eq. 2 and 3.
    """

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        width, hidden, dtype = config.width, config.ffn_width, config.compute_dtype
        std = _glorot_std(width, hidden)
        self.attention_norm = LayerNorm(width, rngs=rngs, epsilon=_EPSILON)
        self.attention = ViTAttention(config, rngs=rngs)
        self.mlp_norm = LayerNorm(width, rngs=rngs, epsilon=_EPSILON)
        self.up = projection(
            "btd,df->btf", (width, hidden), (hidden,), std=std, dtype=dtype, rngs=rngs
        )
        self.down = projection(
            "btf,fd->btd", (hidden, width), (width,), std=std, dtype=dtype, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """``x`` [B, T, D] to [B, T, D]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(gelu(self.up(self.mlp_norm(x))))


class ViTAttention(nnx.Module):
    """Multi-head attention of every position to all, with biases.

    Args:
        config: the model's shape.
        rngs: where the initial parameters come from.
    """

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        width, heads, dtype = config.width, config.heads, config.compute_dtype
        size, std = width // heads, _glorot_std(width, width)

        def inward() -> nnx.Einsum:
            return projection(
                "btd,dhk->bthk",
                (width, heads, size),
                (heads, size),
                std=std,
                dtype=dtype,
                rngs=rngs,
            )

        # The keys' bias cancels in the softmax; published weights have it.
        self.query, self.key, self.value = inward(), inward(), inward()
        self.output = projection(
            "bhtk,hkd->btd", (heads, size, width), (width,), std=std, dtype=dtype, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """``x`` [B, T, D] to [B, T, D]."""
        return self.output(attention(self.query(x), self.key(x), self.value(x)))


def _glorot_std(inputs: int, outputs: int) -> float:
    """Source: Glorot and Bengio, 2010, "Understanding the difficulty of training", eq. 12."""
    return math.sqrt(2.0 / (inputs + outputs))
