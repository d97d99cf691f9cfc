"""Facts about values beside how members share them: sameness, zeros, and powers of a size.

Of a value that all members have whole, each may take the part of its examples where the value is
the same for all of them; and a summand that no example has a part in counts once for each
microbatch, unless it is nothing, or is multiplied by the number of examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetjax import _compat
from hetjax.planner.work.example_shares import WalkedEquation, WalkedValue, counts_in_floats
from hetjax.planner.work.growth import Growth, KnownValue, Power, known_array
from hetjax.sharding.deduction.signature import Signature, shapes_of
from hetjax.sharding.deduction.signatures import signature_of
from hetjax.sharding.deduction.top_tier import WHOLE


@dataclass(frozen=True)
class Facts:
    """What is known of a value.

    Args:
        even: dimensions along which it is the same.
        is_zero: whether it is zero.
        power: of the number of examples, by which it is multiplied.
    """

    even: frozenset[int] = frozenset()
    is_zero: bool = False
    power: Power = 0


_NOTHING = Facts()


class ValueFacts:
    """The facts about the values of a walk.

    Args:
        growth: what grows with the number of examples.
    """

    def __init__(self, growth: Growth):
        self._growth = growth
        self._known: dict[WalkedValue, Facts] = {}

    def of(self, value: WalkedValue) -> Facts:
        """The facts about a value."""
        while value.copied is not None:
            value = value.copied
        if value.constant is not None and value not in self._known:
            self._known[value] = self._of_constant(value.constant)
        return self._known.get(value, _NOTHING)

    def learn(self, found: WalkedEquation) -> None:
        """Find the facts about an equation's results.

        Args:
            found: the equation; facts about its operands are known.
        """
        facts = [self.of(each) for each in found.operands]
        is_plain = not _compat.inner_jaxprs(found.equation)
        signature = signature_of(found.equation) if is_plain else None
        power = self._summed(found, facts, signature, _power(found, facts, signature))
        is_zero = signature is not None and _is_zero(signature, facts)
        is_one = is_plain and len(found.results) == 1
        for result in found.results:
            even = frozenset[int]()
            if is_one and result.top == WHOLE and result.shape.shape:
                even = frozenset(_even(found.equation, signature, facts))
            if even or is_zero or power != 0:
                self._known[result] = Facts(even, is_zero, power)

    def _summed(
        self,
        found: WalkedEquation,
        facts: Sequence[Facts],
        signature: Signature | None,
        power: Power,
    ) -> Power:
        """The power of results, with what is made of as many elements as there are examples.

        That is known of sums, and of what is the same along such a dimension.
        """
        if id(found.equation) in self._growth.scans:
            return None
        if signature is None or power is None:
            return power
        kept = {label.name for labels in signature.results for label in labels if label}
        added = set[int]()
        for place, (operand, each) in enumerate(zip(found.operands, facts, strict=True)):
            grown = self._growth.dimensions.get(id(found.equation.invars[place]), frozenset())
            taken = found.taken.get(place)
            shared = {operand.top.hdim, taken and taken.dimension}
            for dimension in grown - shared if not each.is_zero else ():
                label = signature.operands[place][dimension]
                if label is not None and label.name in kept:
                    continue
                if dimension not in each.even:
                    return None
                if label is not None and label.name in signature.summed:
                    added.add(label.name)
        return power + len(added)

    def _of_constant(self, constant: KnownValue) -> Facts:
        power, array = self._growth.powers.get(id(constant), 0), known_array(constant)
        if array is None:
            return Facts(power=power)
        even = [i for i in range(array.ndim) if (array == np.take(array, [0], axis=i)).all()]
        return Facts(frozenset(even), not array.any(), power)


def _is_zero(signature: Signature, facts: Sequence[Facts]) -> bool:
    """Whether a result is zero, since what it is linear in is."""
    return any(all(facts[i].is_zero for i in together) for together in signature.linear)


def _even(
    equation: _compat.JaxprEqn, signature: Signature | None, facts: Sequence[Facts]
) -> Iterator[int]:
    """The dimensions along which the only result is the same."""
    params = equation.params
    if equation.primitive.name == "iota":
        yield from (i for i in range(len(params["shape"])) if i != params["dimension"])
    if equation.primitive.name == "broadcast_in_dim":
        (before, *_), placed = shapes_of(equation.invars), params["broadcast_dimensions"]
        for place in range(len(params["shape"])):
            dimension = placed.index(place) if place in placed else None
            if dimension is None or before[dimension] == 1 or dimension in facts[0].even:
                yield place
        return
    if signature is None:
        return
    for place, label in enumerate(signature.results[0]):
        divided = [
            dimension in facts[operand].even
            for operand, labels in enumerate(signature.operands)
            for dimension, each in enumerate(labels)
            if label is not None and each is not None and each.name == label.name
        ]
        if divided and all(divided):
            yield place


def _power(found: WalkedEquation, facts: Sequence[Facts], signature: Signature | None) -> Power:
    """The power of an equation's results.

    A whole summand beside summands counts once for each microbatch: in all as often as a sum over
    examples that is multiplied by one power less.
    """
    powers: dict[int, Power] = {}
    for place, each in enumerate(facts):
        once = place in found.taken and found.taken[place].dimension is None
        if not each.is_zero:
            powers[place] = None if each.power is None else each.power - once
    known = {place: power for place, power in powers.items() if power is not None}
    if not any(known.values()) and len(known) == len(powers):
        return 0
    if found.is_in_body or len(known) < len(powers):
        return None
    if found.equation.primitive.name == "cond":
        return _same(known.values())
    if signature is None:
        return None
    if counts_in_floats(found.equation):
        return known[0]
    if found.equation.primitive.name == "div" and signature.linear:
        return known.get(0, 0) - known.get(1, 0)
    if signature.linear == (frozenset({0}), frozenset({1})):
        return sum(known.values())
    multiplied = {place for place, power in known.items() if power}
    for together in signature.linear:
        if multiplied <= together:
            return _same(power for place, power in known.items() if place in together)
    return None


def _same(powers: Iterable[int]) -> Power:
    several = set(powers)
    return several.pop() if len(several) == 1 else None
