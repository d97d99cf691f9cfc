"""Refusals: why an equation cannot be computed as its operands lie, and what mends it."""

from __future__ import annotations

from typing import NoReturn

from hetjax import _compat
from hetjax.errors import InputError
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.deduction.bottom_tier import OperandError
from hetjax.sharding.deduction.computing import Annotations
from hetjax.sharding.deduction.flat_program import FlatEquation, FlatProgram


def refuse(
    program: FlatProgram,
    flat: FlatEquation,
    held: Annotations,
    problem: OperandError,
    mended: HSharding,
) -> NoReturn:
    """Say what is wrong with an operand, where, and which reshard mends it.

    Raises:
        InputError: always.
    """
    operands = "\n".join(
        f"  operand {i}: {program.shapes[variable].dtype}{list(program.shapes[variable].shape)} "
        f"{held[i] or 'known everywhere'}"
        for i, variable in enumerate(flat.operands)
    )
    raise InputError(
        f"{flat.equation.primitive.name} at {_compat.source_line(flat.equation)} cannot take "
        f"operand {problem.operand} as it lies: {problem.reason}.\n{operands}\n"
        f"Mend it with hetjax.reshard(operand {problem.operand}, ...) to\n  {mended}"
    ) from None
