"""Intra-operator sharding: how a stage is divided inside its submesh, by an integer program.

The steps of a stage form groups, each led by a matrix product, a look-up or a value
that the stage is given. A group has a few strategies, which follow from the signatures of its
operations; groups that need a value in another layout than it lies in pay for the collective,
forward and backward. The best choice that fits into a device's memory is an integer program.
"""

from __future__ import annotations

from hetjax.planner.intra_op.stage_sharding import (
    StageDevices,
    StageSharding,
    Training,
    shard_stage,
)

__all__ = ["StageDevices", "StageSharding", "Training", "shard_stage"]
