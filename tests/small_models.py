"""Small models for property tests, put together from blocks that are each hard to cut in some way.

A model embeds tokens, runs its blocks in order, and predicts the next token. A block may leave
something for the end of the model (`Context.late`), which then has to skip all stages between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hetjax

VOCABULARY, WIDTH, LENGTH, DEPTH = 11, 8, 5, 4
"""Tokens; features; tokens that are predicted in an example; iterations of a scan over blocks."""

Parameters = Any
Batch = dict[str, np.ndarray]


@dataclass
class Context:
    """What blocks share while one example batch goes through the model.

    Args:
        keys: one random key an example.
        number: the running block's place in the model.
        late: functions that the end of the model applies to the features.
    """

    keys: jax.Array
    number: int = 0
    late: list[Callable[[jax.Array], jax.Array]] = field(default_factory=list)


@dataclass(frozen=True)
class Block:
    """A block: how its parameters are made, and what it computes.

    Args:
        init: from a function that draws an array of a shape to the block's parameters.
        apply: from its parameters, features ``[examples, LENGTH, WIDTH]`` and the context to
            features.
    """

    init: Callable[[Callable[..., np.ndarray]], Parameters]
    apply: Callable[[Parameters, jax.Array, Context], jax.Array]


@dataclass(frozen=True)
class Model:
    """A model: the names of its blocks, and the choices beside them.

    Args:
        blocks: names in `BLOCKS`.
        tied: whether the embedding is used again to predict.
        counted: whether the loss is a weighted total with its count, instead of a mean.
        half_parameters: whether parameters are stored in bfloat16.
        double: whether what else is computed in float32 is computed in float64.
        chunk: how many tokens have their logits at a time; 0 for all.
    """

    blocks: tuple[str, ...]
    tied: bool = True
    counted: bool = True
    half_parameters: bool = False
    double: bool = False
    chunk: int = 0

    @property
    def dtype(self) -> Any:
        """What features are computed in."""
        return np.dtype(np.float64 if self.double else np.float32)

    @property
    def exact(self) -> bool:
        """Whether none of it is computed in half precision."""
        return not self.half_parameters and "half_precision" not in self.blocks

    def init(self, seed: int = 0) -> Parameters:
        """The initial parameters."""
        rng = np.random.default_rng(seed)

        def draw(*shape: int) -> np.ndarray:
            return (rng.normal(size=shape) * 0.3).astype(self.dtype)

        parameters: dict[str, Any] = {
            "embedding": draw(VOCABULARY, WIDTH),
            "blocks": [BLOCKS[name].init(draw) for name in self.blocks],
        }
        if not self.tied:
            parameters["head"] = draw(WIDTH, VOCABULARY)
        dtype = jnp.bfloat16 if self.half_parameters else self.dtype
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), parameters)

    def loss(self, parameters: Parameters, batch: Mapping[str, Any]) -> Any:
        """The loss of a batch, as `hetjax` takes it: a mean, or a total and a count."""
        parameters = jax.tree.map(lambda leaf: leaf.astype(self.dtype), parameters)
        tokens = batch["tokens"]
        context = Context(jax.vmap(jax.random.wrap_key_data)(batch["keys"]))
        features = parameters["embedding"][tokens[:, :-1]]
        for number, name in enumerate(self.blocks):
            context.number = number
            features = BLOCKS[name].apply(parameters["blocks"][number], features, context)
        for late in context.late:
            features = late(features)
        features, labels = normalized(features), tokens[:, 1:]
        table = parameters["embedding"] if self.tied else parameters["head"].T
        if self.chunk:
            losses = hetjax.linear_cross_entropy(features, table, labels, chunk=self.chunk)
        else:
            scores = jax.nn.log_softmax(features @ table.T)
            losses = -jnp.take_along_axis(scores, labels[..., None], -1)[..., 0]
        if not self.counted:
            return jnp.mean(losses)
        weights = batch["weights"].astype(self.dtype)
        return jnp.sum(losses * weights), jnp.sum(weights)

    def mean_loss(self, parameters: Parameters, batch: Mapping[str, Any]) -> jax.Array:
        """The loss of a batch as one device computes it."""
        result = self.loss(parameters, batch)
        return result[0] / result[1] if self.counted else result


def make_batch(examples: int, seed: int = 0) -> Batch:
    """Random examples, each with a key of its own and a weight for each token."""
    rng = np.random.default_rng(seed)
    return {
        "keys": rng.integers(0, 2**32, (examples, 2), dtype=np.uint32),
        "tokens": rng.integers(0, VOCABULARY, (examples, LENGTH + 1), dtype=np.int32),
        "weights": rng.uniform(0.5, 2.0, (examples, LENGTH)).astype(np.float32),
    }


def normalized(x: jax.Array) -> jax.Array:
    """Features scaled to a mean square of 1."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-3)


