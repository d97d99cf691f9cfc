"""The traced program: a loss function as a flat list of steps that can be cut anywhere.

A loss function is traced once to a jaxpr. Calls are inlined and loops over parameters opened, so
that a cut may fall between any two equations, inside a Transformer block too, however its author
repeats it.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hetjax import _compat
from hetjax.pipeline.program.frozen_leaves import NONE_FROZEN, FrozenLeaves
from hetjax.pipeline.program.loss import (
    accumulator_dtype,
)
from hetjax.pipeline.program.stacked_leaves import StackedLeaves
from hetjax.pipeline.program.token_dimensions import NO_TOKENS, TokenDimensions
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.deduction.clamped_starts import with_clamped_starts


@dataclass(frozen=True, eq=False)
class Constant:
    """An operand whose value was known when the program was traced."""

    value: Any


Operand = int | Constant
"""A value's number, or a constant."""


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a program: an equation on numbered values.

    Args:
        name: the primitive's name.
        inputs: the operands.
        outputs: the numbers of the values that it makes.
        evaluate: from one array for each input to one for each output.
        equation: the jaxpr equation behind it, if it is one.
        calls: the equations whose calls were inlined to get to it, the outermost first.
        beside: what `evaluate` does beside its equation, as a value to compare; it tells apart
            steps of equal equations.
    """

    name: str
    inputs: tuple[Operand, ...]
    outputs: tuple[int, ...]
    evaluate: Callable[..., list[Any]]
    equation: _compat.JaxprEqn | None
    calls: tuple[_compat.JaxprEqn, ...] = ()
    beside: Hashable = ()

    def values(self) -> tuple[int, ...]:
        """The numbers of the values that it reads."""
        return self._values

    @property
    def iterations(self) -> int:
        """How many turns of a loop it takes: a scan's length, 1 for all else."""
        if self.name != "scan" or self.equation is None:
            return 1
        return self.equation.params["length"]

    @functools.cached_property
    def _values(self) -> tuple[int, ...]:
        values = map(operand_value, self.inputs)
        return tuple(value for value in values if value is not None)


@dataclass(frozen=True, eq=False)
class Program:
    """A traced loss function.

    Args:
        avals: shape and dtype of each value, by its number.
        parameters: the numbers of the parameters: leaves of their pytree in its order, each row of
            those that `leaves` says.
        parameter_names: their paths, e.g. ``"blocks/0/attention/query"``, or
            ``"blocks/attention/query[0]"`` for a row.
        batch: the numbers of the batch leaves, whose first axis is that of the examples.
        batch_names: their paths.
        steps: the computation, in order.
        total: the operand that holds the summed loss.
        count: the operand that holds what the summed loss is divided by.
        aux: where the loss has figures beside it, the count again, and each figure times the count.
        aux_tree: the structure of these figures; None where there are none.
        leaves: which leaves of the parameters' pytree count as a parameter for each of their rows.
        model: fingerprint of the loss as it was written, whose training state is saved under it.
        frozen: the parameters of which a training step leaves something out.
        tokens: where tokens are in the order in which members share them.
        unmatched: softmaxes between products that may be attention and are not in one equation, as
            a sentence with their lines and the reasons; empty for none.
    """

    avals: tuple[jax.ShapeDtypeStruct, ...]
    parameters: tuple[int, ...]
    parameter_names: tuple[str, ...]
    batch: tuple[int, ...]
    batch_names: tuple[str, ...]
    steps: tuple[Step, ...]
    total: Operand
    count: Operand
    leaves: StackedLeaves
    model: str
    aux: tuple[Operand, ...] = ()
    aux_tree: Any = None
    frozen: FrozenLeaves = NONE_FROZEN
    tokens: TokenDimensions = NO_TOKENS
    unmatched: str = ""

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """The operands that hold what the last stage computes: total, count, figures."""
        return self.total, self.count, *self.aux

    @functools.cached_property
    def loss_dtype(self) -> np.dtype:
        """The dtype in which losses and counts of microbatches are summed."""
        value = operand_value(self.total)
        if value is not None:
            return accumulator_dtype(self.avals[value].dtype)
        assert isinstance(self.total, Constant), "a loss is a value or a constant"
        return accumulator_dtype(jnp.result_type(self.total.value))

    @property
    def num_examples(self) -> int:
        """For how many examples it was traced."""
        return self.avals[self.batch[0]].shape[0]

    @property
    def num_positions(self) -> int:
        """How many places there are: one a step."""
        return len(self.steps)

    @functools.cached_property
    def fingerprint(self) -> str:
        """What tells this program from another: its parameters and its sequence of primitives.

        It tells no shapes of the batch, so a plan may change the size of its microbatches; unless
        JAX traces other primitives for it, as for microbatches of one example. Nor does it tell
        which values primitives read, or along which axes.
        """
        shapes = [self.avals[value] for value in self.parameters]
        return fingerprint_of(self.parameter_names, shapes, self.steps)


