"""Programs of a given kind, such as data parallelism: the same search among fewer choices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetjax.pipeline.program.costs import is_heavy
from hetjax.planner.hap.module_network import ModuleNetwork
from hetjax.planner.module_programs.program import Stored
from hetjax.planner.module_programs.ways import SUMMANDS, WHOLE, ComputingWay

AllowsWay = Callable[[ModuleNetwork, int, ComputingWay], bool]
AllowsStored = Callable[[ModuleNetwork, int, Stored], bool]


@dataclass(frozen=True)
class Forced:
    """What programs are looked at.

    Args:
        name: what they are called.
        ways: whether an equation of a module may be computed in some way.
        stored: whether a parameter of a module may be stored in some way.
    """

    name: str
    ways: AllowsWay
    stored: AllowsStored

    def allowed(self, network: ModuleNetwork) -> dict[int, NDArray[np.bool_]]:
        """For variables of a module the choices that may be made.

        Where a variable would have none, it may choose as it likes.

        Args:
            network: the module's choices.
        """
        found = {}
        for equation, variable in network.of_equation.items():
            ways = network.ways[equation]
            found[variable] = np.array([self.ways(network, equation, way) for way in ways])
        for place, variable in enumerate(network.stored):
            choices = network.choices[variable]
            found[variable] = np.array(
                [isinstance(e, Stored) and self.stored(network, place, e) for e in choices]
            )
        return {variable: each for variable, each in found.items() if each.any()}


def _by_examples(network: ModuleNetwork, equation: int, way: ComputingWay) -> bool:
    """What can be divided by examples is; nothing is divided otherwise."""
    examples = network.dimensions.examples
    divided = any(each.load.divided == examples for each in network.ways[equation])
    if divided and is_heavy(network.trace.traced.flat.steps[equation]):
        return way.load.divided == examples
    return way.load.divided in (-1, examples)


def _whole(network: ModuleNetwork, place: int, stored: Stored) -> bool:
    return stored.layout == WHOLE


DATA_PARALLEL = Forced("data parallel", _by_examples, _whole)
"""Members share the examples, and sum the gradients of all parameters."""


def _summed(network: ModuleNetwork, place: int, stored: Stored) -> bool:
    return stored == Stored(WHOLE, WHOLE)


REPLICATED = Forced("data parallel, all members update", _by_examples, _summed)
"""The same, and each member updates all parameters: data parallelism as PyTorch's DDP has it."""


def _scattered(network: ModuleNetwork, place: int, stored: Stored) -> bool:
    return stored.layout == WHOLE and stored.update != WHOLE


STATE_SHARDED = Forced("data parallel, state divided", _by_examples, _scattered)
"""The same, and each member updates its part, which the others then get: ZeRO's first stage."""


def _factors(network: ModuleNetwork, equation: int, way: ComputingWay) -> bool:
    step = network.trace.traced.flat.steps[equation]
    if not is_heavy(step) or not _gives_gradient(network, equation):
        return _by_examples(network, equation, way)
    return way.load.divided == -1 and SUMMANDS not in way.results


def _gives_gradient(network: ModuleNetwork, equation: int) -> bool:
    """Whether an equation makes the gradient of a parameter, but for its form."""
    traced = network.trace.traced
    steps = traced.flat.steps
    made = {value: i for i, step in enumerate(steps) for value in step.outputs}
    for gradient in traced.gradients:
        at = made.get(gradient) if isinstance(gradient, int) else None
        while at is not None and at != equation and len(steps[at].values()) == 1:
            at = made.get(steps[at].values()[0])
        if at == equation:
            return True
    return False


GATHERED_FACTORS = Forced("gathered factors", _factors, _summed)
"""Data parallelism whose members gather the factors of gradients in place of their sums."""


def _of_products(network: ModuleNetwork, place: int) -> bool:
    value = network.trace.traced.parameters[place]
    return any(
        value in step.values() and is_heavy(step) for step in network.trace.traced.flat.steps
    )


def _anything(network: ModuleNetwork, equation: int, way: ComputingWay) -> bool:
    return True


def _columns(network: ModuleNetwork, place: int, stored: Stored) -> bool:
    value = network.trace.traced.parameters[place]
    last = len(network.trace.traced.flat.avals[value].shape) - 1
    return not _of_products(network, place) or stored.layout == last


def _rows(network: ModuleNetwork, place: int, stored: Stored) -> bool:
    return not _of_products(network, place) or stored.layout == 0


COLUMNS = Forced("columns", _anything, _columns)
"""The parameters of all products are stored by columns; all else is as is best then."""

ROWS = Forced("rows", _anything, _rows)
"""The parameters of all products are stored by rows; all else is as is best then."""
