import itertools

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from layouts import Layout, array_shapes, layouts

from hetjax.sharding.annotation.bounds import Bounds, overlap, within
from hetjax.sharding.annotation.rules import MESH_AXES

spans = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda pair: (min(pair), max(pair)))
pairs_of_parts = st.integers(0, 3).flatmap(
    lambda rank: st.tuples(*[st.tuples(*[spans] * rank) for _ in range(2)])
)


def indices(part: Bounds | None) -> set[tuple[int, ...]]:
    return set() if part is None else set(itertools.product(*[range(*span) for span in part]))


@given(array_shapes.flatmap(layouts))
def test_shards_are_those_of_jax(layout: Layout):
    devices = jax.devices()[: int(np.prod(layout.mesh_shape))]
    mesh = Mesh(np.array(devices).reshape(layout.mesh_shape), MESH_AXES)
    parts = NamedSharding(mesh, layout.spec).devices_indices_map(layout.shape)
    found = layout.annotation().shards(layout.shape)
    for place, (device, shard) in enumerate(zip(devices, found, strict=True)):
        slices = [s.indices(size) for s, size in zip(parts[device], layout.shape, strict=True)]
        assert shard.bounds == tuple((start, stop) for start, stop, _ in slices)
        assert shard.device == place


@given(pairs_of_parts)
def test_overlap_is_what_two_parts_share(pair: tuple[Bounds, Bounds]):
    a, b = pair
    assert overlap(a, b) == overlap(b, a)
    assert indices(overlap(a, b)) == indices(a) & indices(b)


@given(pairs_of_parts)
def test_within_finds_a_part_inside_another(pair: tuple[Bounds, Bounds]):
    part, other = pair
    whole = tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(part, other, strict=True))
    full = np.arange(10 ** len(whole)).reshape((10,) * len(whole))
    inner, outer = (full[tuple(slice(*span) for span in bounds)] for bounds in (part, whole))
    np.testing.assert_array_equal(outer[within(part, whole)], inner)
