"""What a stage computes to share parameters with others: parts cut out, summed, put together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hetjax.pipeline.program.loss import accumulator_dtype
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.runtime.compilation.compiling import Argument
from hetjax.runtime.compilation.partitioners import Layout, Partitioned, Partitioner
from hetjax.runtime.instructions.buffers import Parameter, ParameterRows, UpdatedParameter
from hetjax.runtime.instructions.placement import Placement
from hetjax.runtime.instructions.shared_rows import StageSharing, held_around
from hetjax.sharding.annotation.annotation import HSharding


class SharingPrograms:
    """Divides what the instructions of `hetjax.runtime.instructions.shared_rows` run.

    Args:
        placement: annotations of all buffers.
        stage: which stage.
        partitioner: what divides them.
    """

    def __init__(self, placement: Placement, stage: int, partitioner: Partitioner):
        self.placement, self.stage, self.partitioner = placement, stage, partitioner
        self.pipelines = placement.pipelines
        self.sharing = StageSharing(placement.pipelines, stage)
        self.annotations: dict[Hashable, HSharding] = {}
        for kind in (Parameter, UpdatedParameter, ParameterRows):
            leaves = placement.leaves(stage, kind)
            self.annotations |= dict(zip(leaves.names, leaves.annotations, strict=True))

    def programs(self) -> dict[str, Partitioned]:
        """The programs, by name."""
        found, sharing = {}, self.sharing
        if sharing.summed_pieces:
            found["sum_gradient"] = self._sum()
        if sharing.cut_gradients:
            pairs = [
                (sharing.held[place], sharing.pieces[place]) for place in sharing.cut_gradients
            ]
            found["cut_gradient"] = self._cut(pairs, gradients=True)
        if sharing.taken:
            places = zip(held_around(sharing), sharing.taken, strict=True)
            pairs = [(sharing.held[held], (sharing.updated[place],)) for held, place in places]
            found["take_parameter"] = self._cut(pairs, gradients=False)
        if sharing.cut_values:
            pairs = [
                (sharing.updated[place], sharing.updated_pieces[place])
                for place in sharing.cut_values
            ]
            found["cut_parameter"] = self._cut(pairs, gradients=False)
        if sharing.joined:
            found["join_parameter"] = self._join()
        return found

    def _shape(self, part: ParameterPart, *, gradients: bool) -> jax.ShapeDtypeStruct:
        shape = self.pipelines.part_shape(part)
        dtype = accumulator_dtype(shape.dtype) if gradients else shape.dtype
        return jax.ShapeDtypeStruct(shape.shape, dtype)

    def _argument(self, parts: Sequence[ParameterPart], *, gradients: bool) -> Argument:
        shapes = [self._shape(part, gradients=gradients) for part in parts]
        return Argument(shapes, self._shardings(parts))

    def _shardings(self, parts: Sequence[ParameterPart]) -> list[Layout]:
        return [self.partitioner.layout(self.annotations[part]) for part in parts]

    def _cut(
        self, pairs: Sequence[tuple[ParameterPart, Sequence[ParameterPart]]], *, gradients: bool
    ) -> Any:
        """Of each part its pieces."""
        wholes = [whole for whole, _ in pairs]

        def cut(arrays: Sequence[jax.Array]) -> list[jax.Array]:
            return [
                array[_rows(piece, whole)]
                for (whole, pieces), array in zip(pairs, arrays, strict=True)
                for piece in pieces
            ]

        outputs = self._shardings([piece for _, pieces in pairs for piece in pieces])
        return self.partitioner.program(cut, [self._argument(wholes, gradients=gradients)], outputs)

    def _sum(self) -> Any:
        pieces_of = self.sharing.summed_pieces
        pieces = [piece for pieces in pieces_of.values() for piece in pieces]
        counts = [len(self.pipelines.shared[piece].stages) for piece in pieces]

        def add(*groups: Sequence[jax.Array]) -> list[jax.Array]:
            sums = iter([sum(group[1:], group[0]) for group in groups])
            return [_joined([next(sums) for _ in pieces]) for pieces in pieces_of.values()]

        summands = [
            self._argument([piece] * count, gradients=True)
            for piece, count in zip(pieces, counts, strict=True)
        ]
        outputs = self._shardings([self.sharing.updated[place] for place in pieces_of])
        return self.partitioner.program(add, summands, outputs)

    def _join(self) -> Any:
        places, pieces_of = self.sharing.joined, self.sharing.pieces
        pieces = [piece for place in places for piece in pieces_of[place]]

        def join(*groups: Sequence[jax.Array]) -> list[jax.Array]:
            arrays = iter([array for (array,) in groups])
            return [_joined([next(arrays) for _ in pieces_of[place]]) for place in places]

        arguments = [self._argument([piece], gradients=False) for piece in pieces]
        outputs = self._shardings([self.sharing.held[place] for place in places])
        return self.partitioner.program(join, arguments, outputs)


def _rows(piece: ParameterPart, whole: ParameterPart) -> slice:
    """Where in a part of a leaf another one is."""
    stop = None if piece.stop is None else piece.stop - whole.start
    return slice(piece.start - whole.start, stop)


def _joined(pieces: Sequence[jax.Array]) -> jax.Array:
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)
