"""Partitioners: what divides a stage's programs among its devices.

On one mesh the compiler does, or deduction where sums shall stay partial; on a union of several,
deduction alone, and what comes out is not compiled yet: segments, and the moves between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetjax.pipeline.program.fences import fenced
from hetjax.pipeline.program.pieces import pieces_of, where_they_belong
from hetjax.pipeline.program.step_program import StepProgram
from hetjax.pipeline.program.traced_program import num_bytes
from hetjax.pipeline.update.alike_leaves import is_divided, leafwise_pieces, program_of
from hetjax.runtime.compilation.compiling import Argument, compile_program
from hetjax.runtime.compilation.fenced_program import PREDICATE, FencedProgram, is_fenced
from hetjax.runtime.compilation.late_sums import compile_deduced, sharding_on
from hetjax.runtime.compilation.piecewise_program import compile_pieces
from hetjax.runtime.instructions.divided_program import DividedProgram, divide_program
from hetjax.sharding.annotation.annotation import DUPLICATE, PARTIAL, HSharding
from hetjax.sharding.deduction.reshard import reshard

Layout = Any
"""How an array lies on a stage: on one mesh a `NamedSharding`, on a union an `HSharding`."""

Partitioned = Any
"""A program of a stage: on one mesh compiled, on a union a `DividedProgram`. Both tell how their
results lie."""


class Partitioner(Protocol):
    """Divides programs among the devices of a stage.

    Attributes:
        whole: how an array lies that every device has.
    """

    whole: Layout

    def layout(self, annotation: HSharding) -> Layout:
        """How an array lies, in the partitioner's own form."""
        ...

    def brought(self, arrays: Sequence[Any], layouts: Sequence[Layout]) -> list[Any]:
        """Arrays of a traced function, as they lie among members from here on.

        Args:
            arrays: the arrays.
            layouts: how each shall lie; inside a mesh the compiler decides.
        """
        ...

    def agreed(self, arrays: Sequence[Any], layouts: Sequence[Layout]) -> list[Any]:
        """Arrays of a traced function, each of them computed once, or by all to the same bits.

        Args:
            arrays: the arrays.
            layouts: how each lies.
        """
        ...

    def program(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Argument],
        outputs: Any,
        *,
        keeps_sums: bool = False,
    ) -> Partitioned:
        """Divide a function of sequences of arrays.

        Args:
            function: takes as many sequences as there are arguments.
            arguments: what it takes.
            outputs: how its results shall lie, in their structure or a prefix of it; None for any.
            keeps_sums: whether sums over divided dimensions stay partial where they may.
        """
        ...

    def task(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Argument],
        outputs: Any,
        *,
        keeps_sums: bool = False,
    ) -> Partitioned:
        """The same of a forward or backward pass."""
        ...

    def update(
        self, function: Callable[..., Any], arguments: Sequence[Argument], outputs: Any
    ) -> Partitioned:
        """The same of a phase of the optimizer's update; its results may come in one sequence."""
        ...


