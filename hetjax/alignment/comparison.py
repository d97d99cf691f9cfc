"""Teacher-forced comparison: each operator of each kind gets the reference's operands.

So errors do not travel: what an operator is off by is its own doing, in the forward pass and, with
the reference's cotangents, in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hetjax.alignment.devices import KindDevice
from hetjax.alignment.differences import TOLERANCE, has_nonfinite, operator_error
from hetjax.alignment.evaluation import Place, evaluate
from hetjax.alignment.operators import Operator, OperatorProgram, occurrences

Told = Callable[[int, int, str], None]
"""Is told how many pieces of work are done, of how many, and which was the last."""


@dataclass(frozen=True)
class OperatorDifference:
    """How far one operator is off on one kind.

    Args:
        kind: the kind's name.
        operator: the operator.
        error: relative to the scale of the reference's results; see `operator_error`. The largest
            of all its runs.
        place: the iteration of each loop that it stands in, in which the error is that large.
        is_overflow: whether the kind's results are not finite where the reference's are.
    """

    kind: str
    operator: Operator
    error: float
    place: Place = ()
    is_overflow: bool = False


@dataclass(frozen=True)
class Comparison:
    """What came of comparing operators.

    Args:
        differences: one for each kind but the reference, and each operator that ran.
        tolerance: the largest error that is rounding.
        reference: the operators of the reference that make what is not finite of what is.
    """

    differences: tuple[OperatorDifference, ...]
    tolerance: float = TOLERANCE
    reference: tuple[Operator, ...] = ()

    def ranked(self, kind: str | None = None) -> list[OperatorDifference]:
        """The differences, the largest error first.

        Args:
            kind: the kind whose; None for those of all.

        Returns:
            The differences; those of one error in the order in which the operators run.
        """
        mine = [each for each in self.differences if kind in (None, each.kind)]
        return sorted(mine, key=lambda each: (-each.error, each.operator.number))

    def named(self, kind: str | None = None) -> list[OperatorDifference]:
        """The differences that are more than rounding, the largest error first.

        Args:
            kind: the kind whose; None for those of all.

        Returns:
            Those whose error is over the tolerance.
        """
        return [each for each in self.ranked(kind) if each.error > self.tolerance]


def worst_differences(found: Iterable[OperatorDifference]) -> tuple[OperatorDifference, ...]:
    """Of all runs of an operator on a kind the one with the largest error.

    Args:
        found: the differences of runs.

    Returns:
        One for each operator and kind; it tells of an overflow in any of them.
    """
    worst: dict[tuple[str, int], OperatorDifference] = {}
    for each in found:
        key = each.kind, each.operator.number
        earlier = worst.setdefault(key, each)
        is_overflow = each.is_overflow or earlier.is_overflow
        larger = each if each.error > earlier.error else earlier
        worst[key] = replace(larger, is_overflow=is_overflow)
    return tuple(worst.values())


def compare_kinds(
    program: OperatorProgram,
    inputs: Sequence[Any],
    reference: KindDevice,
    others: Sequence[KindDevice],
    *,
    tolerance: float = TOLERANCE,
    wanted: Collection[int] | None = None,
    told: Told = lambda count, total, what: None,
) -> Comparison:
    """Compare the operators of kinds with the reference's, each on the reference's operands.

    Args:
        program: the forward and backward pass.
        inputs: the parameters' leaves and the batch's.
        reference: the kind whose operands all get.
        others: the kinds that are compared with it.
        tolerance: the largest error that is rounding.
        wanted: the numbers of the operators to compare; None for all.
        told: is told of each operator.

    Returns:
        The errors.

    Source: H2, section 3.1.2.

    Example:
        >>> import jax.numpy as jnp
        >>> from hetjax.alignment import AlignedKind, bind_kind, trace_operators
        >>> w, x = jnp.linspace(-1.0, 1.0, 8).reshape(4, 2), jnp.ones((3, 4))
        >>> program = trace_operators(lambda w, x: jnp.sum(jnp.tanh(x @ w)), w, x)
        >>> full, half = (bind_kind(AlignedKind(d, "cpu", d)) for d in ("float32", "bfloat16"))
        >>> found = compare_kinds(program, [w, x], full, [half])
        >>> [(each.operator.name, each.operator.direction) for each in found.named()]
        [('dot_general', 'forward'), ('dot_general', 'backward')]
    """
    found, origins = list[OperatorDifference](), dict[int, Operator]()
    total = sum(times for _, times in occurrences(program.block))
    count = 0

    def visit(operator: Operator, operands: list[Any], place: Place) -> list[Any]:
        nonlocal count
        operands = operands_of(operator, operands)
        expected = reference.give(operator, operands)
        count += 1
        if wanted is None or operator.number in wanted:
            told(min(count, total), total, operator.name)
            if has_nonfinite(expected) and not has_nonfinite(operands):
                origins.setdefault(operator.number, operator)
            found.extend(
                difference(operator, operands, expected, other, place, tolerance)
                for other in others
            )
        return expected

    evaluate(program.block, [reference.put(each) for each in inputs], visit)
    return Comparison(worst_differences(found), tolerance, tuple(origins.values()))


def difference(
    operator: Operator,
    operands: Sequence[Any],
    expected: Sequence[Any],
    other: KindDevice,
    place: Place = (),
    tolerance: float = TOLERANCE,
) -> OperatorDifference:
    """Run an operator on a kind with the reference's operands, and compare.

    Args:
        operator: the operator.
        operands: the reference's operands.
        expected: the reference's results.
        other: the kind.
        place: which iteration of its loops it is.
        tolerance: the largest error that is rounding.

    Returns:
        How far it is off.
    """
    found = other.give(operator, [other.put(each) for each in operands])
    error = operator_error(operator, operands, expected, found, tolerance)
    is_overflow = has_nonfinite(found) and not has_nonfinite(expected)
    return OperatorDifference(other.kind.name, operator, error, place, is_overflow)


def operands_of(operator: Operator, operands: Sequence[Any]) -> list[Any]:
    """An operator's operands as arrays: constants of the program have the dtype that it gives them.

    Args:
        operator: the operator.
        operands: arrays, and constants as they stand in the program.

    Returns:
        Arrays.
    """
    return [
        operand if hasattr(operand, "devices") else np.asarray(operand, shape.dtype)
        for operand, shape in zip(operands, operator.taken, strict=True)
    ]


def first_nonfinite(
    program: OperatorProgram, inputs: Sequence[Any], kind: KindDevice
) -> tuple[Operator, Place] | None:
    """The operator that first makes what is not finite of what is, on a kind's own values.

    Args:
        program: the forward and backward pass.
        inputs: the parameters' leaves and the batch's.
        kind: the kind.

    Returns:
        The operator and the iteration of its loops; None where no operator does.
    """
    found: list[tuple[Operator, Place]] = []

    def visit(operator: Operator, operands: list[Any], place: Place) -> list[Any]:
        operands = operands_of(operator, operands)
        results = kind.give(operator, operands)
        if not found and has_nonfinite(results) and not has_nonfinite(operands):
            found.append((operator, place))
        return results

    evaluate(program.block, [kind.put(each) for each in inputs], visit)
    return found[0] if found else None


def mean_relative_error(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The mean relative error of losses: the mean over steps of |y - y'| / |y|.

    Args:
        losses: those of a kind, y'.
        reference: those of the reference, y; steps that one of them lacks do not count.

    Returns:
        The error; NaN where there is no step.

    Source: H2, section 3.1.2.

    Example:
        >>> mean_relative_error([2.0, 1.02], [2.0, 1.0])
        0.01
    """
    found = relative_differences(losses, reference)
    return round(math.fsum(found) / len(found), 15) if found else math.nan


def relative_differences(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """How far each loss is from the reference's, relative to it.

    Args:
        losses: those of a kind.
        reference: those of the reference; steps that one of them lacks are left out.

    Returns:
        A number a step; infinite where the reference's loss is 0 and the other is not.

    Example:
        >>> relative_differences([3.0, 0.0, 1.0], [2.0, 0.0, 0.0])
        [0.5, 0.0, inf]
    """
    pairs = zip(losses, reference, strict=False)
    return [_relative(a - b, b) for a, b in pairs]


def _relative(amount: float, value: float) -> float:
    if not amount:
        return 0.0
    return abs(amount / value) if value else math.inf
