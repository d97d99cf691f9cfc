"""Programs for other numbers of examples, made of two traces.

Traced at two numbers of examples, a loss function mostly gives programs that differ in sizes alone,
each of which grows evenly with the number of examples. Then its program at any number between them
follows, and so does what is derived from it, such as a stage's backward pass, without another
trace. Where the two differ in anything else, as where Python looks at a shape, nothing is said.

What is made so can be cut, counted and compared, but not computed: functions inside it, such as
those of derivatives that a user wrote, are still those of the first trace.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import _compat
from hetjax.pipeline.program.forms import shapes_of, share_form
from hetjax.pipeline.program.traced_program import Constant, FlatJaxpr, Operand, Program, Step
from hetjax.pipeline.stages.traced_stage import TracedStage


class UnlikeError(Exception):
    """Two traces differ in more than sizes that grow evenly with the number of examples."""


@dataclass(frozen=True)
class Between:
    """A number of examples between two at which something was traced.

    Args:
        first: the examples of the first trace.
        second: those of the second, more than of the first.
        wanted: those that are asked for.
    """

    first: int
    second: int
    wanted: int

    def size(self, first: int, second: int) -> int:
        """A size, from those of both traces.

        Args:
            first: what it is in the first trace.
            second: what it is in the second.

        Returns:
            The size for the examples that are asked for.

        Raises:
            UnlikeError: it does not grow evenly. A size that grows with the square is told by what
                would have to be taken away, which is more than one example's share.

        Example:
            >>> Between(2, 8, 4).size(2 * 3, 8 * 3), Between(2, 8, 4).size(5, 5)
            (12, 5)
        """
        if first == second:
            return first
        slope, rest = divmod(second - first, self.second - self.first)
        if rest or first - slope * self.first < -abs(slope):
            raise UnlikeError
        return first + slope * (self.wanted - self.first)


@dataclass(frozen=True)
class _Same(Between):
    """Between two numbers that are one: nothing grows."""

    def size(self, first: int, second: int) -> int:
        if first != second:
            raise UnlikeError
        return first


class SizedProgram:
    """A program of which two traces are known.

    Args:
        first: the trace of fewer examples.
        second: the trace of more.

    Raises:
        UnlikeError: they differ in more than sizes.
    """

    def __init__(self, first: Program, second: Program):
        same = (
            first.parameter_names == second.parameter_names
            and first.batch_names == second.batch_names
            and first.parameters == second.parameters
            and first.batch == second.batch
            and first.aux_tree == second.aux_tree
        )
        if not same:
            raise UnlikeError
        _check_operands(first.outputs, second.outputs)
        self._first = first
        self._steps = _SizedSteps(first.steps, second.steps)
        self._avals = _SizedShapes(first.avals, second.avals)

    def at(self, between: Between) -> Program:
        """The program of a number of examples between those of the traces.

        Args:
            between: which number.

        Raises:
            UnlikeError: some size does not grow evenly.
        """
        return replace(self._first, avals=self._avals.at(between), steps=self._steps.at(between))


class SizedStage:
    """A stage of which two traces are known.

    Args:
        first: the trace of fewer examples.
        second: the trace of more.

    Raises:
        UnlikeError: they differ in more than sizes.
    """

    def __init__(self, first: TracedStage, second: TracedStage):
        roles = (
            "parameters",
            "batch",
            "received",
            "cotangents",
            "returned_places",
            "seeds",
            "trained",
        )
        if any(getattr(first, role) != getattr(second, role) for role in roles):
            raise UnlikeError
        for role in ("sent", "gradients", "returned"):
            _check_operands(getattr(first, role), getattr(second, role))
        self._first = first
        self._steps = _SizedSteps(first.flat.steps, second.flat.steps)
        self._avals = _SizedShapes(first.flat.avals, second.flat.avals)
        self._sent = _SizedShapes(first.sent_shapes, second.sent_shapes)

    def at(self, between: Between) -> TracedStage:
        """The stage's trace for a number of examples between those of the traces.

        Args:
            between: which number.

        Raises:
            UnlikeError: some size does not grow evenly.
        """
        flat = self._first.flat
        made = FlatJaxpr(
            self._avals.at(between), flat.inputs, self._steps.at(between), flat.outputs
        )
        return replace(self._first, flat=made, sent_shapes=list(self._sent.at(between)))


def is_alike(a: Program, b: Program) -> bool:
    """Whether two programs do the same on values of the same shapes.

    Args:
        a: a program.
        b: another one.
    """
    try:
        SizedProgram(a, b).at(_Same(0, 0, 0))
    except UnlikeError:
        return False
    return True


class _SizedShapes:
    """Shapes of values in two traces."""

    def __init__(
        self, first: Sequence[jax.ShapeDtypeStruct], second: Sequence[jax.ShapeDtypeStruct]
    ):
        if [x.dtype for x in first] != [x.dtype for x in second]:
            raise UnlikeError
        self._dtypes = [x.dtype for x in first]
        self._pairs = [(x.shape, y.shape) for x, y in zip(first, second, strict=True)]

    def at(self, between: Between) -> tuple[jax.ShapeDtypeStruct, ...]:
        made: dict[Hashable, jax.ShapeDtypeStruct] = {}
        for key in zip(self._pairs, self._dtypes, strict=True):
            if key not in made:
                pair, dtype = key
                made[key] = jax.ShapeDtypeStruct(_shape(*pair, between), dtype)
        return tuple(made[key] for key in zip(self._pairs, self._dtypes, strict=True))


class _SizedSteps:
    """The steps of two traces, with equations that are alike in one class."""

    def __init__(self, first: Sequence[Step], second: Sequence[Step]):
        if len(first) != len(second):
            raise UnlikeError
        self._steps = first
        self._classes: list[int] = []
        self._equations: list[tuple[_compat.JaxprEqn, _compat.JaxprEqn] | None] = []
        numbers: dict[Hashable, int] = {}
        for a, b in zip(first, second, strict=True):
            if a.outputs != b.outputs:
                raise UnlikeError
            _check_operands(a.inputs, b.inputs)
            pair = _equations(a, b)
            key = None if pair is None else tuple(map(_key, pair))
            if key not in numbers:
                numbers[key] = len(numbers)
                self._equations.append(pair)
            self._classes.append(numbers[key])

    def at(self, between: Between) -> tuple[Step, ...]:
        equations = [each and _Resizer(between).equation(*each) for each in self._equations]
        steps: list[Step] = []
        first: dict[int, Step] = {}
        for step, place in zip(self._steps, self._classes, strict=True):
            equation = equations[place]
            made = Step(step.name, step.inputs, step.outputs, _not_computed, equation)
            steps.append(made)
            like = first.setdefault(place, made)
            if equation is not None and like is not made:
                share_form(made, like)
        return tuple(steps)


def _not_computed(*_: Any) -> list[Any]:
    raise AssertionError("what is made of two traces cannot be computed; trace it")


def _equations(a: Step, b: Step) -> tuple[_compat.JaxprEqn, _compat.JaxprEqn] | None:
    if a.name != b.name:
        raise UnlikeError
    if a.equation is None or b.equation is None:
        if a.equation is not b.equation:
            raise UnlikeError
        return None
    return a.equation, b.equation


def _key(equation: _compat.JaxprEqn) -> Hashable:
    """What equations of one class have in common."""
    params = _frozen(tuple(equation.params.items()))
    return equation.primitive.name, shapes_of(equation), params


def _frozen(parameter: Any) -> Hashable:
    if isinstance(parameter, tuple | list):
        return tuple(map(_frozen, parameter))
    if isinstance(parameter, Mapping):
        return tuple((name, _frozen(each)) for name, each in parameter.items())
    try:
        hash(parameter)
    except TypeError:
        return id(parameter)
    return type(parameter), parameter


def _check_operands(first: Sequence[Operand], second: Sequence[Operand]) -> None:
    """Check that operands are the same values, or constants of one shape.

    A scalar may differ, such as the number of examples that a mean divides by: it says nothing of
    what is computed with it, unless it is nothing at all.
    """
    if len(first) != len(second):
        raise UnlikeError
    for a, b in zip(first, second, strict=True):
        if isinstance(a, Constant) and isinstance(b, Constant):
            _check_constants(a.value, b.value)
        elif a != b:
            raise UnlikeError


def _check_constants(a: Any, b: Any) -> None:
    if a is b:
        return
    shapes = jax.typeof(a), jax.typeof(b)
    if shapes[0] != shapes[1]:
        raise UnlikeError
    if jnp.issubdtype(shapes[0].dtype, jax.dtypes.extended):
        raise UnlikeError
    one, other = np.asarray(a), np.asarray(b)
    alike = one.any() == other.any() if one.shape == () else np.array_equal(one, other)
    if not alike:
        raise UnlikeError


def _shape(first: Sequence[int], second: Sequence[int], between: Between) -> tuple[int, ...]:
    if len(first) != len(second):
        raise UnlikeError
    return tuple(map(between.size, first, second))


@dataclass(frozen=True)
class _Resizer:
    """Makes equations of another size; variables that are one in both traces stay one.

    Args:
        between: which size.
        made: the new variables, by those of the first trace.
        twins: the second trace's, by those of the first.
    """

    between: Between
    made: dict[Any, Any] = field(default_factory=dict)
    twins: dict[Any, Any] = field(default_factory=dict)

    def equation(self, a: _compat.JaxprEqn, b: _compat.JaxprEqn) -> _compat.JaxprEqn:
        if a.primitive is not b.primitive or list(a.params) != list(b.params):
            raise UnlikeError
        return a.replace(
            invars=self._atoms(a.invars, b.invars),
            params={name: self._parameter(of, b.params[name]) for name, of in a.params.items()},
            outvars=self._atoms(a.outvars, b.outvars),
        )

    def _atoms(self, first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
        if len(first) != len(second):
            raise UnlikeError
        return [self._atom(a, b) for a, b in zip(first, second, strict=True)]

    def _atom(self, a: Any, b: Any) -> Any:
        if type(a) is not type(b):
            raise UnlikeError
        if isinstance(a, _compat.Literal):
            _check_constants(a.val, b.val)
            return a
        if a not in self.made:
            self.twins[a] = b
            self.made[a] = type(a)(self._aval(a.aval, b.aval))
        elif self.twins[a] is not b:
            raise UnlikeError
        return self.made[a]

    def _aval(self, a: Any, b: Any) -> Any:
        if a == b:
            return a
        if type(a) is not type(b) or not hasattr(a, "shape") or a.update(shape=b.shape) != b:
            raise UnlikeError
        return a.update(shape=_shape(a.shape, b.shape, self.between))

    def _parameter(self, a: Any, b: Any) -> Any:
        if type(a) is not type(b):
            raise UnlikeError
        if isinstance(a, int) and not isinstance(a, bool):
            return self.between.size(a, b)
        if isinstance(a, tuple | list):
            if len(a) != len(b):
                raise UnlikeError
            each = [self._parameter(x, y) for x, y in zip(a, b, strict=True)]
            return type(a)(*each) if hasattr(a, "_fields") else type(a)(each)
        if isinstance(a, _compat.ClosedJaxpr):
            _check_operands(list(map(Constant, a.consts)), list(map(Constant, b.consts)))
            return _compat.ClosedJaxpr(self._jaxpr(a.jaxpr, b.jaxpr), a.consts)
        if isinstance(a, _compat.Jaxpr):
            return self._jaxpr(a, b)
        if isinstance(a, np.ndarray | jax.Array):
            _check_constants(a, b)
        elif a is not b and not callable(a) and a != b:
            raise UnlikeError
        return a

    def _jaxpr(self, a: _compat.Jaxpr, b: _compat.Jaxpr) -> _compat.Jaxpr:
        if a is b:
            return a
        if len(a.eqns) != len(b.eqns):
            raise UnlikeError
        inside = _Resizer(self.between)
        return a.replace(
            constvars=inside._atoms(a.constvars, b.constvars),
            invars=inside._atoms(a.invars, b.invars),
            eqns=[inside.equation(x, y) for x, y in zip(a.eqns, b.eqns, strict=True)],
            outvars=inside._atoms(a.outvars, b.outvars),
        )