def _dense_init(draw: Callable[..., np.ndarray], *stack: int) -> Parameters:
    return {
        "in": draw(*stack, WIDTH, 2 * WIDTH),
        "bias": draw(*stack, 2 * WIDTH),
        "out": draw(*stack, 2 * WIDTH, WIDTH),
    }


def _stacked_init(draw: Callable[..., np.ndarray]) -> Parameters:
    return _dense_init(draw, DEPTH)


def _dense(w: Parameters, x: jax.Array, context: Context) -> jax.Array:
    return x + jax.nn.gelu(normalized(x) @ w["in"] + w["bias"]) @ w["out"]


def _attention(w: Parameters, x: jax.Array, context: Context) -> jax.Array:
    y = normalized(x)
    scores = jnp.einsum("ntd,de,nse->nts", y, w["scores"], y)
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    return x + jnp.einsum("nts,nsd,de->nte", weights, y, w["values"])


def _scan(w: Parameters, x: jax.Array, context: Context) -> jax.Array:
    return jax.lax.scan(lambda x, row: (_dense(row, x, context), None), x, w)[0]


def _reverse_scan(w: Parameters, x: jax.Array, context: Context) -> jax.Array:
    return jax.lax.scan(lambda x, row: (_dense(row, x, context), None), x, w, reverse=True)[0]


def _two_scans(w: Parameters, x: jax.Array, context: Context) -> jax.Array:
    return _reverse_scan(w, _scan(w, x, context), context)


def _stacked_scan(w: Parameters, x: jax.Array, context: Context) -> jax.Array:
    def body(x: jax.Array, row: Parameters) -> tuple[jax.Array, Any]:
        x = _dense(row, x, context)
        return x, (jnp.mean(x, axis=-1), x > 0.1)

    x, (means, signs) = jax.lax.scan(body, x, w, reverse=True)
    context.late.append(lambda y: y + jnp.einsum("lnt->nt", means)[..., None])
    context.late.append(lambda y: jnp.where(signs[1], y, 0.5 * y))
    return x


def _two_level_scan(w: Parameters, x: jax.Array, context: Context) -> jax.Array:
    """A scan over the stacked output of another one."""
    one = np.ones((), x.dtype)
    _, rows = jax.lax.scan(lambda y, row: (y * 0.5, jnp.tanh(row + y)), one, w["in"])
    return jax.lax.scan(
        lambda x, row: (x + jax.nn.silu(normalized(x) @ row[0]) @ row[1], None), x, (rows, w["out"])
    )[0]


def _skip(w: Parameters, x: jax.Array, context: Context) -> jax.Array:
    context.late.append(lambda y: y + x @ w["late"])
    return x


def _dropout(w: Parameters, x: jax.Array, context: Context) -> jax.Array:
    keys = jax.vmap(lambda key: jax.random.fold_in(key, context.number))(context.keys)
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, x.shape[1:]))(keys)
    return jnp.where(keep, x / 0.8, 0.0)


def _dropout_scan(w: Parameters, x: jax.Array, context: Context) -> jax.Array:
    """Dropout in a scan that carries its keys."""

    def body(carry: Any, row: Parameters) -> tuple[Any, None]:
        x, keys = carry
        y = _dense(row, x, context)
        pairs = jax.vmap(jax.random.split)(keys)
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, x.shape[1:]))(pairs[:, 0])
        return (jnp.where(keep, y / 0.8, 0.0), pairs[:, 1]), None

    return jax.lax.scan(body, (x, context.keys), w)[0][0]


def _discrete(w: Parameters, x: jax.Array, context: Context) -> jax.Array:
    """Booleans and integers that were computed from features and are used at the end."""
    sign, best = x > 0.1, jnp.argmax(x, axis=-1)
    context.late.append(lambda y: jnp.where(sign, y, 0.5 * y) + w["table"][best])
    return x


def _stop_gradient(w: Parameters, x: jax.Array, context: Context) -> jax.Array:
    target = jax.lax.stop_gradient(normalized(x) @ w["fixed"])
    return x * 0.9 + target @ w["learned"]


# The rule is not the function's own derivative, so that losing it shows; and it has no jump, where
# an activation rounded otherwise would move a gradient by much.
@jax.custom_jvp
def _clipped(x: jax.Array) -> jax.Array:
    return jnp.clip(x, -1.0, 1.0)


@_clipped.defjvp
def _clipped_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    return _clipped(x), dx / (1.0 + x * x)


