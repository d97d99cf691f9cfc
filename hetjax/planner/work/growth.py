"""What grows with the number of examples: constants by powers of it, and dimensions.

What a mean is divided by is a number like any other in a trace; two traces for unlike numbers of
examples tell it apart.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import _compat
from hetjax.pipeline.program.traced_program import Constant, Program
from hetjax.pipeline.stages.resized import UnlikeError

KnownValue = Constant | _compat.Literal
"""What holds a value that was known when a program was traced."""

Power = int | None
"""A power of the number of examples; None for a multiple that is no power of it."""


def known_array(known: KnownValue) -> np.ndarray | None:
    """The value as an array; None of random keys.

    Args:
        known: what holds it.
    """
    value = known.value if isinstance(known, Constant) else known.val
    is_keys = jnp.issubdtype(jax.typeof(value).dtype, jax.dtypes.extended)
    return None if is_keys else np.asarray(value)


@dataclass(frozen=True)
class Growth:
    """What grows in a program with the number of examples; all by identity.

    Args:
        powers: of what holds a constant, where it is not 0.
        dimensions: of a variable those that grow, where some do.
        scans: the equations that are scans of more iterations.
    """

    powers: Mapping[int, Power] = field(default_factory=dict)
    dimensions: Mapping[int, frozenset[int]] = field(default_factory=dict)
    scans: Collection[int] = ()


def growth_of(program: Program, other: Program) -> Growth | None:
    """What grows in a program with the number of examples.

    Args:
        program: a traced loss function.
        other: the same, traced for another number of examples.

    Returns:
        What grows in the first; None where the two differ in more than sizes.
    """
    compared = _Compared(other.num_examples / program.num_examples)
    try:
        compared.programs(program, other)
    except UnlikeError:
        return None
    return Growth(compared.powers, compared.dimensions, compared.scans)


class _Compared:
    """What two programs differ in.

    Args:
        growth: how many times as many examples the second has.
    """

    def __init__(self, growth: float):
        self._growth = growth
        self.powers: dict[int, Power] = {}
        self.dimensions: dict[int, frozenset[int]] = {}
        self.scans: set[int] = set()

    def programs(self, program: Program, other: Program) -> None:
        _check_alike(len(program.steps), len(other.steps))
        for step, twin in zip(program.steps, other.steps, strict=True):
            self._operands(step.inputs, twin.inputs)
            assert step.equation is not None, "a traced program has equations"
            assert twin.equation is not None, "a traced program has equations"
            self._equations(step.equation, twin.equation)
        self._operands(program.outputs, other.outputs)

    def _equations(self, a: _compat.JaxprEqn, b: _compat.JaxprEqn) -> None:
        _check_alike(a.primitive, b.primitive)
        self._operands(a.invars, b.invars)
        self._operands(a.outvars, b.outvars)
        if a.params.get("length") != b.params.get("length"):
            self.scans.add(id(a))
        bodies, twins = _compat.inner_jaxprs(a), _compat.inner_jaxprs(b)
        _check_alike(len(bodies), len(twins))
        for body, twin in zip(bodies, twins, strict=True):
            _check_alike(len(body.eqns), len(twin.eqns))
            for x, y in zip(body.eqns, twin.eqns, strict=True):
                self._equations(x, y)
            self._operands(body.outvars, twin.outvars)

    def _operands(self, first: Sequence[Any], second: Sequence[Any]) -> None:
        _check_alike(len(first), len(second))
        for a, b in zip(first, second, strict=True):
            _check_alike(type(a), type(b))
            if isinstance(a, KnownValue):
                power = _power(known_array(a), known_array(b), self._growth)
                if power != 0:
                    self.powers[id(a)] = power
            elif hasattr(a, "aval"):
                _check_alike(len(a.aval.shape), len(b.aval.shape))
                sizes = zip(a.aval.shape, b.aval.shape, strict=True)
                grown = frozenset(i for i, (x, y) in enumerate(sizes) if x != y)
                if grown:
                    self.dimensions[id(a)] = grown


def _check_alike(a: object, b: object) -> None:
    if a != b:
        raise UnlikeError


def _power(a: np.ndarray | None, b: np.ndarray | None, growth: float) -> Power:
    """By which power of its growth a constant grows."""
    if a is None or b is None:
        return 0
    if a.size and b.size and a.shape != b.shape:
        # Of as many elements as there are examples, all are alike or nothing is known.
        a, b = (each.ravel()[:1] if (each == each.flat[0]).all() else None for each in (a, b))
        return None if a is None or b is None else _power(a, b, growth)
    if np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"):
        return 0
    if a.shape != b.shape or a.dtype.kind not in "iuf" or not a.all() or not b.all():
        return None
    grown = b.astype(np.float64) / a.astype(np.float64)
    if (grown <= 0).any():
        return None
    power = round(math.log(grown.flat[0]) / math.log(growth))
    return power if np.allclose(grown, growth**power, rtol=1e-4) else None
