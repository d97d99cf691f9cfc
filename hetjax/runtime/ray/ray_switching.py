"""Switching on Ray: the training state waits in Ray's memory while workers end and others start.

Devices of a plan belong to its workers' processes, and those of another plan can only have them
when these have ended. What each worker of the old plan gives each one of the new plan is one
object in the memory of its host, owned by the driver, which outlives the worker; Ray brings it to
the host that wants it. The driver handles references alone.

It goes in groups of leaves. A worker of the old plan is rid of a group when it has given it, and
when those of the new plan have made one, its objects are freed. Devices and objects together are
hardly more than one state and a group, but for what goes from host to host: Ray has it on both.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from hetjax.pipeline.program.loss import host_array
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import Member
from hetjax.runtime.compilation.state import StageState
from hetjax.runtime.moves.peers import Peer, processes_of
from hetjax.runtime.moves.stage_leaves import DevicesByNumber, Pieces, StageLeaves
from hetjax.runtime.moves.state_move import add_pieces, cut_pieces
from hetjax.sharding.resolution.steps import SentPiece
from hetjax.sharding.resolution.switch_transfers import Messages

FETCH_SECONDS = 1.0
"""How long to wait for word of objects that have been used already."""


Parcels = dict[tuple[Peer, Peer], Messages]
"""For each sending and each receiving worker, what goes from the one to the other."""


def owners_of(plan: Plan) -> dict[int, Peer]:
    """The worker that has each device of a plan, by the device's number in the cluster."""
    return {
        device: peer for peer, process in processes_of(plan).items() for device in process.devices
    }


def parcels_of(
    messages: Messages, senders: Mapping[int, Peer], receivers: Mapping[int, Peer]
) -> Parcels:
    """The messages of a phase, worker by worker.

    Args:
        messages: between devices.
        senders: the worker of each device that sends.
        receivers: the worker of each device that receives.

    Returns:
        What each worker gives each other one.
    """
    found: dict[tuple[Peer, Peer], list[SentPiece]] = {}
    for piece in messages:
        pair = (senders[piece.sender], receivers[piece.receiver])
        found.setdefault(pair, []).append(piece)
    return {pair: tuple(pieces) for pair, pieces in found.items()}


def devices_of_process(plan: Plan, member: Member, mesh: jax.sharding.Mesh) -> DevicesByNumber:
    """The devices of this process in the mesh of a stage's member, by their cluster's numbers."""
    numbers = plan.cluster.device_ids(member.submesh)
    pairs = zip(numbers, mesh.devices.flat, strict=True)
    here = jax.process_index()
    return {number: device for number, device in pairs if device.process_index == here}


@dataclass(frozen=True)
class Fetches:
    """Objects in Ray's memory on their way to the hosts that will want them.

    Args:
        began: when they were asked for.
        arrivals: for each worker, when all of its objects are on its host, by its clock.
    """

    began: float
    arrivals: tuple[Any, ...]

    @classmethod
    def begin(cls, wanted: Sequence[tuple[str, Sequence[Any]]]) -> Fetches:
        """Ask for objects, each time with the Ray node that wants them."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # A task does not begin before its arguments are on its host. Pickled by value, this one
        # imports nothing there.
        arrived = ray.remote(num_cpus=0, max_retries=0)(lambda *_: time.time())
        calls = [
            arrived.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
            ).remote(*references)
            for node, references in wanted
        ]
        return cls(time.time(), tuple(calls))

    def seconds(self) -> float:
        """How long the slowest took, of those that have come."""
        import ray
        from ray.exceptions import RayError

        calls = list(self.arrivals)
        there, _ = ray.wait(calls, num_returns=len(calls), timeout=FETCH_SECONDS)
        longest = 0.0
        for call in there:
            # A fetch is only for speed: what it did not bring is brought when it is taken.
            with contextlib.suppress(RayError):
                longest = max(longest, ray.get(call) - self.began)
        return longest


class StateExchange:
    """A worker's part in a switch, on either side: leaves go, or come, group by group.

    Args:
        leaves: what it has, or shall have.
    """

    def __init__(self, leaves: StageLeaves):
        self._leaves = leaves
        self._arrived: Pieces = {}

    def give_up(self, parcels: Sequence[Messages], group: Sequence[int]) -> list[list[np.ndarray]]:
        """What this worker gives each of several others of a group of leaves, which it then lacks.

        Their memory is free when what is returned has gone to Ray's.
        """
        held: Pieces = {}
        for leaf in group:
            held |= self._leaves.pieces(leaf)
            self._leaves.drop(leaf)
        return _given(held, parcels)

    def pass_on(self, parcels: Sequence[Messages]) -> list[list[np.ndarray]]:
        """What this worker gives each of several others of what it has taken itself."""
        return _given(self._arrived, parcels)

    def take(self, parcels: Sequence[Messages], arrays: Sequence[Sequence[Any]]) -> None:
        """Note what others have given; it can be passed on when all of a phase has come."""
        for each, given in zip(parcels, arrays, strict=True):
            add_pieces(self._arrived, each, given)

    def finish(self, group: Sequence[int]) -> None:
        """Make a group of leaves of all that has come, and forget that."""
        for leaf, device in list(self._arrived):
            self._leaves.join(leaf, device, self._arrived.pop((leaf, device)))
        jax.block_until_ready([self._leaves.finish(leaf) for leaf in group])

    def state(self) -> StageState:
        """The state, when everything has come."""
        return self._leaves.state()


def _given(held: Pieces, parcels: Sequence[Messages]) -> list[list[np.ndarray]]:
    return [[host_array(array) for array in cut_pieces(held, each)] for each in parcels]
