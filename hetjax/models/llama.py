"""Llama: rotary positions, RMS norms, a SwiGLU feed-forward, grouped-query attention, no biases.

Source: Touvron et al., 2023, arXiv:2302.13971, section 2.2, and arXiv:2307.09288, section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from flax import nnx

from hetjax.errors import InputError
from hetjax.models import checks
from hetjax.models.blocks import BlockForm, call_block, make_blocks, run_blocks
from hetjax.models.layers import (
    INIT_STD,
    RMSNorm,
    causal_attention,
    embedding,
    look_up,
    output_logits,
    projection,
    residual_std,
    rotary_tables,
    rotate,
    silu,
)


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama.

    Args:
        vocabulary: number of tokens.
        blocks: number of Transformer blocks.
        width: size of the residual stream.
        heads: attention (query) heads; divides ``width`` into heads of an even size.
        key_value_heads: heads of keys and values; divides ``heads``.
        ffn_width: inner width of the feed-forward layer.
        sequence: longest number of positions.
        rope_base: base of the rotary wavelengths, above 1.
        tied_embeddings: whether the token embedding is the output layer too.
        scan_blocks: whether the blocks are stacked and scanned over.
        compute_dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"`` (for devices without bfloat16;
            the loss is not scaled, but its gradients are those of the sum over tokens, which keeps
            them off the smallest numbers); parameters are float32 in any case.
        logit_chunk: how many tokens of each example have their logits in memory at a time, in the
            loss: see `hetjax.linear_cross_entropy`; 0 for all, each computed once.

    Raises:
        InputError: naming the field, its value and what is allowed.
    """

    vocabulary: int
    blocks: int
    width: int
    heads: int
    key_value_heads: int
    ffn_width: int
    sequence: int
    rope_base: float = 10000.0
    tied_embeddings: bool = False
    scan_blocks: bool = False
    compute_dtype: str = "float32"
    logit_chunk: int = 0

    def __post_init__(self):
        checks.positive_integers(self, "vocabulary", "blocks", "width", "heads")
        checks.positive_integers(self, "key_value_heads", "ffn_width", "sequence")
        checks.divides(self, "heads", "width")
        checks.divides(self, "key_value_heads", "heads")
        checks.interval(self, "rope_base", 1.0, float("inf"))
        checks.compute_dtype(self)
        checks.whole_number(self, "logit_chunk")
        if self.head_size % 2:
            raise InputError(
                f"LlamaConfig.heads is {self.heads}; with width {self.width} a head has size "
                f"{self.head_size}, and rotary positions need an even one"
            )

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.width // self.heads


class Llama(nnx.Module):
    """The model: tokens in, logits out.

    Args:
        config: its shape.
        rngs: where the initial parameters come from.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.token_embedding = embedding(config.vocabulary, config.width, rngs)
        forms = [BlockForm(LlamaBlock, config)] * config.blocks
        self.blocks = make_blocks(forms, stacked=config.scan_blocks, rngs=rngs)
        self.final_norm = RMSNorm(config.width, rngs=rngs)
        if not config.tied_embeddings:
            self.head = embedding(config.vocabulary, config.width, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of the token that follows each position.

        Args:
            tokens: [B, T] int32.

        Returns:
            [B, T, V] float32.
        """
        return output_logits(self.hidden(tokens), self.output_table)

    @property
    def output_table(self) -> jax.Array:
        """The matrix of the output layer, [V, D] float32."""
        return (self.token_embedding if self.config.tied_embeddings else self.head)[...]

    def hidden(self, tokens: jax.Array) -> jax.Array:
        """What the logits are made of.

        Args:
            tokens: [B, T] int32.

        Returns:
            [B, T, D] in the compute dtype.
        """
        config = self.config
        x = look_up(self.token_embedding[...], tokens, config.compute_dtype)
        x = run_blocks(self.blocks, x, lambda block, x, _: call_block(block, x), config.blocks)
        return self.final_norm(x)


class LlamaBlock(nnx.Module):
    """Attention, then a feed-forward layer, each added to the residual stream.

    Args:
        config: the model's shape.
        rngs: where the initial parameters come from.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.width, rngs=rngs)
        self.attention = LlamaAttention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.width, rngs=rngs)
        self.mlp = LlamaMLP(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``x`` [B, T, D] to [B, T, D]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class LlamaAttention(nnx.Module):
    """Causal grouped-query attention with rotary positions.

    Args:
        config: the model's shape.
        rngs: where the initial parameters come from.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        width, heads, size = config.width, config.heads, config.head_size

        def inward(heads: int) -> nnx.Einsum:
            return projection(
                "btd,dhk->bthk",
                (width, heads, size),
                None,
                std=INIT_STD,
                dtype=config.compute_dtype,
                rngs=rngs,
            )

        self.rope_base = config.rope_base
        self.query = inward(heads)
        self.key = inward(config.key_value_heads)
        self.value = inward(config.key_value_heads)
        self.output = projection(
            "bthk,hkd->btd",
            (heads, size, width),
            None,
            std=residual_std(config.blocks),
            dtype=config.compute_dtype,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """``x`` [B, T, D] to [B, T, D]."""
        query, key = self.query(x), self.key(x)
        tables = rotary_tables(x.shape[1], query.shape[-1], self.rope_base)
        mixed = causal_attention(rotate(query, *tables), rotate(key, *tables), self.value(x))
        return self.output(mixed)


class LlamaMLP(nnx.Module):
    """The SwiGLU feed-forward layer.

    Args:
        config: the model's shape.
        rngs: where the initial parameters come from.

    Source: Shazeer, 2020, arXiv:2002.05202, eq. 6.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        width, hidden, dtype = config.width, config.ffn_width, config.compute_dtype

        def inward() -> nnx.Einsum:
            return projection(
                "btd,df->btf", (width, hidden), None, std=INIT_STD, dtype=dtype, rngs=rngs
            )

        self.gate, self.up = inward(), inward()
        self.down = projection(
            "btf,fd->btd",
            (hidden, width),
            None,
            std=residual_std(config.blocks),
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """``x`` [B, T, D] to [B, T, D]."""
        return self.down(silu(self.gate(x)) * self.up(x))