def fingerprint_of(
    names: Sequence[str], shapes: Sequence[jax.ShapeDtypeStruct], steps: Sequence[Step]
) -> str:
    """What tells a function of parameters from another one.

    Args:
        names: the paths of its parameters.
        shapes: their shapes.
        steps: what it computes.
    """
    digest = hashlib.sha256()
    for name, aval in zip(names, shapes, strict=True):
        digest.update(f"{name}:{aval.dtype}{list(aval.shape)};".encode())
    for step in steps:
        digest.update(f"{step.name}*{step.iterations};".encode())
    return digest.hexdigest()[:16]


def with_examples(batch: PyTree, num_examples: int) -> PyTree:
    """Shapes of a batch of another number of examples.

    Args:
        batch: pytree of arrays or shapes, whose first dimension is that of examples.
        num_examples: how many there shall be.

    Returns:
        The shapes, as a pytree of the same structure.

    Example:
        >>> with_examples({"x": jax.ShapeDtypeStruct((8, 3), "float32")}, 2)["x"].shape
        (2, 3)
    """
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((num_examples, *leaf.shape[1:]), leaf.dtype), batch
    )


@dataclass(frozen=True, eq=False)
class FlatJaxpr:
    """A jaxpr with its calls inlined and its variables numbered.

    Args:
        avals: shape and dtype of each value, by its number.
        inputs: the values that it takes.
        steps: the computation, in order.
        outputs: the operands that it gives.
        annotations: how each value lies, where that is known; None for one known everywhere.
    """

    avals: tuple[jax.ShapeDtypeStruct, ...]
    inputs: tuple[int, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Operand, ...]
    annotations: tuple[HSharding | None, ...] = ()


def flatten_jaxpr(
    closed: _compat.ClosedJaxpr,
    *,
    inline_conditionals: bool = False,
    called: Callable[[_compat.JaxprEqn], _compat.ClosedJaxpr | None] = _compat.called_jaxpr,
) -> FlatJaxpr:
    """Inline the calls of a closed jaxpr and number its values; steps without use are dropped.

    Args:
        closed: the jaxpr.
        inline_conditionals: compute every branch of a ``cond`` and select among the results, so
            that its branches too can be divided.
        called: the jaxpr that is put in the place of an equation; None for one that stays.

    Returns:
        The flat jaxpr.
    """
    builder = _Flattener(inline_conditionals, called)
    inputs = tuple(builder.number(variable) for variable in closed.jaxpr.invars)
    outputs = builder.add(closed, inputs)
    return FlatJaxpr(tuple(builder.avals), inputs, needed_steps(builder.steps, outputs), outputs)


def needed_steps(
    steps: Sequence[Step], outputs: Sequence[Operand], known: Sequence[int] = ()
) -> tuple[Step, ...]:
    """The steps that outputs need, in order.

    Args:
        steps: the steps to choose from.
        outputs: the operands that are wanted.
        known: values that are at hand, whose steps need not run.

    Returns:
        Those that have a part in an output.
    """
    at_hand = set(known)
    needed = {operand for operand in outputs if isinstance(operand, int)} - at_hand
    kept = []
    for step in reversed(steps):
        if needed.intersection(step.outputs):
            kept.append(step)
            needed.update(value for value in step.values() if value not in at_hand)
    return tuple(reversed(kept))


