"""What a stage computes to share parameters with others: parts cut out, summed, put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from hetjax.pipeline.backward import accumulator_dtype
from hetjax.pipeline.stages import ParameterPart
from hetjax.runtime.placement import Placement, named
from hetjax.runtime.sharing import (
    cut_parameters,
    given_parameters,
    joined_parameters,
    shared_parameters,
)

Compile = Callable[..., Any]


class SharingPrograms:
    """Compiles what the instructions of `hetjax.runtime.sharing` run.

    Args:
        placement: shardings of all buffers.
        stage: which stage.
        mesh: its mesh.
        compile_program: from a function, the shapes and shardings of its arguments and the
            shardings of its results to a compiled program.
    """

    def __init__(self, placement: Placement, stage: int, mesh: Mesh, compile_program: Compile):
        self.placement, self.stage, self.mesh = placement, stage, mesh
        self.compile = compile_program
        self.pipelines = placement.pipelines
        self.held = self.pipelines.stages[stage].parameters
        self.parts = shared_parameters(self.pipelines, stage)

    def programs(self) -> dict[str, Any]:
        """The compiled programs, by name."""
        found = {}
        if self.parts:
            found["sum_gradient"] = self._sum()
        if cut := tuple(cut_parameters(self.pipelines, self.stage)):
            found["cut_gradient"] = self._cut(cut, gradients=True)
        if given := given_parameters(self.pipelines, self.stage):
            found["cut_parameter"] = self._cut(given, gradients=False)
        if joined := joined_parameters(self.pipelines, self.stage):
            found["join_parameter"] = self._join(joined)
        return found

    def _shape(self, part: ParameterPart, *, gradients: bool) -> jax.ShapeDtypeStruct:
        shape = self.pipelines.part_shape(part)
        dtype = accumulator_dtype(shape.dtype) if gradients else shape.dtype
        return jax.ShapeDtypeStruct(shape.shape, dtype)

    def _shardings(self, parts: Sequence[ParameterPart]) -> list[jax.sharding.NamedSharding]:
        return named(self.mesh, [self.placement.part(self.stage, part) for part in parts])

    def _cut(self, places: Sequence[int], *, gradients: bool) -> Any:
        wholes = [self.held[place] for place in places]
        pieces = [part for place in places for part in self.parts[place]]

        def cut(arrays: Sequence[jax.Array]) -> list[jax.Array]:
            return [
                array[_rows(piece, whole)]
                for place, whole, array in zip(places, wholes, arrays, strict=True)
                for piece in self.parts[place]
            ]

        shapes = [self._shape(whole, gradients=gradients) for whole in wholes]
        return self.compile(cut, (shapes,), (self._shardings(wholes),), self._shardings(pieces))

    def _sum(self) -> Any:
        pieces = [part for parts in self.parts.values() for part in parts]
        counts = [len(self.pipelines.shared[part]) for part in pieces]

        def add(*groups: Sequence[jax.Array]) -> list[jax.Array]:
            sums = iter([sum(group[1:], group[0]) for group in groups])
            return [_joined([next(sums) for _ in parts]) for parts in self.parts.values()]

        shapes = [self._shape(part, gradients=True) for part in pieces]
        return self.compile(
            add,
            [[shape] * count for shape, count in zip(shapes, counts, strict=True)],
            [
                [sharding] * count
                for sharding, count in zip(self._shardings(pieces), counts, strict=True)
            ],
            self._shardings([self.held[place] for place in self.parts]),
        )

    def _join(self, places: Sequence[int]) -> Any:
        pieces = [part for place in places for part in self.parts[place]]

        def join(*groups: Sequence[jax.Array]) -> list[jax.Array]:
            arrays = iter([array for (array,) in groups])
            return [_joined([next(arrays) for _ in self.parts[place]]) for place in places]

        shapes = [[self._shape(part, gradients=False)] for part in pieces]
        return self.compile(
            join,
            shapes,
            [[sharding] for sharding in self._shardings(pieces)],
            self._shardings([self.held[place] for place in places]),
        )


def _rows(piece: ParameterPart, whole: ParameterPart) -> slice:
    """Where in a part of a leaf another one is."""
    stop = None if piece.stop is None else piece.stop - whole.start
    return slice(piece.start - whole.start, stop)


def _joined(pieces: Sequence[jax.Array]) -> jax.Array:
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)
