"""What a stage's microbatches hold over a schedule, and those of stages that share devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetjax.pipeline.schedules.schedule import Task


@dataclass(frozen=True)
class MicrobatchBytes:
    """What one microbatch holds on a stage, in bytes on one device.

    Args:
        activation: from F to the end of B.
        recomputed: beside that, from R to the end of B; 0 where nothing is recomputed.
        deferred: from B to the end of W, where the backward pass is split.
    """

    activation: float
    recomputed: float = 0.0
    deferred: float = 0.0


def peak_bytes(tasks: Sequence[Task], microbatch: MicrobatchBytes) -> float:
    """The most that a stage's microbatches hold at once.

    While B runs, what it reads and what it leaves for W are counted both.

    Args:
        tasks: what the stage runs, in order.
        microbatch: what one of them holds.

    Returns:
        Bytes on one device.

    Example:
        >>> tasks = [Task.parse(text) for text in "F0 F1 B0 B1 W0 W1".split()]
        >>> peak_bytes(tasks, MicrobatchBytes(activation=10.0, deferred=4.0))
        24.0
    """
    return row_peak_bytes([(0, task) for task in tasks], {0: microbatch})


def row_peak_bytes(
    row: Sequence[tuple[int, Task]], microbatches: Mapping[int, MicrobatchBytes]
) -> float:
    """The most that the microbatches of stages that share devices hold there at once.

    Args:
        row: what the devices run, in order: pairs of stage and task.
        microbatches: what one microbatch holds of each stage.

    Returns:
        Bytes on one device.

    Example:
        >>> tasks = [Task.parse(text) for text in "F0 F0 B0 B0".split()]
        >>> held = {0: MicrobatchBytes(activation=10.0), 2: MicrobatchBytes(activation=5.0)}
        >>> row_peak_bytes(list(zip([0, 2, 2, 0], tasks)), held)
        15.0
    """
    split = {(stage, task.microbatch) for stage, task in row if task.kind == "W"}
    ahead = {(stage, task.microbatch) for stage, task in row if task.kind == "R"}
    held = peak = 0.0
    for stage, task in row:
        microbatch, key = microbatches[stage], (stage, task.microbatch)
        match task.kind:
            case "F":
                held += microbatch.activation
                peak = max(peak, held)
            case "R":
                held += microbatch.recomputed
                peak = max(peak, held)
            case "B":
                during = held
                if key not in ahead:
                    during += microbatch.recomputed
                else:
                    held -= microbatch.recomputed
                held -= microbatch.activation
                if key in split:
                    during += microbatch.deferred
                    held += microbatch.deferred
                peak = max(peak, during)
            case "W":
                held -= microbatch.deferred
    return peak


def live_limit(room: float, microbatch: MicrobatchBytes, num_microbatches: int) -> int:
    """How many live microbatches surely fit, whatever the order of their tasks.

    Args:
        room: bytes on one device that they may hold.
        microbatch: what one of them holds.
        num_microbatches: M.

    Returns:
        A number from 0 to M.

    Example:
        >>> live_limit(24.0, MicrobatchBytes(activation=10.0, deferred=4.0), 8)
        2
    """
    one = microbatch.activation + microbatch.recomputed
    largest = max(one, microbatch.deferred)
    if room < one:
        return 0
    if largest == 0:
        return num_microbatches
    return min(num_microbatches, max(1, int((room - microbatch.deferred) // largest)))
