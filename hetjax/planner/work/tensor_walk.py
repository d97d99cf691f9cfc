"""What the devices of a member compute and hold that share values over a tensor axis.

Members that share the context may be several devices each. How these divide what their member has
follows from how parameters lie, and from the reshards of the stage's trace, by the same signatures
by which members share values: a product divides as its parameter does, a sum of parts is added up
where something needs it whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from hetjax import _compat
from hetjax.pipeline.program.costs import equation_cost
from hetjax.pipeline.program.traced_program import Step, num_bytes
from hetjax.pipeline.stages.traced_stage import TracedStage
from hetjax.planner.work.example_shares import WalkedEquation, WalkedValue
from hetjax.planner.work.trace_walk import TraceWalk
from hetjax.sharding.annotation.annotation import PARTIAL
from hetjax.sharding.annotation.rules import TENSOR
from hetjax.sharding.annotation.subgroup import axes_of, entries_of
from hetjax.sharding.context.block_work import is_block
from hetjax.sharding.context.ring_attention import HEADS
from hetjax.sharding.deduction.reshard import Resharding
from hetjax.sharding.deduction.top_tier import WHOLE, TopTier


@dataclass(frozen=True)
class StepShares:
    """What part of a step each device computes.

    Args:
        products: of its matrix products.
        traffic: of what it reads and writes.
    """

    products: float
    traffic: float


@dataclass(frozen=True, eq=False)
class TensorTrace:
    """A stage's trace, with what the devices of one of its members have of what that has.

    Args:
        devices: how many devices there are.
        shares: by value what part of it each has.
        computed: by step what part of it each computes.
        exchanged: by value what they tell each other for it to be made, in bytes of all members.
    """

    devices: int
    shares: Mapping[int, float]
    computed: Mapping[Step, StepShares]
    exchanged: Mapping[int, float]

    def of_value(self, value: int) -> float:
        """What part of a value each device has; of one that the trace has not, all of it."""
        return self.shares.get(value, 1.0)

    def of_step(self, step: Step) -> StepShares:
        """What part of a step each computes; of one that the trace has not, as they read."""
        found = self.computed.get(step)
        if found is not None:
            return found
        least = min((self.of_value(value) for value in step.values()), default=1.0)
        return StepShares(least, least)


def walk_tensor(
    traced: TracedStage, place: int, devices: int, parameters: Mapping[int, TopTier]
) -> TensorTrace:
    """Find what each device of a member has.

    Args:
        traced: the stage's trace, with the moves of its attentions and tokens in it.
        place: the member's place among the members.
        devices: how many devices its tensor axis has.
        parameters: how parameters lie on them that are divided, by their numbers in the trace.

    Returns:
        What was found.
    """
    return _TensorWalk(traced, place, devices).found(parameters)


def divided_evenly(spec: Sequence[object], shape: Sequence[int], devices: int) -> TopTier:
    """How an array lies on the devices of a tensor axis.

    Args:
        spec: its specification.
        shape: its shape.
        devices: how many there are.
    """
    for dimension, entry in enumerate(entries_of(jax.sharding.PartitionSpec(*spec), len(shape))):
        if TENSOR in axes_of(entry):
            return _evenly(dimension, shape, devices)
    return WHOLE


def _evenly(dimension: int, shape: Sequence[int], devices: int) -> TopTier:
    return TopTier(dimension, (shape[dimension] // devices,) * devices)


class _TensorWalk(TraceWalk["_StepParts"]):
    def __init__(self, traced: TracedStage, place: int, devices: int):
        super().__init__(traced)
        self._place, self._devices = place, devices

    def found(self, lies: Mapping[int, TopTier]) -> TensorTrace:
        noted = self.walk(lies)
        return TensorTrace(
            self._devices,
            {number: self._share(each.top) for number, each in self.values.items()},
            {step: each.shares for step, each in noted.items() if step.equation is not None},
            {step.outputs[0]: each.exchanged for step, each in noted.items() if each.exchanged},
        )

    def nothing_noted(self) -> _StepParts:
        return _StepParts()

    def follow(
        self, equation: _compat.JaxprEqn, operands: Sequence[WalkedValue]
    ) -> list[WalkedValue]:
        if is_block(equation):
            return self._block(equation, operands)
        return super().follow(equation, operands)

    def wanted(self, resharding: Resharding, shape: Sequence[int]) -> TopTier:
        group = resharding.annotation(0).subgroups[self._place]
        return divided_evenly(tuple(group.spec), shape, self._devices)

    def note_move(self, step: Step, operand: WalkedValue, top: TopTier) -> None:
        if top != operand.top:
            self._bring_together(operand)

    def _block(
        self, equation: _compat.JaxprEqn, operands: Sequence[WalkedValue]
    ) -> list[WalkedValue]:
        """A block of an attention: by heads where its queries are, else on every device."""
        is_divided = operands[0].top.hdim == HEADS
        for operand in operands:
            if operand.top.hdim != HEADS or not is_divided:
                self._bring_together(operand)
        part = 1 / self._devices if is_divided else 1.0
        self.noted.add(1.0, 1.0, part, part)
        shapes: list[Any] = [variable.aval for variable in equation.outvars]
        tops = [_evenly(HEADS, s.shape, self._devices) if is_divided else WHOLE for s in shapes]
        return [WalkedValue(*pair) for pair in zip(shapes, tops, strict=True)]

    def _bring_together(self, value: WalkedValue) -> None:
        """Have each device have a value whole, from then on."""
        if value.top == WHOLE:
            return
        is_sum = value.top.hdim == PARTIAL
        self.noted.exchanged += value.summand_bytes if is_sum else num_bytes(value.shape)
        value.top = WHOLE

    def note_exchange(self, equation: _compat.JaxprEqn, size: float, times: int) -> None:
        self.noted.exchanged += times * size

    def note_equation(self, walked: WalkedEquation) -> None:
        if walked.is_in_body:
            return
        shares = [self._share(each.top) for each in walked.operands]
        for place, taken in walked.taken.items():
            shares[place] = 1.0 if taken.dimension is None else 1 / self._devices
        shares += [self._share(each.top) for each in walked.results]
        sizes = [float(num_bytes(v.shape)) for v in (*walked.operands, *walked.results)]
        cost = equation_cost(walked.equation)
        moved = float(np.average(shares, weights=sizes)) if sum(sizes) else 1.0
        self.noted.add(cost.matmul_flops, cost.bytes, min(shares, default=1.0), moved)

    def _share(self, top: TopTier) -> float:
        return 1 / self._devices if isinstance(top.hdim, int) else 1.0


class _StepParts:
    """What a step is made of: products and bytes of its equations, and of these what devices do.

    Attributes:
        exchanged: bytes that devices tell each other for it.
    """

    def __init__(self) -> None:
        self._figures: list[tuple[float, float, float, float]] = []
        self.exchanged = 0.0

    def add(self, flops: float, moved: float, products: float, traffic: float) -> None:
        """Note an equation.

        Args:
            flops: FLOPs of its matrix products.
            moved: bytes that it reads and writes.
            products: what part of the one each device computes.
            traffic: what part of the other.
        """
        self._figures.append((flops, moved, products, traffic))

    @property
    def shares(self) -> StepShares:
        """What part of all of it each device does."""
        return StepShares(*(self._mean(weight, part) for weight, part in ((0, 2), (1, 3))))

    def _mean(self, weight: int, part: int) -> float:
        whole = sum(each[weight] for each in self._figures)
        if not whole:
            return 1.0
        return sum(each[weight] * each[part] for each in self._figures) / whole
