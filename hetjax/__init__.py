"""hetjax: one training job out of unlike accelerators.

The names below are the public interface; they are imported when they are first used, so that
``import hetjax`` and the commands' checks of their input are quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetjax.import_when_used import import_when_used

if TYPE_CHECKING:
    from hetjax.errors import (
        CheckpointError,
        InputError,
        NonfiniteError,
        SaveError,
        WorkerLostError,
    )
    from hetjax.mesh import Cluster
    from hetjax.planner import Plan, PlanOptions, plan, simulate
    from hetjax.report import draw_timeline, visualize
    from hetjax.runtime import (
        CheckpointOptions,
        HArray,
        LocalOptions,
        Play,
        RayOptions,
        Trainer,
        reshard,
    )
    from hetjax.sharding import HSharding, Subgroup
    from hetjax.sharding.attention.attention import attention
    from hetjax.sharding.cross_entropy.linear_cross_entropy import linear_cross_entropy

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CheckpointOptions",
    "Cluster",
    "HArray",
    "HSharding",
    "InputError",
    "LocalOptions",
    "NonfiniteError",
    "Plan",
    "PlanOptions",
    "Play",
    "RayOptions",
    "SaveError",
    "Subgroup",
    "Trainer",
    "WorkerLostError",
    "attention",
    "draw_timeline",
    "linear_cross_entropy",
    "plan",
    "reshard",
    "simulate",
    "visualize",
]

import_when_used(
    __name__,
    {
        "CheckpointError": "hetjax.errors",
        "CheckpointOptions": "hetjax.runtime",
        "Cluster": "hetjax.mesh",
        "HArray": "hetjax.runtime",
        "HSharding": "hetjax.sharding",
        "InputError": "hetjax.errors",
        "LocalOptions": "hetjax.runtime",
        "NonfiniteError": "hetjax.errors",
        "Plan": "hetjax.planner",
        "PlanOptions": "hetjax.planner",
        "Play": "hetjax.runtime",
        "RayOptions": "hetjax.runtime",
        "SaveError": "hetjax.errors",
        "Subgroup": "hetjax.sharding",
        "Trainer": "hetjax.runtime",
        "WorkerLostError": "hetjax.errors",
        "attention": "hetjax.sharding.attention.attention",
        "draw_timeline": "hetjax.report",
        "linear_cross_entropy": "hetjax.sharding.cross_entropy.linear_cross_entropy",
        "plan": "hetjax.planner",
        "reshard": "hetjax.runtime",
        "simulate": "hetjax.planner",
        "visualize": "hetjax.report",
    },
)
