"""The best context splits of stages, each found once for all devices that are alike."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hetjax.errors import DoesNotFitError
from hetjax.planner.hexiseq.context_choice import ContextChoice
from hetjax.planner.hexiseq.context_devices import ContextDevices
from hetjax.planner.hexiseq.context_layouts import Part
from hetjax.planner.hexiseq.context_model import ContextModel
from hetjax.planner.hexiseq.scheduler import schedule_context


class StageSplits:
    """The best context splits of some blocks on some devices.

    Args:
        models: cost models of all layers on all devices, one for each thing that may be done with
            layers and each tensor axis that members may have; first those of single devices.
        others: the same with state offloaded, for what these do not keep all of.
    """

    def __init__(self, models: Sequence[ContextModel], others: Sequence[ContextModel] = ()):
        self._models, self._others = models, others
        self._found: dict[Hashable, tuple[Part, ContextChoice] | None] = {}

    def best(
        self, part: Part, blocks: int, live: int = 1, *, is_last: bool
    ) -> ContextChoice | None:
        """The best split of a stage, of layers that are kept or made again.

        Args:
            part: the numbers of its devices.
            blocks: how many layers it has.
            live: how many microbatches are between their passes at once.
            is_last: whether it has the logits, and the parameters outside of layers.

        Returns:
            The split; None where the stage does not fit on these devices.
        """
        members = tuple(_members_of(model.devices, part) for model in self._models)
        key = _kinds_and_nodes(self._models[0].devices, part), members, blocks, live, is_last
        if key not in self._found:
            choice = _best(self._models, part, blocks, live, is_last=is_last)
            if choice is None or not choice.model.work.keeps_all:
                other = _best(self._others, part, blocks, live, is_last=is_last)
                both = [each for each in (choice, other) if each is not None]
                choice = min(both, key=lambda each: each.schedule.seconds, default=None)
            self._found[key] = choice and (part, choice)
        known = self._found[key]
        if known is None:
            return None
        found_of, choice = known
        return _on(choice, dict(zip(found_of, part, strict=True)))


def _members_of(devices: ContextDevices, part: Part) -> tuple[int, ...] | None:
    """Where in a part its members begin; None where it has one only in part."""
    members = devices.of(part)
    return members and tuple(part.index(int(devices.firsts[each])) for each in members)


def _kinds_and_nodes(devices: ContextDevices, part: Part) -> Hashable:
    """What the best split of devices depends on: their subclusters, and who shares a node, a card.

    Nodes and cards are counted in the order of the devices.
    """
    nodes, cards = (
        np.unique(numbers[[*part]], return_inverse=True)[1].tolist()
        for numbers in (devices.node, devices.card)
    )
    return tuple(devices.subcluster[[*part]].tolist()), tuple(nodes), tuple(cards)


def _on(choice: ContextChoice, others: Mapping[int, int]) -> ContextChoice:
    """The split for others of the cluster's devices that are alike."""
    split, firsts = choice.schedule.split, choice.model.devices.firsts

    def other(device: int) -> int:
        return int(np.searchsorted(firsts, others[int(firsts[device])]))

    groups = (replace(group, devices=(*map(other, group.devices),)) for group in split.groups)
    schedule = replace(choice.schedule, split=replace(split, groups=tuple(groups)))
    return replace(choice, schedule=schedule)


def _best(
    models: Sequence[ContextModel], part: Part, blocks: int, live: int, *, is_last: bool
) -> ContextChoice | None:
    found: list[ContextChoice] = []
    for model in models:
        devices, work = model.devices, model.work
        members = devices.of(part)
        # One member of several devices is another question, which the cost model answers.
        if members is None or (len(members) == 1 and len(part) > 1):
            continue
        left = devices.among(part)
        if not len(left.usable):
            continue
        of_part = replace(
            work,
            layers=blocks,
            live=live,
            other_parameters=work.other_parameters if is_last else 0,
            vocabulary=work.vocabulary if is_last else 0,
        )
        stage = ContextModel(left, of_part, model.paces)
        try:
            found.append(ContextChoice(schedule_context(stage), stage))
        except DoesNotFitError:
            continue
    return min(found, key=lambda each: each.schedule.seconds, default=None)
