"""A trace on record: what a process that traces the same function again compares its own with.

Nothing of it depends on the process: no address, no order of a set, no device. Numbers that were
known when the function was traced may differ as much as unlike devices round them.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from hetjax import _compat
from hetjax.pipeline.program.computations import is_extended
from hetjax.pipeline.program.forms import shapes_of
from hetjax.pipeline.program.traced_program import Constant, FlatJaxpr, Operand, Program, Step
from hetjax.sharding.deduction.reshard import Resharding

_DIGEST_BYTES = 12

_SCALARS_DIFFER, _ARRAYS_DIFFER = 1e-6, 1e-4
"""By how much of their size numbers of unlike devices differ at most: a table of sines is hundreds
of roundings off where its angles are thousands."""

_CHUNK = 2**20
"""How many numbers of a constant are looked at together."""

_WEIGHTS = 2654435761, 2246822519
"""Odd numbers of 32 bits; their multiples are spread evenly."""


@dataclass(frozen=True)
class KnownValue:
    """A value that was known when a function was traced.

    Args:
        form: its dtype and shape.
        exact: digest of what must be equal: all numbers, or where floating ones are not finite.
        sums: weighted sums of floating numbers, each compressed by ``arcsinh``.
        rounding: by how much devices may round these sums to unlike ones.
        number: what it is, for people; empty for an array.
    """

    form: str
    exact: bytes
    sums: tuple[float, ...] = ()
    rounding: float = 0.0
    number: str = field(default="", compare=False)

    def is_like(self, other: KnownValue) -> bool:
        """Whether another value is the same, but for how devices round.

        Args:
            other: the other value.
        """
        if (self.form, self.exact) != (other.form, other.exact):
            return False
        allowed = max(self.rounding, other.rounding)
        return all(abs(a - b) <= allowed for a, b in zip(self.sums, other.sums, strict=True))


class Entry(NamedTuple):
    """One step of a trace, its inputs, or one of its outputs.

    Args:
        digest: of all that it is but for numbers that were known.
        known: these.
    """

    digest: bytes
    known: tuple[KnownValue, ...] = ()


@dataclass(frozen=True)
class TraceRecord:
    """A trace on record.

    Args:
        entries: its inputs, each of its steps, each of its outputs.
    """

    entries: tuple[Entry, ...]

    def differences(self, other: TraceRecord) -> list[int]:
        """The places of entries that another trace of as many has otherwise; none where it is like.

        Args:
            other: the other record; where it has another number of entries, all those that follow
                the end of either differ.
        """
        longest = max(len(self.entries), len(other.entries))
        pairs = zip(self.entries, other.entries, strict=False)
        found = [place for place, pair in enumerate(pairs) if not _are_alike(*pair)]
        return [*found, *range(min(len(self.entries), len(other.entries)), longest)]

    def difference(self, other: TraceRecord, place: int) -> str:
        """What is unlike in an entry, in words: of this trace, then of the other one.

        Args:
            other: the other record.
            place: one of the `differences`.
        """
        if place >= min(len(self.entries), len(other.entries)):
            return "only one of the two has it"
        one, another = self.entries[place], other.entries[place]
        if one.digest != another.digest:
            return "it computes something else, or of other values"
        pairs = zip(one.known, another.known, strict=True)
        a, b = next(pair for pair in pairs if not pair[0].is_like(pair[1]))
        numbers = f": {a.number} and {b.number}" if a.number else ""
        return f"its constant {a.form} has other numbers{numbers}"


def record_of(flat: FlatJaxpr, names: Sequence[str] = ()) -> TraceRecord:
    """Put a trace on record.

    What a derivative rule of the user's computes is not in it, nor a function that is called back.

    Args:
        flat: the trace.
        names: the paths of its inputs.

    Returns:
        The record, which can be pickled.
    """
    return TraceRecord(tuple(_TraceWriter(flat).entries(names)))


def record_of_program(program: Program) -> TraceRecord:
    """Put a traced loss on record.

    Args:
        program: the traced loss.
    """
    names = (*program.parameter_names, *program.batch_names)
    return record_of(flat_program(program), names)


def flat_program(program: Program) -> FlatJaxpr:
    """A traced loss as a trace.

    Args:
        program: the traced loss.
    """
    inputs = (*program.parameters, *program.batch)
    return FlatJaxpr(program.avals, inputs, program.steps, program.outputs)


def described(flat: FlatJaxpr, place: int) -> str:
    """An entry of a trace's record, in words.

    Args:
        flat: the trace.
        place: of the entry.
    """
    if place == 0:
        return "what it takes"
    if place <= len(flat.steps):
        step = flat.steps[place - 1]
        where = "an unknown line" if step.equation is None else _compat.source_line(step.equation)
        return f"{step.name!r} at {where}, step {place} of {len(flat.steps)}"
    return f"output {place - len(flat.steps) - 1}"


def _are_alike(one: Entry, other: Entry) -> bool:
    if one.digest != other.digest or len(one.known) != len(other.known):
        return False
    return all(a.is_like(b) for a, b in zip(one.known, other.known, strict=True))


class _TraceWriter:
    """Writes the entries of one trace; what several steps have in common is written once."""

    def __init__(self, flat: FlatJaxpr):
        self._flat = flat
        self._jaxprs: dict[int, tuple[str, list[KnownValue]]] = {}
        self._values: dict[int, KnownValue] = {}
        self._scalars: dict[Hashable, KnownValue] = {}
        self._contexts: dict[Hashable, str] = {}
        self._reshards: dict[int, int] = {}
        # The address of what is not kept may soon be another's.
        self._kept: list[Any] = []

    def entries(self, names: Sequence[str]) -> Iterator[Entry]:
        flat = self._flat
        inputs = [(value, str(flat.avals[value])) for value in flat.inputs]
        yield Entry(_hash(f"{inputs}{list(names)}".encode()))
        for step in flat.steps:
            known: list[KnownValue] = []
            yield Entry(_hash(self._step(step, known).encode()), tuple(known))
        for output in flat.outputs:
            known = []
            yield Entry(_hash(self._operand(output, known).encode()), tuple(known))

    def _step(self, step: Step, known: list[KnownValue]) -> str:
        read = ",".join([self._operand(operand, known) for operand in step.inputs])
        beside = self._text(step.beside, known) if step.beside else ""
        line = f"{step.outputs}={step.name}({read}){beside}"
        if step.equation is None:
            return line + str([str(self._flat.avals[value]) for value in step.outputs])
        return line + self._equation(step.equation, known)

    def _operand(self, operand: Operand, known: list[KnownValue]) -> str:
        if not isinstance(operand, Constant):
            return str(operand)
        known.append(self._known(operand.value))
        return "known"

    def _equation(self, equation: _compat.JaxprEqn, known: list[KnownValue]) -> str:
        params = equation.params
        told = [f"{name}={self._text(params[name], known)}" for name in sorted(params)]
        context = _compat.context_of(equation)
        if context not in self._contexts:
            self._contexts[context] = self._text(context, [])
        name = equation.primitive.name
        return f"{name}{told}{shapes_of(equation)}{self._contexts[context]}"

    def _text(self, value: Any, known: list[KnownValue]) -> str:
        """A parameter of an equation; what may differ from process to process by its type alone."""
        kind = type(value)
        if value is None or kind in (bool, int):
            return repr(value)
        if isinstance(value, str):
            return _ADDRESS.sub("", repr(value))
        if isinstance(value, tuple | list) and not isinstance(value, PartitionSpec):
            return f"{kind.__name__}({','.join([self._text(each, known) for each in value])})"
        if isinstance(value, _compat.ClosedJaxpr | _compat.Jaxpr):
            return self._jaxpr(value, known)
        if isinstance(value, float | complex | np.generic | np.ndarray | jax.Array):
            known.append(self._known(value))
            return "known"
        if isinstance(value, np.dtype | enum.Enum | PartitionSpec | bytes):
            return str(value)
        if isinstance(value, Mapping):
            pairs = sorted((str(key), key) for key in value)
            return str([f"{name}:{self._text(value[key], known)}" for name, key in pairs])
        if isinstance(value, set | frozenset):
            return f"{kind.__name__}{sorted(self._text(each, known) for each in value)}"
        if isinstance(value, Resharding):
            # Its number counts all that the process has traced; what counts is which are one.
            number = self._reshards.setdefault(value.number, len(self._reshards))
            value = dataclasses.replace(value, number=number)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
            return f"{kind.__name__}({','.join([self._text(each, known) for each in fields])})"
        return kind.__name__

    def _jaxpr(self, jaxpr: _compat.ClosedJaxpr | _compat.Jaxpr, known: list[KnownValue]) -> str:
        """The digest of a jaxpr, and what is known in it."""
        if id(jaxpr) not in self._jaxprs:
            found: list[KnownValue] = []
            lines = "\n".join(self._lines(jaxpr, found))
            self._jaxprs[id(jaxpr)] = _hash(lines.encode()).hex(), found
            self._kept.append(jaxpr)
        text, found = self._jaxprs[id(jaxpr)]
        known += found
        return text

    def _lines(
        self, jaxpr: _compat.ClosedJaxpr | _compat.Jaxpr, known: list[KnownValue]
    ) -> Iterator[str]:
        if isinstance(jaxpr, _compat.ClosedJaxpr):
            known += map(self._known, jaxpr.consts)
            jaxpr = jaxpr.jaxpr
        numbers: dict[Any, int] = {}

        def number(atom: Any) -> str:
            if isinstance(atom, _compat.Literal):
                known.append(self._known(atom.val))
                return "known"
            return str(numbers.setdefault(atom, len(numbers)))

        yield str([(number(each), str(each.aval)) for each in (*jaxpr.constvars, *jaxpr.invars)])
        for equation in jaxpr.eqns:
            read, made = (
                ",".join(map(number, each)) for each in (equation.invars, equation.outvars)
            )
            yield f"{made}={read}{self._equation(equation, known)}"
        yield str([number(each) for each in jaxpr.outvars])

    def _known(self, value: Any) -> KnownValue:
        if isinstance(value, jax.Array) or np.ndim(value):
            if id(value) not in self._values:
                self._values[id(value)] = _known_value(value)
                self._kept.append(value)
            return self._values[id(value)]
        # Zeros of either sign, and numbers of unlike types, are equal in Python.
        scalar = np.asarray(value)
        key = scalar.dtype, scalar.tobytes()
        if key not in self._scalars:
            self._scalars[key] = _known_value(scalar)
        return self._scalars[key]


_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def _hash(held: bytes) -> bytes:
    return hashlib.blake2b(held, digest_size=_DIGEST_BYTES).digest()


def _known_value(value: Any) -> KnownValue:
    if not getattr(value, "is_fully_addressable", True):
        return KnownValue(str(value.shape), b"")
    array = np.asarray(jax.random.key_data(value) if is_extended(value) else value)
    form, numbers = f"{array.dtype}{list(array.shape)}", array.ravel()
    number = "" if array.ndim else str(array)
    if not jnp.issubdtype(array.dtype, np.inexact):
        return KnownValue(form, _hash(numbers.tobytes()), number=number)
    where = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    squares, sums = 0.0, np.zeros(len(_WEIGHTS))
    for first in range(0, numbers.size, _CHUNK):
        real = _real(numbers[first : first + _CHUNK])
        if not np.isfinite(real).all():
            where.update(_not_finite(real).tobytes())
            real = np.where(np.isfinite(real), real, 0.0)
        real = np.arcsinh(real)
        squares += float(real @ real)
        sums += _weighted(real, first)
    differ = max(_ARRAYS_DIFFER if array.ndim else _SCALARS_DIFFER, _eps(array.dtype) / 8)
    rounding = differ * squares**0.5
    return KnownValue(form, where.digest(), tuple(sums.tolist()), rounding, number)


def _real(numbers: np.ndarray) -> np.ndarray:
    """Numbers as wide ones, of complex numbers both parts."""
    if jnp.issubdtype(numbers.dtype, np.complexfloating):
        return np.concatenate([np.real(numbers), np.imag(numbers)]).astype(np.float64)
    return numbers.astype(np.float64)


def _not_finite(numbers: np.ndarray) -> np.ndarray:
    """Which numbers are none, and which are infinite."""
    return np.isnan(numbers) + 2 * np.isposinf(numbers) + np.int8(3) * np.isneginf(numbers)


def _weighted(numbers: np.ndarray, first: int) -> list[float]:
    """Sums of numbers times weights from -1 to 1, which their places give."""
    places = np.arange(first + 1, first + 1 + numbers.size, dtype=np.uint64)
    return [
        float(numbers @ ((places * np.uint64(each) % np.uint64(2**32)) / 2**31 - 1.0))
        for each in _WEIGHTS
    ]


def _eps(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps)
