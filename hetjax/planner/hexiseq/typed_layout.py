"""Tokens and heads of a layout by few numbers: weights of groups and devices that are alike.

Groups with as many devices of each subcluster are of one type, and in it devices of one subcluster
of one class. A candidate is a weight for each type, which says how many tokens a group has; and two
for each class, which divide a group's tokens and heads among its devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetjax.planner.hexiseq.apportion import apportion_heads, apportion_tokens
from hetjax.planner.hexiseq.context_work import ContextWork
from hetjax.planner.hexiseq.costs_of_rows import Candidates
from hetjax.planner.hexiseq.group_layout import Floats, GroupLayout, Numbers


class Weights(NamedTuple):
    """A candidate: weights over 0.

    Args:
        groups: of each type of groups.
        tokens: of each class of devices, for tokens.
        heads: of each class of devices, for heads.
    """

    groups: Floats
    tokens: Floats
    heads: Floats


class TypedLayout:
    """A layout, its types of groups and its classes of devices.

    Args:
        layout: the groups.
        work: the model and its sequences.

    Attributes:
        layout: the same.
        group_type: the type of each group.
        device_class: the class of each device.
        class_type: the type of each class.
        flops: FLOP/s of each class.
    """

    def __init__(self, layout: GroupLayout, work: ContextWork):
        self.layout = layout
        self._work = work
        parts = len(layout.devices.cluster.subclusters)
        counts = np.zeros((layout.num_groups, parts), np.int64)
        starts, group, part = layout.parts
        counts[group, part] = np.diff(np.append(starts, len(layout.order)))
        known, group_type = np.unique(counts, axis=0, return_inverse=True)
        self.group_type: Numbers = group_type.reshape(-1)
        self.num_types = len(known)
        key = self.group_type[layout.group] * parts + layout.subcluster
        classes, device_class = np.unique(key, return_inverse=True)
        self.device_class: Numbers = device_class.reshape(-1)
        self.class_type: Numbers = classes // parts
        self.flops: Floats = np.zeros(len(classes))
        self.flops[self.device_class] = layout.of(layout.devices.flops)
        # Of each type, the columns of its groups' devices, [groups, devices of one].
        self._columns = [
            np.flatnonzero(self.group_type[layout.group] == each).reshape(
                int((self.group_type == each).sum()), -1
            )
            for each in range(self.num_types)
        ]
        self._heads: dict[tuple[int, bytes], NDArray[np.int64]] = {}

    def start(self, power: float = 1.0, *, tokens: float = 1.0, heads: float = 1.0) -> Weights:
        """Weights by what devices compute.

        Args:
            power: to which power of its speed a group has tokens: 1 for in proportion.
            tokens: to which power of its speed a device has tokens of its group.
            heads: to which power of its speed it has heads.

        Returns:
            The weights. The speed of a group is that with whole heads.
        """
        rates = self.flops / self.flops.mean()
        for_heads = rates**heads
        speed = np.array(
            [
                (rates[classes] / np.maximum(self._type_heads(each, for_heads), 1e-9)).min()
                for each, classes in enumerate(self._classes_of_types())
            ]
        )
        return Weights((speed / speed.mean()) ** power, rates**tokens, for_heads)

    def _classes_of_types(self) -> list[Numbers]:
        return [self.device_class[columns[0]] for columns in self._columns]

    def _type_heads(self, number: int, weights: Floats) -> NDArray[np.int64]:
        """Heads of the devices of each group of a type."""
        classes = self.device_class[self._columns[number][0]]
        own = weights[classes]
        key = (number, own.tobytes())
        if key not in self._heads:
            work = self._work
            self._heads[key] = work.heads_together * apportion_heads(1 / own, work.head_parts)
        return self._heads[key]

    def fill(self, candidates: Sequence[Weights]) -> Candidates:
        """Tokens and heads of all devices.

        Args:
            candidates: weights. Those whose weights for heads are one array have one division.

        Returns:
            The candidates. Each group has a token or more.
        """
        layout, length = self.layout, self._work.length
        groups = np.array([each.groups for each in candidates])[:, self.group_type]
        lengths = 1 + apportion_tokens(groups, length - layout.num_groups)
        tokens = _within_groups(
            layout, lengths, np.array([each.tokens for each in candidates])[:, self.device_class]
        )
        divisions: dict[int, Floats] = {id(each.heads): each.heads for each in candidates}
        heads = np.empty((len(divisions), len(layout.order)), np.int64)
        for row, weights in enumerate(divisions.values()):
            for number, columns in enumerate(self._columns):
                heads[row, columns] = self._type_heads(number, weights)
        places = {each: row for row, each in enumerate(divisions)}
        return Candidates(tokens, heads, np.array([places[id(each.heads)] for each in candidates]))


def _within_groups(
    layout: GroupLayout, lengths: NDArray[np.int64], weights: Floats
) -> NDArray[np.int64]:
    """Each group's tokens divided among its devices by weights."""
    passed = np.cumsum(weights, axis=1)
    before = (passed - weights)[:, layout.starts][:, layout.group]
    last = np.append(layout.starts[1:], len(layout.order)) - 1
    whole = passed[:, last][:, layout.group] - before
    ends = np.cumsum(lengths, axis=1)
    begins = (ends - lengths)[:, layout.group]
    marks = begins + np.rint((passed - before) / whole * lengths[:, layout.group]).astype(np.int64)
    return np.diff(marks, axis=1, prepend=0)
