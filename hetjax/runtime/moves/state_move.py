"""Carrying out a switch within one process: leaves move in small groups, and can move back.

A group's new arrays are made, and when they are there its old ones are given up: beside one state
there is never more than a group. Where something fails, what has moved so far is moved back, over
the reverse of the switch: the old plan then has every bit that it had.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from itertools import groupby
from operator import attrgetter
from typing import Any

import jax
import numpy as np

from hetjax.runtime.moves.pieces import cut_piece
from hetjax.runtime.moves.stage_leaves import Pieces, StageLeaves
from hetjax.sharding.resolution.network import Network
from hetjax.sharding.resolution.switch_groups import groups_of, messages_of_groups
from hetjax.sharding.resolution.switch_transfers import (
    Messages,
    MovedArray,
    SwitchPlan,
    plan_switch,
)


class StateMove:
    """The move of a training state between two plans on the devices of this process.

    Args:
        plan: the messages, for all leaves of the state.
        source: the stages of the plan that is left, with all their leaves.
        destination: those of the plan that is switched to, with none.
        devices: the device behind each device of the cluster.
        network: the links.
        lost: devices that give nothing. What they hold stays as it is until `done`.
    """

    def __init__(
        self,
        plan: SwitchPlan,
        source: Sequence[StageLeaves],
        destination: Sequence[StageLeaves],
        devices: Sequence[Any],
        *,
        network: Network,
        lost: Set[int] = frozenset(),
    ):
        self._plan, self._source, self._destination = plan, source, destination
        self._devices, self._network, self._lost = devices, network, lost
        self._moved: list[int] = []
        self._kept: Pieces = {}

    def run(self) -> None:
        """Move every leaf. Where this fails, `undo` moves back what has moved."""
        groups = groups_of(self._plan.arrays)
        for group, phases in zip(groups, messages_of_groups(self._plan, groups), strict=True):
            held = _held(self._source, group)
            self._move(group, phases, held, self._destination)
            self._kept |= {key: held[key] for key in held if key[1] in self._lost}
            del held
            self._moved += group
            _drop(self._source, group)

    def undo(self) -> None:
        """Move back what has moved; the source then has all its leaves, with every bit.

        A leaf that was about to move has not left. Those that did are rebuilt from their new
        arrays, but for what lost devices had: nobody else may have had these very bits.
        """
        unmoved = set(range(len(self._plan.arrays))) - set(self._moved)
        _drop(self._destination, unmoved)
        arrays = [self._reverse(i) for i in self._moved]
        plan = plan_switch(arrays, self._network)
        places = dict(enumerate(self._moved))
        groups = groups_of(arrays)
        for group, phases in zip(groups, messages_of_groups(plan, groups), strict=True):
            leaves = [places[place] for place in group]
            messages = [_renumbered(phase, places) for phase in phases]
            self._move(leaves, messages, _held(self._destination, leaves), self._source, self._kept)
            _drop(self._destination, leaves)
        self._moved.clear()
        self._kept.clear()

    def _reverse(self, i: int) -> MovedArray:
        array = self._plan.arrays[i]
        back = tuple(shard for shard in array.before if shard.device not in self._lost)
        return MovedArray(array.name, array.shape, array.itemsize, array.after, back)

    def _move(
        self,
        leaves: Iterable[int],
        phases: Sequence[Messages],
        held: Pieces,
        stages: Sequence[StageLeaves],
        kept: Pieces | None = None,
    ) -> None:
        """Make leaves of stages, from what is held, and from what was kept of lost devices."""
        for receivers in _islands(phases):
            arrived: Pieces = {}
            for place, messages in enumerate(phases):
                readable = held if place == 0 else dict(arrived)
                for (_, receiver), pieces in groupby(messages, attrgetter("sender", "receiver")):
                    if receiver in receivers:
                        message = tuple(pieces)
                        given = _cut(readable, message)
                        add_pieces(arrived, message, jax.device_put(given, self._devices[receiver]))
            for leaf, device in list(arrived):
                _join(stages, leaf, device, arrived.pop((leaf, device)))
        for (leaf, device), pieces in (kept or {}).items():
            if leaf in leaves:
                _join(stages, leaf, device, pieces)
        arrays = [stage.finish(leaf) for leaf in leaves for stage in stages]
        # What an allocation lacks is told here, while the old arrays are still there.
        jax.block_until_ready(arrays)


def _held(stages: Sequence[StageLeaves], leaves: Iterable[int]) -> Pieces:
    found: Pieces = {}
    for leaf in leaves:
        for stage in stages:
            found |= stage.pieces(leaf)
    return found


def _drop(stages: Sequence[StageLeaves], leaves: Iterable[int]) -> None:
    for leaf in leaves:
        for stage in stages:
            stage.drop(leaf)


def _join(stages: Sequence[StageLeaves], leaf: int, device: int, pieces: Sequence[Any]) -> None:
    for stage in stages:
        if stage.has_shard(leaf, device):
            stage.join(leaf, device, pieces)


def _cut(held: Pieces, message: Messages) -> list[Any]:
    """What devices give, each piece in memory of its own.

    On host devices a piece is cut as a view, and JAX would take that over as it is: the array that
    it is cut from would stay in memory as long as what is made of it.
    """
    found = cut_pieces(held, message)
    return [np.array(each) if isinstance(each, np.ndarray) else each for each in found]


def cut_pieces(held: Pieces, message: Messages) -> list[Any]:
    """What devices give of what they hold."""
    return [cut_piece(held[piece.array, piece.sender], piece.bounds) for piece in message]


def add_pieces(arrived: Pieces, message: Messages, given: Sequence[Any]) -> None:
    """Note what devices have got; lists that were there stay as they are."""
    for (array, bounds, _, receiver), piece in zip(message, given, strict=True):
        # A new list: what is read in this phase is what the one before has brought.
        arrived[array, receiver] = [*arrived.get((array, receiver), []), (bounds, piece)]


def _islands(phases: Sequence[Messages]) -> list[set[int]]:
    """Receivers in sets that pass nothing on to one another: each can be served alone."""
    sets = {piece.receiver: {piece.receiver} for messages in phases for piece in messages}
    for messages in phases[1:]:
        for _, _, sender, receiver in messages:
            if sets[sender] is not sets[receiver]:
                both = sets[sender] | sets[receiver]
                sets |= dict.fromkeys(both, both)
    return list({id(each): each for each in sets.values()}.values())


def _renumbered(messages: Messages, numbers: dict[int, int]) -> Messages:
    return tuple(piece._replace(array=numbers[piece.array]) for piece in messages)
