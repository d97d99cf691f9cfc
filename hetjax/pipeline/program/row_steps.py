"""Steps by rows: what works on each row of its arrays alone, computed for one row after another.

A value that comes in rows is a value for each row of its first dimension. Steps that do not mix
rows make rows of rows; sums over rows join what each has, and so do extrema that nothing is to be
differentiated through; what else reads such a value gets its rows stacked.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hetjax import _compat
from hetjax.pipeline.program.traced_program import (
    Constant,
    FlatJaxpr,
    Operand,
    Step,
    flatten_jaxpr,
)
from hetjax.pipeline.program.values import Values, renumbered

ELEMENTWISE = frozenset(
    """
    abs add add_any and atan2 bitcast_convert_type cbrt ceil clamp convert_element_type copy cos
    cosh div eq erf erf_inv exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p
    logistic lt max min mul ne neg nextafter not or pow real reduce_precision rem round rsqrt
    select_n shift_left shift_right_logical sign sin sqrt square stop_gradient sub tan tanh xor
    """.split()
)
"""Work on each element alone, whatever the shape."""

Joins = Mapping[str, Callable[[Any, Any], Any]]
"""Reductions, and what joins those of some rows with those of others."""

JOINS: Joins = {
    "reduce_sum": jnp.add,
    "reduce_max": jnp.maximum,
    "reduce_min": jnp.minimum,
    "reduce_and": jnp.bitwise_and,
    "reduce_or": jnp.bitwise_or,
}
"""Those of programs that are not differentiated any more."""

JOINS_WITH_DERIVATIVES: Joins = {
    name: join for name, join in JOINS.items() if name not in ("reduce_max", "reduce_min")
}
"""Those of losses: an extremum shares its gradient equally among all elements that have it, where a
chain of extrema of two would halve it at each."""


class RowFunction(NamedTuple):
    """What a step does to one row.

    Args:
        of_row: from a row of each operand that has rows, and the other operands, to a row.
        join: of two results one, where rows are reduced over; None where there is one for each row.
    """

    of_row: Callable[..., list[Any]]
    join: Callable[[Any, Any], Any] | None = None


def row_function(
    step: Step,
    avals: Sequence[jax.ShapeDtypeStruct],
    in_rows: Mapping[int, int],
    joins: Joins = JOINS,
) -> RowFunction | None:
    """What a step does to one row of values that come in rows.

    Args:
        step: the step.
        avals: shapes of the values.
        in_rows: the values that come in rows, and how many.
        joins: the reductions over rows that are done for some rows first.

    Returns:
        The function; None where the step mixes rows, or reads none.
    """
    equation = step.equation
    counts = {in_rows[value] for value in step.values() if value in in_rows}
    if len(counts) != 1 or len(step.outputs) != 1:
        return None
    (count,) = counts
    made, name = avals[step.outputs[0]].shape, step.name
    keeps = bool(made) and made[0] == count
    if name in ELEMENTWISE:
        same = all(_goes_with(shape_of(operand, avals), made) for operand in step.inputs)
        # A selection between the branches of a conditional is no equation.
        of_row = step.evaluate if equation is None else functools.partial(_bound, equation, {})
        return RowFunction(of_row) if keeps and same else None
    if equation is None:
        return None
    params = equation.params
    if name in JOINS:
        over_rows = 0 in params["axes"]
        if over_rows and name not in joins:
            return None
        axes = tuple(axis - 1 for axis in params["axes"] if axis)
        of_row = functools.partial(_bound, equation, {"axes": axes}) if axes else _as_it_is
        return RowFunction(of_row, joins[name] if over_rows else None)
    changed = _changed(name, params, made) if keeps else None
    return None if changed is None else RowFunction(functools.partial(_bound, equation, changed))


def _goes_with(shape: Sequence[int], made: Sequence[int]) -> bool:
    """Whether an operand has an element for each that is made, or repeats one along dimensions."""
    if len(shape) not in (0, len(made)):
        return False
    return all(a in (1, b) for a, b in zip(shape, made, strict=False))


def _changed(name: str, params: Mapping[str, Any], made: Sequence[int]) -> dict[str, Any] | None:
    """The parameters of a step in another form for one row; None where it mixes rows."""
    if name == "random_bits":
        return {}  # Each key draws for itself.
    if name == "broadcast_in_dim" and params["broadcast_dimensions"][:1] == (0,):
        dimensions = tuple(d - 1 for d in params["broadcast_dimensions"][1:])
        return {"shape": tuple(made[1:]), "broadcast_dimensions": dimensions}
    if name == "reshape" and params["dimensions"] is None:
        return {"new_sizes": tuple(made[1:])}
    if name == "squeeze" and 0 not in params["dimensions"]:
        return {"dimensions": tuple(d - 1 for d in params["dimensions"])}
    if name == "transpose" and params["permutation"][0] == 0:
        return {"permutation": tuple(d - 1 for d in params["permutation"][1:])}
    return None


def _bound(equation: _compat.JaxprEqn, changed: Mapping[str, Any], *operands: Any) -> list[Any]:
    params = {**equation.params, **changed}
    if "sharding" in params:
        params["sharding"] = None
    return _compat.bind_with(equation, params, operands)


def _as_it_is(array: Any) -> list[Any]:
    return [array]


def shape_of(operand: Operand, avals: Sequence[jax.ShapeDtypeStruct]) -> tuple[int, ...]:
    """The shape of an operand."""
    if isinstance(operand, Constant):
        return jnp.shape(operand.value)
    return tuple(avals[operand].shape)


def picked_rows(
    step: Step, avals: Sequence[jax.ShapeDtypeStruct], in_rows: Mapping[int, int]
) -> slice | None:
    """Which rows of its operand a step gives as they are; None where it does something else."""
    if step.name != "slice" or step.equation is None or step.inputs[0] not in in_rows:
        return None
    params, shape = step.equation.params, avals[step.outputs[0]].shape
    (first, *_), (end, *_) = params["start_indices"], params["limit_indices"]
    if params["strides"] is not None or shape[1:] != shape_of(step.inputs[0], avals)[1:]:
        return None
    return slice(first, end)


class StepsByRows:
    """Steps, some of whose values come in rows.

    Args:
        flat: where the steps are from; values that do not come in rows keep their numbers.
        joins: the reductions over rows that are done for some rows first.
    """

    def __init__(self, flat: FlatJaxpr, joins: Joins = JOINS):
        self.joins = joins
        self.values = Values(flat.avals)
        self.steps: list[Step] = []
        self.counts: dict[int, int] = {}
        self._rows: dict[int, tuple[Operand, ...]] = {}
        self._stacked: dict[int, Operand] = {}
        self._repeated: dict[int, tuple[Operand, tuple[int, ...]]] = {}
        self._same: dict[int, Operand] = {}

    def give(self, value: int) -> tuple[int, ...]:
        """Have an input in rows.

        Args:
            value: its number.

        Returns:
            The numbers of its rows.
        """
        shape = self.values.avals[value]
        rows = tuple(self.values.new(shape.shape[1:], shape.dtype) for _ in range(shape.shape[0]))
        self.set_rows(value, rows)
        return rows

    def set_rows(self, value: int, rows: Sequence[Operand]) -> None:
        """Have a value in rows."""
        self._rows[value], self.counts[value] = tuple(rows), len(rows)

    def set_same(self, value: int, operand: Operand) -> None:
        """Have a value as another one, or a constant."""
        self._same[value] = operand

    def add(self, step: Step) -> None:
        """Add a step: by rows where it can be computed so."""
        found = row_function(step, self.values.avals, self.counts, self.joins)
        if found is not None:
            self._add_by_rows(step, found)
            return
        picked = picked_rows(step, self.values.avals, self.counts)
        if picked is not None and isinstance(step.inputs[0], int):
            self._pick(step, self._rows[step.inputs[0]][picked])
            return
        if step.name == "squeeze" and self._is_one_row(step):
            self.set_same(step.outputs[0], self.rows(step.inputs[0], 1)[0])
            return
        inputs = tuple(self.whole(operand) for operand in step.inputs)
        self.steps.append(step if inputs == step.inputs else replace(step, inputs=inputs))
        if step.name == "broadcast_in_dim" and step.equation is not None:
            dimensions = tuple(step.equation.params["broadcast_dimensions"])
            if 0 not in dimensions:
                self._repeated[step.outputs[0]] = inputs[0], tuple(d - 1 for d in dimensions)

    def _pick(self, step: Step, rows: Sequence[Operand]) -> None:
        """Have a step's output in rows; without any it is a value that needs no rows."""
        (output,) = step.outputs
        if rows:
            self.set_rows(output, rows)
            return
        empty = self.values.avals[output]
        self.set_same(output, self.computed(lambda: [jnp.zeros(empty.shape, empty.dtype)], [])[0])

    def _is_one_row(self, step: Step) -> bool:
        """Whether a step takes the only row out of a value that comes in rows."""
        assert step.equation is not None, "it is an equation"
        one = isinstance(step.inputs[0], int) and self.counts.get(step.inputs[0]) == 1
        return one and step.equation.params["dimensions"] == (0,)

    def _add_by_rows(self, step: Step, found: RowFunction) -> None:
        (output,) = step.outputs
        (count,) = {self.counts[value] for value in step.values() if value in self.counts}
        has_rows = [shape_of(operand, self.values.avals) != () for operand in step.inputs]
        of_each = [
            self.rows(operand, count) if has else (self.whole(operand),) * count
            for operand, has in zip(step.inputs, has_rows, strict=True)
        ]
        made = self._for_each(found.of_row, list(zip(*of_each, strict=True)), has_rows)
        if found.join is None:
            self.set_rows(output, made)
            return
        join = found.join
        joined = functools.reduce(
            lambda a, b: self.computed(lambda a, b: [join(a, b)], [a, b])[0], made
        )
        self.set_same(output, joined)

    def rows(self, operand: Operand, count: int) -> tuple[Operand, ...]:
        """The rows of an operand, which are so many."""
        operand = self._known(operand)
        if isinstance(operand, Constant):
            repeats = jnp.shape(operand.value)[0] == 1
            return tuple(Constant(operand.value[0 if repeats else row]) for row in range(count))
        assert isinstance(operand, int), "nothing is sliced before a program is cut"
        if operand not in self._rows:
            self._stacked[operand] = operand
            self._rows[operand] = tuple(self._rows_of_whole(operand, count))
        return self._rows[operand]

    def _rows_of_whole(self, value: int, count: int) -> list[Operand]:
        shape = self.values.avals[value].shape
        if value in self._repeated:
            source, dimensions = self._repeated[value]
            return (
                self.computed(
                    lambda x: [jax.lax.broadcast_in_dim(x, shape[1:], dimensions)], [source]
                )
                * count
            )
        if shape[0] == 1:
            return self.computed(lambda x: [jax.lax.squeeze(x, (0,))], [value]) * count
        return [
            each
            for row in range(count)
            for each in self.computed(
                lambda x, row=row: [jax.lax.index_in_dim(x, row, keepdims=False)], [value]
            )
        ]

    def whole(self, operand: Operand) -> Operand:
        """An operand in one: where it comes in rows, these stacked."""
        operand = self._known(operand)
        if not isinstance(operand, int) or operand not in self._rows:
            return operand
        if operand not in self._stacked:
            rows = self._rows[operand]
            (self._stacked[operand],) = self.computed(lambda *rows: [jnp.stack(rows)], rows)
        return self._stacked[operand]

    def _known(self, operand: Operand) -> Operand:
        return self._same.get(operand, operand) if isinstance(operand, int) else operand

    def computed(
        self, function: Callable[..., list[Any]], operands: Sequence[Operand]
    ) -> list[Operand]:
        """What a function makes of operands, by steps of its own."""
        shapes = [
            self.values.avals[o] if isinstance(o, int) else jax.typeof(_value(o)) for o in operands
        ]
        return self._opened(flatten_jaxpr(jax.make_jaxpr(function)(*shapes)), operands)

    def _opened(self, flat: FlatJaxpr, operands: Sequence[Operand]) -> list[Operand]:
        """The steps of a function of operands; what they make."""
        steps = renumbered(flat, operands, self.values)
        self.steps += steps.steps
        return list(steps.outputs)

    def _for_each(
        self,
        function: Callable[..., list[Any]],
        operands: Sequence[Sequence[Operand]],
        has_rows: Sequence[bool],
    ) -> list[Operand]:
        """What a function makes of each of several sets of operands, traced once.

        What has no rows and is known is told the function as it is, as it may be of any dtype.
        """
        told = [has or isinstance(o, int) for o, has in zip(operands[0], has_rows, strict=True)]

        def of_told(*arrays: Any) -> list[Any]:
            given = iter(arrays)
            pairs = zip(operands[0], told, strict=True)
            return function(*(next(given) if is_told else _value(o) for o, is_told in pairs))

        first = list(itertools.compress(operands[0], told))
        shapes = [
            self.values.avals[o] if isinstance(o, int) else jax.typeof(_value(o)) for o in first
        ]
        flat = flatten_jaxpr(jax.make_jaxpr(of_told)(*shapes))
        return [
            made
            for each in operands
            for made in self._opened(flat, list(itertools.compress(each, told)))
        ]


def _value(operand: Operand) -> Any:
    assert isinstance(operand, Constant), "an operand is a value or a constant"
    return operand.value
