"""How values lie where members share the examples of a microbatch, by signatures alone.

Each member has some of the examples. What is made of each example by itself is divided as they are;
a sum over examples, as the mean of a batch normalisation is, lies as one summand on each member,
and so may stay while it is only added up and scaled. Where an equation cannot take an operand as it
lies, the members exchange that, and from then on each has it whole.

Deduction, which finds what really moves, asks every equation for every way that values may lie, and
takes a hundred times as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from hetjax import _compat
from hetjax.pipeline.program.traced_program import Constant, num_bytes
from hetjax.planner.work.growth import KnownValue
from hetjax.sharding.annotation.annotation import PARTIAL
from hetjax.sharding.deduction.annotated_program import Taken
from hetjax.sharding.deduction.bottom_tier import ELSEWHERE, OperandError
from hetjax.sharding.deduction.signature import Label, Signature, dtypes_of, shapes_of
from hetjax.sharding.deduction.signatures import signature_of
from hetjax.sharding.deduction.top_tier import (
    WHOLE,
    Passed,
    TopTier,
    indivisible,
    shares_passed,
    take,
)

_IDENTITIES = frozenset(("hetjax_constraint", "hetjax_reshard", "optimization_barrier", "copy_p"))


@dataclass(eq=False, slots=True)
class WalkedValue:
    """A value on the way of a walk.

    Args:
        shape: its shape and dtype.
        top: how members share it.
        summand_bytes: of summands, the bytes of the smallest of what they were made of one by one,
            which is exchanged in their place.
        constant: what holds its value, of one that was known when the program was traced.
        copied: in a body, the value that it has the place of.
    """

    shape: Any
    top: TopTier = WHOLE
    summand_bytes: float = -1.0
    constant: KnownValue | None = None
    copied: WalkedValue | None = None

    def __post_init__(self) -> None:
        if self.summand_bytes < 0:
            self.summand_bytes = num_bytes(self.shape)


@dataclass(frozen=True)
class WalkedEquation:
    """An equation on the way of a walk, or a conditional's results that are brought together.

    Args:
        equation: the equation.
        operands: what it takes; of a conditional, what its branches give for one result.
        results: what it makes.
        taken: by place, those operands that all members have whole, of which each takes a part; or
            the first alone takes them, so that they count once.
        is_in_body: whether it stands in a scan, a loop or a conditional.
    """

    equation: _compat.JaxprEqn
    operands: Sequence[WalkedValue]
    results: Sequence[WalkedValue]
    taken: Mapping[int, Taken]
    is_in_body: bool


def examples_of(shape: Any, examples: int) -> WalkedValue:
    """A value whose first dimension is that of the examples.

    They may be cut anywhere: one of two members has the first example alone.

    Args:
        shape: its shape and dtype.
        examples: how many there are.
    """
    return WalkedValue(shape, TopTier(0, (1, examples - 1)))


def counts_in_floats(equation: _compat.JaxprEqn) -> bool:
    """Whether whole numbers become floating ones, as a count does: their sum becomes the sum.

    Args:
        equation: the equation.
    """
    if equation.primitive.name != "convert_element_type":
        return False
    before, after = dtypes_of([*equation.invars, *equation.outvars])
    return jnp.issubdtype(before, jnp.integer) and jnp.issubdtype(after, jnp.floating)


class ExampleWalk:
    """Goes over equations, and finds how values lie.

    Args:
        exchanged: told of each value that members exchange: for which equation, of how many bytes,
            how often.
        computed: told of each equation that holds no jaxpr, after that; None for nobody.
    """

    def __init__(
        self,
        exchanged: Callable[[_compat.JaxprEqn, float, int], None],
        computed: Callable[[WalkedEquation], None] | None = None,
    ):
        self._told_exchanged, self._told_computed = exchanged, computed
        self._times = 1
        self._depth = 0

    def follow(
        self, equation: _compat.JaxprEqn, operands: Sequence[WalkedValue]
    ) -> list[WalkedValue]:
        """Go over an equation.

        Args:
            equation: the equation.
            operands: what it takes.

        Returns:
            What it makes.
        """
        called = _compat.inlined_jaxpr(equation)
        if called is not None:
            return self._through(called, operands)
        match equation.primitive.name:
            case "scan":
                return self._scan(equation, operands)
            case "while":
                return self._loop(equation, operands)
            case "cond":
                return self._conditional(equation, operands)
        return self._compute(equation, operands)

    def _through(
        self, closed: _compat.ClosedJaxpr, operands: Sequence[WalkedValue]
    ) -> list[WalkedValue]:
        """Go over the equations of a jaxpr."""
        jaxpr = closed.jaxpr
        known: dict[Any, WalkedValue] = dict(zip(jaxpr.invars, operands, strict=True))
        for variable, array in zip(jaxpr.constvars, closed.consts, strict=True):
            known[variable] = WalkedValue(variable.aval, constant=Constant(array))

        def read(atom: Any) -> WalkedValue:
            if isinstance(atom, _compat.Literal):
                return WalkedValue(atom.aval, constant=atom)
            return known[atom]

        for equation in jaxpr.eqns:
            results = self.follow(equation, [read(atom) for atom in equation.invars])
            known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _compute(
        self, equation: _compat.JaxprEqn, operands: Sequence[WalkedValue]
    ) -> list[WalkedValue]:
        tops = [each.top for each in operands]
        passed = Passed([WHOLE] * len(equation.outvars))
        if equation.primitive.name in _IDENTITIES or counts_in_floats(equation):
            passed = Passed(tops)
        elif any(top != WHOLE for top in tops):
            passed = self._passed(equation, operands, tops)
        summands = [each for each in operands if each.top.hdim == PARTIAL]
        results = [
            _made(variable.aval, top, summands)
            for variable, top in zip(equation.outvars, passed.results, strict=True)
        ]
        self._tell(equation, operands, results, passed.taken)
        return results

    def _passed(
        self,
        equation: _compat.JaxprEqn,
        operands: Sequence[WalkedValue],
        tops: list[TopTier],
    ) -> Passed:
        signature = _signature_of(equation)
        while True:
            try:
                return shares_passed(equation, signature, tops)
            except OperandError as error:
                self._exchange(equation, operands, tops, error.operand)

    def _exchange(
        self,
        equation: _compat.JaxprEqn,
        operands: Sequence[WalkedValue],
        tops: list[TopTier],
        refused: int,
    ) -> None:
        """Have members exchange what is in the way of an equation; they have it whole then."""
        summands = [place for place, top in enumerate(tops) if top.hdim == PARTIAL]
        if summands:
            for place in summands:
                self._settle(equation, operands[place])
                tops[place] = WHOLE
            return
        divided = [place for place, top in enumerate(tops) if top != WHOLE]
        for place in divided if refused == ELSEWHERE else (refused,):
            # What makes less of each part exchanges that.
            is_reduced = equation.primitive.name.startswith(("reduce_", "arg"))
            values = equation.outvars if is_reduced else equation.invars[place : place + 1]
            self._tell_exchanged(equation, sum(num_bytes(_shape_of(each)) for each in values))
            tops[place] = WHOLE

    def _settle(self, equation: _compat.JaxprEqn, value: WalkedValue) -> None:
        """Exchange a value, once: from then on each member has it whole."""
        if value.top == WHOLE:
            return
        is_sum = value.top.hdim == PARTIAL
        self._tell_exchanged(equation, value.summand_bytes if is_sum else num_bytes(value.shape))
        value.top = WHOLE

    def _tell_exchanged(self, equation: _compat.JaxprEqn, size: float) -> None:
        if self._times:
            self._told_exchanged(equation, size, self._times)

    def _tell(
        self,
        equation: _compat.JaxprEqn,
        operands: Sequence[WalkedValue],
        results: Sequence[WalkedValue],
        taken: Mapping[int, Taken],
    ) -> None:
        if self._told_computed is not None and self._times:
            found = WalkedEquation(equation, operands, results, taken, self._depth > 0)
            self._told_computed(found)

    @contextmanager
    def _body(self, times: int) -> Iterator[None]:
        """In a body that runs so often; nobody is told of one that runs never."""
        before = self._times
        self._times, self._depth = before * times, self._depth + 1
        yield
        self._times, self._depth = before, self._depth - 1

    def _scan(
        self, equation: _compat.JaxprEqn, operands: Sequence[WalkedValue]
    ) -> list[WalkedValue]:
        params = equation.params
        first, count = _compat.scan_sizes(params)
        consts, carry, stacked = (
            operands[:first],
            operands[first : first + count],
            operands[first + count :],
        )
        for each in stacked:
            if each.top.hdim == 0:
                self._settle(equation, each)
        body: _compat.ClosedJaxpr = params["jaxpr"]
        shapes = [variable.aval for variable in body.jaxpr.invars[first + count :]]
        tops = [_moved(each.top, -1) for each in stacked]

        def iteration(carried: list[WalkedValue]) -> list[WalkedValue]:
            rows = [WalkedValue(*each) for each in zip(shapes, tops, strict=True)]
            return self._through(body, [*map(_copy, consts), *carried, *rows])

        around, made = self._carried(equation, carry, iteration, params["length"])
        found = [*around, *(_moved(each.top, 1) for each in made[count:])]
        return self._of_body(equation, operands, range(first, first + count), found)

    def _loop(
        self, equation: _compat.JaxprEqn, operands: Sequence[WalkedValue]
    ) -> list[WalkedValue]:
        params = equation.params
        first = params["cond_nconsts"]
        second = first + params["body_nconsts"]
        carry = operands[second:]

        def iteration(carried: list[WalkedValue]) -> list[WalkedValue]:
            consts = [_copy(each) for each in operands[:second]]
            (goes_on,) = self._through(params["cond_jaxpr"], [*consts[:first], *carried])
            self._settle(equation, goes_on)
            return self._through(params["body_jaxpr"], [*consts[first:], *carried])

        found, _ = self._carried(equation, carry, iteration, 1)
        return self._of_body(equation, operands, range(second, len(operands)), found)

    def _carried(
        self,
        equation: _compat.JaxprEqn,
        carry: Sequence[WalkedValue],
        iteration: Callable[[list[WalkedValue]], list[WalkedValue]],
        times: int,
    ) -> tuple[list[TopTier], list[WalkedValue]]:
        """How values lie that go round, and what the last iteration makes.

        What each member has whole at first becomes what an iteration makes of it. What an iteration
        leaves in another way than it takes it, the members exchange every time.
        """

        def values() -> list[WalkedValue]:
            return [WalkedValue(c.shape, top) for c, top in zip(carry, tops, strict=True)]

        tops = [each.top for each in carry]
        exchanged = set[int]()
        while True:
            with self._body(0):
                after = [each.top for each in iteration(values())[: len(carry)]]
            unlike = [i for i, top in enumerate(after) if top != tops[i] and i not in exchanged]
            if not unlike:
                break
            for i in unlike:
                if tops[i] != WHOLE:
                    exchanged.add(i)
                tops[i] = after[i] if tops[i] == WHOLE else WHOLE
        for i in exchanged:
            self._settle(equation, carry[i])
        with self._body(times):
            made = iteration(values())
            for i in exchanged:
                self._settle(equation, made[i])
        return tops, made

    def _of_body(
        self,
        equation: _compat.JaxprEqn,
        operands: Sequence[WalkedValue],
        carried: range,
        found: Sequence[TopTier],
    ) -> list[WalkedValue]:
        """What a scan or a loop makes, whose first results are of the operands that went round."""
        pairs = zip(equation.outvars, found, strict=True)
        results = [WalkedValue(variable.aval, top) for variable, top in pairs]
        around = zip(carried, found, strict=False)
        taken = {place: take(top) for place, top in around if operands[place].top != top}
        self._tell(equation, operands, results, taken)
        return results

    def _conditional(
        self, equation: _compat.JaxprEqn, operands: Sequence[WalkedValue]
    ) -> list[WalkedValue]:
        index, *rest = operands
        self._settle(equation, index)
        with self._body(1):
            branches = [self._through(each, rest) for each in equation.params["branches"]]
        pairs = zip(equation.outvars, zip(*branches, strict=True), strict=True)
        return [self._selected(equation, variable, cases) for variable, cases in pairs]

    def _selected(
        self, equation: _compat.JaxprEqn, variable: Any, cases: Sequence[WalkedValue]
    ) -> WalkedValue:
        """What a conditional gives, one of several values that may lie in unlike ways."""
        ways = {each.top for each in cases if each.top != WHOLE}
        if len(ways) > 1:
            for each in cases:
                self._settle(equation, each)
            ways = set()
        top = ways.pop() if ways else WHOLE
        result = WalkedValue(variable.aval, top)
        taken = {place: take(top) for place, each in enumerate(cases) if each.top != top}
        self._tell(equation, cases, [result], taken)
        return result


def _shape_of(variable: Any) -> Any:
    return variable.aval


def _signature_of(equation: _compat.JaxprEqn) -> Signature:
    """The signature of an equation; of a reshape, dimensions of one example are kept as well."""
    found = signature_of(equation) or indivisible(equation)
    if equation.primitive.name != "reshape" or equation.params["dimensions"] is not None:
        return found
    shapes = shapes_of([*equation.invars[:1], *equation.outvars])
    (operand, *others), (result,) = found.operands, found.results
    labels, single = [list(operand), list(result)], [_of_one_element(shape) for shape in shapes]
    for number, ahead in enumerate(single[0].keys() & single[1].keys()):
        for side, places in zip(labels, single, strict=True):
            side[places[ahead]] = Label(-1 - number)
    kept, made = map(tuple, labels)
    return replace(found, operands=(kept, *others), results=(made,))


def _of_one_element(shape: Sequence[int]) -> dict[int, int]:
    """The first dimension of one element behind so many elements."""
    places: dict[int, int] = {}
    for place, size in enumerate(shape):
        if size == 1:
            places.setdefault(math.prod(shape[:place]), place)
    return places


def _made(shape: Any, top: TopTier, summands: Sequence[WalkedValue]) -> WalkedValue:
    made = WalkedValue(shape, top)
    if top.hdim == PARTIAL and summands:
        made.summand_bytes = min(made.summand_bytes, sum(each.summand_bytes for each in summands))
    return made


def _copy(value: WalkedValue) -> WalkedValue:
    """A value as a body has it, where it may be exchanged every time."""
    return WalkedValue(value.shape, value.top, value.summand_bytes, copied=value)


def _moved(top: TopTier, by: int) -> TopTier:
    """How a row lies of an array, or an array of rows."""
    return replace(top, hdim=top.hdim + by) if isinstance(top.hdim, int) else top
