"""What annotated programs move and compile: a Transformer's step, unions in other words."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hspmd_layouts import random_annotation
from jax.sharding import PartitionSpec

from hetjax import HSharding, InputError, Subgroup, reshard
from hetjax.runtime import AnnotatedFunction
from hetjax.sharding import DUPLICATE, deduce
from hetjax.sharding.annotation.subgroup import axes_of, spec_from
from hetjax.sharding.deduction.annotated_program import union_of
from hetjax.sharding.resolution.resolve import moved_elements

Row = Mapping[str, Any]
WIDTH, HEADS, LENGTH, BATCH = 32, 4, 8, 14
FOUR = Subgroup((0, 1, 2, 3), (("tensor", 4),), PartitionSpec())
TWO = Subgroup((4, 5), (("tensor", 2),), PartitionSpec())
ONE = Subgroup((6,), (), PartitionSpec())
UNEQUAL = (FOUR, TWO, ONE)
EXAMPLES = HSharding(UNEQUAL, hdim=0, sizes=(8, 4, 2))


def divided(dimension: int | None, rank: int) -> HSharding:
    """A parameter that every submesh has, divided over its tensor axis along one dimension."""
    entries = ["tensor" if place == dimension else None for place in range(rank)]
    groups = [g.with_spec(PartitionSpec(*entries)) if g.axes else g for g in UNEQUAL]
    return HSharding(tuple(groups))


WEIGHTS: Mapping[str, tuple[tuple[int, ...], int | None]] = {
    "scale": ((WIDTH,), None),
    "query": ((WIDTH, HEADS, WIDTH // HEADS), 1),
    "key": ((WIDTH, HEADS, WIDTH // HEADS), 1),
    "value": ((WIDTH, HEADS, WIDTH // HEADS), 1),
    "out": ((HEADS, WIDTH // HEADS, WIDTH), 0),
    "up": ((WIDTH, 4 * WIDTH), 1),
    "down": ((4 * WIDTH, WIDTH), 0),
}
"""The parameters of a block: shapes, and the dimension that tensor parallelism divides."""


def block(weights: Mapping[str, Any], x: Any) -> Any:
    """A Transformer block as Megatron divides it: whole before and after each half."""
    inside = reshard(_normalized(x) * weights["scale"], EXAMPLES)
    query, key, value = (
        jnp.einsum("ble,ehd->blhd", inside, weights[name]) for name in ("query", "key", "value")
    )
    scores = jax.nn.softmax(jnp.einsum("blhd,bmhd->bhlm", query, key), axis=-1)
    heads = jnp.einsum("bhlm,bmhd->blhd", scores, value)
    x = x + reshard(jnp.einsum("blhd,hde->ble", heads, weights["out"]), EXAMPLES)
    inside = reshard(_normalized(x), EXAMPLES)
    hidden = jax.nn.gelu(jnp.einsum("ble,ef->blf", inside, weights["up"]))
    return x + reshard(jnp.einsum("blf,fe->ble", hidden, weights["down"]), EXAMPLES)


def _normalized(x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def transformer_rows() -> list[Row]:
    """What a step of two blocks moves among pipelines under tensor parallelism of 4, 2 and 1."""
    shapes = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, (s, _) in WEIGHTS.items()}
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)

    def loss(weights: Any, x: Any) -> Any:
        return jnp.mean(block(weights, block(weights, x)) ** 2)

    closed = jax.make_jaxpr(jax.value_and_grad(loss))(shapes, x)
    annotations = [divided(WEIGHTS[name][1], len(WEIGHTS[name][0])) for name in sorted(WEIGHTS)]
    program = deduce(closed, [*annotations, EXAMPLES])
    total = 0
    for move in program.moves:
        shape = program.shapes[move.input]
        elements = moved_elements(move.source, move.destination, shape.shape)
        total += (elements or 0) * shape.dtype.itemsize
    case = "activations of a Transformer step among pipelines, tensor parallelism 4, 2, 1"
    return [{"case": case, "bytes": total, "bound": 0}]


def otherwise(rng: Random, annotation: HSharding) -> HSharding:
    """The same layout in other words: factors of axes, their names and order."""
    groups = []
    for group in annotation.subgroups:
        names = {}
        for name, size in group.axes:
            factors = (2, size // 2) if size % 2 == 0 and rng.random() < 0.5 else (size,)
            names[name] = [(f"{name}{rng.randint(0, 9)}{i}", n) for i, n in enumerate(factors)]
        entries = [
            tuple(new for axis in axes_of(entry) for new, _ in names[axis])
            for entry in group.spec.partitions
        ]
        axes = [pair for name, _ in group.axes for pair in names[name]]
        order = rng.sample(range(len(axes)), len(axes))
        grid = np.reshape(group.devices, [size for _, size in axes])
        devices = tuple(int(device) for device in grid.transpose(order).flat)
        groups.append(Subgroup(devices, tuple(axes[i] for i in order), spec_from(entries)))
    if annotation.hdim == DUPLICATE:
        rng.shuffle(groups)
    return replace(annotation, subgroups=tuple(groups))


def unify_rows(cases: int = 500, seed: int = 0) -> list[Row]:
    """How many pairs of one layout in two wordings are refused; and unions that cross."""
    failed = 0
    shape = jax.ShapeDtypeStruct((24, 24), jnp.float32)
    closed = jax.make_jaxpr(lambda x, y: jnp.tanh(x * y) + x)(shape, shape)
    for number in range(seed, seed + cases):
        rng = Random(number)
        groups = [(0, 1, 2, 3), (4, 5), (6, 7)][: rng.randint(1, 3)]
        annotation = random_annotation(rng, shape.shape, groups, sums=False, unit=4)
        try:
            deduce(closed, [annotation, otherwise(rng, annotation)])
        except InputError as error:
            failed += 1
            print(f"pair {number}: {error}", file=sys.stderr)
    crossing = [((0, 1), (2, 3), (4, 5, 6, 7)), ((0, 1, 2, 3), (4, 5), (6, 7))]
    annotations = [
        HSharding(tuple(Subgroup(d, (("x", len(d)),), PartitionSpec()) for d in union))
        for union in crossing
    ]
    program = deduce(closed, annotations)
    found = program.annotations[program.outputs[0]]
    assert found is not None
    finest = [list(group.devices) for group in union_of(found)]
    return [
        {
            "case": "one layout in two wordings, refused",
            "cases": cases,
            "bytes": failed,
            "bound": 0,
        },
        {
            "case": f"unions that cross meet in {finest}: submeshes",
            "bytes": len(finest),
            "bound": 4,
        },
    ]


def shapes_rows() -> list[Row]:
    """How often a function with symbols compiles for three batch sizes, each run twice."""
    groups = (Subgroup((0, 1), (("tensor", 2),), PartitionSpec()), ONE)
    rows = HSharding(groups, 0, ("batch - batch//3", "batch//3"))
    whole = HSharding(groups)
    function = AnnotatedFunction(lambda w, x: jnp.tanh(x @ w), [whole, rows])
    weight, wrong = np.ones((4, 3), np.float32), 0
    for batch in (6, 9, 10, 6, 9, 10):
        x = np.arange(4.0 * batch, dtype=np.float32).reshape(batch, 4) / 100
        wrong += not np.allclose(function(weight, x).numpy(), np.tanh(x @ weight), atol=1e-6)
    case = "compilations for three batch sizes, each run twice"
    return [{"case": case, "bytes": function.num_compiled, "bound": 3, "wrong": wrong}]
