"""What a step computes, as a value that is equal for steps that compute the same, to the bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import _compat
from hetjax.pipeline.program.fences import REGION
from hetjax.pipeline.program.traced_program import Step

_KNOWN_BY_NAME = frozenset({"copy", "select_n", REGION})
"""Steps without an equation whose name and shapes say all; a barrier's equation says no more."""


def computation_of(step: Step) -> Hashable:
    """What a step computes.

    Two steps compute the same where these are equal: their primitives and all that these are told.
    What only tells how to differentiate is left out, since steps are evaluated.

    Args:
        step: a step of a traced program.

    Returns:
        A value to compare and to hash.
    """
    found = _found.get(step)
    if found is None:
        found = _found[step] = _computation(step)
    return found


_found: WeakKeyDictionary[Step, Hashable] = WeakKeyDictionary()


def constant_of(value: Any) -> Hashable:
    """A constant, as a value that is equal for equal ones of the same dtype.

    A large one is equal to itself alone.
    """
    is_whole = getattr(value, "is_fully_addressable", True)
    if jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended) or not is_whole:
        return _Identity(value)
    array = np.asarray(value)
    if array.nbytes > _LARGE:
        return _Identity(value)
    is_weak = bool(getattr(value, "weak_type", isinstance(value, bool | int | float | complex)))
    return array.shape, array.dtype.name, is_weak, array.tobytes()


_LARGE = 2**20
"""Constants of more bytes are not looked into."""


def _computation(step: Step) -> Hashable:
    if step.name in _KNOWN_BY_NAME:
        return step.name
    return _Identity(step) if step.equation is None else _equation(step.equation)


class _Identity:
    """An object as a key: equal to itself alone, and alive as long as the key is."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _equation(equation: _compat.JaxprEqn) -> Hashable:
    name = equation.primitive.name
    params: Mapping[str, Any] = equation.params
    if name in ("custom_jvp_call", "custom_vjp_call"):
        params = {"call_jaxpr": params["call_jaxpr"]}
    told = tuple((key, _parameter(value)) for key, value in sorted(params.items()))
    return name, told, _compat.context_of(equation)


def _parameter(value: Any) -> Hashable:
    if isinstance(value, _compat.ClosedJaxpr):
        return _jaxpr(value.jaxpr), tuple(map(constant_of, value.consts))
    if isinstance(value, _compat.Jaxpr):
        return _jaxpr(value)
    if isinstance(value, Mapping):
        return tuple((str(key), _parameter(each)) for key, each in value.items())
    if type(value) in (tuple, list):
        return tuple(map(_parameter, value))
    if isinstance(value, np.ndarray | jax.Array):
        return constant_of(value)
    # Numbers of unlike types are equal in Python, and not to a compiler.
    return (type(value), value) if _is_plain(value) else _Identity(value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Hashable) and not isinstance(value, Callable)


@functools.lru_cache(maxsize=1024)
def _jaxpr(jaxpr: _compat.Jaxpr) -> Hashable:
    """A jaxpr with its variables numbered in the order in which they appear."""
    codes: dict[Any, int] = {}

    def code(atom: Any) -> Hashable:
        if isinstance(atom, _compat.Literal):
            return constant_of(atom.val)
        return codes.setdefault(atom, len(codes)), str(atom.aval)

    def lines() -> Iterator[Hashable]:
        yield tuple(code(each) for each in (*jaxpr.constvars, *jaxpr.invars))
        for equation in jaxpr.eqns:
            read, made = (tuple(map(code, each)) for each in (equation.invars, equation.outvars))
            yield _equation(equation), read, made
        yield tuple(map(code, jaxpr.outvars))

    return tuple(lines())
