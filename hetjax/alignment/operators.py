"""The operators of a loss's forward and backward pass: equations in order, each with its line.

A loss function and its gradients are traced once. Calls are inlined (`jit`, `jax.checkpoint`,
functions with derivative rules of their own), and the bodies of `scan`, `while_loop` and `cond` are
gone into, so that what is compared is single operators. An equation that holds a program and is
none of these, such as a Pallas kernel, is one operator that is not looked into.
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from hetjax import _compat
from hetjax.pipeline.program.loss import (
    abstract,
    check_examples,
    from_host,
    host_shape,
    parameter_shapes,
    path_names,
    sums,
)
from hetjax.pipeline.program.traced_program import (
    FlatJaxpr,
    Operand,
    Step,
    flatten_jaxpr,
    num_bytes,
    operand_value,
)

PRODUCTS = ("dot_general", "conv_general_dilated")
"""The primitives that multiply matrices."""

_CONTROL = ("scan", "while", "cond")
_SMALL = frozenset({"reduce", "reduce_window", "scatter", "scatter-add", "scatter_add", "sort"})
"""Operators whose program is that of two numbers, such as the sum of a scatter."""


@dataclass(frozen=True, eq=False)
class Operator:
    """One equation of a loss's forward or backward pass.

    Args:
        number: its place in the program, from 0; what stands in a loop counts once.
        equation: the jaxpr's equation.
        is_backward: whether it is of the backward pass.
        line: file and line of the user's program that it comes from.
        primal: of a backward operator, the operators of the forward pass that it derives from.
        near: the parameter that it reads, or that was read last on the way to it.
        loops: the loops and branches that it stands in, the outermost first.
    """

    number: int
    equation: _compat.JaxprEqn
    is_backward: bool
    line: str
    primal: tuple[int, ...] = ()
    near: str = ""
    loops: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.equation.primitive.name

    @property
    def direction(self) -> str:
        """``"forward"`` or ``"backward"``."""
        return "backward" if self.is_backward else "forward"

    @property
    def is_opaque(self) -> bool:
        """Whether it holds a program that is not looked into."""
        return self.name not in _SMALL and bool(_compat.inner_jaxprs(self.equation))

    @functools.cached_property
    def taken(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of each operand."""
        return shapes_of(self.equation.invars)

    @functools.cached_property
    def given(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of each result."""
        return shapes_of(self.equation.outvars)

    @functools.cached_property
    def signature(self) -> str:
        """The primitive, the shapes and dtypes that it takes and gives."""
        taken = ", ".join(map(_shape_text, self.taken))
        return f"{self.name}({taken}) -> {', '.join(map(_shape_text, self.given))}"


@dataclass(frozen=True, eq=False)
class ControlFlow:
    """A loop or a branch, and the operators in it.

    Args:
        equation: the jaxpr's equation.
        blocks: a scan's body; a loop's condition and its body; each branch.
    """

    equation: _compat.JaxprEqn
    blocks: tuple[OperatorBlock, ...]

    @property
    def name(self) -> str:
        """The primitive's name: ``"scan"``, ``"while"`` or ``"cond"``."""
        return self.equation.primitive.name


@dataclass(frozen=True, eq=False)
class OperatorBlock:
    """Operators and control flow in order, on numbered values.

    Args:
        flat: the steps with their values.
        entries: what each step is.
    """

    flat: FlatJaxpr
    entries: tuple[Operator | ControlFlow, ...]

    @functools.cached_property
    def last_uses(self) -> tuple[tuple[int, ...], ...]:
        """For each step the values that nothing reads after it."""
        kept = {operand for operand in self.flat.outputs if isinstance(operand, int)}
        found: list[tuple[int, ...]] = []
        for step in reversed(self.flat.steps):
            dead = {value for value in (*step.values(), *step.outputs) if value not in kept}
            kept |= dead
            found.append(tuple(sorted(dead)))
        return tuple(reversed(found))


@dataclass(frozen=True, eq=False)
class OperatorProgram:
    """The forward and backward pass of a loss function.

    Its inputs are the parameters' leaves and the batch's, as hosts have them; its outputs are the
    loss and the gradient of each parameter.

    Args:
        block: the computation.
        operators: all operators, in the order of their numbers.
        parameters: shape and dtype of each parameter leaf, by its path.
    """

    block: OperatorBlock
    operators: tuple[Operator, ...]
    parameters: Mapping[str, str]

    @functools.cached_property
    def fingerprint(self) -> str:
        """What tells this model, at this batch size, from another."""
        digest = hashlib.sha256()
        for name, shape in self.parameters.items():
            digest.update(f"{name}:{shape};".encode())
        for operator in self.operators:
            digest.update(f"{operator.signature};".encode())
        return digest.hexdigest()[:16]

    @functools.cached_property
    def product_dtypes(self) -> Mapping[str, str]:
        """The dtypes that products multiply in, and an operator that has each."""
        found: dict[str, str] = {}
        for operator in self.operators:
            if operator.name in PRODUCTS:
                for shape in operator.taken[:2]:
                    found.setdefault(np.dtype(shape.dtype).name, f"operator {operator.number}")
        return found

    @property
    def opaque(self) -> tuple[Operator, ...]:
        """The operators that are not looked into."""
        return tuple(each for each in self.operators if each.is_opaque)


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
        total, count, *_ = sums(result, batch_leaves[0].shape[0], has_aux=False)
        return total / count

    host_leaves = [host_shape(leaf) for leaf in batch_leaves]
    closed = jax.make_jaxpr(jax.value_and_grad(loss))(leaves, host_leaves)
    builder = _OperatorBuilder()
    block = builder.block(closed, (), is_backward=False, calls=())
    names = path_names(shapes)
    operators = _with_primals(builder.operators, builder.places)
    operators = _with_nearest(operators, block, names)
    described = {n: _shape_text(leaf) for n, leaf in zip(names, leaves, strict=True)}
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
        flat = flatten_jaxpr(closed, called=_compat.inlined_jaxpr)
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
        lines = _lines(path)
        made = Operator(len(self.operators), equation, is_backward, lines[0], loops=loops)
        self.operators.append(made)
        self.places.append(lines)
        return made


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
        for position, operator in enumerate(derived):
            if runs:
                run = runs[len(runs) - 1 - position * len(runs) // len(derived)]
                named = [each.number for each in run if each.name == operator.name]
                primal = named if len(named) == 1 else [each.number for each in run]
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


def shapes_of(atoms: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shape and dtype of each variable or constant of an equation."""
    return tuple(jax.ShapeDtypeStruct(each.aval.shape, each.aval.dtype) for each in atoms)


def _shape_text(shape: jax.ShapeDtypeStruct) -> str:
    return f"{shape.dtype}[{','.join(map(str, shape.shape))}]"


def occurrences(block: OperatorBlock, times: int = 1) -> Iterator[tuple[Operator, int]]:
    """How often each operator runs; what a `while_loop` has counts once, and all branches do."""
    for entry in block.entries:
        if isinstance(entry, Operator):
            yield entry, times
        else:
            count = entry.equation.params["length"] if entry.name == "scan" else 1
            for inner in entry.blocks:
                yield from occurrences(inner, times * count)


def output_bytes(operator: Operator) -> int:
    """The bytes of what an operator makes, once."""
    return sum(map(num_bytes, operator.given))


def operand_bytes(operator: Operator) -> int:
    """The bytes of what an operator takes, once."""
    return sum(map(num_bytes, operator.taken))
