"""What a stage's microbatches hold over a schedule, and those of stages that share devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hetjax.pipeline.schedules.activation_copies import (
    MOST_THERE,
    TaskCopies,
    activation_copies,
    travelling,
)
from hetjax.pipeline.schedules.schedule import Task


@dataclass(frozen=True)
class MicrobatchBytes:
    """What one microbatch holds on a stage, in bytes on one device.

    Args:
        activation: from F to the end of B.
        recomputed: beside that, from R to the end of B; 0 where nothing is recomputed.
        deferred: from B to the end of W, where the backward pass is split.
        offloaded: of `activation`, what waits in the hosts' memory; see `activation_copies`.
    """

    activation: float
    recomputed: float = 0.0
    deferred: float = 0.0
    offloaded: float = 0.0


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
    copies = {stage: _copies(row, stage, each) for stage, each in microbatches.items()}
    held = peak = 0.0
    for stage, task in row:
        microbatch, key = microbatches[stage], (stage, task.microbatch)
        around = next(copies[stage], _NONE)
        held += microbatch.offloaded * (len(around.fetched) - len(around.awaited))
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
        # It is about to be read: the next task is the peak.
        coming = len(around.fetched_after) - len(around.awaited_after)
        held += microbatch.offloaded * coming
    return peak


_NONE = TaskCopies()


def _copies(
    row: Sequence[tuple[int, Task]], stage: int, microbatch: MicrobatchBytes
) -> Iterator[TaskCopies]:
    """The copies around each of a stage's tasks."""
    if not microbatch.offloaded:
        return iter(())
    return iter(activation_copies([task for each, task in row if each == stage]))


def host_peak_bytes(tasks: Sequence[Task], microbatch: MicrobatchBytes) -> float:
    """The most that a stage's microbatches hold at once in the hosts' memory.

    What comes back has its place there until the task that reads it.

    Args:
        tasks: what the stage runs, in order.
        microbatch: what one of them holds.

    Returns:
        Bytes of one device's share.

    Example:
        >>> tasks = [Task.parse(text) for text in "F0 F1 F2 F3 B0 B1 B2 B3".split()]
        >>> host_peak_bytes(tasks, MicrobatchBytes(activation=10.0, offloaded=9.0))
        36.0
    """
    if not microbatch.offloaded:
        return 0.0
    read = travelling(tasks)
    there, most = set[int](), 0
    for task in tasks:
        if task.kind == "F" and task.microbatch in read:
            there.add(task.microbatch)
        most = max(most, len(there))
        if task.kind in ("R", "B"):
            there.discard(task.microbatch)
    return most * microbatch.offloaded


def live_limit(
    room: float, microbatch: MicrobatchBytes, num_microbatches: int, host_room: float = 0.0
) -> int:
    """How many live microbatches surely fit, whatever the order of their tasks.

    Args:
        room: bytes on one device that they may hold.
        microbatch: what one of them holds.
        num_microbatches: M.
        host_room: bytes of a device's share of its host's memory that they may hold.

    Returns:
        A number from 0 to M.

    Example:
        >>> live_limit(24.0, MicrobatchBytes(activation=10.0, deferred=4.0), 8)
        2
    """
    one = microbatch.activation + microbatch.recomputed
    if microbatch.offloaded:
        return _live_limit_with_host(room, host_room, microbatch, num_microbatches)
    largest = max(one, microbatch.deferred)
    if room < one:
        return 0
    if largest == 0:
        return num_microbatches
    return min(num_microbatches, max(1, int((room - microbatch.deferred) // largest)))


def _live_limit_with_host(
    room: float, host_room: float, microbatch: MicrobatchBytes, num_microbatches: int
) -> int:
    """The same where activations are offloaded: of three microbatches they may be on a device."""
    without = live_limit(room, replace(microbatch, offloaded=0.0), num_microbatches)
    if microbatch.recomputed:
        # Whoever recomputes far ahead has them there as long.
        return without
    stays = microbatch.activation - microbatch.offloaded
    each = max(stays, microbatch.deferred)
    left = room - microbatch.deferred - MOST_THERE * microbatch.offloaded
    if left < each:
        return without
    count = num_microbatches if each <= 0 else int(left // each)
    on_host = int(host_room // microbatch.offloaded)
    return max(without, min(count, on_host, num_microbatches))
