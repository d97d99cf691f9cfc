"""How the local runtime runs a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetjax.runtime.workers.playing import Play


@dataclass(frozen=True)
class LocalOptions:
    """That a plan runs in this process, and how.

    Args:
        devices: the process's devices, in any order: each goes where its kind is wanted, and what
            does not say its kind keeps the order given; None for ``jax.devices()``.
        play: play the plan's cluster on this machine: every task and transfer takes as long as the
            plan predicts, and all times are told in the cluster's seconds.
        deadline: seconds after which a stage that waits for another gives up.

    Example:
        >>> LocalOptions(play=Play(scale=2.5)).deadline
        300.0
    """

    devices: Sequence[Any] | None = None
    play: Play | None = None
    deadline: float = 300.0
