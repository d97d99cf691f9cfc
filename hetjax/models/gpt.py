"""GPT: learned positions, layer norms before each half of a block, a GELU feed-forward.

Source: GPT-2 (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners"),
section 2.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from flax import nnx

from hetjax.models import checks
from hetjax.models.blocks import make_blocks, run_blocks
from hetjax.models.layers import (
    INIT_STD,
    LayerNorm,
    causal_attention,
    dropout,
    embedding,
    gelu,
    look_up,
    output_logits,
    projection,
    residual_std,
)

_EMBEDDING_SITE = 0
_SITES_PER_BLOCK = 3


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT.

    Args:
        vocabulary: number of tokens.
        blocks: number of Transformer blocks.
        width: size of the residual stream.
        heads: attention heads; divides ``width``.
        sequence: longest number of positions.
        dropout: share dropped after the embedding, of the attention weights, and after either half
            of a block, in [0, 1).
        tied_embeddings: whether the token embedding is the output layer too.
        scan_blocks: whether the blocks are stacked and scanned over.
        compute_dtype: ``"float32"`` or ``"bfloat16"``; parameters are float32 in any case.

    Raises:
        InputError: naming the field, its value and what is allowed.

    Example:
        >>> GPTConfig(vocabulary=256, blocks=4, width=192, heads=6, sequence=128).head_size
        32
    """

    vocabulary: int
    blocks: int
    width: int
    heads: int
    sequence: int
    dropout: float = 0.0
    tied_embeddings: bool = True
    scan_blocks: bool = False
    compute_dtype: str = "float32"

    def __post_init__(self):
        checks.positive_integers(self, "vocabulary", "blocks", "width", "heads", "sequence")
        checks.divides(self, "heads", "width")
        checks.interval(self, "dropout", 0.0, 1.0)
        checks.compute_dtype(self)

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.width // self.heads


class GPT(nnx.Module):
    """The model: tokens in, logits out.

    Args:
        config: its shape.
        rngs: where the initial parameters come from.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.token_embedding = embedding(config.vocabulary, config.width, rngs)
        self.position_embedding = embedding(config.sequence, config.width, rngs)
        self.blocks = make_blocks(
            lambda rngs: GPTBlock(config, rngs=rngs),
            config.blocks,
            stacked=config.scan_blocks,
            rngs=rngs,
        )
        self.final_norm = LayerNorm(config.width, rngs=rngs)
        if not config.tied_embeddings:
            self.head = embedding(config.vocabulary, config.width, rngs)

    def __call__(self, tokens: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        """Logits of the token that follows each position.

        Args:
            tokens: [B, T] int32, T at most the configured sequence.
            keys: [B, 2] uint32, a threefry key an example, for dropout; ``None`` for none.

        Returns:
            [B, T, V] float32.
        """
        config = self.config
        position = self.position_embedding[: tokens.shape[1]].astype(config.compute_dtype)
        x = look_up(self.token_embedding[...], tokens, config.compute_dtype) + position[None]
        x = dropout(x, keys, _EMBEDDING_SITE, config.dropout)

        def call(block: GPTBlock, x: jax.Array, index: int | jax.Array) -> jax.Array:
            return block(x, keys, _EMBEDDING_SITE + 1 + _SITES_PER_BLOCK * index)

        x = self.final_norm(run_blocks(self.blocks, x, call, config.blocks))
        head = self.token_embedding if config.tied_embeddings else self.head
        return output_logits(x, head[...])


class GPTBlock(nnx.Module):
    """Attention, then a feed-forward layer, each added to the residual stream.

    Args:
        config: the model's shape.
        rngs: where the initial parameters come from.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.rate = config.dropout
        self.attention_norm = LayerNorm(config.width, rngs=rngs)
        self.attention = GPTAttention(config, rngs=rngs)
        self.mlp_norm = LayerNorm(config.width, rngs=rngs)
        self.mlp = GPTMLP(config, rngs=rngs)

    def __call__(self, x: jax.Array, keys: jax.Array | None, site: int | jax.Array) -> jax.Array:
        """``x`` [B, T, D] to [B, T, D]; ``site`` is the first of the block's dropout sites."""
        attended = self.attention(self.attention_norm(x), keys, site)
        x = x + dropout(attended, keys, site + 1, self.rate)
        return x + dropout(self.mlp(self.mlp_norm(x)), keys, site + 2, self.rate)


class GPTAttention(nnx.Module):
    """Causal multi-head attention with biases, except on the keys.

    Args:
        config: the model's shape.
        rngs: where the initial parameters come from.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        width, heads, size = config.width, config.heads, config.head_size

        def inward(bias_shape: tuple[int, ...] | None) -> nnx.Einsum:
            return projection(
                "btd,dhk->bthk",
                (width, heads, size),
                bias_shape,
                std=INIT_STD,
                dtype=config.compute_dtype,
                rngs=rngs,
            )

        self.rate = config.dropout
        self.query = inward((heads, size))
        # A bias would add one number to a whole row of scores, which the softmax cancels.
        self.key = inward(None)
        self.value = inward((heads, size))
        self.output = projection(
            "bhtk,hkd->btd",
            (heads, size, width),
            (width,),
            std=residual_std(config.blocks),
            dtype=config.compute_dtype,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array, keys: jax.Array | None, site: int | jax.Array) -> jax.Array:
        """``x`` [B, T, D] to [B, T, D]; ``site`` is that of the attention weights' dropout."""
        mixed = causal_attention(
            self.query(x),
            self.key(x),
            self.value(x),
            drop=lambda weights: dropout(weights, keys, site, self.rate),
        )
        return self.output(mixed)


class GPTMLP(nnx.Module):
    """The feed-forward layer, four times as wide as the stream.

    Args:
        config: the model's shape.
        rngs: where the initial parameters come from.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        width, hidden, dtype = config.width, 4 * config.width, config.compute_dtype
        self.up = projection(
            "btd,df->btf", (width, hidden), (hidden,), std=INIT_STD, dtype=dtype, rngs=rngs
        )
        self.down = projection(
            "btf,fd->btd",
            (hidden, width),
            (width,),
            std=residual_std(config.blocks),
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """``x`` [B, T, D] to [B, T, D]."""
        return self.down(gelu(self.up(x)))
