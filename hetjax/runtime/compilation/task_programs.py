"""The programs of a stage's tasks compiled for its mesh: forward and backward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetjax.pipeline.program.fences import fenced
from hetjax.pipeline.stages.backward import Reads, StagePrograms, accumulator_dtype
from hetjax.runtime.compilation.late_sums import compile_deduced
from hetjax.runtime.instructions.instruction_list import WEIGHT_GRADIENT

Compiled = Any
"""A compiled program: called with its arguments, it also tells the shardings of its results."""


@dataclass(frozen=True, eq=False)
class TaskCompiler:
    """Compiles what a stage's tasks run.

    Args:
        shapes: the stage's programs.
        mesh: its mesh.
        parameters: shardings of the parameter parts.
        batch: shardings of the batch leaves.
        received: shardings of the values received, and of their cotangents.
        sent: shardings of the values sent, and of their cotangents.
        sums: shardings of the sums of the parameters' gradients.
        accumulates: whether gradients of several microbatches are summed.
        late: whether some of the sums are partial.
    """

    shapes: StagePrograms
    mesh: Mesh
    parameters: Sequence[NamedSharding]
    batch: Sequence[NamedSharding]
    received: Sequence[NamedSharding]
    sent: Sequence[NamedSharding]
    sums: Sequence[NamedSharding]
    accumulates: bool
    late: bool

    @property
    def gradient_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the sums of the parameters' gradients."""
        return [
            jax.ShapeDtypeStruct(s.shape, accumulator_dtype(s.dtype))
            for s in self.shapes.parameters
        ]

    def programs(
        self, names: Iterable[str], known: Mapping[str, Compiled] | None = None
    ) -> Iterator[tuple[str, Compiled]]:
        """Compile programs.

        Args:
            names: which, in the order of
                `hetjax.runtime.instructions.instruction_list.stage_programs`.
            known: what was compiled before.

        Yields:
            The name of each program that is not known, and the program; none for a weight gradient
            of which there is nothing to compute.
        """
        known = known or {}
        recomputes = self.shapes.recompute is not None
        residuals = deferred = None
        for name in names:
            program = known.get(name) or self._task(name, residuals, deferred)
            if program is None:
                continue
            if name == ("recompute" if recomputes else "forward"):
                residuals = program.output_shardings if recomputes else program.output_shardings[1]
            if name == "input_gradient":
                deferred = program.output_shardings[1]
            if name not in known:
                yield name, program

    def _task(self, name: str, residuals: Any, deferred: Any) -> Any:
        match name:
            case "forward":
                return self._forward()
            case "recompute":
                return self._recompute()
            case "backward":
                return self._backward(residuals)
            case "input_gradient":
                return self._input_gradient(residuals)
        assert name == WEIGHT_GRADIENT, name
        return self._weight_gradient(residuals, deferred)

    def _forward(self) -> Compiled:
        shapes = self.shapes
        return self._task_program(
            shapes.forward,
            (shapes.parameters, shapes.batch, shapes.received),
            (self.parameters, self.batch, self.received),
            (self.sent, None),
        )

    def _recompute(self) -> Compiled:
        assert self.shapes.recompute is not None
        shapes, shardings = self._read(self.shapes.recompute_reads, ())
        return self._task_program(self.shapes.recompute, shapes[:3], shardings[:3], None)

    def _read(self, reads: Reads, residuals: Any) -> tuple[list[Any], list[Any]]:
        """Shapes and shardings of a program's arguments but the last ones."""
        shapes = self.shapes
        cotangents = [shapes.cotangents_in[i] for i in reads.cotangents]
        sorts = (
            (reads.batch, shapes.batch, self.batch),
            (reads.received, shapes.received, self.received),
            (reads.residuals, shapes.residuals, list(residuals)),
            (cotangents, shapes.sent, self.sent),
        )
        return (
            [shapes.parameters, *([of[i] for i in chosen] for chosen, of, _ in sorts)],
            [self.parameters, *([where[i] for i in chosen] for chosen, _, where in sorts)],
        )

    def _accumulators(self, places: Iterable[int]) -> tuple[list[Any], list[Any]]:
        """Shapes and shardings of the sums of some parameter parts' gradients."""
        places = list(places) if self.accumulates else []
        return [self.gradient_shapes[i] for i in places], [self.sums[i] for i in places]

    def _backward(self, residuals: Any) -> Compiled:
        shapes, shardings = self._read(self.shapes.backward_reads, residuals)
        sums, where = self._accumulators(range(len(self.parameters)))
        return self._task_program(
            self.shapes.backward,
            (*shapes, sums),
            (*shardings, where),
            (self._returned(), self.sums),
            donate=(5,),
        )

    def _input_gradient(self, residuals: Any) -> Compiled:
        split = self.shapes.split
        shapes, shardings = self._read(split.input_gradient_reads, residuals)
        sums, where = self._accumulators(split.light)
        light = [self.sums[i] for i in split.light]
        return self._task_program(
            split.input_gradient,
            (*shapes, sums),
            (*shardings, where),
            (self._returned(), None, light),
            donate=(5,),
        )

    def _weight_gradient(self, residuals: Any, deferred: Any) -> Compiled | None:
        split = self.shapes.split
        if not split.heavy:
            return None
        shapes, shardings = self._read(split.weight_gradient_reads, residuals)
        sums, where = self._accumulators(split.heavy)
        return self._task_program(
            split.weight_gradient,
            (*shapes, split.deferred, sums),
            (*shardings, list(deferred), where),
            [self.sums[i] for i in split.heavy],
            donate=(6,),
        )

    def _task_program(
        self,
        function: Callable[..., Any],
        shapes: Sequence[Any],
        in_shardings: Sequence[Any],
        out_shardings: Any,
        donate: tuple[int, ...] = (),
    ) -> Compiled:
        """Compile a task's program; for CPUs, with fences."""
        compile_task = compile_program
        if donate and self.late:
            compile_task = partial(compile_deduced, mesh=self.mesh)
        if self.mesh.devices.flat[0].platform != "cpu":
            return compile_task(function, shapes, in_shardings, out_shardings, donate)

        def run(predicates: Sequence[Any], *arguments: Any) -> Any:
            with fenced(predicates[0]):
                return function(*arguments)

        whole = NamedSharding(self.mesh, PartitionSpec())
        program = compile_task(
            run,
            ([jax.ShapeDtypeStruct((), bool)], *shapes),
            ([whole], *in_shardings),
            out_shardings,
            tuple(place + 1 for place in donate),
        )
        true = jax.make_array_from_callback((), whole, lambda _: np.array(True))
        return _Fenced(program, [true])

    def _returned(self) -> list[NamedSharding]:
        return [self.received[i] for i in self.shapes.cotangents_out]


def compile_program(
    function: Callable[..., Any],
    shapes: Sequence[Any],
    in_shardings: Sequence[Any],
    out_shardings: Any,
    donate: tuple[int, ...] = (),
) -> Any:
    """Compile a function of sequences of arrays, whose shapes and shardings are known."""
    arguments = [list(shape) for shape in shapes]
    jitted = jax.jit(
        function,
        in_shardings=tuple(list(s) for s in in_shardings),
        out_shardings=out_shardings,
        donate_argnums=donate,
        keep_unused=True,
    )
    return jitted.lower(*arguments).compile()


class _Fenced:
    """A compiled program whose fences are given what keeps them closed; see `pipeline.fences`.

    Args:
        program: the compiled program, whose first argument they are.
        predicates: a boolean scalar, true, in a list.
    """

    def __init__(self, program: Any, predicates: Sequence[jax.Array]):
        self._program, self._predicates = program, predicates
        self.output_shardings = program.output_shardings
        self.memory_analysis = program.memory_analysis

    def __call__(self, *arguments: Any) -> Any:
        return self._program(self._predicates, *arguments)
