"""Captures: what the reference's operators took and gave, in files that another machine replays.

A capture is a folder: `capture.json` says which model it is of, which operators there are, and
which value each took and gave; the values lie in NumPy archives beside it, each once, whichever
operators share it. Reading one never runs what is in it: there is no pickle.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.alignment.comparison import (
    Comparison,
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
    operand_bytes,
    output_bytes,
)
from hetjax.alignment.result import NamedKind, named_kind
from hetjax.checked_files import read_json
from hetjax.errors import InputError, shown
from hetjax.file_content import from_content, to_content
from hetjax.files import replacing
from hetjax.mesh.quantities import format_bytes
from hetjax.pipeline.program.loss import from_host, host_array, host_shape, is_key
from hetjax.reading import opened

CAPTURE_FILE = "capture.json"
LIMIT_BYTES = 10**9
"""The most bytes of values that a capture holds unless another limit is given."""

_VERSION = 1
_ARCHIVE_BYTES = 64 * 10**6
_HEADER_BYTES = 10_000
_NUMPY_DTYPES = frozenset(
    f"{sort}{bits}" for sort in ("int", "uint", "float") for bits in (8, 16, 32, 64)
) | {"bool", "complex64", "complex128"}


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
class Capture:
    """What a capture's file says.

    Args:
        jax: the version of JAX that traced the model.
        reference: the kind that it was made on.
        parameters: shape and dtype of each parameter leaf, by its path.
        signatures: of every operator of the model, in order.
        losses: those of a training on the reference; empty where there was none.
        training: what the losses depend on besides the model, by name.
        values: the values.
        operators: the runs of operators that were captured.
    """

    jax: str
    reference: NamedKind
    parameters: Mapping[str, str]
    signatures: tuple[str, ...]
    losses: tuple[float, ...]
    training: Mapping[str, str]
    values: tuple[SavedValue, ...]
    operators: tuple[SavedOperator, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of its values."""
        return sum(_num_bytes(each) for each in self.values)


def check_limit(program: OperatorProgram, wanted: Collection[int] | None, limit: float) -> None:
    """Check by shapes alone that a capture can be within a limit.

    Args:
        program: the forward and backward pass.
        wanted: the numbers of the operators to capture; None for all.
        limit: bytes.

    Raises:
        InputError: what the operators give alone is more; the message says how many bytes it is.
    """
    chosen = [
        each for each in occurrences(program.block) if wanted is None or each[0].number in wanted
    ]
    count = output_bytes if wanted is None else lambda o: output_bytes(o) + operand_bytes(o)
    most = sum(times * count(operator) for operator, times in chosen)
    if most > limit:
        raise _over_limit(len(chosen), most, limit)


def _over_limit(operators: int, num_bytes: float, limit: float) -> InputError:
    return InputError(
        f"--limit is {format_bytes(limit)}, and the {operators} operators to capture have "
        f"{format_bytes(num_bytes)} or more; capture fewer (--operators 0-99), a smaller batch "
        f"(train.batch_size), or raise the limit"
    )


