"""What a model computes, moves and holds for one long sequence, in numbers.

Attention is counted apart from all else: what else a layer does grows with its tokens, attention
with their square, and the two are divided among devices in unlike ways.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetjax.errors import InputError

ADAM_BYTES = 16
"""Bytes of a parameter's state in mixed precision: 2 of the weight, 2 of its gradient, and 12 of a
float32 copy and Adam's two moments."""

WHOLE_LOGIT_PRODUCTS, CHUNKED_LOGIT_PRODUCTS = 3, 4
"""Products with the output matrix in a step: two of gradients, and one for logits, which is done
again where they are made chunk by chunk."""

ACTIVATION_TRAFFIC = 20
"""How often a layer's forward pass reads or writes a token's activation (HexiSeq, equation 4)."""


@dataclass(frozen=True)
class ContextWork:
    """A model, and the sequences that it trains on in one step.

    Args:
        length: tokens of a sequence.
        query_heads: query heads of an attention.
        key_value_heads: heads of keys and values.
        head_size: numbers of a head.
        width: numbers of a token's activation between layers.
        layers: how many layers there are, all alike.
        token_flops: FLOPs of all but attention of a layer's forward pass, for a token.
        layer_parameters: parameters of a layer.
        other_parameters: parameters outside of the layers, as of an embedding.
        vocabulary: tokens of the vocabulary; 0 where there are no logits.
        working_bytes: bytes that a token takes while a layer's backward pass is made, all but what
            attention has by heads.
        sequences: sequences of a step.
        batch: how many of them are there at once; it divides them.
        item_bytes: bytes of a number of activations and weights.
        is_causal: whether a token sees only those before it.
        is_recomputed: whether a layer keeps only its input, and is made again in the backward pass.
        divides_state: whether parameters, gradients and optimizer state are divided among all
            devices; otherwise each has them whole.
        state_bytes: bytes of a parameter, its gradient and its optimizer state; without what is
            told in `updated_bytes`.
        updated_bytes: bytes of what only the device has that updates a parameter, where all have
            the parameters whole and each updates as many.
        offloaded_bytes: bytes of what only the device has that updates a parameter and waits in its
            host's memory; what is on its way of that is told in `updated_bytes`.
        weight_bytes: bytes of a parameter, or of its gradient, as devices send it to each other;
            None for those of an activation.
        live: of how many microbatches a layer keeps activations at once.
        heads_together: query heads that are never divided, as those of a member with a tensor axis.
        logit_tokens: for how many tokens logits are there at once; where they are for all, they
            are not made again.

    Raises:
        InputError: a number is out of range.
    """

    length: int
    query_heads: int
    key_value_heads: int
    head_size: int
    width: int
    layers: int
    token_flops: float
    layer_parameters: int
    other_parameters: int = 0
    vocabulary: int = 0
    working_bytes: float = 0.0
    sequences: int = 1
    batch: int = 1
    item_bytes: int = 2
    is_causal: bool = True
    is_recomputed: bool = True
    divides_state: bool = True
    state_bytes: float = ADAM_BYTES
    updated_bytes: float = 0.0
    offloaded_bytes: float = 0.0
    weight_bytes: float | None = None
    live: int = 1
    heads_together: int = 1
    logit_tokens: int = 2048

    def __post_init__(self) -> None:
        least_one = ("length", "query_heads", "key_value_heads", "head_size", "width", "layers")
        least_one += ("sequences", "batch", "item_bytes", "live", "heads_together", "logit_tokens")
        for field in least_one:
            _check(field, getattr(self, field), 1)
        others = ("token_flops", "layer_parameters", "other_parameters", "vocabulary")
        for field in (*others, "working_bytes", "state_bytes", "updated_bytes", "offloaded_bytes"):
            _check(field, getattr(self, field), 0)
        if self.query_heads % self.key_value_heads:
            raise InputError(
                f"key_value_heads: {self.key_value_heads} is not allowed: it must divide the "
                f"{self.query_heads} query heads"
            )

        if self.query_heads % self.heads_together:
            raise InputError(
                f"heads_together: {self.heads_together} is not allowed: it must divide the "
                f"{self.query_heads} query heads"
            )
        if self.sequences % self.batch:
            raise InputError(
                f"batch: {self.batch} is not allowed: it must divide the {self.sequences} sequences"
            )

    @property
    def head_parts(self) -> int:
        """Into how many parts query heads may be divided."""
        return self.query_heads // self.heads_together

    @property
    def heads_per_key_value(self) -> int:
        """How many query heads one head of keys and values serves."""
        return self.query_heads // self.key_value_heads

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is made again, nor offloaded."""
        return not self.is_recomputed and not self.offloaded_bytes

    @property
    def rounds(self) -> int:
        """How often a step goes through the layers."""
        return self.sequences // self.batch

    @property
    def sent_weight_bytes(self) -> float:
        """Bytes of a parameter, or of its gradient, as devices send it to each other."""
        return self.item_bytes if self.weight_bytes is None else self.weight_bytes

    @property
    def logit_flops(self) -> float:
        """FLOPs that logits of a token take in both passes, made again where they are in chunks."""
        is_whole = self.logit_tokens >= self.batch * self.length
        products = WHOLE_LOGIT_PRODUCTS if is_whole else CHUNKED_LOGIT_PRODUCTS
        return 2.0 * products * self.width * self.vocabulary

    @property
    def parameters(self) -> int:
        """All parameters of the model."""
        return self.layers * self.layer_parameters + self.other_parameters


def _check(field: str, value: float, least: int) -> None:
    if not value >= least:
        raise InputError(f"{field}: {value} is not allowed: it must be {least} or more")


def transformer_work(
    length: int,
    *,
    width: int,
    layers: int,
    query_heads: int,
    key_value_heads: int | None = None,
    hidden: int | None = None,
    is_gated: bool = False,
    vocabulary: int = 0,
    is_tied: bool = False,
    sequences: int = 1,
    batch: int = 1,
    is_recomputed: bool = True,
    divides_state: bool = True,
) -> ContextWork:
    """The work of a decoder-only Transformer in 16 bits, under a causal mask.

    Args:
        length: tokens of a sequence.
        width: numbers of a token's activation; heads have an equal part of it each.
        layers: Transformer blocks.
        query_heads: query heads.
        key_value_heads: heads of keys and values; as many as query heads unless given.
        hidden: numbers in the middle of the MLP; four times the width unless given.
        is_gated: whether the MLP has a third matrix, as Llama's.
        vocabulary: tokens of the vocabulary.
        is_tied: whether the embedding is also the output matrix.
        sequences: sequences of a step.
        batch: how many of them are there at once.
        is_recomputed: whether layers are made again in the backward pass.
        divides_state: whether the state is divided among all devices.

    Returns:
        The work.

    Raises:
        InputError: a number is out of range, or query heads do not divide the width.

    Example:
        >>> work = transformer_work(2**16, width=5120, layers=40, query_heads=40)
        >>> work.parameters, work.token_flops == 24 * 5120**2
        (12582912000, True)
    """
    _check("query_heads", query_heads, 1)
    if width % query_heads:
        raise InputError(
            f"query_heads: {query_heads} is not allowed: it must divide the width, {width}"
        )
    size = width // query_heads
    kept = query_heads if key_value_heads is None else key_value_heads
    middle = 4 * width if hidden is None else hidden
    matrices = 3 if is_gated else 2
    layer = 2 * width * size * (query_heads + kept) + matrices * width * middle
    # Kept for the backward pass: the inputs of two norms and of what follows them, queries, keys,
    # values, outputs, and the MLP's middle before and after its nonlinearity; and one gradient.
    working = 4 * width + 2 * size * (query_heads + kept) + (matrices + 1) * middle
    return ContextWork(
        length=length,
        query_heads=query_heads,
        key_value_heads=kept,
        head_size=size,
        width=width,
        layers=layers,
        token_flops=2.0 * layer,
        layer_parameters=layer,
        other_parameters=vocabulary * width * (1 if is_tied else 2),
        vocabulary=vocabulary,
        working_bytes=2.0 * working,
        sequences=sequences,
        batch=batch,
        is_recomputed=is_recomputed,
        divides_state=divides_state,
    )
