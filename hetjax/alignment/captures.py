"""Capturing what the reference's operators take and give, and replaying it on other kinds."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from hetjax.alignment.capture_file import (
    CAPTURE_FILE,
    CAPTURE_VERSION,
    Capture,
    SavedOperator,
    saved_overflow,
)
from hetjax.alignment.capture_values import CapturedValues, ValueArchives, over_limit
from hetjax.alignment.comparison import (
    Comparison,
    OperatorDifference,
    Told,
    difference,
    operands_of,
    worst_differences,
)
from hetjax.alignment.devices import KindDevice
from hetjax.alignment.differences import TOLERANCE
from hetjax.alignment.evaluation import Place, evaluate
from hetjax.alignment.operators import (
    Operator,
    OperatorProgram,
    occurrences,
    output_bytes,
)
from hetjax.alignment.result import named_kind
from hetjax.alignment.training import KindTraining
from hetjax.errors import InputError, reason_of
from hetjax.file_content import to_content
from hetjax.files import replacing

LIMIT_BYTES = 10**9
"""The most bytes of values that a capture holds unless another limit is given."""


def check_limit(program: OperatorProgram, wanted: Collection[int] | None, limit: float) -> None:
    """Check by shapes alone that a capture can be within a limit.

    Args:
        program: the forward and backward pass.
        wanted: the numbers of the operators to capture; None for all.
        limit: bytes.

    Raises:
        InputError: what the operators give alone is more; the message says how many bytes it is.
    """
    # What they give is counted; what they take may be given by another.
    least = sum(
        times * output_bytes(operator)
        for operator, times in occurrences(program.block)
        if wanted is None or operator.number in wanted
    )
    if least > limit:
        raise over_limit(least, limit)


def write_capture(
    folder: Path,
    program: OperatorProgram,
    inputs: Sequence[Any],
    reference: KindDevice,
    *,
    wanted: Collection[int] | None = None,
    limit: float = LIMIT_BYTES,
    train: Callable[[], KindTraining | None] = lambda: None,
    training: Mapping[str, str] = MappingProxyType({}),
    told: Told = lambda count, total, what: None,
) -> Capture:
    """Evaluate a program on the reference, and write what operators took and gave.

    Args:
        folder: where to; it is made, and must be empty.
        program: the forward and backward pass.
        inputs: the parameters' leaves and the batch's.
        reference: the kind.
        wanted: the numbers of the operators to capture; None for all.
        limit: the most bytes of values.
        train: trains on the reference, once it is known that the values are within the limit;
            gives None where there are no losses to be compared with.
        training: what losses depend on besides the model, by name.
        told: is told of each operator.

    Returns:
        What was captured.

    Raises:
        InputError: it would be over the limit, and nothing is written; or it cannot be written.
    """
    check_limit(program, wanted, limit)
    values, runs = CapturedValues(limit), list[SavedOperator]()
    total = sum(times for _, times in occurrences(program.block))
    count = 0

    def visit(operator: Operator, operands: list[Any], place: Place) -> list[Any]:
        nonlocal count
        operands = operands_of(operator, operands)
        results = reference.give(operator, operands)
        count += 1
        if wanted is None or operator.number in wanted:
            taken = tuple(values.number(each) for each in operands)
            given = tuple(values.number(each) for each in results)
            runs.append(SavedOperator(operator.number, place, operator.line, taken, given))
            told(min(count, total), total, operator.name)
        return results

    evaluate(program.block, [reference.put(each) for each in inputs], visit)
    values.leave_devices()
    trained = train()
    capture = Capture(
        jax=jax.__version__,
        reference=named_kind(reference),
        parameters=dict(program.parameters),
        signatures=tuple(each.signature for each in program.operators),
        details=tuple(each.details for each in program.operators),
        losses=() if trained is None else trained.losses,
        overflow=None if trained is None else saved_overflow(trained.overflow),
        training=dict(training),
        values=tuple(values.saved),
        operators=tuple(runs),
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        values.write(folder)
        # Last, so that a folder that has it is whole.
        with replacing(folder / CAPTURE_FILE) as temporary:
            content = {"version": CAPTURE_VERSION, **to_content(capture)}
            temporary.write_text(json.dumps(content), encoding="utf-8")
    except OSError as error:
        raise InputError(f"--capture {folder} cannot be written: {reason_of(error)}") from None
    return capture


def replay(
    folder: Path,
    capture: Capture,
    program: OperatorProgram,
    kinds: Sequence[KindDevice],
    *,
    tolerance: float = TOLERANCE,
    wanted: Collection[int] | None = None,
    told: Told = lambda count, total, what: None,
) -> Comparison:
    """Run captured operators on kinds, and compare with what the reference gave.

    Args:
        folder: the capture's folder.
        capture: what its file says, of the same model: see `check_same_model`.
        program: the model's forward and backward pass.
        kinds: the kinds that are compared with the reference.
        tolerance: the largest error that is rounding.
        wanted: the numbers of the operators to run; None for all that were captured.
        told: is told of each run.

    Returns:
        The errors.

    Raises:
        InputError: a value is missing, damaged or not of its operator's shape.
    """
    chosen = [run for run in capture.operators if wanted is None or run.number in wanted]

    def differences() -> Iterator[OperatorDifference]:
        with ValueArchives(folder, capture) as archives:
            for count, run in enumerate(chosen, start=1):
                operator = program.operators[run.number]
                operands = archives.read(run.inputs, operator.taken, run)
                expected = archives.read(run.outputs, operator.given, run)
                for kind in kinds:
                    yield difference(operator, operands, expected, kind, run.place, tolerance)
                told(count, len(chosen), operator.name)

    return Comparison(worst_differences(differences()), tolerance)