class MeshPartitioner:
    """Divides programs among the devices of one mesh, and compiles them.

    Args:
        mesh: the mesh.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.whole = NamedSharding(mesh, PartitionSpec())
        # A card's host takes 0.5 ms to call a program of many arrays: steps were a seventh longer.
        self._in_pieces = mesh.devices.flat[0].platform == "cpu"

    def layout(self, annotation: HSharding) -> NamedSharding:
        """The sharding of an array; of partial sums, on a mesh with typed axes."""
        return sharding_on(self.mesh, annotation)

    def brought(self, arrays: Sequence[Any], layouts: Sequence[Layout]) -> list[Any]:
        """The arrays themselves."""
        return list(arrays)

    def agreed(self, arrays: Sequence[Any], layouts: Sequence[Layout]) -> list[Any]:
        """The arrays themselves: one compiler makes all devices compute alike."""
        return list(arrays)

    def program(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Argument],
        outputs: Any,
        *,
        keeps_sums: bool = False,
    ) -> Any:
        """A compiled program."""
        if keeps_sums:
            return compile_deduced(function, arguments, outputs, self.mesh)
        return compile_program(function, arguments, outputs)

    def task(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Argument],
        outputs: Any,
        *,
        keeps_sums: bool = False,
    ) -> Any:
        """A compiled program, for CPUs with fences; of one that repeats itself, compiled pieces."""
        compiled = partial(self._task, keeps_sums=keeps_sums)
        if self._in_pieces and isinstance(function, StepProgram):
            pieces = pieces_of(function)
            if pieces:
                return compile_pieces(function, pieces, arguments, outputs, compiled, self.whole)
        return compiled(function, arguments, outputs)

    def _task(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Argument],
        outputs: Any,
        *,
        keeps_sums: bool,
    ) -> Any:
        make = partial(self.program, keeps_sums=keeps_sums)
        if not is_fenced(self.mesh):
            return make(function, arguments, outputs)

        def run(predicates: Sequence[Any], *arguments: Any) -> Any:
            with fenced(predicates[0]):
                return function(*arguments)

        predicates = Argument([PREDICATE], [self.whole])
        return FencedProgram(make(run, [predicates, *arguments], outputs), self.mesh)

    def update(
        self, function: Callable[..., Any], arguments: Sequence[Argument], outputs: Any
    ) -> Any:
        """A compiled program; of many leaves that are updated alike, compiled pieces."""
        # Told by what it takes, so that what stays whole is traced once.
        most = sum(num_bytes(shape) for argument in arguments for shape in argument.shapes)
        if not self._in_pieces or not is_divided(len(arguments[0].shapes), most):
            return self.program(function, arguments, outputs)
        program, structure = program_of(function, [argument.shapes for argument in arguments])
        whole, pieces = leafwise_pieces(program)
        if not pieces:
            return self.program(function, arguments, outputs)
        made = jax.tree.unflatten(structure, whole.outputs[0])
        lies = _flat_layouts(outputs, made)
        return compile_pieces(whole, pieces, arguments, (lies,), self.program, self.whole)


class UnionPartitioner:
    """Divides programs among the members of a stage, by deduction.

    Args:
        whole: how an array lies that every device of every member has.
    """

    def __init__(self, whole: HSharding):
        self.whole = whole

    def layout(self, annotation: HSharding) -> HSharding:
        """The annotation itself."""
        return annotation

    def brought(self, arrays: Sequence[Any], layouts: Sequence[Layout]) -> list[Any]:
        """The arrays after moves, of those that lie otherwise."""
        return [reshard(x, layout) for x, layout in zip(arrays, layouts, strict=True)]

    def agreed(self, arrays: Sequence[Any], layouts: Sequence[Layout]) -> list[Any]:
        """The arrays as the first member has them, where each has computed all: kinds round unlike.

        Whole numbers are the same anyway.
        """
        # The first member's summand is the value, and those of the others are zeros.
        return [
            reshard(reshard(array, replace(layout, hdim=PARTIAL)), layout)
            if layout.hdim == DUPLICATE and jnp.issubdtype(array.dtype, jnp.inexact)
            else array
            for array, layout in zip(arrays, layouts, strict=True)
        ]

    def program(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Argument],
        outputs: Any,
        *,
        keeps_sums: bool = True,
    ) -> DividedProgram:
        """Segments and moves, with moves where they are needed; sums stay partial."""
        return self._divided(function, arguments, outputs, is_told=False)

    def task(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Argument],
        outputs: Any,
        *,
        keeps_sums: bool = True,
    ) -> DividedProgram:
        """Segments and the moves that its trace has been told; sums stay partial."""
        if isinstance(function, StepProgram):
            # What is cheap would else be made by the first segment, for all that come after it.
            function = replace(function, steps=tuple(where_they_belong(function.steps)))
        return self._divided(function, arguments, outputs, is_told=True)

    def update(
        self, function: Callable[..., Any], arguments: Sequence[Argument], outputs: Any
    ) -> DividedProgram:
        """Segments and moves, with moves where they are needed."""
        return self.program(function, arguments, outputs)

    def _divided(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Argument],
        outputs: Any,
        *,
        is_told: bool,
    ) -> DividedProgram:
        shapes = [list(argument.shapes) for argument in arguments]
        made = jax.eval_shape(function, *shapes)
        return divide_program(
            function,
            shapes,
            [list(argument.shardings) for argument in arguments],
            _flat_layouts(outputs, made),
            self.whole,
            [place for place, argument in enumerate(arguments) if argument.donated],
            is_told=is_told,
        )


def _flat_layouts(outputs: Any, made: Any) -> list[Layout | None]:
    """How each result shall lie; None for any."""
    if not isinstance(outputs, list | tuple):
        return [outputs] * len(jax.tree.leaves(made))
    return [
        layout
        for part, of_part in zip(outputs, made, strict=True)
        for layout in _flat_layouts(part, of_part)
    ]
