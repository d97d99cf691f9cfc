"""Loops over parameters, opened: their iterations one after another, as if written so.

A model whose blocks are alike is often a ``scan`` over them, which stacks their parameters. What a
plan may do must not depend on that. So a loop that reads parameters row by row, and multiplies by
them, becomes the steps of its iterations, and each row a parameter of its own. Other loops (over
time, over pieces of the batch) stay one step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from hetjax import _compat
from hetjax.pipeline.program.costs import is_heavy
from hetjax.pipeline.program.row_steps import (
    JOINS_WITH_DERIVATIVES,
    StepsByRows,
    picked_rows,
    row_function,
)
from hetjax.pipeline.program.stacked_leaves import StackedLeaves, whole_leaves
from hetjax.pipeline.program.traced_program import (
    FlatJaxpr,
    Operand,
    Step,
    flatten_jaxpr,
    needed_steps,
)
from hetjax.pipeline.program.values import renumbered

_MOST_OPENED = 20_000
"""How many equations a loop may become; a longer one stays a step like any other."""


def with_open_loops(flat: FlatJaxpr, num_parameters: int) -> tuple[FlatJaxpr, StackedLeaves]:
    """Open the loops over parameters.

    Args:
        flat: a loss function.
        num_parameters: how many of its inputs, the first ones, are leaves of its parameters.

    Returns:
        The function of these leaves' rows, where a loop was opened that reads them; and which
        leaves these are.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def loss(w, x):
        ...     return jnp.sum(jax.lax.scan(lambda h, row: (h @ row, None), x, w)[0])
        >>> closed = jax.make_jaxpr(loss)(jnp.ones((3, 4, 4)), jnp.ones((2, 4)))
        >>> flat, leaves = with_open_loops(flatten_jaxpr(closed), 1)
        >>> [step.name for step in flat.steps], leaves.rows
        (['dot_general', 'dot_general', 'dot_general', 'reduce_sum'], (3,))
    """
    leaves = flat.inputs[:num_parameters]
    stacked = _stacked(flat, leaves)
    if not stacked:
        return flat, whole_leaves(num_parameters)
    made = StepsByRows(flat, JOINS_WITH_DERIVATIVES)
    inputs: list[int] = []
    for value in flat.inputs:
        inputs += made.give(value) if value in stacked else [value]
    for step in flat.steps:
        if _may_open(step) and any(value in made.counts for value in _over(step)):
            _open(step, made)
        else:
            made.add(step)
    outputs = tuple(made.whole(operand) for operand in flat.outputs)
    steps = needed_steps(made.steps, outputs)
    rows = tuple(flat.avals[v].shape[0] if v in stacked else None for v in leaves)
    return FlatJaxpr(tuple(made.values.avals), tuple(inputs), steps, outputs), StackedLeaves(rows)


def _may_open(step: Step) -> bool:
    """Whether a step is a loop that has products, and is not too long."""
    if step.name != "scan" or step.equation is None or not is_heavy(step):
        return False
    return step.iterations * len(step.equation.params["jaxpr"].eqns) <= _MOST_OPENED


def _over(step: Step) -> tuple[Operand, ...]:
    """What a loop goes over, row by row."""
    assert step.equation is not None, "a loop has an equation"
    params = step.equation.params
    return step.inputs[sum(_compat.scan_sizes(params)) :]


def _stacked(flat: FlatJaxpr, leaves: Collection[int]) -> set[int]:
    """The leaves that loops read row by row, as they are or in another form."""
    counts = {value: flat.avals[value].shape[0] for value in leaves if flat.avals[value].shape}
    forms: dict[int, set[int]] = {value: {value} for value in counts}
    found: set[int] = set()
    for step in flat.steps:
        if _may_open(step):
            found.update(*(forms.get(v, ()) for v in _over(step) if isinstance(v, int)))
            continue
        by_rows = row_function(step, flat.avals, counts, JOINS_WITH_DERIVATIVES)
        keeps = by_rows is not None and by_rows.join is None
        if keeps or picked_rows(step, flat.avals, counts) is not None:
            (output,) = step.outputs
            counts[output] = flat.avals[output].shape[0]
            forms[output] = set().union(*(forms.get(value, ()) for value in step.values()))
    return found


def _open(step: Step, made: StepsByRows) -> None:
    """Add the iterations of a loop one after another."""
    assert step.equation is not None, "a loop has an equation"
    params = step.equation.params
    num_consts, num_carry = _compat.scan_sizes(params)
    body = flatten_jaxpr(params["jaxpr"])
    constants, carry = (
        [made.whole(operand) for operand in operands]
        for operands in (step.inputs[:num_consts], step.inputs[num_consts : num_consts + num_carry])
    )
    over = [made.rows(operand, step.iterations) for operand in _over(step)]
    order = range(step.iterations)
    rows: dict[int, Sequence[Operand]] = {}
    for place in reversed(order) if params["reverse"] else order:
        inputs = (*constants, *carry, *(each[place] for each in over))
        iteration = renumbered(body, inputs, made.values)
        made.steps += [
            replace(each, calls=(*step.calls, step.equation, *each.calls))
            for each in iteration.steps
        ]
        carry, rows[place] = list(iteration.outputs[:num_carry]), iteration.outputs[num_carry:]
    for output, operand in zip(step.outputs, carry, strict=False):
        made.set_same(output, operand)
    stacked = zip(*(rows[place] for place in order), strict=True)
    for output, operands in zip(step.outputs[num_carry:], stacked, strict=True):
        made.set_rows(output, operands)
