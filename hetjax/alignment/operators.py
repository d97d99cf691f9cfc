"""The operators of a loss's forward and backward pass, and the loops and branches around them."""

from __future__ import annotations

import enum
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import jax
import numpy as np

from hetjax import _compat
from hetjax.pipeline.program.traced_program import FlatJaxpr, num_bytes

PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")
"""The primitives that multiply matrices."""

_SMALL = frozenset(
    """
    reduce reduce_window sort scatter scatter-add scatter_add scatter-sub scatter-mul scatter-min
    scatter-max
    """.split()
)
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
        taken = ", ".join(map(shape_text, self.taken))
        return f"{self.name}({taken}) -> {', '.join(map(shape_text, self.given))}"

    @functools.cached_property
    def details(self) -> str:
        """What tells it from others of its signature, such as ``"axes=(0)"``.

        Of what stands in the equation that is all plain values: axes, exponents, numbers of
        dimensions. Those of an operator that is not looked into may name files.
        """
        params = {} if self.is_opaque else self.equation.params
        texts = {name: _plain_text(each) for name, each in sorted(params.items())}
        return ", ".join(f"{name}={text}" for name, text in texts.items() if text)


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
            digest.update(f"{operator.signature} {operator.details};".encode())
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


def _plain_text(value: Any) -> str:
    """A plain value as text that is the same in each process; nothing of others, as of a mesh."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool | int | float | complex | str):
        return repr(value)
    if is_dataclass(value):
        value = [getattr(value, each.name) for each in fields(value)]
    return f"({','.join(map(_plain_text, value))})" if isinstance(value, tuple | list) else ""


def shapes_of(atoms: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shape and dtype of each variable or constant of an equation."""
    return tuple(jax.ShapeDtypeStruct(each.aval.shape, each.aval.dtype) for each in atoms)


def shape_text(shape: jax.ShapeDtypeStruct) -> str:
    """A shape and its dtype, such as ``"float32[2,3]"``."""
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
