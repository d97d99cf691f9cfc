"""GPT: learned positions, layer norms before each half of a block, a GELU feed-forward.

With experts every second block's feed-forward is a layer of them.

Source: GPT-2 (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners"),
section 2.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from flax import nnx

from hetjax.errors import InputError
from hetjax.models import checks
from hetjax.models.blocks import BlockForm, call_block, make_blocks, run_blocks
from hetjax.models.experts import Experts
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
        compute_dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"`` (for devices without bfloat16;
            the loss is not scaled, but its gradients are those of the sum over tokens, which keeps
            them off the smallest numbers); parameters are float32 in any case.
        experts: how many experts the feed-forward of every second block has; 0 for none.
        expert_capacity: how many tokens an expert takes of each example, over an even share.
        expert_balance: the weight of the experts' loss of balance.
        logit_chunk: how many tokens of each example have their logits in memory at a time, in the
            loss: see `hetjax.linear_cross_entropy`; 0 for all, each computed once.

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
    experts: int = 0
    expert_capacity: float = 1.25
    expert_balance: float = 0.01
    logit_chunk: int = 0

    def __post_init__(self):
        checks.positive_integers(self, "vocabulary", "blocks", "width", "heads", "sequence")
        if self.experts:
            checks.positive_integers(self, "experts")
            checks.unrolled(self)
            if self.blocks < 2:
                raise InputError(
                    f"experts is {self.experts}, and blocks is {self.blocks}: every second block "
                    f"has experts; allowed: 2 blocks or more, or experts = 0"
                )
        checks.interval(self, "expert_capacity", 0.0, float("inf"))
        checks.interval(self, "expert_balance", 0.0, float("inf"))
        checks.divides(self, "heads", "width")
        checks.interval(self, "dropout", 0.0, 1.0)
        checks.compute_dtype(self)
        checks.whole_number(self, "logit_chunk")

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
        experts = (_has_experts(config, index) for index in range(config.blocks))
        forms = [BlockForm(GPTBlock, config, (("expert", expert),)) for expert in experts]
        self.blocks = make_blocks(forms, stacked=config.scan_blocks, rngs=rngs)
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
        return output_logits(self.hidden(tokens, keys)[0], self.output_table)

    @property
    def output_table(self) -> jax.Array:
        """The matrix of the output layer, [V, D] float32."""
        return (self.token_embedding if self.config.tied_embeddings else self.head)[...]

    def hidden(
        self, tokens: jax.Array, keys: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """What the logits are made of, and what the experts add to each example's loss.

        Args:
            tokens: [B, T] int32, T at most the configured sequence.
            keys: [B, 2] uint32, a threefry key an example, for dropout; ``None`` for none.

        Returns:
            [B, T, D] in the compute dtype, and [B] float32, the weighted loss of balance of all
            layers of experts; ``None`` where there are none.
        """
        config, balance = self.config, None
        position = self.position_embedding[: tokens.shape[1]].astype(config.compute_dtype)
        x = look_up(self.token_embedding[...], tokens, config.compute_dtype) + position[None]
        x = dropout(x, keys, _EMBEDDING_SITE, config.dropout)

        def call(block: GPTBlock, x: jax.Array, index: int | jax.Array) -> jax.Array:
            nonlocal balance
            site = _EMBEDDING_SITE + 1 + _SITES_PER_BLOCK * index
            if isinstance(site, int):
                # Without dropout blocks are alike wherever they stand.
                x, added = call_block(block, x, keys, told=(0 if keys is None else site,))
            else:
                x, added = block(x, keys, site)
            if added is not None:
                weighted = config.expert_balance * added
                balance = weighted if balance is None else balance + weighted
            return x

        return self.final_norm(run_blocks(self.blocks, x, call, config.blocks)), balance


def _has_experts(config: GPTConfig, index: int) -> bool:
    """Whether a block's feed-forward is a layer of experts: every second block's, from 1."""
    return config.experts > 0 and index % 2 == 1


class GPTBlock(nnx.Module):
    """Attention, then a feed-forward layer, each added to the residual stream.

    Args:
        config: the model's shape.
        expert: whether the feed-forward layer is one of experts.
        rngs: where the initial parameters come from.
    """

    def __init__(self, config: GPTConfig, *, expert: bool = False, rngs: nnx.Rngs):
        self.rate = config.dropout
        self.attention_norm = LayerNorm(config.width, rngs=rngs)
        self.attention = GPTAttention(config, rngs=rngs)
        self.mlp_norm = LayerNorm(config.width, rngs=rngs)
        self.mlp = _make_experts(config, rngs) if expert else GPTMLP(config, rngs=rngs)

    def __call__(
        self, x: jax.Array, keys: jax.Array | None, site: int | jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Run the block.

        Args:
            x: [B, T, D].
            keys: a key an example, for dropout; ``None`` for none.
            site: the first of the block's dropout sites.

        Returns:
            [B, T, D], and each example's loss of balance among experts, where there are some.
        """
        attended = self.attention(self.attention_norm(x), keys, site)
        x = x + dropout(attended, keys, site + 1, self.rate)
        inner, balance = self.mlp_norm(x), None
        if isinstance(self.mlp, Experts):
            fed, balance = self.mlp(inner)
        else:
            fed = self.mlp(inner)
        return x + dropout(fed, keys, site + 2, self.rate), balance


def _make_experts(config: GPTConfig, rngs: nnx.Rngs) -> Experts:
    return Experts(
        config.width,
        config.experts,
        config.expert_capacity,
        config.blocks,
        config.compute_dtype,
        rngs=rngs,
    )


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
            "bthk,hkd->btd",
            (heads, size, width),
            (width,),
            std=residual_std(config.blocks),
            dtype=config.compute_dtype,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array, keys: jax.Array | None, site: int | jax.Array) -> jax.Array:
        """``x`` [B, T, D] to [B, T, D]; ``site`` is that of the attention weights' dropout."""

        def drop(weights: jax.Array) -> jax.Array:
            return dropout(weights, keys, site, self.rate)

        drops = keys is not None and self.rate > 0.0
        mixed = causal_attention(
            self.query(x),
            self.key(x),
            self.value(x),
            drop=drop if drops else None,
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