@jax.custom_vjp
def _damped(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sin(x @ w)


def _damped_forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    return _damped(x, w), (x, w)


def _damped_backward(kept: Any, cotangent: jax.Array) -> Any:
    x, w = kept
    inner = 0.5 * cotangent * jnp.cos(x @ w)
    return inner @ w.T, jnp.einsum("ntd,nte->de", x, inner)


_damped.defvjp(_damped_forward, _damped_backward)


def _custom_rules(w: Parameters, x: jax.Array, context: Context) -> jax.Array:
    return x + _clipped(_damped(normalized(x), w["inner"]) * 2.0) @ w["outer"]


def _checkpointed(w: Parameters, x: jax.Array, context: Context) -> jax.Array:
    return jax.checkpoint(lambda w, x: _dense(w, x, context))(w, x)


def _checkpointed_scan(w: Parameters, x: jax.Array, context: Context) -> jax.Array:
    body = jax.checkpoint(lambda x, row: (_dense(row, x, context), None))
    return jax.lax.scan(body, x, w)[0]


def _conditional(w: Parameters, x: jax.Array, context: Context) -> jax.Array:
    return jax.lax.cond(
        w["gate"][0] > 0.0,
        lambda x: x + jnp.tanh(x @ w["yes"]) * w["gate"][0],
        lambda x: x + normalized(x) @ w["no"],
        x,
    )


def _loops(w: Parameters, x: jax.Array, context: Context) -> jax.Array:
    """A loop of known length, and one of unknown length that no gradient goes through."""
    x = jax.lax.fori_loop(0, 3, lambda i, x: _dense(w["loop"], x, context), x)
    level = jax.lax.stop_gradient(jnp.abs(w["level"][0]))
    halvings, _ = jax.lax.while_loop(
        lambda state: (state[1] > 0.01) & (state[0] < 9),
        lambda state: (state[0] + 1, state[1] / 2),
        (jnp.int32(0), level),
    )
    return x * (1.0 + 0.1 * halvings.astype(x.dtype))


def _scalar(w: Parameters, x: jax.Array, context: Context) -> jax.Array:
    return x * (1.0 + w["scale"]) + jnp.exp(w["shift"])


def _half_precision(w: Parameters, x: jax.Array, context: Context) -> jax.Array:
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), w)
    return x + _dense(half, normalized(x).astype(jnp.bfloat16), context).astype(x.dtype)


def _weight_product(w: Parameters, x: jax.Array, context: Context) -> jax.Array:
    """A matrix made of parameters alone, which has no axis of examples."""
    return x + normalized(x) @ (w["left"] @ w["right"])


def _unused(w: Parameters, x: jax.Array, context: Context) -> jax.Array:
    return x + 0.0 * w["multiplied_by_zero"]


BLOCKS: Mapping[str, Block] = {
    "dense": Block(_dense_init, _dense),
    "attention": Block(
        lambda draw: {"scores": draw(WIDTH, WIDTH), "values": draw(WIDTH, WIDTH)}, _attention
    ),
    "scan": Block(_stacked_init, _scan),
    "reverse_scan": Block(_stacked_init, _reverse_scan),
    "two_scans": Block(_stacked_init, _two_scans),
    "stacked_scan": Block(_stacked_init, _stacked_scan),
    "two_level_scan": Block(_stacked_init, _two_level_scan),
    "skip": Block(lambda draw: {"late": draw(WIDTH, WIDTH)}, _skip),
    "dropout": Block(lambda draw: {}, _dropout),
    "dropout_scan": Block(_stacked_init, _dropout_scan),
    "discrete": Block(lambda draw: {"table": draw(WIDTH, WIDTH)}, _discrete),
    "stop_gradient": Block(
        lambda draw: {"fixed": draw(WIDTH, WIDTH), "learned": draw(WIDTH, WIDTH)}, _stop_gradient
    ),
    "custom_rules": Block(
        lambda draw: {"inner": draw(WIDTH, WIDTH), "outer": draw(WIDTH, WIDTH)}, _custom_rules
    ),
    "checkpointed": Block(_dense_init, _checkpointed),
    "checkpointed_scan": Block(_stacked_init, _checkpointed_scan),
    "conditional": Block(
        lambda draw: {"gate": draw(1), "yes": draw(WIDTH, WIDTH), "no": draw(WIDTH, WIDTH)},
        _conditional,
    ),
    "loops": Block(lambda draw: {"loop": _dense_init(draw), "level": draw(1)}, _loops),
    "scalar": Block(lambda draw: {"scale": draw(), "shift": draw()}, _scalar),
    "half_precision": Block(_dense_init, _half_precision),
    "weight_product": Block(
        lambda draw: {"left": draw(WIDTH, 2), "right": draw(2, WIDTH)}, _weight_product
    ),
    "unused": Block(
        lambda draw: {"never": draw(3, 4), "scalar": draw(), "multiplied_by_zero": draw()}, _unused
    ),
}
"""All blocks by name."""
