"""The best context splits of stages, each found once for all devices that are alike."""

from __future__ import annotations

import math
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
        self._alike = _alike(models[0])

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
        key = self._what_counts(part), members, blocks, live, is_last
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

    def least_round_seconds(self, part: Part, blocks: int, *, is_last: bool) -> float:
        """What a microbatch takes in a stage at least, if none of its devices ever waits.

        Args:
            part: the numbers of its devices.
            blocks: how many layers it has.
            is_last: whether it has the logits.

        Returns:
            Seconds; 0 where its devices are no members.
        """
        stages = (_of_part(each, part, blocks, 1, is_last=is_last) for each in self._models)
        kept = [each for each in stages if each is not None and not each.work.is_recomputed]
        return min((_least_seconds(each) / each.work.rounds for each in kept), default=0.0)

    def _what_counts(self, part: Part) -> Hashable:
        """What the best split of devices depends on.

        That is what they are, how they are joined, and who shares a subcluster, a node, a card;
        these are counted in the order of the devices.
        """
        devices = self._models[0].devices
        own = devices.subcluster[[*part]]
        subclusters, nodes, cards = (
            np.unique(numbers[[*part]], return_inverse=True)[1]
            for numbers in (devices.subcluster, devices.node, devices.card)
        )
        firsts = own[np.sort(np.unique(own, return_index=True)[1])]
        among = np.ix_(firsts, firsts)
        links = devices.far_cost[among], devices.far_latency[among], devices.card_cost[[*part]]
        told = np.array(self._alike)[own], subclusters, nodes, cards, *links
        return tuple(tuple(each.ravel().tolist()) for each in told)


def _alike(model: ContextModel) -> list[int]:
    """For each subcluster the first one that is the same but for its name."""
    told = [
        (replace(part, name="any"), None if model.paces is None else model.paces[part.name])
        for part in model.devices.cluster.subclusters
    ]
    return [told.index(each) for each in told]


def _members_of(devices: ContextDevices, part: Part) -> tuple[int, ...] | None:
    """Where in a part its members begin; None where it has one only in part."""
    members = devices.of(part)
    return members and tuple(part.index(int(devices.firsts[each])) for each in members)


def _on(choice: ContextChoice, others: Mapping[int, int]) -> ContextChoice:
    """The split for others of the cluster's devices that are alike."""
    split, firsts = choice.schedule.split, choice.model.devices.firsts

    def other(device: int) -> int:
        return int(np.searchsorted(firsts, others[int(firsts[device])]))

    groups = (replace(group, devices=(*map(other, group.devices),)) for group in split.groups)
    schedule = replace(choice.schedule, split=replace(split, groups=tuple(groups)))
    return replace(choice, schedule=schedule)


def _of_part(
    model: ContextModel, part: Part, blocks: int, live: int, *, is_last: bool
) -> ContextModel | None:
    """The cost model of a stage; None where its devices are no members, or one of several."""
    devices, work = model.devices, model.work
    members = devices.of(part)
    # One member of several devices is another question, which the cost model answers.
    if members is None or (len(members) == 1 and len(part) > 1):
        return None
    left = devices.among(part)
    if not len(left.usable):
        return None
    of_part = replace(
        work,
        layers=blocks,
        live=live,
        other_parameters=work.other_parameters if is_last else 0,
        vocabulary=work.vocabulary if is_last else 0,
    )
    return ContextModel(left, of_part, model.paces)


def _least_seconds(stage: ContextModel) -> float:
    """What a stage takes at least: none of its devices ever waits."""
    devices = stage.devices
    return stage.least_seconds(float(devices.flops[devices.usable].sum()))


def _best(
    models: Sequence[ContextModel], part: Part, blocks: int, live: int, *, is_last: bool
) -> ContextChoice | None:
    found: list[ContextChoice] = []
    least = math.inf
    # Layers that are made again take longer: mostly others take less than they can.
    for model in sorted(models, key=lambda each: each.work.is_recomputed):
        stage = _of_part(model, part, blocks, live, is_last=is_last)
        if stage is None or _least_seconds(stage) >= least:
            continue
        try:
            found.append(ContextChoice(schedule_context(stage), stage))
        except DoesNotFitError:
            continue
        least = min(least, found[-1].schedule.seconds)
    return min(found, key=lambda each: each.schedule.seconds, default=None)
