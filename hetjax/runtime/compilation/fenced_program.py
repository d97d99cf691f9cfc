"""Compiled programs with fences; see `hetjax.pipeline.program.fences`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

PREDICATE = jax.ShapeDtypeStruct((), bool)
"""What a program with fences is told to keep them closed: a boolean scalar, in a list."""


def is_fenced(mesh: Mesh) -> bool:
    """Whether programs for a mesh have fences: those for CPUs.

    Args:
        mesh: what they run on.
    """
    return mesh.devices.flat[0].platform == "cpu"


class FencedProgram:
    """A compiled program whose fences are told to stay closed.

    Args:
        program: the compiled program, whose first argument they are.
        mesh: what it runs on.
    """

    def __init__(self, program: Any, mesh: Mesh):
        whole = NamedSharding(mesh, PartitionSpec())
        true = jax.make_array_from_callback((), whole, lambda _: np.array(True))
        self._program, self._predicates = program, [true]
        self.output_shardings = program.output_shardings
        self.memory_analysis = program.memory_analysis

    def __call__(self, *arguments: Any) -> Any:
        """Run it on its other arguments."""
        return self._program(self._predicates, *arguments)
