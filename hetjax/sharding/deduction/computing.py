"""Computing one equation: how its results lie, given how its operands do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from hetjax import _compat
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.annotation.subgroup import Subgroup
from hetjax.sharding.deduction.annotated_program import (
    AnnotatedProgram,
    Compute,
    Union,
    shape_on,
    union_of,
)
from hetjax.sharding.deduction.bottom_tier import OperandError
from hetjax.sharding.deduction.control_flow import deduce_control
from hetjax.sharding.deduction.evaluation import evaluate_equation, holds_jaxprs
from hetjax.sharding.deduction.signatures import signature_of
from hetjax.sharding.deduction.top_tier import TopTier, indivisible, pass_through, top_tier_of

Annotations = Sequence[HSharding | None]
Body = Callable[[Union, _compat.ClosedJaxpr, Annotations], AnnotatedProgram]
"""Deduces a jaxpr inside an equation, on a union and given how its inputs lie."""


@dataclass(frozen=True, eq=False)
class Computed:
    """An equation that can be computed as its operands lie.

    Args:
        node: what is computed, without the values' numbers.
        results: how each result lies.
    """

    node: Compute
    results: tuple[HSharding | None, ...]


class EquationLayouts:
    """Finds how results lie, and remembers it.

    Args:
        body: deduces jaxprs inside equations.
        sums_stay: see `hetjax.sharding.deduce`.
    """

    def __init__(self, body: Body, *, sums_stay: bool):
        self._body, self._sums_stay = body, sums_stay

    def __call__(
        self, equation: _compat.JaxprEqn, shapes: Sequence[Any], annotations: Annotations
    ) -> Computed:
        """Compute an equation on the union that its operands lie on.

        Args:
            equation: the equation.
            shapes: shape and dtype of its operands, whole.
            annotations: how each lies; None for one that is known everywhere.

        Returns:
            The equation, and how its results lie.

        Raises:
            OperandError: an operand cannot be taken as it lies.
        """
        union = anchor(annotations, shapes)
        for place, annotation in enumerate(annotations):
            if annotation is not None and union_of(annotation) != union:
                raise OperandError(place, "it lies on other submeshes than the others")
        signature = signature_of(equation) or indivisible(equation)
        node = Compute(equation, (), (), union, signature, sums_stay=self._sums_stay)
        if holds_jaxprs(equation):

            def body(program: _compat.ClosedJaxpr, held: Annotations) -> AnnotatedProgram:
                return self._body(union, program, held)

            node, tops = deduce_control(node, annotations, body)
        elif union:
            pairs = zip(annotations, shapes, strict=True)
            node, tops = pass_through(node, [top_tier_of(a, s.shape) for a, s in pairs])
        else:
            tops = []
        return Computed(node, tuple(self._results(node, tops, shapes, annotations)))

    def _results(
        self, node: Compute, tops: Sequence[TopTier], shapes: Sequence[Any], held: Annotations
    ) -> list[HSharding | None]:
        """The results: their shardings inside each submesh are those that JAX finds."""
        if not node.union:
            return [None] * len(node.equation.outvars)
        specs = [self._specs_on(node, place, shapes, held) for place in range(len(node.union))]
        found: list[HSharding | None] = []
        for i, top in enumerate(tops):
            groups = [group.with_spec(specs[place][i]) for place, group in enumerate(node.union)]
            found.append(HSharding(tuple(groups), top.hdim, top.widths, top.ranges))
        return found

    def _specs_on(
        self, node: Compute, place: int, shapes: Sequence[Any], held: Annotations
    ) -> list[PartitionSpec]:
        """The results' shardings inside one submesh."""
        if node.union[place].num_devices == 1 and not node.bodies:
            return [PartitionSpec()] * len(node.equation.outvars)
        mesh = _abstract_mesh(node.union[place])
        operands = [shape_on(mesh, place, *pair) for pair in zip(shapes, held, strict=True)]
        if node.bodies:
            return _specs_under(mesh, node, place, operands)
        taken = tuple((i, each.dimension, each.parts) for i, each in sorted(node.taken.items()))
        # Where a part is taken, or zeros, what counts besides is which submesh it is.
        at = place if taken else None
        widths = tuple((each.shape, each.sharding.spec) for each in operands)
        kind = kind_of(node.equation) or tuple(node.equation.outvars)
        key = kind, node.union[place].axes, widths, taken, at, node.sums_stay
        found = _known_specs(_Question(key, mesh, node, place, tuple(operands)))
        if isinstance(found, OperandError):
            raise found.at(place)
        return found


@dataclass(frozen=True)
class _Question:
    """How results of an equation are divided inside a submesh: alike wherever the key is."""

    key: Any
    mesh: AbstractMesh = field(compare=False)
    node: Compute = field(compare=False)
    place: int = field(compare=False)
    operands: tuple[Any, ...] = field(compare=False)


@functools.lru_cache(maxsize=16384)
def _known_specs(question: _Question) -> list[PartitionSpec] | OperandError:
    """What `_specs_under` gives or raises. JAX takes long, and blocks of models are alike."""
    try:
        return _specs_under(question.mesh, question.node, question.place, question.operands)
    except OperandError as problem:
        return problem


def kind_of(equation: _compat.JaxprEqn) -> Any:
    """What equations have in common that compute alike, of operands of the same shapes.

    None of one that is like no other.

    Example:
        >>> import jax.numpy as jnp
        >>> equations = jax.make_jaxpr(lambda x: jnp.sin(jnp.sin(x)) + x[0])(jnp.ones(3)).eqns
        >>> kind_of(equations[0]) == kind_of(equations[1])
        True
    """
    types = tuple(variable.aval for variable in (*equation.invars, *equation.outvars))
    kind = equation.primitive, tuple(sorted(equation.params.items(), key=_name_of)), types
    try:
        hash(kind)
    except TypeError:
        # Parameters are arrays: it is like no other.
        return None
    return kind


def _name_of(parameter: tuple[str, Any]) -> str:
    return parameter[0]


def _specs_under(
    mesh: AbstractMesh, node: Compute, place: int, operands: Sequence[Any]
) -> list[PartitionSpec]:
    problems: list[OperandError] = []

    def results_of(operands: Sequence[Any]) -> list[Any]:
        # JAX takes long to shorten the traceback of what is raised through its functions.
        try:
            return evaluate_equation(node, place, operands)
        except OperandError as problem:
            problems.append(problem)
            return []

    with jax.sharding.use_abstract_mesh(mesh):
        results = jax.eval_shape(results_of, operands)
    for problem in problems:
        raise problem.at(place)
    # What is computed of constants alone has no sharding in its type.
    shardings = (result.sharding for result in results)
    return [PartitionSpec() if each is None else each.spec for each in shardings]


def anchor(annotations: Annotations, shapes: Sequence[Any]) -> Union:
    """The submeshes that the largest operand lies on; none if all are known everywhere."""
    held = [(s.size, a) for a, s in zip(annotations, shapes, strict=True) if a is not None]
    return union_of(max(held, key=lambda pair: pair[0])[1]) if held else ()


def _abstract_mesh(group: Subgroup) -> AbstractMesh:
    """The mesh of a submesh, without its devices, with axes that types tell of."""
    names, sizes = group.named_axes
    return AbstractMesh(sizes, names, axis_types=(AxisType.Explicit,) * len(names))
