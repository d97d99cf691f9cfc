"""How the local runtime runs a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetjax.errors import InputError, check_seconds, shown
from hetjax.runtime.workers.playing import Play


@dataclass(frozen=True)
class LocalOptions:
    """That a plan runs in this process, and how.

    Args:
        devices: the process's devices, in any order: each goes where its kind is wanted, and what
            does not say its kind keeps the order given; None for ``jax.devices()``.
        play: play the plan's cluster on this machine: every task and transfer takes as long as the
            plan predicts, and all times are told in the cluster's seconds. A plan with a stage of
            several members is not played.
        deadline: seconds after which a stage that waits for another gives up.

    Raises:
        InputError: there are no such devices or one is given twice, `play` is none, or the deadline
            is no time to wait.

    Example:
        >>> LocalOptions(play=Play(scale=2.5)).deadline
        300.0
    """

    devices: Sequence[Any] | None = None
    play: Play | None = None
    deadline: float = 300.0

    def __post_init__(self) -> None:
        check_seconds("deadline", self.deadline)
        if self.play is not None and not isinstance(self.play, Play):
            raise InputError(f"play is {shown(self.play)}; give hetjax.Play(), or None")
        if self.devices is None:
            return
        devices = _listed(self.devices)
        object.__setattr__(self, "devices", devices)
        if not devices:
            raise InputError("devices has none; give some, or None for jax.devices()")
        if strange := [each for each in devices if not hasattr(each, "device_kind")]:
            raise InputError(f"devices: {shown(strange[0])} is no device of JAX")
        if len(set(devices)) < len(devices):
            raise InputError(f"devices is {shown(devices)}; allowed: each once")


def _listed(devices: Any) -> list[Any]:
    """What was given as devices, of which an array of NumPy is neither true nor false."""
    try:
        return list(devices)
    except TypeError:
        raise InputError(
            f"devices is {shown(devices)}; give a sequence, such as jax.devices(), or None"
        ) from None
