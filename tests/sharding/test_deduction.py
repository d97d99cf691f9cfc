"""Deduction and specialization: whatever the annotations, the programs compute what one would."""

import itertools
from random import Random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import examples, random_model
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from small_models import Model, make_batch

from hetjax.sharding import DUPLICATE, HArray, HSharding, Subgroup
from hetjax.sharding.annotation import HDim
from hetjax.sharding.deduction import deduce
from hetjax.sharding.run_program import ProgramRunner
from hetjax.sharding.specialize import specialize

pytestmark = pytest.mark.usefixtures("quick_compilation")


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


def gradients_of(model: Model, leaves, batch):
    tree = jax.tree.structure(model.init())
    return jax.value_and_grad(lambda p: model.mean_loss(jax.tree.unflatten(tree, p), batch))(leaves)


@examples(usual=25, full=300)
@given(st.integers(0, 2**32 - 1))
def test_specialized_programs_equal_the_whole_one(number: int):
    """Loss and gradients, with annotations drawn for every input, and reshards put in."""
    rng = Random(number)
    model = random_model(rng, max_blocks=1)
    batch, leaves = make_batch(rng.randint(3, 6)), jax.tree.leaves(model.init())
    names = sorted(batch)
    inputs = [*leaves, *(jnp.asarray(batch[name]) for name in names)]
    unions = [random_union(rng) for _ in range(rng.choice((1, 1, 2)))]

    def program(*values):
        batch = dict(zip(names, values[len(leaves) :], strict=True))
        return gradients_of(model, list(values[: len(leaves)]), batch)

    annotations = [
        None if rng.random() < 0.2 else random_annotation(rng, rng.choice(unions), value.shape)
        for value in inputs
    ]
    with jax.numpy_dtype_promotion("standard"):
        found = deduce(jax.make_jaxpr(program)(*inputs), annotations, mend=True)
        expected = jax.tree.leaves(jax.jit(program)(*inputs))
    runner = ProgramRunner(specialize(found))
    results = runner(
        *(
            value if annotation is None else HArray.of(value, annotation)
            for value, annotation in zip(inputs, annotations, strict=True)
        )
    )
    tolerance = 1e-5 if model.exact else 0.05
    for result, whole in zip(results, expected, strict=True):
        array = result.numpy() if isinstance(result, HArray) else np.asarray(result)
        scale = max(float(np.max(np.abs(whole.astype(np.float32)))), 1e-3)
        error = np.max(np.abs(array.astype(np.float32) - np.asarray(whole, np.float32)))
        assert error <= tolerance * scale, (model, error / scale)
