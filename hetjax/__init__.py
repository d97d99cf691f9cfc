"""hetjax: one training job out of unlike accelerators.

The names below are the public interface; they are imported when they are first used, so that
``import hetjax`` and the commands' checks of their input are quick.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

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

_HOMES = {
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
}

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


class _Package(ModuleType):
    """The package: a command's module does not take the place of the public name it shares.

    Python sets a submodule that is imported as an attribute of its package, so that after
    ``import hetjax.plan`` the module of the command would stand where the function was.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _HOMES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hetjax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
