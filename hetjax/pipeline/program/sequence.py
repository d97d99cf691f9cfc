"""The sequence of a program: which dimension of each value is that of the tokens that attend.

From the tokens of attentions, dimensions that belong together are followed through the program by
the signatures of its equations. Along them tokens can be put in another order, and divided: what
else a model does with tokens it does with each alone, or it is refused by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from hetjax import _compat
from hetjax.errors import InputError
from hetjax.pipeline.program.opened_equations import (
    OpenedEquation,
    called_equations,
    opened_equations,
    own_derivative,
)
from hetjax.pipeline.program.token_dimensions import TokenDimensions
from hetjax.pipeline.program.traced_program import Constant, Operand, Program, Step
from hetjax.sharding.attention.equation import attention_of
from hetjax.sharding.attention.primitive import ATTENTION, attention_line
from hetjax.sharding.deduction.evaluation import holds_jaxprs
from hetjax.sharding.deduction.signature import Labels
from hetjax.sharding.deduction.signatures import signature_of
from hetjax.sharding.deduction.top_tier import indivisible

SYMMETRIC = frozenset(
    ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod")
)
"""What does not depend on the order of what it reduces."""


def token_dimensions(program: Program) -> TokenDimensions:
    """Find the tokens of a program whose attentions are equations of their own.

    Whole numbers and truth values stay in the model's order where something needs them in it, as
    the shift between tokens and labels does.

    Args:
        program: the traced loss function.

    Returns:
        The dimensions.

    Raises:
        InputError: there is no attention, one stands in a loop that is a single step, or something
            depends on the order of the tokens; the message has the equation and its line.
    """
    for step in program.steps:
        _check_step(step)
    every = [
        each for place, step in enumerate(program.steps) for each in opened_equations(place, step)
    ]
    equations = [each for each in every if not each.has_own_rule]
    seeds = [seed for each in equations for seed in _attended(each)]
    if not seeds:
        raise InputError(
            "loss: it has no attention whose context members could share; allowed: "
            "hetjax.attention, or a softmax of scores between two products, without dropout"
        )
    own: set[Operand] = {*program.parameters, *program.batch}
    lineage = _whole_numbers(equations, program)
    small = own | lineage | _of_parameters(equations, program)
    while True:
        walk = _TokenWalk(equations, own, small, program.unmatched)
        refused = walk.follow(seeds)
        if refused is None:
            for each in every:
                if each.has_own_rule:
                    walk.check_rule(each)
            return walk.found(program)
        value, problem = refused
        if value not in lineage:
            raise problem
        own |= _ancestors(value, equations, lineage)


def _check_step(step: Step) -> None:
    """Check that no attention stands in a step that is more than itself, as a loop or a region."""
    if step.equation is None:
        return
    line = attention_line(_compat.inner_jaxprs(step.equation))
    if line is not None:
        whole = OpenedEquation(0, step.name, step.equation, step.inputs, step.outputs, step.calls)
        raise InputError(
            f"loss: an attention at {line} stands in a {whole.name} at {whole.line} that is one "
            f"step, so members cannot share its context; allowed: blocks one after another, or a "
            f"scan over their stacked parameters, whose iterations are steps of their own"
        )


def _whole_numbers(equations: Sequence[OpenedEquation], program: Program) -> set[Any]:
    """The values that are whole numbers or truth values, and made of such alone."""
    found = {v for v in program.batch if not _is_floating(program.avals[v])}
    for each in equations:
        variables = [] if each.equation is None else each.equation.outvars
        floating = not variables or any(_is_floating(variable.aval) for variable in variables)
        if not floating and all(isinstance(o, Constant) or o in found for o in each.operands):
            found.update(each.results)
    return found


def _of_parameters(equations: Sequence[OpenedEquation], program: Program) -> set[Any]:
    """The values that are made of parameters and of constants alone."""
    found: set[Any] = set(program.parameters)
    for each in equations:
        if all(isinstance(operand, Constant) or operand in found for operand in each.operands):
            found.update(each.results)
    return found


def _is_floating(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def _ancestors(value: Any, equations: Sequence[OpenedEquation], among: set[Any]) -> set[Any]:
    found = {value}
    for each in reversed(equations):
        if not found.isdisjoint(each.results):
            found |= {o for o in each.operands if not isinstance(o, Constant) and o in among}
    return found


class _TokenWalk:
    """One way from tokens to tokens.

    Args:
        equations: all equations.
        own: the values whose tokens stay in the model's order.
        small: the values that every member may have whole, to make tokens of.
        unmatched: why some attention is no equation of its own; empty where all is.
    """

    def __init__(
        self,
        equations: Sequence[OpenedEquation],
        own: set[Any],
        small: set[Any],
        unmatched: str = "",
    ):
        self.equations, self.unmatched = equations, unmatched
        self.own, self.small, self.dimensions = own, small, dict[Any, int]()
        self.made: list[tuple[OpenedEquation, int, int]] = []
        self.taken: list[tuple[OpenedEquation, int, int]] = []
        self.makers: dict[Any, tuple[OpenedEquation, int]] = {}
        self.uses: dict[Any, list[tuple[OpenedEquation, int]]] = {}
        for each in equations:
            self.makers |= {result: (each, place) for place, result in enumerate(each.results)}
            for place, operand in enumerate(each.operands):
                if not isinstance(operand, Constant):
                    self.uses.setdefault(operand, []).append((each, place))

    def follow(
        self, seeds: Sequence[tuple[Any, int, OpenedEquation]]
    ) -> tuple[Any, InputError] | None:
        """Follow tokens wherever they go; what cannot be followed, with the reason."""
        waiting: list[tuple[Any, int, OpenedEquation]] = []
        for value, dimension, attention in seeds:
            if isinstance(value, Constant) or value in self.own:
                # An attention may be given what stays in the model's order, as a batch's segments.
                for place, operand in enumerate(attention.operands):
                    if operand is value:
                        self._take(attention, place, dimension)
            else:
                waiting.append((value, dimension, attention))
        while waiting:
            value, dimension, by = waiting.pop()
            if isinstance(value, Constant) or value in self.own:
                continue
            known = self.dimensions.get(value)
            if known == dimension:
                continue
            if known is not None:
                return value, self._met(by, known, dimension)
            self.dimensions[value] = dimension
            if value in self.makers:
                found = self._origin(*self.makers[value], dimension)
                if isinstance(found, InputError):
                    return value, found
                waiting += found
            for each, place in self.uses.get(value, ()):
                found = self._through(each, place, dimension)
                if isinstance(found, InputError):
                    return value, found
                waiting += found
        return None

    def _origin(
        self, each: OpenedEquation, place: int, dimension: int
    ) -> list[tuple[Any, int, OpenedEquation]] | InputError:
        """Where tokens come from that an equation makes."""
        if _attends(each):
            return []
        if each.equation is None or holds_jaxprs(each.equation):
            return self._problem(each, "makes them inside a body")
        operands, results = _labels(each)
        label = results[place][dimension]
        if label is None or label.scale != 1:
            # What is repeated for every token is the same in any order.
            if _repeats(each, dimension):
                return []
            if not all(isinstance(o, Constant) or o in self.small for o in each.operands):
                return self._goes_along(each)
            self.made.append((each, place, dimension))
            return []
        return self._alike(each, operands, results, label.name)

    def _through(
        self, each: OpenedEquation, place: int, dimension: int
    ) -> list[tuple[Any, int, OpenedEquation]] | InputError:
        """Where tokens go that an equation takes."""
        if _attends(each):
            return []
        if each.equation is None or holds_jaxprs(each.equation):
            return self._problem(each, "takes them inside a body")
        operands, results = _labels(each)
        label = operands[place][dimension]
        if label is not None and label.scale == 1:
            return self._alike(each, operands, results, label.name)
        if each.name in SYMMETRIC:
            return []
        return self._goes_along(each, f", operand {place}, dimension {dimension}")

    def _alike(
        self,
        each: OpenedEquation,
        operands: Sequence[Labels],
        results: Sequence[Labels],
        name: int,
    ) -> list[tuple[Any, int, OpenedEquation]] | InputError:
        """All that an equation divides as one label, of operands and results."""
        divided = [label for label in itertools.chain(*operands, *results) if label is not None]
        if any(label.name == name and label.scale != 1 for label in divided):
            return self._problem(each, "makes one of several of them, or several of one")
        found: list[tuple[Any, int, OpenedEquation]] = []
        for place, labels in enumerate(operands):
            for dimension in _places(name, labels):
                operand = each.operands[place]
                if isinstance(operand, Constant) or operand in self.own:
                    self._take(each, place, dimension)
                else:
                    found.append((operand, dimension, each))
        for place, labels in enumerate(results):
            found += [(each.results[place], d, each) for d in _places(name, labels)]
        return found

    def _take(self, each: OpenedEquation, place: int, dimension: int) -> None:
        """Note that tokens come to an equation in the model's order."""
        if (each, place, dimension) not in self.taken:
            self.taken.append((each, place, dimension))

    def _goes_along(self, each: OpenedEquation, where: str = "") -> InputError:
        if each.name == "reshape":
            return self._problem(
                each,
                "makes one dimension of them and of others, or several of theirs (products and "
                "losses take [batch, tokens, ...] as it is)",
            )
        has_rule = each.equation is not None and signature_of(each.equation) is not None
        why = "" if has_rule else "has no sharding rule, so it "
        return self._problem(each, f"{why}goes along them{where}")

    def _met(self, each: OpenedEquation, *dimensions: int) -> InputError:
        """What is wrong where a value would have tokens along two dimensions, as scores have."""
        first, second = sorted(dimensions)
        told = f" ({self.unmatched})" if self.unmatched else ""
        return self._problem(each, f"has tokens along dimensions {first} and {second}{told}")

    def _problem(self, each: OpenedEquation, what: str) -> InputError:
        return InputError(
            f"loss: {each.name} at {each.line} {what}: the tokens of a sequence whose context "
            "members share are in another order; allowed: what treats each token alone, "
            "attentions, and sums"
        )

    def found(self, program: Program) -> TokenDimensions:
        made: dict[int, dict[int, int]] = {}
        for each, place, dimension in self.made:
            outputs = program.steps[each.place].outputs
            result = each.results[place]
            if result not in outputs:
                raise self._problem(each, "makes them inside a call")
            made.setdefault(each.place, {})[outputs.index(result)] = dimension
        taken: dict[int, dict[int, tuple[int, ...]]] = {}
        for each, place, dimension in self.taken:
            of_step = taken.setdefault(each.place, {})
            for at in self._operands_of_step(each, place, dimension, program.steps[each.place]):
                of_step[at] = tuple(dict.fromkeys((*of_step.get(at, ()), dimension)))
        values = {v: d for v, d in self.dimensions.items() if isinstance(v, int)}
        return TokenDimensions(values, made, taken)

    def _operands_of_step(
        self, each: OpenedEquation, place: int, dimension: int, step: Step
    ) -> Sequence[int]:
        """Which operands of a step are the one that an equation of it takes."""
        if each.equation is step.equation:
            return [place]
        operand = each.operands[place]
        at = [i for i, other in enumerate(step.inputs) if other is operand or other == operand]
        if not at:
            raise self._problem(each, "takes them inside a call")
        # The whole step is given it in another order.
        for other in (other for other in self.equations if other.place == each.place):
            used = [p for p, taken in enumerate(other.operands) if taken is operand]
            if not all((other, p, dimension) in self.taken for p in used):
                raise self._problem(other, "takes them in two orders inside a call")
        return at

    def check_rule(self, call: OpenedEquation) -> None:
        """Check the derivative of a call that has one of the user's own.

        What it computes of tokens in another order has to be what it computes of them in theirs.

        Raises:
            InputError: it depends on the order.
        """
        assert call.equation is not None
        along = [self._along(call, value) for value in call.operands]
        of_results = [self._along(call, value) for value in call.results]
        is_asked = any(dimension is not None for dimension in (*along, *of_results))
        derivative = own_derivative(call.equation) if is_asked else None
        if derivative is None:
            return
        closed, seeded, graded = derivative
        gradients = [object() for _ in graded]
        given = [*along, *(of_results[i] for i in seeded)]
        seeds = [*zip(closed.jaxpr.invars, given, strict=True)]
        seeds += [(gradient, along[i]) for gradient, i in zip(gradients, graded, strict=True)]
        calls = *call.calls, call.equation
        every = called_equations(call.place, closed, closed.jaxpr.invars, gradients, calls)
        own = {value for value, dimension in seeds if dimension is None}
        walk = _TokenWalk([each for each in every if not each.has_own_rule], own, own)
        refused = walk.follow([(v, d, call) for v, d in seeds if d is not None])
        if refused is not None:
            raise refused[1]
        for each, _, _ in (*walk.taken, *walk.made):
            raise self._problem(each, "takes them in two orders in a derivative of a call's own")

    def _along(self, call: OpenedEquation, value: Any) -> int | None:
        """Which dimension of a call's operand or result has tokens in another order."""
        if isinstance(value, Constant):
            return None
        taken = (
            dimension
            for each, place, dimension in self.taken
            if each.place == call.place and each.operands[place] == value
        )
        return self.dimensions.get(value, next(taken, None))


