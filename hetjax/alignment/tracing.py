"""Tracing a loss to operators: each with its pass, its line, and what it derives from.

A loss function and its gradients are traced once. Calls are inlined (`jit`, `jax.checkpoint`,
functions with derivative rules of their own), and the bodies of `scan`, `while_loop` and `cond` are
gone into, so that what is compared is single operators. An equation that holds a program and is
none of these, such as a Pallas kernel, is one operator that is not looked into.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jaxtyping import PyTree

from hetjax import _compat
from hetjax.alignment.operators import (
    PRODUCTS,
    ControlFlow,
    Operator,
    OperatorBlock,
    OperatorProgram,
    shape_text,
)
from hetjax.pipeline.program.loss import (
    abstract,
    check_examples,
    from_host,
    host_shape,
    parameter_shapes,
    path_names,
    sums,
)
from hetjax.pipeline.program.traced_program import Operand, Step, flatten_jaxpr, operand_value

_CONTROL = ("scan", "while", "cond")


def trace_operators(
    loss_function: Callable[..., Any], parameters: PyTree, batch: PyTree
) -> OperatorProgram:
    """Trace a loss function's forward and backward pass to operators.

    Args:
        loss_function: ``loss_function(parameters, batch)``, which returns a scalar, or a pair of
            scalars (total, count) whose quotient is the loss.
        parameters: pytree of arrays or shapes, all of floating dtype.
        batch: pytree of arrays or shapes; the first axis of each leaf is that of the examples.

    Returns:
        The program.

    Raises:
        InputError: a parameter is not floating, a batch leaf has no example axis, or the loss is
            not a floating scalar.

    Example:
        >>> import jax.numpy as jnp
        >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
        >>> program = trace_operators(loss, jnp.ones((4, 2)), jnp.ones((8, 4)))
        >>> [each.name for each in program.operators if each.name == "dot_general"]
        ['dot_general', 'dot_general']
        >>> [each.direction for each in program.operators][0]
        'forward'
    """
    shapes, batch = parameter_shapes(parameters), abstract(batch)
    check_examples(batch)
    leaves, tree = jax.tree.flatten(shapes)
    batch_leaves, batch_tree = jax.tree.flatten(batch)

    def loss(values: Sequence[Any], batch_values: Sequence[Any]) -> Any:
        examples = map(from_host, batch_values, batch_leaves)
        result = loss_function(
            jax.tree.unflatten(tree, values), jax.tree.unflatten(batch_tree, examples)
        )
        total, count, *_ = sums(result, batch_leaves[0].shape[0], has_aux=None)
        return total / count

    host_leaves = [host_shape(leaf) for leaf in batch_leaves]
    closed = jax.make_jaxpr(jax.value_and_grad(loss))(leaves, host_leaves)
    builder = _OperatorBuilder()
    block = builder.block(closed, (), is_backward=False, calls=())
    names = path_names(shapes)
    operators = _with_primals(builder.operators, builder.places)
    operators = _with_nearest(operators, block, names)
    described = {n: shape_text(leaf) for n, leaf in zip(names, leaves, strict=True)}
    return OperatorProgram(_replaced(block, operators), tuple(operators), described)


class _OperatorBuilder:
    """Numbers operators, and notes for each the lines that led to it."""

    def __init__(self) -> None:
        self.operators: list[Operator] = []
        self.places: list[tuple[str, ...]] = []

    def block(
        self,
        closed: _compat.ClosedJaxpr,
        loops: tuple[str, ...],
        *,
        is_backward: bool,
        calls: tuple[_compat.JaxprEqn, ...],
    ) -> OperatorBlock:
        flat = flatten_jaxpr(closed, called=_opened)
        entries = tuple(self._entry(step, loops, is_backward, calls) for step in flat.steps)
        return OperatorBlock(flat, entries)

    def _entry(
        self,
        step: Step,
        loops: tuple[str, ...],
        is_backward: bool,
        calls: tuple[_compat.JaxprEqn, ...],
    ) -> Operator | ControlFlow:
        equation = step.equation
        assert equation is not None, "nothing was concatenated"
        path = (*calls, *step.calls, equation)
        # In a body the names of the passes begin anew: whoever calls it knows.
        is_backward = is_backward or any(map(_compat.is_transposed, path))
        if step.name in _CONTROL:
            inside = (*loops, step.name)
            blocks = tuple(
                self.block(each, inside, is_backward=is_backward, calls=path)
                for each in _bodies(equation)
            )
            return ControlFlow(equation, blocks)
        # Inside of attention it is the user's line that tells which.
        own = [i for i, each in enumerate(path) if _compat.is_compiled(each)]
        lines = _lines(path[: own[0] + 1] if own else path)
        made = Operator(len(self.operators), equation, is_backward, lines[0], loops=loops)
        self.operators.append(made)
        self.places.append(lines)
        return made


def _opened(equation: _compat.JaxprEqn) -> _compat.ClosedJaxpr | None:
    """What is looked into in the place of an equation: calls, and equations of hetjax's own."""
    return _compat.inlined_jaxpr(equation) or _compat.compiled_jaxpr(equation)


