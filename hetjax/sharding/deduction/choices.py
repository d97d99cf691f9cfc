"""The ways in which an equation's operands could lie, those first that move little."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.deduction.bottom_tier import ELSEWHERE, OperandError
from hetjax.sharding.deduction.computing import Annotations, Computed
from hetjax.sharding.deduction.evaluation import holds_jaxprs
from hetjax.sharding.deduction.flat_program import FlatEquation, FlatProgram
from hetjax.sharding.deduction.mending import (
    Proposal,
    mended_operand,
    proposals,
    widths_of,
)
from hetjax.sharding.deduction.numbered_layouts import NumberedLayouts
from hetjax.sharding.deduction.origins import Origins
from hetjax.sharding.deduction.remembering import Remembered
from hetjax.sharding.deduction.signatures import signature_of
from hetjax.sharding.deduction.top_tier import indivisible
from hetjax.sharding.deduction.trials import MOST_REMEMBERED, Trials, replaced

MOST_CHOICES = 8
"""How many ways to compute an equation are tried for each way in which its operands lie."""

MOST_PROPOSALS = 24
"""How many ways in which operands could lie are tried, those first by which devices lack little."""

_MOST_COMBINATIONS = 4
"""Of the ways in which operands lie already."""

_CHOICES = Remembered[Any, tuple[Proposal, ...]](MOST_REMEMBERED)


class Choices:
    """Chooses how operands of a program's equations could lie.

    Args:
        flat: the program.
        inputs: how its inputs lie.
        layouts: how values lie.
        trials: tries its equations.
        origins: how operands of reshards around the program lay.
        message_bytes: what a move costs beside its bytes.
    """

    def __init__(
        self,
        flat: FlatProgram,
        inputs: Annotations,
        layouts: NumberedLayouts,
        trials: Trials,
        origins: Origins,
        message_bytes: int,
    ):
        self._flat, self._layouts, self._trials, self._origins = flat, layouts, trials, origins
        self._widths = widths_of(inputs, [flat.shapes[variable] for variable in flat.inputs])
        self._shared: Hashable = (tuple(sorted(self._widths.items())), message_bytes)
        self._choices: dict[Any, tuple[tuple[int, ...], ...]] = {}
        self._proposals: dict[Any, tuple[Proposal, ...]] = {}

    def of(self, flat: FlatEquation, held: Mapping[int, tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Ways in which the operands could lie, from the ways in which they do.

        Args:
            flat: the equation.
            held: by variable, how it lies.
        """
        combinations = itertools.product(*(held[variable] for variable in flat.operands))
        found: dict[tuple[int, ...], None] = {}
        for numbers in itertools.islice(combinations, _MOST_COMBINATIONS):
            found.update(dict.fromkeys(self._from(flat, numbers)))
        return list(found)

    def _from(self, flat: FlatEquation, numbers: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Ways to compute an equation, those first that move little; one for each result."""
        key = self._trials.kind(flat), numbers
        if key not in self._choices:
            asked = self._trials.asked(flat, numbers)
            known = _CHOICES.of(
                asked and (asked, self._shared),
                lambda: tuple(map(self._layouts.held, self._chosen(flat, numbers))),
            )
            self._choices[key] = tuple(tuple(map(self._layouts.number, each)) for each in known)
        return self._choices[key]

    def _chosen(self, flat: FlatEquation, numbers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        plain = self._layouts.aligned(self._flat.operand_shapes(flat), numbers)
        found, _ = self._trials.of(flat, plain, self._origins)
        if isinstance(found, OperandError):
            candidates = list(self._proposed(flat, numbers))
        elif self._grows(flat, plain):
            candidates = [plain, *self._proposed(flat, numbers)]
        else:
            candidates = [plain]
        costs = {vector: self._cost(flat, numbers, vector) for vector in candidates}
        chosen: dict[Any, tuple[int, ...]] = {}
        for vector in sorted(candidates, key=lambda vector: costs[vector]):
            found, _ = self._trials.of(flat, vector, self._origins)
            assert isinstance(found, Computed)
            chosen.setdefault(found.results, vector)
        return itertools.islice(chosen.values(), MOST_CHOICES)

    def _grows(self, flat: FlatEquation, numbers: tuple[int, ...]) -> bool:
        """Whether a sum that is added up later would be larger: then it may be so before."""
        largest = max((self._flat.shapes[variable].size for variable in flat.results), default=0)
        held = zip(self._flat.operand_shapes(flat), self._layouts.held(numbers), strict=True)
        return any(a is not None and a.is_partial and s.size < largest for s, a in held)

    def _proposed(self, flat: FlatEquation, numbers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        shapes, equation = self._flat.operand_shapes(flat), flat.equation
        signature = signature_of(equation) or indivisible(equation)
        holds = holds_jaxprs(equation)
        # Of primitives with the same rule: all that is elementwise has one.
        key = signature.form, holds, numbers, tuple(shape.shape for shape in shapes)
        if key not in self._proposals:
            held = list(self._layouts.held(numbers))
            found = proposals(signature, shapes, held, self._widths, holds_jaxprs=holds)
            self._proposals[key] = tuple(itertools.islice(found, MOST_PROPOSALS))
        for proposal in self._proposals[key]:
            vector = self._taken(flat, tuple(map(self._layouts.number, proposal)))
            if vector is not None and self._is_possible(flat, numbers, vector):
                yield vector

    def _taken(self, flat: FlatEquation, vector: tuple[int, ...]) -> tuple[int, ...] | None:
        """How operands lie at last that shall lie in some way; None where that does not do."""
        for _ in range(2 * len(vector) + 1):
            problem, _ = self._trials.of(flat, vector, self._origins)
            if not isinstance(problem, OperandError):
                return vector
            if problem.spec is None or problem.operand == ELSEWHERE:
                return None
            mended = self._layouts.number(self.mended(flat, vector, problem))
            if mended == vector[problem.operand]:
                return None
            vector = replaced(vector, problem.operand, mended)
        return None

    def mended(
        self, flat: FlatEquation, numbers: tuple[int, ...], problem: OperandError
    ) -> HSharding:
        """How an operand that cannot be taken shall lie.

        Args:
            flat: the equation.
            numbers: how its operands lie.
            problem: what is wrong with that.
        """
        held = list(self._layouts.held(numbers))
        return mended_operand(self._flat.operand_shapes(flat), held, problem)

    def _is_possible(
        self, flat: FlatEquation, before: tuple[int, ...], after: tuple[int, ...]
    ) -> bool:
        moves = zip(self._flat.operand_shapes(flat), before, after, strict=True)
        return all(self._layouts.bytes_moved(*each) is not None for each in moves)

    def _cost(self, flat: FlatEquation, before: tuple[int, ...], after: tuple[int, ...]) -> int:
        moves = zip(self._flat.operand_shapes(flat), before, after, strict=True)
        return sum(self._layouts.bytes_moved(*each) or 0 for each in moves)
