"""Refinement: unlike unions of the same devices meet wherever each device has what it needs."""

import itertools
from dataclasses import replace
from random import Random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import examples
from deducing import check, drawn, random_annotation, random_union, run
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from hetjax.errors import InputError
from hetjax.sharding import DUPLICATE, PARTIAL, HSharding, Subgroup
from hetjax.sharding.annotation.subgroup import axes_of
from hetjax.sharding.deduction.annotated_program import union_of
from hetjax.sharding.deduction.refinement import refined_together


def renamed(group: Subgroup, names: dict[str, tuple[tuple[str, int], ...]]) -> Subgroup:
    """A submesh with axes in the place of others, which are their factors."""
    axes = tuple(each for name, _ in group.axes for each in names[name])

    def factors(entry):
        return tuple(name for axis in axes_of(entry) for name, _ in names[axis]) or None

    unreduced = frozenset(name for axis in group.spec.unreduced for name, _ in names[axis])
    spec = P(*(factors(entry) for entry in group.spec.partitions), unreduced=unreduced)
    return Subgroup(group.devices, axes, spec)


def turned(rng: Random, group: Subgroup) -> Subgroup:
    """The same layout with axes in another order, and its devices with them."""
    order = list(range(len(group.axes)))
    rng.shuffle(order)
    grid = np.reshape(group.devices, [size for _, size in group.axes])
    devices = tuple(int(device) for device in grid.transpose(order).flat)
    return Subgroup(devices, tuple(group.axes[i] for i in order), group.spec)


def otherwise(rng: Random, annotation: HSharding) -> HSharding:
    """The same layout in other words: factors of axes, their names and order."""
    groups = []
    for group in annotation.subgroups:
        names = {}
        for name, size in group.axes:
            is_split = size == 4 and rng.random() < 0.5
            sizes = (2, 2) if is_split else (size,)
            names[name] = tuple((f"{name}{rng.randint(0, 9)}{i}", n) for i, n in enumerate(sizes))
        groups.append(turned(rng, renamed(group, names)))
    if annotation.hdim == DUPLICATE:
        rng.shuffle(groups)
    return replace(annotation, subgroups=tuple(groups))


@examples(usual=30, full=200)
@given(st.integers(0, 2**32 - 1))
def test_the_same_layout_in_other_words_meets_without_a_reshard(number: int):
    rng = Random(number)
    shape = (24, 12)
    annotation = random_annotation(rng, random_union(rng), shape)
    others = [otherwise(rng, annotation) for _ in range(2)]
    inputs = drawn(shape, shape, shape)

    def program(x, y, z):
        return jnp.tanh(x * y) + z

    found, specialized = run(program, inputs, [annotation, *others])
    check(found, program(*inputs))
    assert specialized.program.annotations[specialized.program.outputs[0]] is not None


@examples(usual=30, full=200)
@given(st.integers(0, 2**32 - 1))
def test_a_union_meets_each_of_its_devices_alone(number: int):
    """What is whole everywhere can be written over any union of the same devices."""
    rng = Random(number)
    first, second = random_union(rng), random_union(rng)
    devices = sorted({device for group in (*first, *second) for device in group.devices})

    def completed(union):
        rest = [d for d in devices if all(d not in group.devices for group in union)]
        return HSharding((*union, *(Subgroup((d,), (), P()) for d in rest)))

    annotations = [completed(first), completed(second)]
    inputs = drawn((4, 6), (4, 6))
    found, _ = run(jnp.add, inputs, annotations)
    check(found, jnp.add(*inputs))
    finest = found[0].annotation
    for annotation in annotations:
        for group in finest.subgroups:
            assert any(set(group.devices) <= set(each.devices) for each in annotation.subgroups)
    # As coarse as can be: no two submeshes lie in one of both unions.
    for a, b in itertools.combinations(finest.subgroups, 2):
        assert not all(
            any({*a.devices, *b.devices} <= set(each.devices) for each in annotation.subgroups)
            for annotation in annotations
        )


def whole(*groups):
    return HSharding(tuple(Subgroup(devices, (("x", len(devices)),), P()) for devices in groups))


def test_unions_that_cross_are_cut_where_either_is():
    a = whole((0, 1), (2, 3), (4, 5, 6, 7))
    b = whole((0, 1, 2, 3), (4, 5), (6, 7))
    found = refined_together([a, b], [(8,), (8,)])
    assert found is not None
    assert [group.devices for group in found[0].subgroups] == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_one_axis_of_four_meets_two_submeshes_of_two():
    four = HSharding((Subgroup((0, 1, 2, 3), (("x", 4),), P("x")),))
    halves = tuple(Subgroup((i, i + 1), (("y", 2),), P("y")) for i in (0, 2))
    inputs = drawn((8, 2), (8, 2))
    found, _ = run(jnp.multiply, inputs, [four, HSharding(halves, 0, (4, 4))])
    check(found, jnp.multiply(*inputs))
    assert union_of(found[0].annotation) == union_of(HSharding(halves))


def test_rows_and_columns_meet_over_axes_that_divide_both():
    rows = HSharding((Subgroup((0, 1, 2, 3), (("x", 4),), P("x")),))
    grid = HSharding((Subgroup((0, 1, 2, 3), (("a", 2), ("b", 2)), P("a")),))
    inputs = drawn((8, 4), (8, 4))
    x = refined_together([rows, grid], [(8, 4), (8, 4)])
    assert x is not None
    assert x[0].subgroups[0].spec == P(("a", "b"))
    # The product's operands are divided unlike: one of them must move, and that is said.
    with pytest.raises(InputError, match=r"mul at .* cannot take operand"):
        run(jnp.multiply, inputs, [rows, grid])


def test_sums_keep_their_summands():
    summands = P(unreduced=frozenset({"x"}))
    four = HSharding((Subgroup((0, 1, 2, 3), (("x", 4),), summands),))
    each = HSharding(tuple(Subgroup((device,), (), P()) for device in (2, 0, 3, 1)), PARTIAL)
    inputs = drawn((4,), (4,))
    found, specialized = run(jnp.add, inputs, [four, each])
    check(found, jnp.add(*inputs))
    assert found[0].annotation.hdim == PARTIAL
    assert len(found[0].annotation.subgroups) == 4
    assert len(list(specialized.program.moves)) == 1


def test_layouts_that_no_union_has_are_refused():
    forward = HSharding(tuple(Subgroup((device,), (), P()) for device in (0, 1)), 0, (2, 2))
    backward = HSharding(tuple(Subgroup((device,), (), P()) for device in (1, 0)), 0, (2, 2))
    assert refined_together([forward, backward], [(4,), (4,)]) is None
    assert refined_together([forward, whole((0, 1, 2))], [(4,), (4,)]) is None
    closed = jax.make_jaxpr(jnp.add)(*drawn((4,), (4,)))
    from hetjax.sharding import deduce

    with pytest.raises(InputError, match="lies on other submeshes than the others"):
        deduce(closed, [forward, backward])
