"""What a capture's file says: of which model it is, which operators ran, and on which values.

A capture is a folder: `capture.json` says all that, and the values lie in NumPy archives beside it,
each once, whichever operators share it. Reading one never runs what is in it: there is no pickle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import pydantic

from hetjax.alignment.operators import OperatorProgram
from hetjax.alignment.result import CaptureSize, NamedKind
from hetjax.alignment.training import KindTraining, Overflow
from hetjax.checked_files import read_json
from hetjax.errors import InputError, shown, unknown_name
from hetjax.file_content import from_content
from hetjax.limits import Index, Text

CAPTURE_FILE = "capture.json"
CAPTURE_VERSION = 2

_INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
NUMPY_DTYPES = _INTEGERS | {"bool", "complex64", "complex128", "float16", "float32", "float64"}
"""The dtypes of values that NumPy knows by itself."""

_INTEGERS_BELOW_A_BYTE = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (2, 4))
_FORMS = ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
_FLOATS_OF_A_BYTE = frozenset(f"float8_{form}" for form in _FORMS)
DTYPES = NUMPY_DTYPES | {"bfloat16", "float4_e2m1fn"} | _INTEGERS_BELOW_A_BYTE | _FLOATS_OF_A_BYTE
"""The dtypes of values that a capture can hold."""


@dataclass(frozen=True)
class SavedValue:
    """One value of a capture.

    Args:
        archive: the number of the archive that it lies in.
        shape: its shape.
        dtype: its dtype; what NumPy does not know, such as bfloat16, is stored as whole numbers.
    """

    archive: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class SavedOperator:
    """One run of an operator.

    Args:
        number: the operator's number.
        place: which iteration of each loop that it stands in.
        line: where it comes from, for people.
        inputs: the numbers of the values that it took.
        outputs: the numbers of the values that it gave.
    """

    number: int
    place: tuple[int, ...]
    line: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class SavedOverflow:
    """The first step of the reference's training in which something was not finite.

    Args:
        step: which, from 1.
        operator: the number of the operator that first makes it; None where none does by itself.
        place: the iteration of its loops in which it does.
        what: what was seen not to be finite.
    """

    step: Annotated[Index, pydantic.Field(ge=1)]
    operator: Index | None
    place: tuple[Index, ...]
    what: Text


@dataclass(frozen=True)
class Capture:
    """What a capture's file says.

    Args:
        jax: the version of JAX that traced the model.
        reference: the kind that it was made on.
        parameters: shape and dtype of each parameter leaf, by its path.
        signatures: of every operator of the model, in order.
        details: what tells each from others of its signature.
        losses: those of a training on the reference; empty where there was none.
        overflow: the first step of it in which something was not finite; None where there is none.
        training: what the losses depend on besides the model, by name.
        values: the values.
        operators: the runs of operators that were captured.
    """

    jax: str
    reference: NamedKind
    parameters: Mapping[str, str]
    signatures: tuple[str, ...]
    details: tuple[str, ...]
    losses: tuple[float, ...]
    overflow: SavedOverflow | None
    training: Mapping[str, str]
    values: tuple[SavedValue, ...]
    operators: tuple[SavedOperator, ...]

    @property
    def size(self) -> CaptureSize:
        """What it holds."""
        numbers = {run.number for run in self.operators}
        num_bytes = sum(each.num_bytes for each in self.values)
        return CaptureSize(len(numbers), len(self.operators), len(self.values), num_bytes)

    @property
    def steps(self) -> int:
        """How many steps the reference was trained; the last may have no loss."""
        return max(len(self.losses), 0 if self.overflow is None else self.overflow.step)


def read_capture(folder: Path) -> Capture:
    """What a folder's capture says, checked; its values are read when they are used.

    Args:
        folder: the folder.

    Returns:
        The capture.

    Raises:
        InputError: there is none, it is of another version, or it does not make sense.
    """
    path = folder / CAPTURE_FILE
    subject = f"--replay {shown(str(path), 200)}"
    content = read_json(path, subject)
    try:
        capture = from_content(Capture, content, CAPTURE_VERSION)
        overflow, last = capture.overflow, len(capture.signatures) - 1
        if len(capture.details) != len(capture.signatures):
            raise InputError(
                f"details: there are {len(capture.details)}; there must be one for each of the "
                f"{len(capture.signatures)} signatures"
            )
        if overflow is not None and (overflow.operator or 0) > last:
            raise InputError(
                f"overflow.operator: {overflow.operator} is not allowed: there are 0 to {last}"
            )
        for place, run in enumerate(capture.operators):
            if not 0 <= run.number < len(capture.signatures):
                raise InputError(
                    f"operators[{place}].number: {run.number} is not allowed: there are 0 to {last}"
                )
            for value in (*run.inputs, *run.outputs):
                if not 0 <= value < len(capture.values):
                    raise InputError(
                        f"operators[{place}]: value {value} is not allowed: there are 0 to "
                        f"{len(capture.values) - 1}"
                    )
        for place, value in enumerate(capture.values):
            if value.archive < 0 or min(value.shape, default=0) < 0:
                raise InputError(
                    f"values[{place}]: archive {value.archive} and shape {list(value.shape)} are "
                    f"not allowed: numbers must be 0 or more"
                )
            if value.dtype not in DTYPES:
                raise InputError(unknown_name(f"values[{place}].dtype", value.dtype, DTYPES))
    except InputError as error:
        raise InputError(f"{subject}: {error}") from None
    return capture


def saved_overflow(overflow: Overflow | None) -> SavedOverflow | None:
    """What a file says of a training's overflow."""
    if overflow is None:
        return None
    number = None if overflow.operator is None else overflow.operator.number
    return SavedOverflow(overflow.step, number, overflow.place, overflow.what)