def _attended(each: OpenedEquation) -> Iterator[tuple[Any, int, OpenedEquation]]:
    """The tokens of an attention: of its queries, keys, values, segments, and of what it makes."""
    if not _attends(each):
        return
    assert each.equation is not None
    found = attention_of(each.equation, each.operands)
    query: Any = each.equation.invars[0].aval
    if query.shape[found.token_dimension] == 1:
        raise InputError(
            f"loss: an attention at {each.line} has sequences of 1 token, which members cannot "
            "share; allowed: 2 or more"
        )
    for value in (found.query, found.key, found.value, *found.segments, *each.results):
        yield value, found.token_dimension, each


def _attends(each: OpenedEquation) -> bool:
    return each.name == ATTENTION.name


def _repeats(each: OpenedEquation, dimension: int) -> bool:
    """Whether an equation makes what is the same all along a dimension without a label."""
    assert each.equation is not None
    is_iota = each.name == "iota" and each.equation.params["dimension"] != dimension
    return is_iota or each.name == "broadcast_in_dim"


def _labels(each: OpenedEquation) -> tuple[Sequence[Labels], Sequence[Labels]]:
    """The labels of an equation's operands and results; none where nothing is known of it."""
    equation = each.equation
    assert equation is not None
    signature = signature_of(equation) or indivisible(equation)
    return signature.operands, signature.results


def _places(name: int, labels: Labels) -> list[int]:
    return [i for i, label in enumerate(labels) if label is not None and label.name == name]
