"""A small language model whose stages share the context; workers import this module too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ray_jobs import HOST

import hetjax
from hetjax.mesh import Cluster, Link, Subcluster, SubMesh
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner import make_problem
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import Member, PipelinePlan, Shares, StagePlan
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.sharding.context.context_split import ContextGroup, ContextSplit

VOCABULARY, WIDTH, QUERY_HEADS, KEY_HEADS, LENGTH = 13, 24, 6, 2, 20
MICROBATCHES, SIZE = 2, 2
OPTIMIZER = optax.adamw(1e-2)

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention, as one equation."""
    return hetjax.attention(query, key, value, causal=True)


def dense(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention, written out."""
    repeated = (jnp.repeat(each, QUERY_HEADS // KEY_HEADS, axis=2) for each in (key, value))
    key, value = repeated
    scores = jnp.einsum("bthd,bshd->bhts", query, key) * query.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), value)


def loss(
    parameters: Any, batch: Any, attend: Attend = attend, chunk: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Two blocks with rotary positions and a table of positions: the summed loss, and the count."""
    x = _embedded(parameters, batch)
    for block in parameters["blocks"]:
        x = _block(x, block, attend)
    return _sums(parameters, batch, x, chunk)


def scanned(parameters: Any, batch: Any, attend: Attend = attend) -> tuple[jax.Array, jax.Array]:
    """The same loss of stacked blocks that are scanned over."""
    x, _ = jax.lax.scan(
        lambda x, block: (_block(x, block, attend), None),
        _embedded(parameters, batch),
        parameters["blocks"],
    )
    return _sums(parameters, batch, x)


def _embedded(parameters: Any, batch: Any) -> jax.Array:
    return parameters["embedding"][batch["tokens"][:, :-1]] + parameters["positions"][:LENGTH]


def _block(x: jax.Array, block: Any, attend: Attend) -> jax.Array:
    scaled = _normalized(x)
    query, key, value = (
        (scaled @ block[name]).reshape(*x.shape[:2], -1, WIDTH // QUERY_HEADS)
        for name in ("query", "key", "value")
    )
    mixed = attend(_rotated(query), _rotated(key), value).reshape(x.shape)
    x = x + mixed @ block["out"]
    return x + jax.nn.silu(_normalized(x) @ block["up"]) @ block["down"]


def _sums(parameters: Any, batch: Any, x: jax.Array, chunk: int = 0) -> tuple[jax.Array, jax.Array]:
    labels = batch["tokens"][:, 1:]
    if chunk:
        losses = hetjax.linear_cross_entropy(x, parameters["embedding"], labels, chunk=chunk)
        return jnp.sum(losses), jnp.float32(losses.size)
    scores = jax.nn.log_softmax(x @ parameters["embedding"].T)
    losses = -jnp.take_along_axis(scores, labels[..., None], -1)
    return jnp.sum(losses), jnp.float32(losses.size)


def _normalized(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def _rotated(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    places, pairs = (jnp.arange(size, dtype=jnp.float32) for size in (x.shape[1], half))
    angles = places[:, None] * 10.0**-pairs
    cosine, sine = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * cosine - second * sine, first * sine + second * cosine], -1)


def parameters() -> Any:
    """The initial parameters."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return (0.3 * rng.normal(size=shape)).astype(np.float32)

    keys = WIDTH * KEY_HEADS // QUERY_HEADS
    shapes = {
        "query": (WIDTH, WIDTH),
        "key": (WIDTH, keys),
        "value": (WIDTH, keys),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 2 * WIDTH),
        "down": (2 * WIDTH, WIDTH),
    }
    blocks = [{name: draw(*shape) for name, shape in shapes.items()} for _ in range(2)]
    table = draw(LENGTH + 4, WIDTH)
    return {"embedding": draw(VOCABULARY, WIDTH), "positions": table, "blocks": blocks}


def stacked() -> Any:
    """The initial parameters, those of the blocks stacked."""
    made = parameters()
    return {**made, "blocks": jax.tree.map(lambda *rows: np.stack(rows), *made["blocks"])}


@dataclass(frozen=True)
class Tokens:
    """Random tokens as a source of batches."""

    def batch(self, step: int, batch_size: int, rows: slice | None = None) -> Any:
        rng = np.random.default_rng(step)
        tokens = rng.integers(0, VOCABULARY, (batch_size, LENGTH + 1), np.int32)
        return {"tokens": tokens[rows or slice(None)]}

    def held_out_batches(self, batch_size: int) -> Iterator[Any]:
        return (self.batch(1000 + i, batch_size) for i in range(2))


JOB: dict[str, Any] = {
    "loss_function": loss,
    "parameters": parameters,
    "optimizer": OPTIMIZER,
    "batch": Tokens().batch(0, MICROBATCHES * SIZE),
    "source": Tokens(),
}
"""The arguments of a trainer, but for the plan and the runtime."""


def one_device_losses(steps: int, function: Any = None) -> list[float]:
    """Of the job's first steps, by plain JAX: with attention written out, or of another loss."""
    summed = function or partial(loss, attend=dense)

    def mean(parameters: Any, batch: Any) -> jax.Array:
        total, count = summed(parameters, batch)
        return total / count

    held, gradient = parameters(), jax.jit(jax.value_and_grad(mean))
    found = []
    with jax.numpy_dtype_promotion("standard"):
        state = OPTIMIZER.init(held)
        for step in range(steps):
            value, gradients = gradient(held, Tokens().batch(step, MICROBATCHES * SIZE))
            updates, state = OPTIMIZER.update(gradients, state, held)
            held = optax.apply_updates(held, updates)
            found.append(float(value))
    return found


Group = tuple[tuple[int, tuple[int, int]], ...]
"""The tokens and the query heads of each member of a group."""


def split_of(*groups: Group) -> ContextSplit:
    """A context split of the model, its members counted through."""
    made, first = [], 0
    for group in groups:
        devices = tuple(range(first, first + len(group)))
        made.append(ContextGroup(devices, *map(tuple, zip(*group, strict=True))))
        first += len(group)
    return ContextSplit(LENGTH, QUERY_HEADS, KEY_HEADS, tuple(made))


def written_out(parameters: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """The same loss with attention written out."""
    return loss(parameters, batch, dense)


def in_chunks(parameters: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """The same loss with the logits of a few tokens at a time."""
    return loss(parameters, batch, chunk=3)


def context_plan(
    *splits: ContextSplit,
    function: Any = loss,
    parameters: Any = parameters,
    batch: Any = None,
    **changes: Any,
) -> Plan:
    """A stage for each split, each member a host of one device."""
    whole = Tokens().batch(0, SIZE) if batch is None else batch
    shapes = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf[:SIZE], whole))
    program = trace(function, parameters(), shapes, divides_sequences=True)
    link = Link(bandwidth=1e9, latency=1e-5)
    counts = [len(split.devices) for split in splits]
    cluster = Cluster("hosts", (Subcluster("host", HOST, sum(counts), 1, link, link),))
    stages, first = [], 0
    for place, (split, count) in enumerate(zip(splits, counts, strict=True)):
        members = tuple(Member(SubMesh("host", first + i, (1, 1)), (1, 1)) for i in range(count))
        stage = StagePlan((place, place + 1), members, shares=Shares(context=split))
        stages.append(replace(stage, **changes))
        first += count
    schedule = one_f_one_b(len(splits), MICROBATCHES)
    end = program.num_positions
    layers = tuple(end * place // len(splits) for place in range(len(splits) + 1))
    pipeline = PipelinePlan(tuple(stages), MICROBATCHES, SIZE, schedule)
    return Plan(program.fingerprint, layers, cluster, (pipeline,))


def problem_of(plan: Plan) -> PlanningProblem:
    """What a plan of the job solves."""
    return make_problem(
        JOB["loss_function"],
        JOB["parameters"],
        JOB["batch"],
        cluster=plan.cluster,
        optimizer=JOB["optimizer"],
        num_microbatches=MICROBATCHES,
        divides_sequences=True,
    )
