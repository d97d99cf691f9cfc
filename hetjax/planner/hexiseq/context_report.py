"""A context split for people: who has which tokens and heads, the rings, and other systems."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hetjax.planner.hexiseq.context_choice import ContextChoice
from hetjax.planner.hexiseq.context_devices import ContextDevices
from hetjax.planner.hexiseq.costs_of_rows import Candidates
from hetjax.planner.hexiseq.group_layout import GroupLayout
from hetjax.sharding.context.context_split import ContextSplit, HeadRange
from hetjax.sharding.context.positions import PositionRun, device_positions, group_positions
from hetjax.sharding.context.sub_rings import key_value_range, sub_rings


@dataclass(frozen=True)
class DeviceRow:
    """What a device of a group has, by the scheduler's model.

    Args:
        device: the device, for people.
        subcluster: its subcluster.
        place: its number there.
        tokens: how many tokens it has.
        positions: where these are in the sequence.
        heads: the query heads that it attends with.
        key_value_heads: the heads of keys and values that these see.
        attention_seconds: for how long it attends in a step.
        other_seconds: for how long it computes all else.
        memory_bytes: what it holds at most; of a member, each of its devices.
        memory_limit_bytes: what that may hold.
        size: how many devices it is: a member with a tensor axis is several, from `place` on.
    """

    device: str
    subcluster: str
    place: int
    tokens: int
    positions: tuple[PositionRun, ...]
    heads: HeadRange
    key_value_heads: HeadRange
    attention_seconds: float
    other_seconds: float
    memory_bytes: float
    memory_limit_bytes: float
    size: int = 1


@dataclass(frozen=True)
class GroupRow:
    """A group.

    Args:
        positions: the positions of its tokens.
        length: how many these are.
        devices: what its devices have.
    """

    positions: tuple[PositionRun, ...]
    length: int
    devices: tuple[DeviceRow, ...]


@dataclass(frozen=True)
class RingRow:
    """A sub-ring.

    Args:
        heads: its query heads.
        key_value_heads: the heads of keys and values that go round in it.
        owners: of each group the device that has them, for people.
    """

    heads: HeadRange
    key_value_heads: HeadRange
    owners: tuple[str, ...]


@dataclass(frozen=True)
class SystemRow:
    """A system at its best settings, by the scheduler's model.

    Args:
        system: ``"hexiseq"``, ``"ring"``, ``"ulysses"`` or ``"usp"``.
        groups: how many devices each of its groups has.
        microbatch_size: sequences at once.
        is_recomputed: whether its layers are made again in the backward pass.
        seconds: of a step; None where it is not legal, or fits in no way.
        tensor: over how many devices the longest tensor axis of a member goes.
    """

    system: str
    groups: tuple[int, ...] = ()
    microbatch_size: int = 0
    is_recomputed: bool = False
    seconds: float | None = None
    tensor: int = 1


@dataclass(frozen=True)
class ContextReport:
    """A context split for people.

    Args:
        length: tokens of a sequence.
        query_heads: query heads.
        key_value_heads: heads of keys and values.
        groups: the groups in the order of the ring.
        rings: the sub-rings; empty where there is one group.
        left_out: devices that have nothing to do, for people.
        systems: the split's system first, and those that it is compared with.
    """

    length: int
    query_heads: int
    key_value_heads: int
    groups: tuple[GroupRow, ...]
    rings: tuple[RingRow, ...]
    left_out: tuple[str, ...]
    systems: tuple[SystemRow, ...]

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        seconds = self.systems[0].seconds
        assert seconds is not None, "what was found takes some time"
        return seconds


def explain_context(choice: ContextChoice, beside: Mapping[str, ContextChoice]) -> ContextReport:
    """Say what a context split is, and what other systems would take.

    Args:
        choice: the split that was found.
        beside: even systems at their best, by name; those that are not there do not fit.

    Returns:
        The report; what is predicted in it is by the scheduler's model.
    """
    split, devices = choice.schedule.split, choice.model.devices
    return ContextReport(
        length=split.length,
        query_heads=split.query_heads,
        key_value_heads=split.key_value_heads,
        groups=tuple(_group_rows(choice)),
        rings=tuple(_ring_rows(split, devices)) if len(split.groups) > 1 else (),
        left_out=tuple(_left_out(devices, split)),
        systems=tuple(_system_rows(choice, beside)),
    )


def _left_out(devices: ContextDevices, split: ContextSplit) -> Iterator[str]:
    """Devices that have nothing to do; of a member of which one is lost, the others."""
    usable = set(devices.usable.tolist())
    for member in sorted(set(range(devices.num_devices)) - set(split.devices)):
        if member in usable:
            yield devices.name(member)
            continue
        (name, place), first = devices.place(member), int(devices.firsts[member])
        for each in range(int(devices.sizes[member])):
            if first + each not in devices.lost:
                yield f"{name}[{place + each}]"


def _group_rows(choice: ContextChoice) -> Iterator[GroupRow]:
    split, model = choice.schedule.split, choice.model
    layout = GroupLayout(model.devices, [group.devices for group in split.groups])
    heads = itertools.chain.from_iterable(group.head_counts for group in split.groups)
    candidate = Candidates.one(np.array(split.tokens), np.array([*heads]))
    seconds = model.device_seconds(layout, candidate)
    rows = zip(
        layout.order.tolist(),
        seconds.attention[0].tolist(),
        seconds.others[0].tolist(),
        choice.schedule.memory,
        layout.of(model.devices.memory).tolist(),
        strict=True,
    )
    for number, group in enumerate(split.groups):
        devices = []
        for member, heads in enumerate(group.heads):
            device, attention, others, memory, limit = next(rows)
            subcluster, place = model.devices.place(device)
            size = int(model.devices.sizes[device])
            devices.append(
                DeviceRow(
                    device=model.devices.name(device),
                    subcluster=subcluster,
                    place=place,
                    size=size,
                    tokens=group.tokens[member],
                    positions=device_positions(split, number, member),
                    heads=heads,
                    key_value_heads=key_value_range(heads, split.heads_per_key_value),
                    attention_seconds=attention,
                    other_seconds=others,
                    memory_bytes=memory / size,
                    memory_limit_bytes=limit / size,
                )
            )
        yield GroupRow(group_positions(split, number), group.length, tuple(devices))


def _ring_rows(split: ContextSplit, devices: ContextDevices) -> Iterator[RingRow]:
    for ring in sub_rings(split):
        yield RingRow(ring.heads, ring.key_value_heads, tuple(map(devices.name, ring.owners)))


def _system_rows(choice: ContextChoice, beside: Mapping[str, ContextChoice]) -> Iterator[SystemRow]:
    yield _system_row(choice.schedule.system, choice)
    for name in ("ring", "ulysses", "usp"):
        if name != choice.schedule.system:
            yield _system_row(name, beside[name]) if name in beside else SystemRow(name)


def _system_row(name: str, choice: ContextChoice) -> SystemRow:
    split, work, devices = choice.schedule.split, choice.model.work, choice.model.devices
    return SystemRow(
        name,
        tuple(int(devices.sizes[[*group.devices]].sum()) for group in split.groups),
        work.batch,
        work.is_recomputed,
        choice.schedule.seconds,
        int(devices.sizes[[*split.devices]].max()),
    )
