"""Random unions and annotations, and functions that are computed on them."""

import itertools
from random import Random

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from hetjax import HArray
from hetjax.runtime.local.local_program import LocalProgram
from hetjax.sharding import DUPLICATE, HSharding, Subgroup
from hetjax.sharding.annotation.annotation import HDim
from hetjax.sharding.deduction.deduce import deduce
from hetjax.sharding.deduction.specialize import specialize


def random_union(rng: Random) -> tuple[Subgroup, ...]:
    """One to three submeshes of the eight devices, each with one or two axes."""
    numbers = list(range(8))
    rng.shuffle(numbers)
    found = []
    for _ in range(rng.randint(1, 3)):
        size = rng.choice([n for n in (1, 2, 3, 4) if n <= len(numbers) - 2] or [1])
        devices, numbers = tuple(numbers[:size]), numbers[size:]
        first = rng.choice([n for n in (1, 2, 3, 4) if size % n == 0])
        found.append(Subgroup(devices, (("data", first), ("tensor", size // first)), P()))
    return tuple(found)


def random_annotation(
    rng: Random, union: tuple[Subgroup, ...], shape: tuple[int, ...]
) -> HSharding:
    """Any annotation on a union, divided along a random dimension at either tier."""
    dimensions = [d for d, size in enumerate(shape) if size >= len(union)]
    choices: list[HDim] = [DUPLICATE, *dimensions]
    hdim = rng.choice(choices) if len(union) > 1 else DUPLICATE
    sizes = ()
    if isinstance(hdim, int):
        cuts = sorted(rng.sample(range(1, shape[hdim]), len(union) - 1))
        sizes = tuple(b - a for a, b in itertools.pairwise([0, *cuts, shape[hdim]]))
    groups = []
    for place, group in enumerate(union):
        widths = [sizes[place] if d == hdim else size for d, size in enumerate(shape)]
        entries: list[str | None] = [None] * len(shape)
        for name, size in group.axes:
            free = [d for d, w in enumerate(widths) if entries[d] is None and w % size == 0]
            if free and rng.random() < 0.6:
                entries[rng.choice(free)] = name
        groups.append(group.with_spec(P(*entries)))
    return HSharding(tuple(groups), hdim, sizes)


def run(function, inputs, annotations, **options):
    """What a function gives, computed on submeshes; and its specialized program."""
    program = specialize(deduce(jax.make_jaxpr(function)(*inputs), annotations, **options))
    laid_out = [
        value if annotation is None else HArray.of(value, annotation)
        for value, annotation in zip(inputs, annotations, strict=True)
    ]
    return LocalProgram(program)(*laid_out), program


def check(found, expected, tolerance=1e-5):
    for result, whole in zip(found, jax.tree.leaves(expected), strict=True):
        array = result.numpy() if isinstance(result, HArray) else np.asarray(result)
        scale = np.max(np.abs(np.asarray(whole, np.float64)))
        np.testing.assert_allclose(array, whole, atol=tolerance * float(scale))


def drawn(*shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
