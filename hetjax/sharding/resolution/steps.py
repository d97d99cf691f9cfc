"""Communication steps: what resolution yields, as data.

A step says which parts of an array are put together from whose, in phases; from that alone it can
be carried out, and its cost follows. Its kind names the collective that it is, for people.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hetjax.sharding.annotation.bounds import Bounds, volume
from hetjax.sharding.annotation.subgroup import Shard

KINDS = {
    "identity": "every device has already what it shall have",
    "slice": "every device keeps a part of what it has",
    "send_receive": "whole shards go from one device to another",
    "all_reduce": "summands are added, and each device has the sum",
    "all_gather": "parts are put together on each device",
    "reduce_scatter": "summands are added, and each device has a part of the sum",
    "all_to_all": "each device gives parts to the others and takes parts of theirs",
    "split_all_reduce": "all-reduce among subgroups, slice by slice",
    "split_all_gather": "all-gather among subgroups, slice by slice",
    "split_reduce_scatter": "reduce-scatter among subgroups, slice by slice",
    "split_all_to_all": "all-to-all among subgroups, slice by slice",
    "batched_send_receive": "each slice goes from one of its owners to those who want it",
    "batched_reduce": "each slice's summands are added on the way to those who want it",
}
"""The kinds of communication steps, and what each does.

Source: Hetu v2, section 4; slice, all-to-all and batched_reduce are ours.
"""


class SentPiece(NamedTuple):
    """A piece of an array that one device gives another one, or keeps: the message of every move.

    Args:
        array: the place of the array among those that move together.
        bounds: the part of it.
        sender: the number of the device that gives it.
        receiver: the number of the device that it lands on.
    """

    array: int
    bounds: Bounds
    sender: int
    receiver: int


@dataclass(frozen=True)
class Combination:
    """A part of an array that some devices give and others get.

    Args:
        bounds: the part.
        senders: devices that hold a summand of it each; it is their sum, in this order. None: it is
            zero.
        receivers: devices that then have it; a sender may be among them.
    """

    bounds: Bounds
    senders: tuple[int, ...]
    receivers: tuple[int, ...]

    @property
    def messages(self) -> Iterator[tuple[int, int]]:
        """The pairs of unlike devices (sender, receiver) between which the part moves."""
        return (
            (sender, receiver)
            for receiver in self.receivers
            for sender in self.senders
            if sender != receiver
        )

    def pieces(self, array: int) -> Iterator[SentPiece]:
        """What is sent of it, in the order that all ends know.

        Args:
            array: the place of the array among those that move together.
        """
        for receiver in self.receivers:
            for sender in self.senders:
                yield SentPiece(array, self.bounds, sender, receiver)


Phase = tuple[Combination, ...]


@dataclass(frozen=True)
class CommunicationStep:
    """One step from what devices hold to what they shall hold.

    A later phase may send what an earlier one has brought, the latest of it; what a device has at
    the end is put together from what it received, from itself included, and what came later counts.

    Args:
        kind: a name in `KINDS`.
        phases: what is combined, one phase after the other.
        after: what the devices of the step hold when it is done. Devices that are in no `after`
            hold nothing more of the array.
    """

    kind: str
    phases: tuple[Phase, ...]
    after: tuple[Shard, ...]

    def elements_sent(self) -> dict[tuple[int, int], int]:
        """How many elements go from each device to each other one."""
        sent: dict[tuple[int, int], int] = {}
        for phase in self.phases:
            for part in phase:
                for pair in part.messages:
                    sent[pair] = sent.get(pair, 0) + volume(part.bounds)
        return sent


@dataclass(frozen=True)
class Resolution:
    """The way of one array from one annotation to another.

    Args:
        shape: the array's shape.
        source: what every device holds at first.
        rounds: steps that begin together, on devices of their own; a round reads what the one
            before it has left.
        destination: what every device holds at the end.
    """

    shape: tuple[int, ...]
    source: tuple[Shard, ...]
    rounds: tuple[tuple[CommunicationStep, ...], ...]
    destination: tuple[Shard, ...]

    @property
    def kinds(self) -> tuple[tuple[str, ...], ...]:
        """The kinds of the steps, round by round."""
        return tuple(tuple(step.kind for step in steps) for steps in self.rounds)

    @property
    def phases(self) -> Iterator[Phase]:
        """All phases one after the other; those of steps of one round side by side."""
        for steps in self.rounds:
            for place in range(max(len(step.phases) for step in steps)):
                yield tuple(
                    part
                    for step in steps
                    if place < len(step.phases)
                    for part in step.phases[place]
                )
