"""The operations of a stage's steps: how the dimensions of what they read and make go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hetjax import _compat
from hetjax.pipeline.program.costs import REPEATABLE, step_cost
from hetjax.pipeline.program.traced_program import Constant, Operand, Step, num_bytes, operand_value
from hetjax.planner.intra_op.collectives import Layout
from hetjax.sharding.attention.work import BACKWARD_PASSES as OF_ATTENTION
from hetjax.sharding.cross_entropy.work import BACKWARD_PASSES as OF_CROSS_ENTROPY
from hetjax.sharding.deduction.signature import Label, Labels, Signature
from hetjax.sharding.deduction.signature_rules import elementwise_rule
from hetjax.sharding.deduction.signatures import signature_of

LEADERS = frozenset(
    """
    attention linear_cross_entropy dot_general conv_general_dilated gather scatter-add scatter-sub
    """.split()
)
"""The operations that choose how their work is divided; others follow what they read."""

_BACKWARD_PASSES = {"attention": OF_ATTENTION, "linear_cross_entropy": OF_CROSS_ENTROPY}
"""Of operations of which one equation gives all gradients, how often it does their work."""

_COMPLETED = frozenset({"reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod"})
"""Reductions that are no sums, but of parts of which an all-reduce makes the whole, too."""


@dataclass(frozen=True)
class Read:
    """What an operation reads of a value.

    Args:
        value: the value's number.
        labels: what each of its dimensions belongs to in the operation.
        again: whether the backward pass reads it, too, as the operation does.
    """

    value: int
    labels: Labels
    again: bool = False


class Need(NamedTuple):
    """How an operation needs a value.

    Args:
        value: the value.
        layout: how it is to lie.
        is_partial: whether its cotangent comes back as a partial sum.
        again: whether the backward pass reads it in the same way.
    """

    value: int
    layout: Layout
    is_partial: bool
    again: bool


@dataclass(frozen=True, eq=False)
class Operation:
    """A step as the planner of shardings sees it.

    Args:
        name: the primitive's name.
        reads: what it reads; what every device makes for itself is left out.
        results: the numbers of the values that it makes.
        labels: for each of them, what its dimensions belong to.
        summed: labels over which the results are reduced.
        leads: whether it chooses how it is divided.
        passes: how often its work is done: once, and in the backward pass once for each gradient,
            or as often as one equation for all of them does it.
        flops: FLOPs of its matrix product.
        traffic: bytes that it reads and writes where it is none.
    """

    name: str
    reads: tuple[Read, ...]
    results: tuple[int, ...]
    labels: tuple[Labels, ...]
    summed: frozenset[int]
    leads: bool
    passes: float
    flops: float
    traffic: float
    _needs: dict[int | None, tuple[Need, ...]] = field(default_factory=dict, repr=False)

    def needs(self, label: int | None) -> tuple[Need, ...]:
        """How it needs what it reads where it is divided along a label, or not at all."""
        if label not in self._needs:
            self._needs[label] = tuple(_need(read, label) for read in self.reads)
        return self._needs[label]


def _need(read: Read, label: int | None) -> Need:
    place = place_of(read.labels, label)
    return Need(read.value, place, label is not None and place is None, read.again)


def place_of(labels: Labels, name: int | None) -> int | None:
    """The dimension that a label belongs to; None where there is none."""
    places = (i for i, label in enumerate(labels) if label is not None and label.name == name)
    return None if name is None else next(places, None)


@dataclass(eq=False)
class Operations:
    """The operations of a run of steps, and what is known of their values.

    Args:
        avals: shape and dtype of each value.
        steps: the steps, in order.
        sources: the values that the run is given.
        learned: those of them that have a gradient.
        examples: for values that have a dimension of examples, which one it is.
        weights: the sources that are parameters; and what is made of them alone.
        found: the operations.
        moving: values that have a cotangent.
        broadcasts: for widened values what they were before, and what became of its dimensions.
        sizes: bytes of values, where they were asked for.
        divisions: labels along which operations can be divided, where they were asked for: among
            how many devices, and whether others divide the examples.
    """

    avals: Sequence[jax.ShapeDtypeStruct]
    steps: Sequence[Step]
    sources: Sequence[int]
    learned: Sequence[int]
    examples: dict[int, int]
    weights: set[int]
    found: list[Operation] = field(default_factory=list)
    moving: set[int] = field(default_factory=set)
    broadcasts: dict[int, tuple[int, Labels]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    divisions: dict[tuple[Operation, int, bool], list[int | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.known = set(self.sources)
        self.moving = set(self.learned)
        for step in self.steps:
            self._add(step)

    def size(self, value: int) -> int:
        """Bytes of a whole value."""
        if value not in self.sizes:
            self.sizes[value] = num_bytes(self.avals[value])
        return self.sizes[value]

    def shape(self, value: int) -> tuple[int, ...]:
        """The shape of a value."""
        return self.avals[value].shape

    def is_divisible(self, operation: Operation, name: int, devices: int) -> bool:
        """Whether all dimensions of a label can be divided among so many devices."""
        pairs = [(read.value, read.labels) for read in operation.reads]
        pairs += list(zip(operation.results, operation.labels, strict=True))
        return all(
            size // label.scale % devices == 0 and size >= devices
            for value, labels in pairs
            for size, label in zip(self.shape(value), labels, strict=True)
            if label is not None and label.name == name
        )

    def examples_label(self, operation: Operation) -> int | None:
        """The label of an operation that examples belong to."""
        for read in operation.reads:
            place = self.examples.get(read.value)
            if place is not None and (label := read.labels[place]) is not None:
                return label.name
        return None

    def _add(self, step: Step) -> None:
        values = [operand_value(operand) for operand in step.inputs]
        if not any(value in self.known for value in values):
            return
        self.known.update(step.outputs)
        signature = _signature(step, self.avals)
        if step.name == "broadcast_in_dim" and self._is_widened(step, signature):
            self._widen(step, signature)
            return
        moves = {v for v in values if v in self.moving} if step.name != "stop_gradient" else set()
        if moves:
            self.moving.update(o for o in step.outputs if _is_float(self.avals[o]))
        reads = tuple(
            self._read(step, place, operand, labels)
            for place, (operand, labels) in enumerate(
                zip(step.inputs, signature.operands, strict=True)
            )
            if operand_value(operand) in self.known
        )
        cost = step_cost(step)
        is_known = step.equation is None or signature_of(step.equation) is not None
        operation = Operation(
            name=step.name,
            reads=reads,
            results=step.outputs,
            labels=signature.results,
            summed=signature.summed,
            leads=step.name in LEADERS or not (is_known or _is_elementwise(step)),
            passes=1 + self._num_gradients(step, moves),
            flops=cost.matmul_flops,
            traffic=0.0 if cost.matmul_flops else cost.bytes,
        )
        self.found.append(operation)
        if all(read.value in self.weights for read in reads):
            self.weights.update(step.outputs)
        self._examples_of(operation)

    def _num_gradients(self, step: Step, moves: set[int]) -> float:
        if step.name in _BACKWARD_PASSES:
            return _BACKWARD_PASSES[step.name] if moves else 0
        return len(moves) if step.name in LEADERS else min(len(moves), 1)

    def _is_widened(self, step: Step, signature: Signature) -> bool:
        """Whether a broadcast adds dimensions of more than one element."""
        shape = self.shape(step.outputs[0])
        return any(
            size > 1 and label is None
            for size, label in zip(shape, signature.results[0], strict=True)
        )

    def _widen(self, step: Step, signature: Signature) -> None:
        """Who reads a widened value is seen as a reader of what it was before."""
        base, labels = self._base(step.inputs[0])
        (output,) = step.outputs
        dimensions: list[Label | None] = [None] * len(self.shape(output))
        for own, label in enumerate(signature.operands[0]):
            if label is not None:
                dimensions[label.name] = labels[own]
        self.broadcasts[output] = base, tuple(dimensions)
        if base in self.moving:
            self.moving.add(output)

    def _base(self, operand: Operand) -> tuple[int, Labels]:
        """The value behind an operand and, for each dimension of it, the value's dimension."""
        value = operand_value(operand)
        assert value is not None
        if value in self.broadcasts:
            return self.broadcasts[value]
        return value, tuple(Label(i) for i in range(len(self.shape(value))))

    def _read(self, step: Step, place: int, operand: Operand, labels: Labels) -> Read:
        base, dimensions = self._base(operand)
        found: list[Label | None] = [None] * len(self.shape(base))
        for label, dimension in zip(labels, dimensions, strict=True):
            if dimension is not None:
                found[dimension.name] = label
        if not isinstance(operand, int):
            found[:1] = [None]
        others = [o for i, o in enumerate(step.inputs) if i != place]
        again = step.name in LEADERS and any(operand_value(o) in self.moving for o in others)
        return Read(base, tuple(found), again)

    def _examples_of(self, operation: Operation) -> None:
        """Which dimension of the results is that of the examples."""
        name = self.examples_label(operation)
        for result, labels in zip(operation.results, operation.labels, strict=True):
            place = place_of(labels, name)
            if place is not None:
                self.examples[result] = place


