"""Opening equations, where submeshes must exchange something inside them.

A move cannot stand in a body. Where one is needed there, a scan becomes its iterations one after
the other, and of a conditional every branch is computed and the results are selected. An extremum
over a long dimension becomes those of its parts, which can be divided, and that of these few: so
the loss of a language model is computed where its logits are, divided by the vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hetjax import _compat
from hetjax.errors import InputError
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.deduction.annotated_program import AnnotatedProgram
from hetjax.sharding.deduction.deduce import deduce
from hetjax.sharding.deduction.signature import dtypes_of, shapes_of

EXTREMA = ("reduce_max", "reduce_min")

CAN_BE_OPENED = ("scan", "cond", *EXTREMA)

LONG = 1024
"""An extremum over fewer elements is not taken by parts: less would be saved than it costs."""

FEWEST_PARTS, MOST_PARTS = 16, 128
"""Into how many parts a long dimension may be cut: members share whole ones."""

MESSAGE_BYTES = 1 << 12
"""What a message costs beside its bytes: far less than a link carries within its latency.

Fewer messages mean that more is gathered, and then all members compute what follows: that is not
counted.
"""


def deduce_opened(
    program: _compat.ClosedJaxpr, annotations: Sequence[HSharding]
) -> AnnotatedProgram:
    """Deduce a program, with bodies opened where operands would have to be moved for them.

    Args:
        program: what `jax.make_jaxpr` gives.
        annotations: how each input lies.

    Returns:
        The annotated program, mended; of the two forms the one whose mends move less.

    Raises:
        InputError: a value cannot be taken as it lies, in neither form.
    """
    # Where nothing but norms and counts is missing there is nothing to search for.
    with contextlib.suppress(InputError):
        return deduce(program, annotations, mend_scalars=True, sums_stay=True)
    try:
        found = _mended(program, annotations)
        names = {mend.equation for mend in found.mends}
    except InputError:
        found, names = None, set(CAN_BE_OPENED)
    names &= set(CAN_BE_OPENED)
    if found is not None and not names:
        return found
    try:
        opened = _mended(opened_program(program, names), annotations)
    except InputError:
        if found is None:
            raise
        return found
    if found is None or _bytes_moved(opened) < _bytes_moved(found):
        return opened
    return found


def _mended(program: _compat.ClosedJaxpr, annotations: Sequence[HSharding]) -> AnnotatedProgram:
    return deduce(program, annotations, mend=True, sums_stay=True, message_bytes=MESSAGE_BYTES)


def _bytes_moved(program: AnnotatedProgram) -> int:
    return sum(mend.num_bytes for mend in program.mends)


def opened_program(program: _compat.ClosedJaxpr, names: Collection[str]) -> _compat.ClosedJaxpr:
    """A program without some kinds of bodies.

    Args:
        program: what `jax.make_jaxpr` gives.
        names: of `CAN_BE_OPENED` those that are opened.

    Returns:
        The program that computes the same.

    Example:
        >>> closed = jax.make_jaxpr(lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x))(1.0)
        >>> [each.primitive.name for each in opened_program(closed, ("cond",)).jaxpr.eqns]
        ['gt', 'convert_element_type', 'cos', 'sin', 'convert_element_type', 'select_n']
    """
    return jax.make_jaxpr(lambda *arrays: _evaluate(program, arrays, names))(*program.in_avals)


def _evaluate(
    program: _compat.ClosedJaxpr, arrays: Sequence[Any], names: Collection[str]
) -> list[Any]:
    known: dict[Any, Any] = dict(zip(program.jaxpr.invars, arrays, strict=True))
    known.update(zip(program.jaxpr.constvars, program.consts, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, _compat.Literal) else known[atom]

    for equation in program.jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        inner, name = _compat.inlined_jaxpr(equation), equation.primitive.name
        if inner is not None:
            results = _evaluate(inner, operands, names)
        elif name == "cond" and name in names:
            results = _selected(equation, operands, names)
        elif name == "scan" and name in names:
            results = _unrolled(equation, operands, names)
        elif name in EXTREMA and name in names:
            results = [_by_parts(equation, *operands)]
        else:
            results = _compat.bind(equation, operands)
        known.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in program.jaxpr.outvars]


def _selected(
    equation: _compat.JaxprEqn, operands: Sequence[Any], names: Collection[str]
) -> list[Any]:
    index, *rest = operands
    cases = [_evaluate(branch, rest, names) for branch in equation.params["branches"]]
    if len(cases) == 2:
        index = index.astype(bool)
    return [jax.lax.select_n(index, *each) for each in zip(*cases, strict=True)]


def _by_parts(equation: _compat.JaxprEqn, array: Any) -> Any:
    """An extremum, of its parts first along the first long dimension that can be cut so."""
    axes, name = equation.params["axes"], equation.primitive.name
    extremum = jax.lax.reduce_max if name == "reduce_max" else jax.lax.reduce_min
    for axis in axes:
        size = array.shape[axis]
        if size >= LONG and (parts := _parts(size)):
            shape = (*array.shape[:axis], parts, size // parts, *array.shape[axis + 1 :])
            return extremum(extremum(array.reshape(shape), (axis + 1,)), axes)
    return extremum(array, axes)


def _parts(size: int) -> int:
    """How many equal parts a long dimension is cut into; 0 where it cannot be."""
    found = (count for count in range(MOST_PARTS, FEWEST_PARTS - 1, -1) if size % count == 0)
    return next(found, 0)


def _unrolled(
    equation: _compat.JaxprEqn, operands: Sequence[Any], names: Collection[str]
) -> list[Any]:
    params = equation.params
    num_consts, num_carry = _compat.scan_sizes(params)
    consts, carry = list(operands[:num_consts]), list(operands[num_consts:][:num_carry])
    stacked = operands[num_consts + num_carry :]
    order = range(params["length"])
    made: dict[int, list[Any]] = {}
    for turn in reversed(order) if params["reverse"] else order:
        rows = [jax.lax.index_in_dim(array, turn, keepdims=False) for array in stacked]
        results = _evaluate(params["jaxpr"], [*consts, *carry, *rows], names)
        carry, made[turn] = results[:num_carry], results[num_carry:]
    if not order:
        stacks = equation.outvars[num_carry:]
        pairs = zip(shapes_of(stacks), dtypes_of(stacks), strict=True)
        return [*carry, *(jnp.zeros(shape, dtype) for shape, dtype in pairs)]
    columns = zip(*(made[turn] for turn in order), strict=True)
    return [*carry, *(jnp.stack(each) for each in columns)]
