"""Models of one shape, planned and trained with a divided context: `bench_context.py models`.

hetjax's GPT and Llama, with their blocks one by one and scanned over, one of `flax.nnx`, and one
whose softmax is written out by hand. Each has the same work, so each gets the same split on two
unlike devices; and each trains as it does on one device. Rows: the `model`, its `split` (tokens and
heads of each device), `is_the_same` as the first one's, how many `steps`, and `largest_difference`,
relative, between losses of the plan and of plain `jax.jit` with plain attention.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from hetjax import Trainer
from hetjax.commands.devices import host_device_flags
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster
from hetjax.models import GPTConfig, LlamaConfig, language_model
from hetjax.models.pure import parameters_of, structure_of, with_parameters
from hetjax.planner import PlanningProblem, make_problem
from hetjax.planner.hexiseq.hexiseq_planner import HexiSeqPlanner

VOCABULARY, BLOCKS, WIDTH, HEADS, LENGTH, EXAMPLES = 31, 2, 48, 4, 32, 2

Loss = Callable[[Any, Any], Any]
Made = tuple[Callable[[], Any], Loss]
"""What makes a model's parameters, and its loss function."""


class Block(nnx.Module):
    """A block as `flax.nnx` writes it, with its own attention."""

    def __init__(self, rngs: nnx.Rngs):
        self.first, self.second = (nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``x`` [B, T, D] to [B, T, D]."""
        x = x + self.attention(self.first(x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.second(x))))


class OfFlax(nnx.Module):
    """A small language model of such blocks."""

    def __init__(self, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (LENGTH, WIDTH)))
        self.blocks = nnx.List([Block(rngs) for _ in range(BLOCKS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Tokens [B, T] to logits [B, T, V]."""
        x = self.tokens(tokens) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


def _of_flax() -> Made:
    graph, _ = structure_of(lambda: OfFlax(nnx.Rngs(0)))

    def loss(parameters: Any, batch: Any) -> jax.Array:
        tokens = batch["tokens"]
        return mean_loss(with_parameters(graph, parameters)(tokens[:, :-1]), tokens)

    return lambda: parameters_of(OfFlax(nnx.Rngs(0))), loss


def _by_hand() -> Made:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)

    shapes = {
        "query": (WIDTH, WIDTH),
        "key": (WIDTH, WIDTH),
        "value": (WIDTH, WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    blocks = [{name: draw(*shape) for name, shape in shapes.items()} for _ in range(BLOCKS)]
    parameters = {"tokens": draw(VOCABULARY, WIDTH), "blocks": blocks}

    def normalized(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    def loss(parameters: Any, batch: Any) -> jax.Array:
        tokens = batch["tokens"]
        x = parameters["tokens"][tokens[:, :-1]]
        for block in parameters["blocks"]:
            inside = normalized(x)
            query, key, value = (
                (inside @ block[name]).reshape(*x.shape[:2], HEADS, -1)
                for name in ("query", "key", "value")
            )
            scores = jnp.einsum("bthd,bshd->bhts", query, key) / np.float32(key.shape[-1] ** 0.5)
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
            mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), value)
            x = x + mixed.reshape(x.shape) @ block["out"]
            x = x + jax.nn.gelu(normalized(x) @ block["up"]) @ block["down"]
        return mean_loss(normalized(x) @ parameters["tokens"].T, tokens)

    return lambda: parameters, loss


def mean_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The mean cross-entropy of the tokens that follow."""
    scores = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], -1))


def _of_hetjax(config: GPTConfig | LlamaConfig) -> Made:
    model = language_model(config)
    return lambda: model.init(jax.random.key(0)), model.loss


SHAPE: dict[str, Any] = {
    "vocabulary": VOCABULARY,
    "blocks": BLOCKS,
    "width": WIDTH,
    "heads": HEADS,
    "sequence": LENGTH,
}

# Three matrices of 8/3 times the width have the work of two of four times the width.
LLAMA: dict[str, Any] = {
    **SHAPE,
    "key_value_heads": HEADS,
    "ffn_width": 8 * WIDTH // 3,
    "tied_embeddings": True,
}

MODELS: dict[str, Callable[[], Made]] = {
    "hetjax's GPT": lambda: _of_hetjax(GPTConfig(**SHAPE)),
    "hetjax's GPT, scanned": lambda: _of_hetjax(GPTConfig(**SHAPE, scan_blocks=True)),
    "hetjax's Llama": lambda: _of_hetjax(LlamaConfig(**LLAMA)),
    "hetjax's Llama, scanned": lambda: _of_hetjax(LlamaConfig(**LLAMA, scan_blocks=True)),
    "flax.nnx": _of_flax,
    "softmax by hand": _by_hand,
}


def unlike_cluster() -> Cluster:
    """Two hosts, of which one is half as fast, with a fast link between them."""
    link = Link(1e10, 1e-6)
    kinds = [
        DeviceKind(f"host-{speed}", {"float32": speed * 1e9}, 10**9, speed * 1e9, "made up")
        for speed in (2, 1)
    ]
    parts = tuple(Subcluster(kind.name, kind, 1, 1, link, link) for kind in kinds)
    return Cluster("two unlike hosts", parts, ((parts[0].name, parts[1].name, link),))


def batch_of(step: int) -> dict[str, np.ndarray]:
    """The tokens of a step."""
    shape = (EXAMPLES, LENGTH + 1)
    return {"tokens": np.random.default_rng(step).integers(0, VOCABULARY, shape, np.int32)}


def problem_of(parameters: Callable[[], Any], loss: Loss) -> PlanningProblem:
    """A model on the unlike cluster."""
    return make_problem(
        loss,
        parameters,
        batch_of(0),
        cluster=unlike_cluster(),
        optimizer=optax.adam(1e-2),
        num_microbatches=1,
        divides_sequences=True,
    )


def model_rows(steps: int) -> Iterator[dict[str, Any]]:
    """A row for each model.

    Args:
        steps: how many are trained.
    """
    # Before JAX starts.
    os.environ["XLA_FLAGS"] = host_device_flags(os.environ.get("XLA_FLAGS", ""), 2)
    first = None
    for name, make in MODELS.items():
        init, loss = make()
        plan = HexiSeqPlanner().plan(problem_of(init, loss))
        parameters = jax.jit(init)()
        split = plan.stages[0].shares.context
        assert split is not None
        first = first or split
        found = _by_plan(plan, parameters, loss, steps)
        expected = _on_one_device(parameters, loss, steps)
        yield {
            "model": name,
            "split": [{"tokens": group.tokens, "heads": group.heads} for group in split.groups],
            "is_the_same": split == first,
            "steps": steps,
            "first_loss": expected[0],
            "last_loss": expected[-1],
            "largest_difference": float(np.max(np.abs(np.divide(found, expected) - 1))),
        }


def _by_plan(plan: Any, parameters: Any, loss: Loss, steps: int) -> list[float]:
    with Trainer(plan, loss, parameters, optax.adam(1e-2), batch_of(0), source=_Source()) as each:
        return [each.train_step().loss for _ in range(steps)]


def _on_one_device(parameters: Any, loss: Loss, steps: int) -> list[float]:
    optimizer, found = optax.adam(1e-2), []

    def mean(parameters: Any, batch: Any) -> jax.Array:
        result = loss(parameters, batch)
        return result[0] / result[1] if isinstance(result, tuple) else result

    @jax.jit
    def step(parameters: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(mean)(parameters, batch)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    state = optimizer.init(parameters)
    for number in range(steps):
        parameters, state, value = step(parameters, state, batch_of(number))
        found.append(float(value))
    return found


class _Source:
    def batch(self, step: int, batch_size: int, rows: slice | None = None) -> Any:
        del batch_size
        return {"tokens": batch_of(step)["tokens"][rows or slice(None)]}

    def held_out_batches(self, batch_size: int) -> Iterator[Any]:
        del batch_size
        return iter(())
