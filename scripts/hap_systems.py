"""What synthesised programs are compared with: programs of one kind, and even or padded shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hetjax.planner.hap.forced import (
    COLUMNS,
    DATA_PARALLEL,
    GATHERED_FACTORS,
    ROWS,
    STATE_SHARDED,
    Forced,
)
from hetjax.planner.module_programs.program import Stored


def _stored(network: Any, place: int, stored: Stored) -> bool:
    """DeepSpeed: experts on devices of their own, all else as ZeRO has it."""
    value = network.trace.traced.parameters[place]
    if len(network.trace.traced.flat.avals[value].shape) == 3:
        return stored.layout == 0
    return STATE_SHARDED.stored(network, place, stored)


def _ways(network: Any, equation: int, way: Any) -> bool:
    """What has experts is divided by them, or by examples."""
    operands = network.trace.traced.flat.steps[equation].values()
    shapes = [network.trace.traced.flat.avals[value].shape for value in operands]
    if any(len(shape) >= 4 for shape in shapes) or any(len(shape) == 3 for shape in shapes):
        return True
    return STATE_SHARDED.ways(network, equation, way)


DEEPSPEED = Forced("DeepSpeed-like", _ways, _stored)


@dataclass(frozen=True)
class System:
    """How a model is trained.

    Args:
        forced: what programs are looked at; None for all.
        is_even: whether all members have as much of everything; else the best ratios.
        is_padded: whether each has as many experts, some of them idle.
        stages: which planner finds it: HAP's, Harp's, or Harp's with synthesised stages.
    """

    forced: Forced | None = None
    is_even: bool = False
    is_padded: bool = False
    stages: Literal["one", "pipeline", "either"] = "one"


SYSTEMS = {
    "synthesised": System(),
    "even data parallel": System(DATA_PARALLEL, is_even=True),
    "data parallel": System(DATA_PARALLEL),
    "columns": System(COLUMNS),
    "rows": System(ROWS),
    "gathered factors": System(GATHERED_FACTORS),
    "experts": System(DEEPSPEED),
    "padded experts": System(DEEPSPEED, is_even=True, is_padded=True),
    "Harp": System(stages="pipeline"),
    "Harp with programs": System(stages="either"),
}
