"""Refusals: why an equation cannot be computed as its operands lie, and what mends it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NoReturn

from hetjax import _compat
from hetjax.errors import InputError
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.deduction.annotated_program import elements_between
from hetjax.sharding.deduction.bottom_tier import OperandError
from hetjax.sharding.deduction.computing import Annotations
from hetjax.sharding.deduction.flat_program import FlatEquation, FlatProgram
from hetjax.sharding.deduction.top_tier import cotangent_of

Made = Mapping[int, HSharding | None]
"""How variables lie that have been made so far."""


def refuse(
    program: FlatProgram,
    flat: FlatEquation,
    held: Annotations,
    problem: OperandError,
    mended: HSharding,
    made: Made,
) -> NoReturn:
    """Say what is wrong with an operand, where, and which reshard mends it.

    A person has no name for a cotangent: of an equation of the backward pass it is said which
    reshard of the forward pass brings the cotangent back as it should lie.

    Args:
        program: the program.
        flat: the equation.
        held: how its operands lie.
        problem: what is wrong with one of them.
        mended: how that one should lie.
        made: how all variables lie that are there.

    Raises:
        InputError: always.
    """
    equation, shapes = flat.equation, [program.shapes[variable] for variable in flat.operands]
    operands = "\n".join(
        f"  operand {i}: {shape.dtype}{list(shape.shape)} {held[i] or 'known everywhere'}"
        for i, shape in enumerate(shapes)
    )
    place, shape = problem.operand, shapes[problem.operand]
    elements = elements_between(held[place], mended, shape.shape) or 0
    backward = ", in the backward pass," if _compat.is_transposed(equation) else ""
    text = (
        f"{equation.primitive.name} at {_compat.source_line(equation)}{backward} cannot take "
        f"operand {place} as it lies: {problem.reason}.\n{operands}\n"
    )
    forward = _forward_mend(program, flat, place, made) if backward else None
    if forward is not None:
        raise InputError(text + forward) from None
    raise InputError(
        f"{text}Mend it with hetjax.reshard(operand {place}, ...), which moves "
        f"{elements * shape.dtype.itemsize} bytes, to\n  {mended}"
    ) from None


def _forward_mend(program: FlatProgram, flat: FlatEquation, place: int, made: Made) -> str | None:
    """The reshard of the forward pass after which a cotangent lies as its value does."""
    for user, variable in _forward_values(program, flat, flat.operands[place]):
        annotation = made.get(variable)
        if annotation is None or annotation.is_partial:
            continue
        shape, line = program.shapes[variable], _compat.source_line(user.equation)
        return (
            f"Operand {place} is the gradient of a value of the forward pass: of operand "
            f"{user.operands.index(variable)} of {user.equation.primitive.name} at {line}, "
            f"{shape.dtype}{list(shape.shape)}. Mend it there: before that line, put "
            f"x = hetjax.reshard(x, ...) of that value, which moves nothing, and brings its "
            f"gradient back to lie as\n  {cotangent_of(annotation)}"
        )
    return None


def _forward_values(
    program: FlatProgram, flat: FlatEquation, cotangent: int
) -> Iterator[tuple[FlatEquation, int]]:
    """Forward values that a cotangent may be of, each with an equation that takes it.

    A transposed equation has the line of the forward one, and its result the shape of an operand of
    that.
    """
    makers = {variable: each for each in program.equations for variable in each.results}
    waiting, seen = [cotangent], set[int]()
    while waiting:
        maker = makers.get(waiting.pop())
        if maker is None or maker.index in seen or not _compat.is_transposed(maker.equation):
            continue
        seen.add(maker.index)
        if maker.equation.primitive.name == "add_any":
            waiting += maker.operands
            continue
        line, shape = _compat.source_line(maker.equation), program.shapes[cotangent]
        for each in program.equations[: flat.index]:
            if _compat.is_transposed(each.equation) or _compat.source_line(each.equation) != line:
                continue
            for variable in each.operands:
                alike = program.shapes[variable]
                if (alike.shape, alike.dtype) == (shape.shape, shape.dtype):
                    yield each, variable
