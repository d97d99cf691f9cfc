"""Arrays get another sharding inside a submesh, partial sums too."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hetjax.sharding.deduction.bottom_tier import resharded

_SPECS = (
    P(),
    P("data", "tensor"),
    P("tensor"),
    P("tensor", unreduced=frozenset({"data"})),
    P(unreduced=frozenset({"tensor"})),
    P(unreduced=frozenset({"data", "tensor"})),
)


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(_SPECS, 2)])
def test_complex_numbers_are_split_in_partial_sums(before: P, after: P):
    """XLA ends the process where it is to split them by itself."""
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    array = (np.arange(16.0) + 1j * np.arange(16.0)[::-1]).reshape(4, 4).astype(np.complex64)

    def moved(array: jax.Array) -> jax.Array:
        return resharded(resharded(resharded(array, before), after), P())

    with jax.set_mesh(mesh):
        found = jax.jit(moved)(jax.device_put(array, NamedSharding(mesh, P())))
    np.testing.assert_array_equal(np.asarray(found), array)
