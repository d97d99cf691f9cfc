"""What a step computes, as a value that is equal for steps that compute the same, to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np

from hetjax import _compat
from hetjax.pipeline.program.traced_program import Step
from hetjax.sharding.deduction.region import REGION

_KNOWN_BY_NAME = frozenset({"copy", "select_n", REGION})
"""Steps without an equation whose name and shapes say all; a barrier's equation says no more."""


def computation_of(step: Step, *, differentiated: bool = False) -> Hashable:
    """What a step computes.

    Two steps compute the same where these are equal: their primitives and all that these are told,
    and what the steps do beside.

    Args:
        step: a step of a traced program.
        differentiated: whether it is to be differentiated yet, so that derivative rules count, too:
            those of ``jax.custom_vjp`` and ``jax.custom_jvp`` are equal to themselves alone.

    Returns:
        A value to compare and to hash.
    """
    if step.equation is None and step.name not in _KNOWN_BY_NAME:
        # Not to be kept below: it would keep the step alive that it is kept for.
        return _Identity(step)
    known = _found.setdefault(step, {})
    if differentiated not in known:
        known[differentiated] = _computation(step, differentiated), step.beside
    return known[differentiated]


_found: WeakKeyDictionary[Step, dict[bool, Hashable]] = WeakKeyDictionary()


def constant_of(value: Any) -> Hashable:
    """A constant, as a value that is equal for equal ones of the same dtype.

    A large one is equal to itself alone.
    """
    is_whole = getattr(value, "is_fully_addressable", True)
    if not is_whole or is_extended(value) or is_large(value):
        return _Identity(value)
    array = np.asarray(value)
    is_weak = bool(getattr(value, "weak_type", isinstance(value, bool | int | float | complex)))
    held = array.tobytes()
    if len(held) > _SHORT:
        held = hashlib.sha256(held).digest()
    return array.shape, array.dtype.name, is_weak, held


def is_large(value: Any) -> bool:
    """Whether a constant has so many bytes that it is not looked into."""
    return getattr(value, "nbytes", 0) > _LARGE


def is_extended(value: Any) -> bool:
    """Whether a constant is of a dtype that NumPy does not have, such as random keys."""
    dtype = getattr(value, "dtype", None)
    # What JAX says of a dtype takes as long as all else that is asked of a number.
    return not (dtype is None or isinstance(dtype, np.dtype))


_LARGE = 2**20
"""Constants of more bytes are not looked into."""

_SHORT = 64
"""Of constants of more bytes a digest is kept: keys live as long as the programs do."""


def _computation(step: Step, differentiated: bool) -> Hashable:
    if step.name in _KNOWN_BY_NAME:
        return step.name
    assert step.equation is not None, "what has none is known by name"
    return _equation(step.equation, differentiated)


class _Identity:
    """An object as a key: equal to itself alone, and alive as long as the key is."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _equation(equation: _compat.JaxprEqn, differentiated: bool) -> Hashable:
    name = equation.primitive.name
    params: Mapping[str, Any] = equation.params
    rules: tuple[Hashable, ...] = ()
    if name in ("custom_jvp_call", "custom_vjp_call"):
        rest = {key: value for key, value in params.items() if key != "call_jaxpr"}
        rules = tuple(_Identity(rest[key]) for key in sorted(rest)) if differentiated else ()
        params = {"call_jaxpr": params["call_jaxpr"]}
    told = tuple((key, _parameter(value, differentiated)) for key, value in sorted(params.items()))
    return name, told, rules, _compat.context_of(equation)


def _parameter(value: Any, differentiated: bool) -> Hashable:
    if isinstance(value, _compat.ClosedJaxpr):
        return _jaxpr(value.jaxpr, differentiated), tuple(map(constant_of, value.consts))
    if isinstance(value, _compat.Jaxpr):
        return _jaxpr(value, differentiated)
    if isinstance(value, Mapping):
        return tuple((str(key), _parameter(each, differentiated)) for key, each in value.items())
    if type(value) in (tuple, list):
        return tuple(_parameter(each, differentiated) for each in value)
    if isinstance(value, np.ndarray | jax.Array):
        return constant_of(value)
    if isinstance(value, float | complex):
        # Zeros of either sign are equal in Python.
        return type(value), repr(value)
    # Numbers of unlike types are equal in Python, and not to a compiler.
    return (type(value), value) if _is_plain(value) else _Identity(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Callable):
        return False
    try:
        hash(value)
    except TypeError:  # Of something that it holds.
        return False
    return True


def _jaxpr(jaxpr: _compat.Jaxpr, differentiated: bool) -> Hashable:
    """A jaxpr with its variables numbered in the order in which they appear."""
    known = _found_of_jaxprs.setdefault(jaxpr, {})
    if differentiated not in known:
        known[differentiated] = tuple(_lines(jaxpr, differentiated))
    return known[differentiated]


_found_of_jaxprs: WeakKeyDictionary[_compat.Jaxpr, dict[bool, Hashable]] = WeakKeyDictionary()


def _lines(jaxpr: _compat.Jaxpr, differentiated: bool) -> Iterator[Hashable]:
    codes: dict[Any, int] = {}

    def code(atom: Any) -> Hashable:
        if isinstance(atom, _compat.Literal):
            return constant_of(atom.val), str(atom.aval)
        return codes.setdefault(atom, len(codes)), str(atom.aval)

    yield tuple(code(each) for each in (*jaxpr.constvars, *jaxpr.invars))
    for equation in jaxpr.eqns:
        read, made = (tuple(map(code, each)) for each in (equation.invars, equation.outvars))
        yield _equation(equation, differentiated), read, made
    yield tuple(map(code, jaxpr.outvars))