@functools.lru_cache(maxsize=4096)
def _shape_of(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """A shape; values have few unlike ones, and programs tens of thousands of values."""
    return jax.ShapeDtypeStruct(shape, dtype)


class _Flattener:
    def __init__(
        self,
        inline_conditionals: bool,
        called: Callable[[_compat.JaxprEqn], _compat.ClosedJaxpr | None],
    ) -> None:
        self.inline_conditionals = inline_conditionals
        self.called = called
        self.avals: list[jax.ShapeDtypeStruct] = []
        self.steps: list[Step] = []

    def number(self, variable: Any) -> int:
        self.avals.append(_shape_of(variable.aval.shape, variable.aval.dtype))
        return len(self.avals) - 1

    def add(
        self,
        closed: _compat.ClosedJaxpr,
        inputs: Sequence[Operand],
        calls: tuple[_compat.JaxprEqn, ...] = (),
    ) -> tuple[Operand, ...]:
        known: dict[_compat.Var, Operand] = {}
        known.update(zip(closed.jaxpr.invars, inputs, strict=True))
        known.update(
            (variable, Constant(value))
            for variable, value in zip(closed.jaxpr.constvars, closed.consts, strict=True)
        )

        def read(atom: Any) -> Operand:
            return Constant(atom.val) if isinstance(atom, _compat.Literal) else known[atom]

        for equation in closed.jaxpr.eqns:
            operands = tuple(read(atom) for atom in equation.invars)
            inner = self.called(equation)
            if inner is not None:
                results = self.add(inner, operands, (*calls, equation))
                known.update(zip(equation.outvars, results, strict=True))
                continue
            outputs = tuple(self.number(variable) for variable in equation.outvars)
            known.update(zip(equation.outvars, outputs, strict=True))
            if self.inline_conditionals and equation.primitive.name == "cond":
                self._select(equation.params["branches"], operands, outputs)
                continue
            self.steps.append(_step_of(equation, operands, outputs, calls))
        return tuple(read(atom) for atom in closed.jaxpr.outvars)

    def _select(
        self,
        branches: Sequence[_compat.ClosedJaxpr],
        operands: tuple[Operand, ...],
        outputs: tuple[int, ...],
    ) -> None:
        index, *arguments = operands
        results = [self.add(branch, arguments) for branch in branches]
        for output, cases in zip(outputs, zip(*results, strict=True), strict=True):
            self.steps.append(
                Step(
                    "select_n",
                    (index, *cases),
                    (output,),
                    lambda which, *cases: [jax.lax.select_n(which, *cases)],
                    None,
                )
            )


def _step_of(
    equation: _compat.JaxprEqn,
    operands: tuple[Operand, ...],
    outputs: tuple[int, ...],
    calls: tuple[_compat.JaxprEqn, ...],
) -> Step:
    def evaluate(*arguments: Any) -> list[Any]:
        params, given = with_clamped_starts(equation, equation.params, arguments)
        started = equation if params is equation.params else equation.replace(params=dict(params))
        return _compat.bind(started, given)

    return Step(equation.primitive.name, operands, outputs, evaluate, equation, calls)


def evaluate_steps(
    steps: Sequence[Step], environment: dict[int, Any], outputs: Sequence[Operand]
) -> list[Any]:
    """Evaluate steps on values or tracers.

    Args:
        steps: what to evaluate, in order.
        environment: the values that are known, by number; it is filled with those that are made.
        outputs: the operands to return.

    Returns:
        One value for each operand of ``outputs``.
    """
    for step in steps:
        results = step.evaluate(*(read_operand(environment, operand) for operand in step.inputs))
        environment.update(zip(step.outputs, results, strict=True))
    return [read_operand(environment, operand) for operand in outputs]


def read_operand(environment: Mapping[int, Any], operand: Operand) -> Any:
    """The value of an operand in an environment."""
    if isinstance(operand, Constant):
        return operand.value
    return environment[operand]


def operand_value(operand: Operand) -> int | None:
    """The number of the value that an operand reads, None for a constant."""
    return operand if isinstance(operand, int) else None


def num_bytes(aval: jax.ShapeDtypeStruct) -> int:
    """The size of a value in bytes; a random key counts as its two words."""
    return int(math.prod(aval.shape)) * _itemsize(aval.dtype)


@functools.lru_cache(maxsize=256)
def _itemsize(dtype: Any) -> int:
    return 8 if jnp.issubdtype(dtype, jax.dtypes.extended) else dtype.itemsize
