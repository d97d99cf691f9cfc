"""Sharding rules divide evenly, use each axis once, and leave whole what they should."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from hetjax.sharding.annotation.rules import (
    DATA,
    MESH_AXES,
    RULES,
    TENSOR,
    division,
    example_spec,
    parameter_spec,
    state_spec,
)

rules = st.sampled_from(sorted(RULES))
shapes = st.lists(st.integers(0, 24), max_size=4).map(tuple)
mesh_shapes = st.tuples(st.integers(1, 8), st.integers(1, 8))


def axes_of(spec: PartitionSpec) -> list[str]:
    return [axis for axis in spec if axis is not None]


@given(rule=rules, shape=shapes, mesh_shape=mesh_shapes)
def test_parameters_are_divided_evenly(
    rule: str, shape: tuple[int, ...], mesh_shape: tuple[int, int]
):
    spec = parameter_spec(rule, shape, mesh_shape)
    sizes: dict[str | None, int] = dict(zip(MESH_AXES, mesh_shape, strict=True))
    axes = axes_of(spec)
    assert len(spec) == len(shape)
    assert len(axes) == len(set(axes))
    for size, axis in zip(shape, spec, strict=True):
        assert axis is None or size % sizes[axis] == 0
    assert all(sizes[axis] > 1 for axis in axes)


@given(shape=shapes, mesh_shape=mesh_shapes, places=st.sets(st.integers(0, 3)), named=rules)
def test_state_is_divided_evenly_and_at_least_as_fine(
    shape: tuple[int, ...], mesh_shape: tuple[int, int], places: set[int], named: str
):
    """Whatever divides the parameter: a rule, or a specification of the plan's own."""
    by_rule = parameter_spec(named, shape, mesh_shape)
    entries: list[str | None] = [None] * len(shape)
    chosen = sorted(place for place in places if place < len(shape))[:2]
    for place, axis in zip(chosen, (TENSOR, DATA), strict=False):
        entries[place] = axis
    for spec in (by_rule, PartitionSpec(*entries)):
        assert state_spec("data", spec, shape, mesh_shape) == spec
        found = state_spec("state_sharded", spec, shape, mesh_shape)
        axes = axes_of(found)
        assert len(axes) == len(set(axes))
        for size, before, after in zip(shape, spec, found, strict=True):
            assert after == before or (before is None and after == DATA)
            assert after == before or (size and size % mesh_shape[0] == 0)
        even = any(
            size and size % mesh_shape[0] == 0 and entry is None
            for size, entry in zip(shape, spec, strict=True)
        )
        if mesh_shape[0] > 1 and even:
            assert DATA in axes


@given(shape=shapes, mesh_shape=mesh_shapes)
def test_only_the_sharded_rule_divides_parameters_over_the_data_axis(
    shape: tuple[int, ...], mesh_shape: tuple[int, int]
):
    assert DATA not in axes_of(parameter_spec("data", shape, mesh_shape))
    even = any(size and size % mesh_shape[0] == 0 for size in shape)
    if mesh_shape[0] > 1 and mesh_shape[1] == 1 and even:
        assert DATA in axes_of(parameter_spec("fully_sharded", shape, mesh_shape))


@pytest.mark.parametrize(
    ("rule", "shape", "mesh_shape", "spec"),
    [
        ("data", (512, 128), (4, 1), (None, None)),
        ("data", (512, 128), (4, 2), (None, TENSOR)),
        ("data", (512, 127), (4, 2), (TENSOR, None)),
        ("data", (128,), (4, 2), (None,)),
        ("fully_sharded", (512, 128), (4, 2), (DATA, TENSOR)),
        ("fully_sharded", (12, 64, 256), (4, 2), (None, DATA, TENSOR)),
        ("fully_sharded", (6, 10), (4, 1), (None, None)),
        ("fully_sharded", (128,), (4, 2), (DATA,)),
        ("fully_sharded", (), (4, 2), ()),
        ("state_sharded", (64, 64), (4, 2), (None, TENSOR)),
    ],
)
def test_parameters(
    rule: str, shape: tuple[int, ...], mesh_shape: tuple[int, int], spec: tuple[str | None, ...]
):
    assert parameter_spec(rule, shape, mesh_shape) == PartitionSpec(*spec)


@pytest.mark.parametrize(
    ("shape", "examples", "mesh_shape", "spec"),
    [
        ((8, 128, 64), 8, (4, 2), (DATA, None, None)),
        ((8,), 8, (4, 1), (DATA,)),
        ((8, 128), 8, (1, 4), ()),
        ((128, 8), 8, (4, 1), ()),
        ((6, 128), 6, (4, 1), ()),
        ((), 8, (4, 1), ()),
    ],
)
def test_examples(
    shape: tuple[int, ...],
    examples: int,
    mesh_shape: tuple[int, int],
    spec: tuple[str | None, ...],
):
    assert example_spec(shape, examples, mesh_shape) == PartitionSpec(*spec)


@pytest.mark.parametrize(
    ("spec", "pieces"),
    [
        (PartitionSpec(), 1),
        (PartitionSpec(None, TENSOR), 2),
        (PartitionSpec(DATA, TENSOR), 8),
        (PartitionSpec((DATA, TENSOR)), 8),
    ],
)
def test_division(spec: PartitionSpec, pieces: int):
    assert division(spec, (4, 2)) == pieces
