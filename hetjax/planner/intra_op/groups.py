"""Groups: an operation that chooses how it is divided, and those that follow it.

Whatever is cheap follows what it reads: of several values the one that the most matrix products
stand behind. So a graph of hundreds of equations has a few dozen places to decide at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hetjax.planner.intra_op.collectives import Layout, Ring
from hetjax.planner.intra_op.operations import Need, Operation, Operations, Read, place_of


@dataclass(eq=False)
class Group:
    """A leader and what follows it.

    Args:
        leader: the operation that leads; None where a value leads that the stage is given.
        value: the first value: the leader's result, or that which is given.
        followers: the operations that follow, each with the place of what it follows in its reads.
    """

    leader: Operation | None
    value: int
    followers: list[tuple[Operation, int]] = field(default_factory=list)

    @property
    def operations(self) -> Iterator[Operation]:
        """The leader, where it is an operation, and the followers."""
        if self.leader is not None:
            yield self.leader
        yield from (operation for operation, _ in self.followers)


def groups_of(operations: Operations) -> tuple[list[Group], dict[int, int]]:
    """Group operations.

    Args:
        operations: the operations of a stage.

    Returns:
        The groups, those of what the stage is given first; and for each value its group.
    """
    groups = [Group(None, value) for value in operations.sources]
    home = {value: place for place, value in enumerate(operations.sources)}
    depth = dict.fromkeys(operations.sources, 0)
    for operation in operations.found:
        deepest = max((depth[read.value] for read in operation.reads), default=0)
        if operation.leads:
            groups.append(Group(operation, operation.results[0]))
            place = len(groups) - 1
        else:
            main = _main(operations, operation, depth)
            place = home[operation.reads[main].value]
            groups[place].followers.append((operation, main))
        for result in operation.results:
            home[result] = place
            depth[result] = deepest + operation.leads
    return groups, home


def _main(operations: Operations, operation: Operation, depth: Mapping[int, int]) -> int:
    """The place of what an operation follows: the deepest that it reads, the largest of those."""

    def rank(place: int) -> tuple[int, int, int]:
        value = operation.reads[place].value
        return depth[value], operations.size(value), -place

    return max(range(len(operation.reads)), key=rank)


@dataclass(frozen=True, eq=False)
class Strategy:
    """One way to divide what a group does.

    Args:
        layouts: how each value of the group lies along the tensor axis.
        needs: how it needs values of other groups, in an order that all strategies share.
        seconds: what it takes for one microbatch, forward and backward, without what moving values
            of other groups takes.
    """

    layouts: Mapping[int, Layout]
    needs: tuple[Need, ...]
    seconds: float


@dataclass(frozen=True, eq=False)
class Costs:
    """What work and communication take.

    Args:
        operations: the operations, with the sizes of their values.
        ring: the devices of the tensor axis.
        data: devices of the data axis.
        flops: FLOP/s that matrix products reach on one device.
        bandwidth: bytes/s of unfused traffic that a device's memory manages.
        joins_sums: whether the compiler adds partial sums before it reduces them, where their sum
            is wanted; XLA for CPUs reduces each of them.
    """

    operations: Operations
    ring: Ring
    data: int
    flops: float
    bandwidth: float
    joins_sums: bool

    def size(self, value: int) -> float:
        """Bytes of a value on the devices of one tensor axis together."""
        return self.operations.size(value) / self.data_division(value)

    def data_division(self, value: int) -> int:
        """In how many parts the data axis divides a value: where it has a dimension of examples."""
        return self.data if value in self.operations.examples else 1

    def computing(self, operation: Operation, label: int | None) -> float:
        """Seconds of an operation, forward and backward, divided along a label or not."""
        division = 1 if label is None else self.ring.devices
        if not self.operations.examples.keys().isdisjoint(operation.results):
            division *= self.data
        once = operation.flops / self.flops + operation.traffic / self.bandwidth
        return operation.passes * once / division

    def moved(self, value: int, lies: Layout, layout: Layout) -> float:
        """Seconds to bring a value from one layout to another.

        That of a parameter cannot be said beside how it is stored: a compiler that finds it divided
        otherwise than a product asks for is as likely to move what the product makes.
        """
        if lies is None or lies == layout:
            return 0.0
        seconds = self.ring.move(self.size(value), lies, layout)
        return math.inf if seconds and value in self.operations.weights else seconds

    def forward(self, need: Need, lies: Layout) -> float:
        """Seconds to bring a value to who reads it; twice where the backward pass reads it, too."""
        return (1 + need.again) * self.moved(need.value, lies, need.layout)

    def backward(self, need: Need, lies: Layout) -> float:
        """Seconds to bring the cotangent of what was read to where the value lies."""
        if need.value not in self.operations.moving:
            return 0.0
        if need.is_partial:
            return self.ring.add_up(self.size(need.value), lies)
        if need.layout is None or need.layout == lies:
            return 0.0
        return self.ring.move(self.size(need.value), need.layout, lies)

    def moving(self, needs: Sequence[Need], lies: Mapping[int, Layout]) -> float:
        """Seconds of all moves between values and one group that reads them.

        A value is moved forward once for all who read it there in one layout.
        """
        forward: dict[tuple[int, Layout], float] = {}
        for need in needs:
            key, seconds = (need.value, need.layout), self.forward(need, lies[need.value])
            forward[key] = max(seconds, forward.get(key, 0.0))
        return sum(forward.values()) + sum(self.backward(need, lies[need.value]) for need in needs)


def strategies_of(group: Group, costs: Costs) -> list[Strategy]:
    """The ways to divide a group along the tensor axis.

    Args:
        group: the group.
        costs: what work and communication take.

    Returns:
        First that which divides nothing; then one for each label of the leader that the axis can
        divide, and where that is summed over, one for each way in which the sum may lie.
    """
    return [_followed(group, costs, *beginning) for beginning in _beginnings(group, costs)]


def strategy_of(group: Group, costs: Costs, place: int) -> Strategy:
    """One of the ways to divide a group, without the work of finding what the others cost.

    Args:
        group: the group.
        costs: what work and communication take.
        place: its place among `strategies_of`, which rates do not change.
    """
    return _followed(group, costs, *_beginnings(group, costs)[place])


def _beginnings(
    group: Group, costs: Costs
) -> list[tuple[dict[int, Layout], Sequence[Need], float]]:
    """For each strategy how the first values lie, what these need, and what they take."""
    leader = group.leader
    if leader is None:
        return [({group.value: d}, (), 0.0) for d in layouts_of(group.value, costs)]
    return [
        (layouts, leader.needs(label), seconds + costs.computing(leader, label))
        for label in _leading_labels(leader, costs)
        for layouts, seconds in _results(leader, label, costs)
    ]


def layouts_of(value: int, costs: Costs) -> list[Layout]:
    """The layouts that a value can have along the tensor axis, whole first."""
    operations, devices = costs.operations, costs.ring.devices
    taken = operations.examples.get(value) if costs.data > 1 else None
    shape = operations.shape(value)
    if devices == 1:
        return [None]
    return [None, *(i for i, n in enumerate(shape) if n and n % devices == 0 and i != taken)]


def _labels(operation: Operation, costs: Costs) -> list[int | None]:
    """The labels along which an operation can be divided, and None."""
    known, key = costs.operations.divisions, (operation, costs.ring.devices, costs.data > 1)
    if key not in known:
        labels = [*(read.labels for read in operation.reads), *operation.labels]
        names = dict.fromkeys(label.name for each in labels for label in each if label is not None)
        taken = costs.operations.examples_label(operation) if costs.data > 1 else None
        free = (name for name in names if name != taken and _is_free(operation, name, costs))
        known[key] = [None, *free]
    return known[key]


def _leading_labels(operation: Operation, costs: Costs) -> list[int | None]:
    """The labels along which a leader may be divided.

    A product of parameters alone is whole where there is a data axis: its gradients are partial
    sums along that axis, which Shardy cannot have change into such along the other.
    """
    if costs.data > 1 and costs.operations.examples_label(operation) is None:
        return [None]
    return _labels(operation, costs)


def _is_free(operation: Operation, name: int, costs: Costs) -> bool:
    return costs.ring.devices > 1 and costs.operations.is_divisible(
        operation, name, costs.ring.devices
    )


def _results(
    operation: Operation, label: int | None, costs: Costs
) -> Iterator[tuple[dict[int, Layout], float]]:
    """How the results of a leader may lie, and what adding them up takes, forward and backward."""
    if label not in operation.summed:
        labels = zip(operation.results, operation.labels, strict=True)
        yield {value: place_of(each, label) for value, each in labels}, 0.0
        return
    result, *others = operation.results
    if others:
        sizes = map(costs.size, operation.results)
        yield dict.fromkeys(operation.results), sum(map(costs.ring.all_reduce, sizes))
        return
    size = costs.size(result)
    for layout in layouts_of(result, costs):
        # What was scattered comes back as a cotangent that all devices need whole.
        back = costs.ring.move(size, layout, None) * (result in costs.operations.moving)
        yield {result: layout}, costs.ring.add_up(size, layout) + back


def _followed(
    group: Group,
    costs: Costs,
    layouts: dict[int, Layout],
    needs: Sequence[Need],
    seconds: float,
) -> Strategy:
    """The strategy in which all operations of a group follow its first values."""
    layouts, outward = dict(layouts), list(needs)
    for operation, main in group.followers:
        label = _follow(operation, operation.reads[main], layouts, costs)
        inner = []
        for need in operation.needs(label):
            (inner if need.value in layouts else outward).append(need)
        seconds += costs.moving(inner, layouts) + costs.computing(operation, label)
        for result, labels in zip(operation.results, operation.labels, strict=True):
            layouts[result] = place_of(labels, label)
            if label in operation.summed:
                seconds += costs.ring.all_reduce(costs.size(result))
    return Strategy(layouts, tuple(outward), seconds)


def _follow(
    operation: Operation, read: Read, layouts: Mapping[int, Layout], costs: Costs
) -> int | None:
    """The label along which an operation is divided as what it follows is."""
    place = layouts[read.value]
    label = None if place is None else read.labels[place]
    if label is None or label.name not in _labels(operation, costs):
        return None
    return label.name
