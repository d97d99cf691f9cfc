"""Deduction: from annotations of some values of a program to annotations of all.

The submeshes of a value change only where a program says so (`hetjax.reshard`); an equation is
computed on the union that its operands lie on. Its results are divided among the submeshes as
its signature tells, and inside each submesh as JAX's explicit sharding says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from hetjax import _compat
from hetjax.errors import InputError
from hetjax.sharding.annotation.annotation import HSharding, Subgroup
from hetjax.sharding.deduction.annotated_program import (
    AnnotatedProgram,
    Compute,
    Move,
    Union,
    shape_on,
    union_of,
)
from hetjax.sharding.deduction.bottom_tier import ELSEWHERE, OperandError
from hetjax.sharding.deduction.control_flow import deduce_control
from hetjax.sharding.deduction.evaluation import evaluate_equation, holds_jaxprs
from hetjax.sharding.deduction.origins import Origins
from hetjax.sharding.deduction.refinement import refined_together
from hetjax.sharding.deduction.reshard import RESHARD, Resharding
from hetjax.sharding.deduction.signature import shapes_of
from hetjax.sharding.deduction.signatures import signature_of
from hetjax.sharding.deduction.top_tier import (
    WHOLE,
    TopTier,
    cotangent_of,
    indivisible,
    pass_through,
    sized,
    top_tier_of,
    whole_on,
)


def deduce(
    program: _compat.ClosedJaxpr,
    annotations: Sequence[HSharding | None],
    *,
    strategy: int = 0,
    symbols: Mapping[str, int] | None = None,
    mend: bool = False,
    sums_stay: bool = False,
) -> AnnotatedProgram:
    """Deduce how every value of a program lies.

    Args:
        program: what `jax.make_jaxpr` gives, with `hetjax.reshard` where values change submeshes.
        annotations: for each input how it lies; None for one that is known everywhere.
        symbols: numbers for the symbols that annotations have; see `HSharding.bind`.
        strategy: which of the annotations that a `hetjax.reshard` carries is meant.
        mend: whether to put in the reshards that are missing, in place of an error.
        sums_stay: whether inside submeshes all sums over divided dimensions stay partial until
            something needs them whole, as those of contractions do; else only contractions' do.

    Returns:
        The annotated program.

    Raises:
        InputError: an annotation does not fit its input; or a value cannot be taken as it lies,
            then the message names the equation, its source line, how its operands lie, and the
            reshard that mends it.

    Source: Hetu v2, section 5.2.

    Example:
        >>> import jax.numpy as jnp
        >>> from hetjax.sharding import Subgroup
        >>> closed = jax.make_jaxpr(lambda x, w: x @ w)(jnp.ones((6, 4)), jnp.ones((4, 2)))
        >>> one, two = Subgroup((0,), (), PartitionSpec()), Subgroup((1,), (), PartitionSpec())
        >>> uneven = HSharding((one, two), hdim=0, sizes=(4, 2))
        >>> found = deduce(closed, [uneven, HSharding((one, two))])
        >>> found.annotations[found.outputs[0]] == uneven
        True
    """
    variables = program.jaxpr.invars
    if len(annotations) != len(variables):
        raise InputError(
            f"annotations: {len(annotations)} are given, and the program has {len(variables)} "
            f"inputs"
        )
    bound: list[HSharding | None] = []
    pairs = zip(annotations, shapes_of(variables), strict=True)
    for place, (annotation, shape) in enumerate(pairs):
        try:
            bound.append(annotation and sized(annotation.bind(symbols or {}), shape))
            if annotation is not None:
                _known(bound[-1]).shards(shape)
        except InputError as error:
            raise InputError(f"annotations[{place}]: {error}") from None
    return _Deducer(strategy, symbols or {}, mend=mend, sums_stay=sums_stay).program(program, bound)


class _Deducer:
    """Walks over one jaxpr; each jaxpr inside an equation has a deducer of its own."""

    def __init__(
        self,
        strategy: int,
        symbols: Mapping[str, int],
        *,
        mend: bool,
        sums_stay: bool,
        body_of: Union | None = None,
    ):
        self.strategy, self.symbols = strategy, symbols
        self.mend, self.sums_stay, self.body_of = mend, sums_stay, body_of
        self.shapes: list[Any] = []
        self.annotations: list[HSharding | None] = []
        self.constants: dict[int, Any] = {}
        self.nodes: list[Compute | Move] = []
        self.origins = Origins()

    def program(
        self, program: _compat.ClosedJaxpr, annotations: Sequence[HSharding | None]
    ) -> AnnotatedProgram:
        pairs = zip(program.jaxpr.invars, annotations, strict=True)
        inputs = tuple(self.value(variable.aval, annotation) for variable, annotation in pairs)
        outputs = tuple(self.walk(program, inputs))
        return AnnotatedProgram(
            inputs,
            outputs,
            tuple(self.shapes),
            tuple(self.annotations),
            self.constants,
            tuple(self.nodes),
        )

    def value(self, aval: Any, annotation: HSharding | None) -> int:
        """A new value."""
        self.shapes.append(jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        self.annotations.append(annotation)
        return len(self.shapes) - 1

    def constant(self, array: Any, aval: Any) -> int:
        number = self.value(aval, None)
        self.constants[number] = array
        return number

    def top(self, value: int) -> TopTier:
        return top_tier_of(self.annotations[value], self.shapes[value].shape)

    def walk(self, program: _compat.ClosedJaxpr, inputs: Sequence[int]) -> list[int]:
        """Deduce all equations of a jaxpr; what it merely calls is taken as part of it."""
        known: dict[Any, int] = dict(zip(program.jaxpr.invars, inputs, strict=True))
        for variable, array in zip(program.jaxpr.constvars, program.consts, strict=True):
            known[variable] = self.constant(array, variable.aval)

        def read(atom: Any) -> int:
            if isinstance(atom, _compat.Literal):
                return self.constant(atom.val, atom.aval)
            return known[atom]

        for equation in program.jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            inner = _compat.inlined_jaxpr(equation)
            if inner is not None:
                results = self.walk(inner, operands)
            elif equation.primitive.name == "optimization_barrier":
                results = operands
            elif equation.primitive is RESHARD:
                results = [self.reshard(equation, operands[0])]
            else:
                results = self.equation(equation, operands)
            known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in program.jaxpr.outvars]

    def reshard(self, equation: _compat.JaxprEqn, value: int) -> int:
        resharding: Resharding = equation.params["resharding"]
        source = self.annotations[value]
        if resharding.is_reverse:
            destination = self.origins.pop(resharding.number, equation)
            destination = destination and cotangent_of(destination)
        else:
            self.origins.push(resharding.number, source)
            destination = resharding.annotation(self.strategy).bind(self.symbols)
            destination = sized(destination, self.shapes[value].shape)
        if destination is None or destination == source:
            return value
        return self.move(value, destination)

    def move(self, value: int, destination: HSharding) -> int:
        shape = self.shapes[value]
        assert destination != self.annotations[value], "a move changes how a value lies"
        destination.shards(shape.shape)
        node = Move(value, self.value(shape, destination), self.annotations[value], destination)
        if self.body_of is not None and (
            not node.is_inside or union_of(destination) != self.body_of
        ):
            raise OperandError(ELSEWHERE, "inside, a value must come to other submeshes")
        self.nodes.append(node)
        return node.output

    def equation(self, equation: _compat.JaxprEqn, operands: Sequence[int]) -> list[int]:
        """Deduce one equation; where that is asked for, with reshards of its operands."""
        values = list(operands)
        for _ in range(_MOST_RESHARDS):
            try:
                values = self.aligned(values)
                return self.computed(equation, values)
            except OperandError as problem:
                if problem.operand == ELSEWHERE:
                    if self.body_of is not None:
                        raise
                    problem = self.outside(values, problem)
                mended = self.mended(values, problem)
                if not self.mend:
                    self.refuse(equation, values, problem, mended)
                values[problem.operand] = self.move(values[problem.operand], mended)
        raise InputError(
            f"{equation.primitive.name} at {_compat.source_line(equation)}: reshards of its "
            f"operands do not come to an end; bring them to one union with hetjax.reshard"
        )

    def outside(self, values: Sequence[int], problem: OperandError) -> OperandError:
        """A problem inside a body, as one of the first operand that submeshes do not have whole."""
        for place, value in enumerate(values):
            if self.top(value) != WHOLE:
                return OperandError(place, problem.reason)
        raise InputError(f"{problem.reason}, which a scan, a conditional or a loop cannot do")

    def aligned(self, values: Sequence[int]) -> list[int]:
        """The values on one union, where each device has already what it needs for that."""
        held = {v: a for v in values if (a := self.annotations[v]) is not None}
        if len({union_of(annotation) for annotation in held.values()}) < 2:
            return list(values)
        shapes = [self.shapes[value].shape for value in held]
        found = refined_together(list(held.values()), shapes)
        if found is None:
            return list(values)
        finer = {
            value: value if annotation == held[value] else self.move(value, annotation)
            for value, annotation in zip(held, found, strict=True)
        }
        return [finer.get(value, value) for value in values]

    def union(self, values: Sequence[int]) -> Union:
        """The submeshes that the largest operand lies on; none if all are known everywhere."""
        held = [value for value in values if self.annotations[value] is not None]
        if not held:
            return ()
        anchor = max(held, key=lambda value: self.shapes[value].size)
        return union_of(_known(self.annotations[anchor]))

    def mended(self, values: Sequence[int], problem: OperandError) -> HSharding:
        """How an operand should lie, so that an equation can take it."""
        value, union = values[problem.operand], self.union(values)
        annotation = _known(self.annotations[value])
        if problem.spec is None:
            return whole_on(annotation, union, self.shapes[value].shape)
        groups = list(annotation.subgroups)
        at_fault = groups[problem.place]
        if at_fault.spec.unreduced and not problem.spec.unreduced:
            # What cannot be a partial sum on one submesh cannot be one on any.
            groups = [group.with_spec(PartitionSpec(*group.spec.partitions)) for group in groups]
        groups[problem.place] = at_fault.with_spec(problem.spec)
        return replace(annotation, subgroups=tuple(groups))

    def refuse(
        self,
        equation: _compat.JaxprEqn,
        values: Sequence[int],
        problem: OperandError,
        mended: HSharding,
    ) -> NoReturn:
        operands = "\n".join(
            f"  operand {i}: {self.shapes[value].dtype}{list(self.shapes[value].shape)} "
            f"{self.annotations[value] or 'known everywhere'}"
            for i, value in enumerate(values)
        )
        raise InputError(
            f"{equation.primitive.name} at {_compat.source_line(equation)} cannot take operand "
            f"{problem.operand} as it lies: {problem.reason}.\n{operands}\n"
            f"Mend it with hetjax.reshard(operand {problem.operand}, ...) to\n  {mended}"
        )

    def computed(self, equation: _compat.JaxprEqn, values: Sequence[int]) -> list[int]:
        """Deduce the results of an equation whose operands lie on one union, and add its node."""
        union = self.union(values)
        for place, value in enumerate(values):
            annotation = self.annotations[value]
            if annotation is not None and union_of(annotation) != union:
                raise OperandError(place, "it lies on other submeshes than the others")
        signature = signature_of(equation) or indivisible(equation)
        node = Compute(equation, tuple(values), (), union, signature, sums_stay=self.sums_stay)
        if holds_jaxprs(equation):
            held = [self.annotations[value] for value in values]
            self.origins.enter()
            node, tops = deduce_control(node, held, partial(self.body, union))
            self.origins.leave()
        elif union:
            node, tops = pass_through(node, [self.top(value) for value in values])
        else:
            tops = []
        outputs = self.results(node, tops)
        self.nodes.append(replace(node, outputs=outputs))
        return list(outputs)

    def results(self, node: Compute, tops: Sequence[TopTier]) -> tuple[int, ...]:
        """The results as values: their shardings inside each submesh are those that JAX finds."""
        avals = [variable.aval for variable in node.equation.outvars]
        if not node.union:
            return tuple(self.value(aval, None) for aval in avals)
        specs = [self.specs(node, place) for place in range(len(node.union))]
        found = []
        for i, (aval, top) in enumerate(zip(avals, tops, strict=True)):
            groups = [group.with_spec(specs[place][i]) for place, group in enumerate(node.union)]
            found.append(self.value(aval, HSharding(tuple(groups), top.hdim, top.widths)))
        return tuple(found)

    def specs(self, node: Compute, place: int) -> list[PartitionSpec]:
        """The results' shardings inside one submesh."""
        mesh = _abstract_mesh(node.union[place])
        operands = [
            shape_on(mesh, place, self.shapes[value], self.annotations[value])
            for value in node.inputs
        ]
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
            problem.place = place
            raise problem
        # What is computed of constants alone has no sharding in its type.
        shardings = (result.sharding for result in results)
        return [PartitionSpec() if each is None else each.spec for each in shardings]

    def body(
        self,
        union: Union,
        program: _compat.ClosedJaxpr,
        annotations: Sequence[HSharding | None],
    ) -> AnnotatedProgram:
        inner = _Deducer(
            self.strategy,
            self.symbols,
            mend=self.mend,
            sums_stay=self.sums_stay,
            body_of=union,
        )
        inner.origins = self.origins.inside(program)
        return inner.program(program, annotations)


_MOST_RESHARDS = 200
"""Of the operands of one equation: each takes a few for each of its submeshes."""


def _known(annotation: HSharding | None) -> HSharding:
    assert annotation is not None, "the value is known everywhere"
    return annotation


def _abstract_mesh(group: Subgroup) -> AbstractMesh:
    """The mesh of a submesh, without its devices, with axes that types tell of."""
    names, sizes = group.named_axes
    return AbstractMesh(sizes, names, axis_types=(AxisType.Explicit,) * len(names))