def _signature(step: Step, avals: Sequence[jax.ShapeDtypeStruct]) -> Signature:
    """The signature of a step; of one without a rule, that nothing may be divided."""
    if step.equation is not None:
        if _is_elementwise(step):
            return elementwise_rule()(step.equation)
        signature = signature_of(step.equation)
        if signature is not None and step.name in _COMPLETED:
            return _completed(step.equation, signature)
        if signature is not None and step.name == "attention":
            return _of_whole_sequences(signature, signature.results[0][-3])
        if signature is not None and step.name == "linear_cross_entropy":
            return _with_vocabulary(_of_whole_sequences(signature, signature.results[0][-1]))
        if signature is not None:
            return signature
    shapes = [_shape(operand, avals) for operand in step.inputs]
    whole = tuple((None,) * len(shape) for shape in shapes)
    return Signature(whole, tuple((None,) * len(avals[o].shape) for o in step.outputs))


def _of_whole_sequences(signature: Signature, tokens: Label | None) -> Signature:
    """A loop over tiles as compilers divide it: they would gather tokens for it."""

    def kept(many: Sequence[Labels]) -> tuple[Labels, ...]:
        return tuple(tuple(None if each == tokens else each for each in labels) for labels in many)

    return Signature(kept(signature.operands), kept(signature.results))