def captured_training(
    capture: Capture, program: OperatorProgram, name: str, steps: int
) -> KindTraining:
    """The reference's training, as a capture has it.

    Args:
        capture: the capture.
        program: the same model's forward and backward pass.
        name: what the reference is called.
        steps: how many of its steps.

    Returns:
        Its losses and its overflow up to there.
    """
    saved, overflow = capture.overflow, None
    if saved is not None and saved.step <= steps:
        operator = None if saved.operator is None else program.operators[saved.operator]
        overflow = Overflow(saved.step, operator, saved.place, saved.what)
    return KindTraining(name, capture.losses[:steps], overflow)


def check_same_model(capture: Capture, program: OperatorProgram) -> None:
    """Check that a capture is of a model.

    Args:
        capture: the capture.
        program: the model's forward and backward pass.

    Raises:
        InputError: it is of another one; the message names the first parameter or operator that
            differs.
    """
    for name in dict.fromkeys((*capture.parameters, *program.parameters)):
        there = capture.parameters.get(name, "missing")
        here = program.parameters.get(name, "missing")
        if there != here:
            raise InputError(
                f"--replay: the capture is of another model: parameter {shown(name)} is {there} "
                f"in the capture, and {here} in the configured model"
            )
    here = [each.signature for each in program.operators]
    for number, signature in enumerate(capture.signatures):
        if number >= len(here) or signature != here[number]:
            found = here[number] if number < len(here) else "missing"
            raise InputError(
                f"--replay: the capture is of another model or batch size: operator {number} is "
                f"{shown(signature, 200)} in the capture, and {shown(found, 200)} in the model "
                f"(traced by JAX {capture.jax} there, {jax.__version__} here)"
            )
        details = program.operators[number].details
        if capture.details[number] != details:
            raise InputError(
                f"--replay: the capture is of another model: operator {number}, "
                f"{shown(signature, 200)}, has {shown(capture.details[number], 400)} in the "
                f"capture, and {shown(details, 400)} in the model"
            )
    if len(here) > len(capture.signatures):
        raise InputError(
            f"--replay: the capture is of another model: it has {len(capture.signatures)} "
            f"operators, and the configured model {len(here)}"
        )


def check_same_training(capture: Capture, training: Mapping[str, str]) -> None:
    """Check that a capture's losses are of the same training.

    Args:
        capture: the capture.
        training: what losses depend on besides the model, by name.

    Raises:
        InputError: they are of another one; the message names the first thing that differs.
    """
    for name in dict.fromkeys((*capture.training, *training)):
        there, here = capture.training.get(name, "missing"), training.get(name, "missing")
        if there != here:
            raise InputError(
                f"--replay: the capture's losses are of another training: {name} is "
                f"{shown(there, 200)} in the capture, and {shown(here, 200)} here; --steps 0 "
                f"compares operators alone"
            )
