"""A Flax model as the plain JAX program that the trainer takes: an ``init`` and a ``loss``.

The parameters leave Flax as a nested dict of arrays with string keys, and come back to it inside
the loss, where the module is put together around them. Nothing of Flax remains in the jaxpr.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from hetjax.errors import InputError
from hetjax.models.gpt import GPT, GPTConfig
from hetjax.models.layers import cross_entropies, output_logits
from hetjax.models.llama import Llama, LlamaConfig
from hetjax.models.pure import (
    counted_rngs,
    num_parameters,
    parameters_of,
    structure_of,
    with_parameters,
)
from hetjax.sharding.cross_entropy.linear_cross_entropy import linear_cross_entropy

Batch = Mapping[str, jax.Array]
"""Arrays whose first axis is the examples'; see `LanguageModel` for the names."""


@dataclass(frozen=True)
class LanguageModel:
    """A single-device JAX program, pure and traceable.

    A batch holds ``"tokens"``, int32 [B, sequence + 1]: each position but the last predicts the
    next. It may hold ``"weights"``, float32 [B, sequence], a weight for each predicted token, and
    ``"keys"``, uint32 [B, 2], a threefry key for each example: dropout happens where a batch has
    them (training), and not where it has none or zeros (evaluation).

    Args:
        init: key -> float32 parameters, a nested dict with string keys.
        parameter_shapes: () -> their shapes; nothing is allocated.
        loss: (parameters, batch) -> the weighted sum of the tokens' losses in nats and the sum of
            their weights (their number, where there are none), both float32 scalars. Sums, so that
            microbatches add up exactly.
        logits: (parameters, tokens, int32 [B, T] with T up to ``sequence``) -> float32
            [B, T, vocabulary], the logits of the token that follows each; nothing is dropped out.
        sequence: number of predicted tokens an example.
        vocabulary: number of tokens.
        name: for people, e.g. ``"gpt-12x768"``.
        needs_keys: whether the training batches must hold ``"keys"``.

    Example:
        >>> model = language_model(GPTConfig(vocabulary=7, blocks=1, width=8, heads=2, sequence=4))
        >>> params = model.init(jax.random.key(0))
        >>> total, count = model.loss(params, {"tokens": jnp.zeros((3, 5), jnp.int32)})
        >>> float(count)
        12.0
    """

    init: Callable[[jax.Array], PyTree]
    parameter_shapes: Callable[[], PyTree]
    loss: Callable[[PyTree, Batch], tuple[jax.Array, jax.Array]]
    logits: Callable[[PyTree, jax.Array], jax.Array]
    sequence: int
    vocabulary: int
    name: str
    needs_keys: bool = False

    unit = "tokens"
    """What a step counts."""

    @property
    def units_per_example(self) -> int:
        """How many tokens an example predicts."""
        return self.sequence

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a training batch: ``"tokens"``, and ``"keys"`` where the model needs them."""
        shapes = {"tokens": jax.ShapeDtypeStruct((batch_size, self.sequence + 1), np.int32)}
        if self.needs_keys:
            shapes["keys"] = jax.ShapeDtypeStruct((batch_size, 2), np.uint32)
        return shapes

    def num_parameters(self) -> int:
        """How many numbers the parameters hold; nothing is allocated to count them."""
        return num_parameters(self.parameter_shapes())


def language_model(config: GPTConfig | LlamaConfig) -> LanguageModel:
    """The program of a configured model.

    Args:
        config: of a GPT or a Llama.

    Returns:
        The model's program. It can be sent to other processes.
    """
    family = "gpt" if isinstance(config, GPTConfig) else "llama"
    return LanguageModel(
        init=functools.partial(_init, config),
        parameter_shapes=functools.partial(_parameter_shapes, config),
        loss=functools.partial(_loss, config),
        logits=functools.partial(_next_logits, config),
        sequence=config.sequence,
        vocabulary=config.vocabulary,
        name=f"{family}-{config.blocks}x{config.width}",
        needs_keys=isinstance(config, GPTConfig) and config.dropout > 0,
    )


def _init(config: GPTConfig | LlamaConfig, key: jax.Array) -> PyTree:
    return parameters_of(_make(config, counted_rngs(key)))


def _parameter_shapes(config: GPTConfig | LlamaConfig) -> PyTree:
    return _structure(config)[1]


def _loss(
    config: GPTConfig | LlamaConfig, params: PyTree, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    tokens = batch["tokens"]
    if tokens.ndim != 2 or not 2 <= tokens.shape[1] <= config.sequence + 1:
        raise InputError(
            f"batch['tokens'] has shape {tokens.shape}; it must be [batch, positions + 1] with at "
            f"most {config.sequence} positions"
        )
    x, table, balance = _hidden(config, params, tokens[:, :-1], batch.get("keys"))
    if config.logit_chunk:
        losses = linear_cross_entropy(x, table, tokens[:, 1:], chunk=config.logit_chunk)
    else:
        losses = cross_entropies(output_logits(x, table), tokens[:, 1:])
    weights = batch.get("weights")
    if weights is None:
        weights = jnp.ones_like(losses)
    if balance is not None:
        losses = losses + balance[:, None]
    return jnp.sum(losses * weights), jnp.sum(weights)


def _next_logits(config: GPTConfig | LlamaConfig, params: PyTree, tokens: jax.Array) -> jax.Array:
    x, table, _ = _hidden(config, params, tokens, None)
    return output_logits(x, table)


def _hidden(
    config: GPTConfig | LlamaConfig, params: PyTree, tokens: jax.Array, keys: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """What logits are made of: hidden states and a matrix; and what experts add to the losses."""
    model = with_parameters(_structure(config)[0], params)
    if isinstance(model, GPT):
        x, balance = model.hidden(tokens, keys)
        return x, model.output_table, balance
    return model.hidden(tokens), model.output_table, None


def _make(config: GPTConfig | LlamaConfig, rngs: nnx.Rngs) -> GPT | Llama:
    if isinstance(config, GPTConfig):
        return GPT(config, rngs=rngs)
    return Llama(config, rngs=rngs)


@functools.lru_cache(maxsize=32)
def _structure(config: GPTConfig | LlamaConfig) -> tuple[nnx.GraphDef[Any], PyTree]:
    """The module's structure and its parameters' shapes; made abstractly, once a configuration."""
    return structure_of(lambda: _make(config, counted_rngs(jax.random.key(0))))