def write_capture(
    folder: Path,
    program: OperatorProgram,
    inputs: Sequence[Any],
    reference: KindDevice,
    *,
    wanted: Collection[int] | None = None,
    limit: float = LIMIT_BYTES,
    losses: Sequence[float] = (),
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
        losses: of a training on the reference, to be compared with.
        training: what they depend on besides the model, by name.
        told: is told of each operator.

    Returns:
        What was captured.

    Raises:
        InputError: it would be over the limit; nothing is written.
    """
    check_limit(program, wanted, limit)
    values, runs = _Values(limit), list[SavedOperator]()
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
    capture = Capture(
        jax=jax.__version__,
        reference=named_kind(reference),
        parameters=dict(program.parameters),
        signatures=tuple(each.signature for each in program.operators),
        losses=tuple(losses),
        training=dict(training),
        values=tuple(values.saved),
        operators=tuple(runs),
    )
    folder.mkdir(parents=True, exist_ok=True)
    values.write(folder)
    with replacing(folder / CAPTURE_FILE) as temporary:
        content = {"version": _VERSION, **to_content(capture)}
        temporary.write_text(json.dumps(content), encoding="utf-8")
    return capture


class _Values:
    """The values of a capture, each held once until they are written."""

    def __init__(self, limit: float) -> None:
        self.saved: list[SavedValue] = []
        self._arrays: list[np.ndarray] = []
        self._numbers: dict[int, int] = {}
        # While a value is held here no other one has its identity.
        self._held: list[Any] = []
        self._limit, self._bytes = limit, 0

    def number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            array = host_array(value)
            self._bytes += array.nbytes
            if self._bytes > self._limit:
                raise _over_limit(len(self.saved), self._bytes, self._limit)
            self._numbers[id(value)] = len(self.saved)
            self._held.append(value)
            archive = self._bytes // _ARCHIVE_BYTES
            self.saved.append(SavedValue(archive, array.shape, array.dtype.name))
            self._arrays.append(array)
        return self._numbers[id(value)]

    def write(self, folder: Path) -> None:
        for archive in sorted({each.archive for each in self.saved}):
            with (
                replacing(folder / _archive_name(archive)) as temporary,
                zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as file,
            ):
                for number, saved in enumerate(self.saved):
                    if saved.archive == archive:
                        stored = io.BytesIO()
                        np.save(stored, _plain(self._arrays[number]), allow_pickle=False)
                        file.writestr(f"{number}.npy", stored.getvalue())


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
        capture = from_content(Capture, content, _VERSION)
        for place, run in enumerate(capture.operators):
            if not 0 <= run.number < len(capture.signatures):
                raise InputError(
                    f"operators[{place}].number: {run.number} is not allowed: there are 0 to "
                    f"{len(capture.signatures) - 1}"
                )
            for value in (*run.inputs, *run.outputs):
                if not 0 <= value < len(capture.values):
                    raise InputError(
                        f"operators[{place}]: value {value} is not allowed: there are 0 to "
                        f"{len(capture.values) - 1}"
                    )
        for place, value in enumerate(capture.values):
            if value.archive < 0 or min(value.shape, default=0) < 0 or not _is_dtype(value.dtype):
                raise InputError(f"values[{place}]: {shown(value)} is not allowed")
    except InputError as error:
        raise InputError(f"{subject}: {error}") from None
    return capture


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

    def differences() -> Iterator[Any]:
        with _Archives(folder, capture) as archives:
            for count, run in enumerate(chosen, start=1):
                operator = program.operators[run.number]
                operands = archives.read(run.inputs, operator.taken, run)
                expected = archives.read(run.outputs, operator.given, run)
                for kind in kinds:
                    yield difference(operator, operands, expected, kind, run.place)
                told(count, len(chosen), operator.name)

    return Comparison(worst_differences(differences()), tolerance)


class _Archives:
    """Reads values from a capture's archives."""

    def __init__(self, folder: Path, capture: Capture) -> None:
        self._folder, self._capture = folder, capture
        self._open: dict[int, zipfile.ZipFile] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Archives:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(
        self, numbers: Sequence[int], shapes: Sequence[jax.ShapeDtypeStruct], run: SavedOperator
    ) -> list[Any]:
        """Values as an operator takes or gives them."""
        if len(numbers) != len(shapes):
            raise InputError(
                f"--replay {self._folder}: operator {run.number} has {len(numbers)} values in the "
                f"capture where the model has {len(shapes)}"
            )
        return [self._value(n, shape) for n, shape in zip(numbers, shapes, strict=True)]

    def _value(self, number: int, shape: jax.ShapeDtypeStruct) -> Any:
        saved, words = self._capture.values[number], host_shape(shape)
        if saved.shape != tuple(words.shape) or saved.dtype != np.dtype(words.dtype).name:
            raise InputError(
                f"--replay {self._folder}: value {number} is {saved.dtype}{list(saved.shape)}, and "
                f"the model has {words.dtype}{list(words.shape)} there"
            )
        stored = self._stored(number, saved).view(jnp.dtype(saved.dtype))
        return from_host(jnp.asarray(stored) if is_key(shape) else stored, shape)

    def _stored(self, number: int, saved: SavedValue) -> np.ndarray:
        path = self._folder / _archive_name(saved.archive)
        subject = f"--replay {shown(str(path), 200)}"
        try:
            file = self._archive(saved.archive, path, subject)
            member = file.getinfo(f"{number}.npy")
            if member.compress_type != zipfile.ZIP_STORED:
                raise ValueError("it is compressed")
            if member.file_size > _num_bytes(saved) + _HEADER_BYTES:
                raise ValueError("it is larger than it should be")
            array = np.load(io.BytesIO(file.read(member)), allow_pickle=False)
            if array.shape != saved.shape or array.dtype != _plain_dtype(saved.dtype):
                raise ValueError(f"it is {array.dtype}{list(array.shape)}")
        except (zipfile.BadZipFile, ValueError, KeyError, OSError, EOFError, RuntimeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{subject}: value {number} cannot be read: {shown(str(error), 200)}"
            ) from None
        return array

    def _archive(self, number: int, path: Path, subject: str) -> zipfile.ZipFile:
        if number not in self._open:
            handle = self._stack.enter_context(opened(path, subject))
            file = self._stack.enter_context(os.fdopen(handle, "rb", closefd=False))
            self._open[number] = self._stack.enter_context(zipfile.ZipFile(file))
        return self._open[number]


def _archive_name(number: int) -> str:
    return f"values-{number:04d}.npz"


def _is_dtype(name: str) -> bool:
    try:
        dtype = jnp.dtype(name)
    except TypeError:
        return False
    return dtype.name == name and (dtype == np.bool_ or jnp.issubdtype(dtype, jnp.number))


def _num_bytes(saved: SavedValue) -> int:
    return math.prod(saved.shape) * jnp.dtype(saved.dtype).itemsize


def _plain_dtype(name: str) -> np.dtype:
    """The dtype that NumPy stores one as: whole numbers for what it does not know."""
    dtype = jnp.dtype(name)
    return dtype if name in _NUMPY_DTYPES else np.dtype(f"uint{8 * dtype.itemsize}")


def _plain(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(_plain_dtype(array.dtype.name)).reshape(array.shape)
