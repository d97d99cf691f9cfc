"""The programs of a stage's tasks, divided among its devices: forward and backward passes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from hetjax.pipeline.program.loss import accumulator_dtype
from hetjax.pipeline.stages.backward import Reads, StagePrograms
from hetjax.runtime.compilation.compiling import Argument
from hetjax.runtime.compilation.partitioners import Layout, Partitioned, Partitioner
from hetjax.runtime.instructions.instruction_list import WEIGHT_GRADIENT


@dataclass(frozen=True, eq=False)
class TaskPrograms:
    """Divides what a stage's tasks run.

    Args:
        shapes: the stage's programs.
        partitioner: what divides them.
        parameters: layouts of the parameter parts.
        batch: layouts of the batch leaves.
        received: layouts of the values received, and of their cotangents.
        sent: layouts of the values sent, and of their cotangents.
        sums: layouts of the sums of the parameters' gradients.
        accumulates: whether gradients of several microbatches are summed.
        late: whether some of the sums are partial.
    """

    shapes: StagePrograms
    partitioner: Partitioner
    parameters: Sequence[Layout]
    batch: Sequence[Layout]
    received: Sequence[Layout]
    sent: Sequence[Layout]
    sums: Sequence[Layout]
    accumulates: bool
    late: bool

    @functools.cached_property
    def gradient_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the sums of the parameters' gradients."""
        return [
            jax.ShapeDtypeStruct(s.shape, accumulator_dtype(s.dtype))
            for s in self.shapes.parameters
        ]

    def programs(
        self, names: Iterable[str], known: Mapping[str, Partitioned] | None = None
    ) -> Iterator[tuple[str, Partitioned]]:
        """Divide programs.

        Args:
            names: which, in the order of
                `hetjax.runtime.instructions.instruction_list.stage_programs`.
            known: what was compiled before.

        Yields:
            The name of each program that is not known, and the program; none for a backward pass
            or a weight gradient of which there is nothing to compute.
        """
        known = known or {}
        recomputes = self.shapes.recompute is not None
        residuals = deferred = None
        for name in names:
            program = known.get(name) or self._task(name, residuals, deferred)
            if program is None:
                continue
            if name == ("recompute" if recomputes else "forward"):
                residuals = program.output_shardings[0 if recomputes else 1]
            if name == "input_gradient":
                deferred = program.output_shardings[1]
            if name not in known:
                yield name, program

    def _task(self, name: str, residuals: Any, deferred: Any) -> Any:
        if name == "forward":
            return self._forward()
        if not self.shapes.has_backward:
            return None
        match name:
            case "recompute":
                return self._recompute()
            case "backward":
                return self._backward(residuals)
            case "input_gradient":
                return self._input_gradient(residuals)
        assert name == WEIGHT_GRADIENT, name
        return self._weight_gradient(residuals, deferred)

    def _forward(self) -> Partitioned:
        shapes = self.shapes
        arguments = [
            Argument(shapes.parameters, self.parameters),
            Argument(shapes.batch, self.batch),
            Argument(shapes.received, self.received),
        ]
        return self._task_program(shapes.forward, arguments, (self.sent, None))

    def _recompute(self) -> Partitioned:
        assert self.shapes.recompute is not None
        arguments = self._stage_inputs(self.shapes.recompute_reads)
        return self._task_program(self.shapes.recompute, arguments, (None,))

    def _stage_inputs(self, reads: Reads) -> list[Argument]:
        """The first arguments of a program: parameters, batch, received."""
        shapes = self.shapes
        return [
            Argument(shapes.parameters, self.parameters),
            Argument(shapes.batch, self.batch).chosen(reads.batch),
            Argument(shapes.received, self.received).chosen(reads.received),
        ]

    def _backward_inputs(self, reads: Reads, residuals: Any) -> list[Argument]:
        """The same of a backward pass, and residuals and cotangents."""
        shapes = self.shapes
        cotangents = [shapes.cotangents_in[i] for i in reads.cotangents]
        return [
            *self._stage_inputs(reads),
            Argument(shapes.residuals, list(residuals)).chosen(reads.residuals),
            Argument(shapes.sent, self.sent).chosen(cotangents),
        ]

    def _accumulators(self, places: Iterable[int]) -> Argument:
        """The sums of some parameter parts' gradients, which programs write over."""
        sums = Argument(self.gradient_shapes, self.sums, donated=True)
        return sums.chosen(list(places) if self.accumulates else [])

    def _backward(self, residuals: Any) -> Partitioned:
        inputs = self._backward_inputs(self.shapes.backward_reads, residuals)
        trained = self.shapes.trained
        sums = self._accumulators(trained)
        outputs = (self._returned(), [self.sums[i] for i in trained])
        return self._task_program(self.shapes.backward, [*inputs, sums], outputs)

    def _input_gradient(self, residuals: Any) -> Partitioned:
        split = self.shapes.split
        inputs = self._backward_inputs(split.input_gradient_reads, residuals)
        sums = self._accumulators(split.light)
        outputs = (self._returned(), None, [self.sums[i] for i in split.light])
        return self._task_program(split.input_gradient, [*inputs, sums], outputs)

    def _weight_gradient(self, residuals: Any, deferred: Any) -> Partitioned | None:
        split = self.shapes.split
        if not split.heavy:
            return None
        inputs = self._backward_inputs(split.weight_gradient_reads, residuals)
        made = Argument(split.deferred, list(deferred))
        sums = self._accumulators(split.heavy)
        outputs = ([self.sums[i] for i in split.heavy],)
        return self._task_program(split.weight_gradient, [*inputs, made, sums], outputs)

    def _task_program(
        self, function: Callable[..., Any], arguments: Sequence[Argument], outputs: Any
    ) -> Partitioned:
        adds = any(argument.donated for argument in arguments)
        return self.partitioner.task(function, arguments, outputs, keeps_sums=self.late and adds)

    def _returned(self) -> list[Layout]:
        return [self.received[i] for i in self.shapes.cotangents_out]
