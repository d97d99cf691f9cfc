"""What members that share the context compute and move, read off the trace of their stage.

A stage whose members share the context is traced with its moves written in it, as reshards. A walk
over the trace finds how every value lies, and from that what part of each equation each member
computes, and who sends which bytes to whom.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetjax import _compat
from hetjax.pipeline.program.costs import equation_cost, step_cost
from hetjax.pipeline.program.traced_program import Step, num_bytes
from hetjax.pipeline.program.work_classes import Work, attention_classes, is_product, step_work
from hetjax.pipeline.stages.traced_stage import TracedStage
from hetjax.planner.work.example_shares import WalkedEquation, WalkedValue
from hetjax.planner.work.trace_walk import TraceWalk
from hetjax.sharding.annotation.annotation import DUPLICATE, PARTIAL, HSharding
from hetjax.sharding.annotation.subgroup import Subgroup
from hetjax.sharding.context.block_work import block_bytes, block_work, is_block
from hetjax.sharding.deduction.annotated_program import Taken
from hetjax.sharding.deduction.reshard import Resharding
from hetjax.sharding.deduction.signatures import signature_of
from hetjax.sharding.deduction.top_tier import WHOLE, TopTier, shares_passed, top_tier_of
from hetjax.sharding.resolution.crossing import crossing
from hetjax.sharding.resolution.network import Network
from hetjax.sharding.resolution.senders import BestLink

Shares = NDArray[np.float64]
"""Something of each member, ``[members]``."""

Messages = Mapping[tuple[int, int], int]
"""Bytes by the place of the member that sends them and of the one that gets them."""


@dataclass(frozen=True, eq=False)
class Amounts:
    """What members compute.

    Args:
        flops: FLOPs of matrix products.
        traffic: bytes read and written, were nothing fused.
        classes: FLOPs and bytes by class of work.
    """

    flops: Shares
    traffic: Shares
    classes: Mapping[str, Shares]

    def __add__(self, other: Amounts) -> Amounts:
        classes = dict(self.classes)
        for name, amount in other.classes.items():
            classes[name] = classes[name] + amount if name in classes else amount
        return Amounts(self.flops + other.flops, self.traffic + other.traffic, classes)


@dataclass(frozen=True, eq=False)
class ContextMove:
    """A value that comes to lie in another way.

    Args:
        value: its number before.
        moved: its number afterwards.
        messages: who sends what to whom; none where each member has what it wants.
        is_early: whether it leaves as soon as it is there.
    """

    value: int
    moved: int
    messages: Messages
    is_early: bool = False


@dataclass(frozen=True, eq=False)
class ContextTrace:
    """A stage's trace, with what its members have of it.

    Args:
        count: how many members there are.
        computed: by step what members compute of it.
        moves: of the steps that are moves, what is moved.
        exchanged: by step what all members tell each other before it, in bytes.
        given: what they tell each other of what the stage gives to others, in bytes.
        shares: by value what part of it each member has.
        blocks: of steps that are blocks of an attention, what each member holds while it computes
            its own.
    """

    count: int
    computed: Mapping[Step, Amounts]
    moves: Mapping[Step, ContextMove]
    exchanged: Mapping[Step, float]
    given: Sequence[float]
    shares: Mapping[int, Shares]
    blocks: Mapping[Step, tuple[int, ...]]

    def amounts(self, step: Step) -> Amounts:
        """What members compute of a step; of one that the trace has not, as much as they read."""
        found = self.computed.get(step)
        if found is not None:
            return found
        read = [self.shares[value] for value in step.values() if value in self.shares]
        share = np.minimum.reduce(read) if read else np.ones(self.count)
        cost = step_cost(step)
        of_classes = _classes(step_work(step), share, share)
        return Amounts(cost.matmul_flops * share, cost.bytes * share, of_classes)

    def held_bytes(self, value: int, size: int) -> Shares:
        """What members hold of a value of so many bytes."""
        found = self.shares.get(value)
        return np.full(self.count, float(size)) if found is None else size * found


def walk_context(
    traced: TracedStage, union: tuple[Subgroup, ...], lies: Mapping[int, TopTier]
) -> ContextTrace:
    """Find what members compute and move.

    Args:
        traced: the stage's trace, with the moves of its attentions and tokens in it.
        union: the members.
        lies: how the inputs of the trace lie that members do not have whole, by their numbers.

    Returns:
        What was found.
    """
    return _ContextWalk(traced, union).found(lies)


class _ContextWalk(TraceWalk["_Noted"]):
    def __init__(self, traced: TracedStage, union: tuple[Subgroup, ...]):
        super().__init__(traced)
        self._union, self._count = union, len(union)
        self._equation: _compat.JaxprEqn | None = None
        self._counted: dict[object, Amounts] = {}
        self._moves: dict[Step, ContextMove] = {}

    def found(self, lies: Mapping[int, TopTier]) -> ContextTrace:
        walked = self.walk(lies)
        noted = {step: each for step, each in walked.items() if step not in self._moves}
        given = []
        for operands in (self.traced.sent, self.traced.returned):
            numbers = dict.fromkeys(n for n in operands if isinstance(n, int))
            last = [self.values[n] for n in numbers if self.values[n].top.hdim == PARTIAL]
            given.append(float(sum(each.summand_bytes for each in last)))
        lying = {n: self._share(v.top, v.shape.shape) for n, v in self.values.items()}
        taken = _whole_but_taken(noted, self.values)
        return ContextTrace(
            self._count,
            {step: self._amounts(step, each, taken) for step, each in noted.items()},
            self._moves,
            {step: each.exchanged for step, each in noted.items() if each.exchanged},
            given,
            {**lying, **taken},
            {step: each.block_bytes for step, each in noted.items() if each.block_bytes},
        )

    def nothing_noted(self) -> _Noted:
        return _Noted()

    def follow(
        self, equation: _compat.JaxprEqn, operands: Sequence[WalkedValue]
    ) -> list[WalkedValue]:
        self._equation = equation
        return super().follow(equation, operands)

    def wanted(self, resharding: Resharding, shape: Sequence[int]) -> TopTier:
        return top_tier_of(resharding.annotation(0), shape)

    def note_move(self, step: Step, operand: WalkedValue, top: TopTier) -> None:
        assert step.equation is not None
        resharding: Resharding = step.equation.params["resharding"]
        shape = operand.shape
        messages = _messages(
            self._union, operand.top, top, tuple(shape.shape), shape.dtype.itemsize
        )
        (value,) = step.values()
        self._moves[step] = ContextMove(value, step.outputs[0], messages, resharding.is_early)

    def note_exchange(self, equation: _compat.JaxprEqn, size: float, times: int) -> None:
        self.noted.exchanged += times * size

    def note_equation(self, walked: WalkedEquation) -> None:
        if walked.is_in_body:
            return
        shares = [self._share(each.top, each.shape.shape) for each in walked.operands]
        for place, taken in walked.taken.items():
            shares[place] = self._taken_share(taken, walked.operands[place].shape.shape)
        made = [self._share(each.top, each.shape.shape) for each in walked.results]
        if walked.equation is self._equation:
            for place, operand in enumerate(walked.operands):
                if operand.top == WHOLE:
                    took = shares[place] if place in walked.taken else None
                    self.noted.taken[place] = took
        located: tuple[Mapping[int, tuple[int, int]], ...] = ()
        if is_block(walked.equation):
            signature = signature_of(walked.equation)
            assert signature is not None
            tops = [each.top for each in walked.operands]
            located = shares_passed(walked.equation, signature, tops).located
        shapes = [*(each.shape for each in walked.operands), *(v.shape for v in walked.results)]
        sizes = [float(num_bytes(each)) for each in shapes]
        self.noted.parts.append(_Part(walked.equation, sizes, [*shares, *made], located))

    def _amounts(self, step: Step, noted: _Noted, taken: Mapping[int, Shares]) -> Amounts:
        """What members compute of a step."""
        made = next((taken[number] for number in step.outputs if number in taken), None)
        key = id(noted), None if made is None else made.tobytes()
        if key not in self._counted:
            self._counted[key] = self._found_amounts(step, noted.parts, made)
        return self._counted[key]

    def _found_amounts(self, step: Step, parts: Sequence[_Part], made: Shares | None) -> Amounts:
        if len(parts) == 1 and parts[0].located:
            return _block_amounts(parts[0])
        cost = step_cost(step)
        products, traffic = self._mean(parts, "matmul_flops"), self._mean(parts, "bytes")
        if made is not None:
            # Nobody makes more of it than is used.
            traffic = made
        return Amounts(
            cost.matmul_flops * products,
            cost.bytes * traffic,
            _classes(step_work(step), products, traffic),
        )

    def _mean(self, parts: Sequence[_Part], figure: str) -> Shares:
        """What part members have of what equations take, as a mean of them all."""
        weights = [getattr(equation_cost(part.equation), figure) for part in parts]
        if not sum(weights):
            return np.ones(self._count)
        shares = [part.least if figure == "matmul_flops" else part.of_bytes for part in parts]
        return np.average(shares, axis=0, weights=weights)

    def _share(self, top: TopTier, shape: Sequence[int]) -> Shares:
        if top == WHOLE or top.hdim == PARTIAL:
            return np.ones(self._count)
        return _share_of(top, tuple(shape))

    def _taken_share(self, taken: Taken, shape: Sequence[int]) -> Shares:
        if taken.dimension is None:
            return np.ones(self._count)
        size = max(1, shape[taken.dimension])
        return np.array([(stop - start) / size for start, stop in taken.parts])


def _whole_but_taken(
    noted: Mapping[Step, _Noted], values: Mapping[int, WalkedValue]
) -> dict[int, Shares]:
    """The values that all members could have whole, but of which each uses a part alone."""
    uses: dict[int, list[Shares | None]] = {}
    for step, each in noted.items():
        for place, took in each.taken.items():
            operand = step.inputs[place]
            if isinstance(operand, int):
                uses.setdefault(operand, []).append(took)
    made = {number for step in noted for number in step.outputs}
    found = {}
    for number, used in uses.items():
        known = [each for each in used if each is not None]
        if number in made and values[number].top == WHOLE and len(known) == len(used):
            found[number] = np.maximum.reduce(known)
    return found


@dataclass(eq=False)
class _Noted:
    """What is noted of a step.

    Args:
        parts: its equations.
        exchanged: bytes that all members tell each other before it.
        taken: of the operands that all members have whole, by place, the part that each takes; None
            for all of it.
    """

    parts: list[_Part] = field(default_factory=list)
    exchanged: float = 0.0
    taken: dict[int, Shares | None] = field(default_factory=dict)

    @functools.cached_property
    def block_bytes(self) -> tuple[int, ...]:
        """Of a block of an attention, what each member holds while it computes its own."""
        return tuple(
            block_bytes(part.equation, ranges) for part in self.parts for ranges in part.located
        )


@dataclass(frozen=True, eq=False)
class _Part:
    """An equation of a step.

    Args:
        equation: the equation.
        sizes: bytes of its operands and results, whole.
        shares: what part of each members have.
        located: of a block of an attention, the range of each label that each member has.
    """

    equation: _compat.JaxprEqn
    sizes: Sequence[float]
    shares: Sequence[Shares]
    located: tuple[Mapping[int, tuple[int, int]], ...]

    @property
    def least(self) -> Shares:
        """What part members have of what is divided: a product takes as much of its FLOPs."""
        return np.minimum.reduce(self.shares)

    @property
    def of_bytes(self) -> Shares:
        """What part members have of all that is read and written."""
        return np.average(self.shares, axis=0, weights=self.sizes if sum(self.sizes) else None)


@functools.lru_cache(maxsize=1024)
def _share_of(top: TopTier, shape: tuple[int, ...]) -> Shares:
    """What part of a value members have that divide it."""
    if isinstance(top.hdim, int):
        return np.array(top.widths) / max(1, shape[top.hdim])
    assert isinstance(top.hdim, tuple)
    found = np.ones(len(top.ranges))
    for place, dimension in enumerate(top.hdim):
        widths = [each[place][1] - each[place][0] for each in top.ranges]
        found *= np.array(widths) / max(1, shape[dimension])
    return found


def _classes(work: Work, of_products: Shares, of_traffic: Shares) -> dict[str, Shares]:
    return {
        name: amount * (of_products if is_product(name) else of_traffic)
        for name, amount in work.items()
    }


def _block_amounts(part: _Part) -> Amounts:
    """What members compute of a block of an attention, of which each has another part."""
    works = [block_work(part.equation, ranges) for ranges in part.located]
    moved = sum(part.sizes) * part.of_bytes
    classes: dict[str, Shares] = {}
    for member, work in enumerate(works):
        for name, amount in attention_classes(work).items():
            classes.setdefault(name, np.zeros(len(works)))[member] += amount
    return Amounts(
        np.array([each.products for each in works]),
        moved + np.array([each.traffic for each in works]),
        classes,
    )


@functools.lru_cache(maxsize=1024)
def _messages(
    union: tuple[Subgroup, ...],
    source: TopTier,
    target: TopTier,
    shape: tuple[int, ...],
    itemsize: int,
) -> Messages:
    """Who sends what to whom, so that a value comes to lie in another way; as the runtime does."""
    if source in (target, WHOLE):
        return {}
    member_of = {d: place for place, group in enumerate(union) for d in group.devices}
    before, after = (HSharding(union, *_fields(top)) for top in (source, target))
    found = crossing(before, after, shape, member_of, BestLink(Network.alike()), itemsize)
    sent: Counter[tuple[int, int]] = Counter()
    for part in found.parts:
        size = itemsize * int(np.prod([stop - start for start, stop in part.bounds]))
        for sender, receiver in part.messages:
            if size and member_of[sender] != member_of[receiver]:
                sent[member_of[sender], member_of[receiver]] += size
    return dict(sent)


def _fields(top: TopTier) -> tuple[Any, Any, Any]:
    return (DUPLICATE, (), ()) if top == WHOLE else (top.hdim, top.widths, top.ranges)
