"""Stages whose steps are traced in groups: groups that are alike are differentiated once.

To trace a stage of many blocks takes as long as it is deep. But JAX differentiates a function that
it knows by its name, as one that ``jax.jit`` made, once for all its calls. So the blocks of a model
become calls of one function. The trace has the same steps, once these calls are inlined.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from hetjax import _compat
from hetjax.pipeline.program.forms import form_of
from hetjax.pipeline.program.traced_program import (
    Constant,
    Operand,
    Program,
    Step,
    evaluate_steps,
    operand_value,
    read_operand,
)
from hetjax.pipeline.stages.cutting import Stage, shared_steps


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of a program's steps.

    Args:
        program: the traced loss function.
        edges: the positions where groups begin, such as a model's blocks.
    """

    program: Program
    edges: Sequence[int]
    _functions: dict[Hashable, Callable[..., list[Any]]] = field(default_factory=dict)
    _groups: dict[Step, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for position, step in enumerate(self.program.steps):
            self._groups[step] = bisect.bisect_right(self.edges, position)

    def grouped(self, stage: Stage, *, is_last: bool) -> Stage:
        """A stage that computes the same, by calls of one function for all groups that are alike.

        They are alike where their work is: the values that the stage makes are not to be used.

        Args:
            stage: a stage of the program.
            is_last: whether it returns the program's outputs.

        Returns:
            The stage; as it is where it has a scan, or another step whose inner jaxpr JAX divides
            otherwise where it is called.
        """
        if not all(step in self._groups and _is_plain(step) for step in stage.steps):
            return stage
        outputs: Sequence[Operand] = self.program.outputs if is_last else stage.sends
        names = (
            *(self.program.parameters[part.leaf] for part in stage.parameters),
            *(self.program.batch[leaf] for leaf in stage.batch),
            *stage.receives,
        )
        calls = list(self._calls(stage, outputs))

        def function(*inputs: Sequence[Any]) -> list[Any]:
            environment = dict(zip(names, itertools.chain(*inputs), strict=True))
            for called, reads, made in calls:
                results = called(*(environment[value] for value in reads))
                environment.update(zip(made, results, strict=True))
            return [read_operand(environment, operand) for operand in outputs]

        return replace(stage, function=function)

    def _calls(
        self, stage: Stage, outputs: Sequence[Operand]
    ) -> Iterator[tuple[Callable[..., list[Any]], list[int], list[int]]]:
        """The function of each group of a stage, the values that it reads and those it returns."""
        shared = shared_steps(self.program)

        def group(step: Step) -> tuple[bool, int]:
            return shared.issuperset(step.outputs), self._groups[step]

        groups = [list(steps) for _, steps in itertools.groupby(stage.steps, key=group)]
        wanted = {operand_value(operand) for operand in outputs}
        returned: list[list[int]] = []
        for steps in reversed(groups):
            returned.append([value for step in steps for value in step.outputs if value in wanted])
            wanted.update(value for step in steps for value in step.values())
        for steps, made in zip(groups, reversed(returned), strict=True):
            key, reads = _wiring(steps, made)
            if key not in self._functions:
                self._functions[key] = _function(steps, reads, made)
            yield self._functions[key], reads, made


def _is_plain(step: Step) -> bool:
    """Whether a step has no inner jaxpr that is differentiated: a branch, a loop, a region."""
    if step.equation is None or not _compat.inner_jaxprs(step.equation):
        return True
    return step.name.startswith(("custom_jvp_call", "reduce", "scatter", "sort", "argm"))


def _function(
    steps: Sequence[Step], reads: Sequence[int], made: Sequence[int]
) -> Callable[..., list[Any]]:
    def function(*values: Any) -> list[Any]:
        return evaluate_steps(steps, dict(zip(reads, values, strict=True)), made)

    return jax.jit(function)


def _wiring(steps: Sequence[Step], made: Sequence[int]) -> tuple[Hashable, list[int]]:
    """What groups that are alike have in common, and the values that this one reads."""
    numbers: dict[int, int] = {}
    reads: list[int] = []

    def code(operand: Operand) -> Hashable:
        if isinstance(operand, Constant):
            value = operand.value
            return "constant", repr(value) if jax.numpy.shape(value) == () else id(value)
        if operand not in numbers:
            numbers[operand] = len(numbers)
            reads.append(operand)
        return numbers[operand], ()

    forms = []
    for step in steps:
        inputs = tuple(map(code, step.inputs))
        numbers.update((value, len(numbers) + place) for place, value in enumerate(step.outputs))
        forms.append((form_of(step), inputs))
    return (tuple(forms), tuple(numbers[value] for value in made)), reads
