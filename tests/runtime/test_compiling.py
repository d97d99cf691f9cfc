"""Compiled programs: what is donated is said by the argument, wherever it stands."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetjax.runtime.compilation.compiling import Argument, compile_program
from hetjax.runtime.compilation.late_sums import compile_deduced

MESH = Mesh([jax.devices()[0]], ("data",))
WHOLE = NamedSharding(MESH, PartitionSpec())
SHAPES = [jax.ShapeDtypeStruct((4,), jnp.float32)]


def step(values, sums):
    return [total + value for total, value in zip(sums, values, strict=True)]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("deduced", [False, True])
def test_the_memory_of_the_donated_argument_alone_is_taken(place: int, deduced: bool):
    arguments = [Argument(SHAPES, [WHOLE], donated=i == place) for i in range(2)]
    program = (
        compile_deduced(step, arguments, None, MESH)
        if deduced
        else compile_program(step, arguments, None)
    )
    given = [jax.device_put(jnp.full(4, float(i)), WHOLE) for i in range(2)]
    (result,) = program(*([array] for array in given))
    assert result.tolist() == [1.0] * 4
    assert [array.is_deleted() for array in given] == [i == place for i in range(2)]


def test_chosen_arrays_stay_donated():
    shapes = [jax.ShapeDtypeStruct((n,), jnp.float32) for n in range(3)]
    chosen = Argument(shapes, [WHOLE] * 3, donated=True).chosen([2, 0])
    assert [shape.shape for shape in chosen.shapes] == [(2,), (0,)]
    assert chosen.donated