def _with_vocabulary(signature: Signature) -> Signature:
    """Losses of parts of the vocabulary, of which sums and the largest logit make the whole."""
    hidden, weights, labels = signature.operands
    vocabulary = Label(len(hidden))
    divided = (*weights[:-2], vocabulary, None)
    summed = frozenset({vocabulary.name})
    return Signature((hidden, divided, labels), signature.results, summed=summed)


def _completed(equation: _compat.JaxprEqn, signature: Signature) -> Signature:
    """A reduction of parts, of which an all-reduce makes the whole."""
    axes = frozenset(equation.params["axes"])
    (labels,) = signature.operands
    operand = tuple(Label(i) if i in axes else label for i, label in enumerate(labels))
    return Signature((operand,), signature.results, summed=axes)


def _shape(operand: Operand, avals: Sequence[Any]) -> tuple[int, ...]:
    if isinstance(operand, Constant):
        return jnp.shape(operand.value)
    value = operand_value(operand)
    assert value is not None
    return avals[value].shape


def _is_float(aval: jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _is_elementwise(step: Step) -> bool:
    """Whether a step is a function with a rule of its own, of nothing but elementwise steps."""
    if step.equation is None or step.name not in ("custom_jvp_call", "custom_vjp_call"):
        return False
    first: Any = step.equation.outvars[0].aval
    return all(
        _has_shape(equation, first.shape)
        for jaxpr in _compat.inner_jaxprs(step.equation)[:1]
        for equation in jaxpr.eqns
    )


def _has_shape(equation: _compat.JaxprEqn, shape: tuple[int, ...]) -> bool:
    """Whether an equation, and all in it, is elementwise on arrays of one shape and scalars."""
    inner = _compat.inner_jaxprs(equation)
    if inner:
        return all(_has_shape(each, shape) for each in inner[0].eqns)
    avals: list[Any] = [v.aval for v in (*equation.invars, *equation.outvars)]
    return equation.primitive.name in REPEATABLE and all(a.shape in (shape, ()) for a in avals)