def _bodies(equation: _compat.JaxprEqn) -> tuple[_compat.ClosedJaxpr, ...]:
    params = equation.params
    if equation.primitive.name == "scan":
        return (params["jaxpr"],)
    if equation.primitive.name == "while":
        return params["cond_jaxpr"], params["body_jaxpr"]
    return tuple(params["branches"])


def _lines(path: Sequence[_compat.JaxprEqn]) -> tuple[str, ...]:
    """The lines of the innermost call that has some; what a library's function holds has none."""
    return next(filter(None, map(_compat.source_lines, reversed(path))), ("an unknown line",))


def _with_primals(
    operators: Sequence[Operator], places: Sequence[tuple[str, ...]]
) -> list[Operator]:
    """Backward operators with those of the forward pass that they derive from.

    They come from the same line by the same way. What runs more than once, such as a block that a
    loop of Python's makes, goes backward in the reverse order.
    """
    forward: dict[Any, list[Operator]] = defaultdict(list)
    backward: dict[Any, list[Operator]] = defaultdict(list)
    for operator, place in zip(operators, places, strict=True):
        (backward if operator.is_backward else forward)[place].append(operator)
    found = list(operators)
    for place, derived in backward.items():
        runs = _runs(forward[place])
        if not runs:
            continue
        # What comes last, of the first run, may have fewer: what it takes needs no gradient.
        size = -(-len(derived) // len(runs))
        for position, operator in enumerate(derived):
            run = runs[-1 - position // size]
            named = [each.number for each in run if each.name == operator.name]
            is_told = len(named) == 1 or (named and operator.name in PRODUCTS)
            primal = named if is_told else [each.number for each in run]
            found[operator.number] = replace(operator, primal=tuple(primal))
    return found


def _runs(operators: Sequence[Operator]) -> list[list[Operator]]:
    """Operators of one line, by how often it ran: a run begins with what the first began with."""
    if not operators:
        return []
    names = [each.name for each in operators]
    size = next(
        size
        for size in range(1, len(operators) + 1)
        if len(operators) % size == 0
        and names == names[:size] * (len(operators) // size)
        and not (size == 1 and len(operators) > 1 and _follow(operators))
    )
    return [list(operators[i : i + size]) for i in range(0, len(operators), size)]


def _follow(operators: Sequence[Operator]) -> bool:
    """Whether operators stand one after another, as those of one expression do."""
    return operators[-1].number - operators[0].number == len(operators) - 1


def _with_nearest(
    operators: Sequence[Operator], block: OperatorBlock, names: Sequence[str]
) -> list[Operator]:
    """Operators with the parameter that is nearest to each."""
    found = list(operators)
    # A value's age is the number of the operator that made it; a parameter is newest of all.
    newest = float(len(operators))
    inputs = [(newest, name) for name in names]
    inputs += [(-1.0, "")] * (len(block.flat.inputs) - len(names))

    def go(block: OperatorBlock, inputs: Sequence[tuple[float, str]]) -> tuple[float, str]:
        known = dict(zip(block.flat.inputs, inputs, strict=True))
        last = (-1.0, "")
        for step, entry in zip(block.flat.steps, block.entries, strict=True):
            operands = [_known(known, operand) for operand in step.inputs]
            newest = max(operands, default=last)
            if isinstance(entry, Operator):
                primals = found[entry.number].primal
                primal = found[primals[0]].near if primals else ""
                last = (float(entry.number), primal or newest[1])
                found[entry.number] = replace(found[entry.number], near=last[1])
            else:
                for inner in entry.blocks:
                    count = len(inner.flat.inputs)
                    same = entry.name == "scan"
                    last = max(last, go(inner, operands if same else [newest] * count))
            known.update((value, last) for value in step.outputs)
        return last

    go(block, inputs)
    return found


def _known(known: Mapping[int, tuple[float, str]], operand: Operand) -> tuple[float, str]:
    value = operand_value(operand)
    return (-1.0, "") if value is None else known[value]


def _replaced(block: OperatorBlock, operators: Sequence[Operator]) -> OperatorBlock:
    """A block with the operators that bear its operators' numbers."""
    entries = tuple(
        operators[each.number]
        if isinstance(each, Operator)
        else replace(each, blocks=tuple(_replaced(inner, operators) for inner in each.blocks))
        for each in block.entries
    )
    return replace(block, entries=entries)
