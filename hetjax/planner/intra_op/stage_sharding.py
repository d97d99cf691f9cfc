"""How a stage is divided inside its submesh: the best logical mesh, and the best way on it."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jax.sharding import PartitionSpec

from hetjax.mesh.kinds import DeviceKind
from hetjax.mesh.links import Link
from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.stages.cutting import Stage
from hetjax.planner.intra_op.alike_nodes import solve_alike
from hetjax.planner.intra_op.collectives import Layout, Ring
from hetjax.planner.intra_op.graph import StageGraph
from hetjax.planner.intra_op.groups import Costs, Group, Strategy, groups_of, strategies_of
from hetjax.planner.intra_op.integer_program import Graph
from hetjax.planner.intra_op.kept_values import kept_values
from hetjax.planner.intra_op.operations import Operations
from hetjax.planner.plan.stage_plan import Spec
from hetjax.planner.work.execution import state_bytes
from hetjax.planner.work.part_kinds import part_kind
from hetjax.planner.work.rates import TRAFFIC_SHARE, data_axis_link
from hetjax.planner.work.run_structure import part_shape
from hetjax.sharding.annotation.rules import DATA, TENSOR, state_spec


@dataclass(frozen=True)
class StageDevices:
    """What a stage is to run on.

    Args:
        kind: the kind of the devices.
        count: how many there are.
        link: what carries their collectives.
        memory_bytes: what a stage may fill of one device's memory.
        nodes: on how many nodes they are, on each as many.
    """

    kind: DeviceKind
    count: int
    link: Link
    memory_bytes: float
    nodes: int = 1


@dataclass(frozen=True)
class Training:
    """What a stage is to do.

    Args:
        microbatch_size: examples in a microbatch.
        num_microbatches: microbatches in a step.
        live_microbatches: how many wait for their backward pass at once.
        dtype: what matrix products are computed in.
        optimizer_bytes: bytes of optimizer state for each element of the parameters.
    """

    microbatch_size: int
    num_microbatches: int
    live_microbatches: int
    dtype: str
    optimizer_bytes: float


@dataclass(frozen=True)
class StageSharding:
    """How a stage is divided.

    Args:
        mesh_shape: sizes of the data and the tensor axis.
        sharding: the sharding rule, of `hetjax.sharding.RULES`.
        parameters: the specification of each parameter, by its path.
        values: specifications of what the stage's operations make, by the value's number in the
            program.
        seconds: what one microbatch takes, forward and backward, with its share of what happens
            once a step.
        memory_bytes: what one device holds.
        solve_seconds: how long the integer programs took, those of all logical meshes.
        is_optimal: whether it is proved that nothing is better in this model.
    """

    mesh_shape: tuple[int, int]
    sharding: str
    parameters: Mapping[str, Spec]
    values: Mapping[int, Spec]
    seconds: float
    memory_bytes: float
    solve_seconds: float = field(default=0.0, compare=False)
    is_optimal: bool = True


def shard_stage(
    program: Program,
    stage: Stage,
    devices: StageDevices,
    training: Training,
    *,
    mesh_shapes: Sequence[tuple[int, int]] | None = None,
    divides_state: bool = True,
    time_limit: float = 60.0,
) -> StageSharding | None:
    """Choose how a stage is divided inside its submesh.

    Args:
        program: the traced loss function, at the size of a microbatch.
        stage: the stage.
        devices: what it is to run on.
        training: what it is to do.
        mesh_shapes: the logical meshes to choose from; None for all whose data axis divides the
            microbatch.
        divides_state: whether the data axis may divide the state, too.
        time_limit: seconds that one integer program may take.

    Returns:
        What takes the fewest seconds of all that fits; of equals that with the longest data axis
        and the plainest rule. None where nothing fits.

    Source: Alpa (Zheng et al., 2022), section 4; Harp, section 5.1.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from hetjax.mesh import kind
        >>> from hetjax.pipeline.program.tracing import trace
        >>> from hetjax.pipeline.stages.cutting import cut
        >>> def loss(w, x):
        ...     return jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)
        >>> def matrix(rows, columns):
        ...     return jax.ShapeDtypeStruct((rows, columns), jnp.float32)
        >>> weights = {"down": matrix(8192, 2048), "up": matrix(2048, 8192)}
        >>> program = trace(loss, weights, matrix(1024, 2048))
        >>> (stage,) = cut(program, (0, program.num_positions))
        >>> devices = StageDevices(kind("A100-40"), 4, Link(3e11, 5e-6), 30e9)
        >>> training = Training(1024, 8, 1, "float32", 8.0)
        >>> found = shard_stage(program, stage, devices, training, mesh_shapes=[(1, 4)])
        >>> found.parameters["up"], found.parameters["down"]
        ((None, 'tensor'), ('tensor', None))
    """
    began = time.perf_counter()
    best = None
    parts = StageParts.of(program, stage, training.microbatch_size)
    for mesh_shape in mesh_shapes or tuple(_mesh_shapes(devices.count, training.microbatch_size)):
        problem = StageProblem(program, stage, devices, training, mesh_shape, parts)
        for rule in ("data", "state_sharded") if divides_state and mesh_shape[0] > 1 else ("data",):
            found = problem.solve(rule, time_limit)
            if found and (best is None or found.seconds < best.seconds * (1 - _EQUAL)):
                best = found
    return best and replace(best, solve_seconds=time.perf_counter() - began)


_EQUAL = 1e-9
"""Relative difference below which two costs are the same."""


def _mesh_shapes(count: int, microbatch_size: int) -> Iterator[tuple[int, int]]:
    for data in range(count, 0, -1):
        if count % data == 0 and microbatch_size % data == 0:
            yield data, count // data


@dataclass(frozen=True, eq=False)
class StageParts:
    """What is the same on every logical mesh.

    Args:
        operations: the stage's operations.
        groups: its groups.
        home: for each value the place of its group.
    """

    operations: Operations
    groups: list[Group]
    home: Mapping[int, int]

    @classmethod
    def of(cls, program: Program, stage: Stage, microbatch_size: int) -> StageParts:
        """Those of a stage, whose program was traced at a size of microbatches."""
        found = _operations(program, stage, microbatch_size)
        return cls(found, *groups_of(found))

    @functools.cached_property
    def kept(self) -> frozenset[int]:
        """The values that a microbatch keeps for its backward pass."""
        of = self.operations
        return kept_values(of.steps, of.avals, of.sources, of.moving)

    def told(
        self, program: Program, stage: Stage, strategies: Sequence[Sequence[Strategy]]
    ) -> set[int]:
        """The values of which a stage says how they lie: products, and what goes between groups.

        Args:
            program: the traced loss function.
            stage: the stage.
            strategies: of each group.
        """
        parameters = {program.parameters[part.leaf] for part in stage.parameters}
        told = {group.value for group in self.groups if group.leader is not None}
        told |= {need.value for ways in strategies for need in ways[0].needs}
        whole = set(program.steps)
        made = {value for step in stage.steps if step in whole for value in step.outputs}
        return {
            value
            for value in told & self.operations.moving & made
            # What is made of a parameter alone lies as that does.
            if self.groups[self.home[value]].value not in parameters
            and value not in self.operations.sources
        }


@dataclass(frozen=True, eq=False)
class GroupStrategy:
    """A strategy of a group, in a stage.

    Args:
        strategy: the strategy, with what the stage adds to its cost.
        memory_bytes: what one device holds of the group.
        spec: how its first value is divided.
    """

    strategy: Strategy
    memory_bytes: float
    spec: Spec


class StageProblem:
    """The choice on one logical mesh.

    Args:
        program: the traced loss function.
        stage: the stage.
        devices: what it is to run on.
        training: what it is to do.
        mesh_shape: sizes of the data and the tensor axis.
        parts: its groups, where they are known.
    """

    def __init__(
        self,
        program: Program,
        stage: Stage,
        devices: StageDevices,
        training: Training,
        mesh_shape: tuple[int, int],
        parts: StageParts | None = None,
    ):
        self.program, self.stage, self.mesh_shape = program, stage, mesh_shape
        self.devices, self.training = devices, training
        data, tensor = mesh_shape
        self.parts = {program.parameters[part.leaf]: part for part in stage.parameters}
        found = parts or StageParts.of(program, stage, training.microbatch_size)
        self.operations, self.groups, self.home = found.operations, found.groups, found.home
        self.kept = found.kept
        optimizes = not devices.kind.is_processor
        # Where values are told of, the runtime reduces gradients as they are made.
        self.sums = training.num_microbatches if tensor == 1 else 1
        shape = devices.nodes, devices.count // devices.nodes
        self.data_ring = Ring(data_axis_link(devices.link, shape, mesh_shape), data, optimizes)
        self.costs = Costs(
            self.operations,
            Ring(devices.link, tensor, optimizes),
            data,
            devices.kind.product_flops(training.dtype),
            devices.kind.memory_bandwidth / TRAFFIC_SHARE,
            optimizes,
        )
        self.strategies = [strategies_of(group, self.costs) for group in self.groups]

    def ways(self, rule: str) -> list[list[GroupStrategy]]:
        """The strategies of every group under a sharding rule."""
        pairs = zip(self.groups, self.strategies, strict=True)
        return [list(self._ways(*pair, rule)) for pair in pairs]

    def graph(self, rule: str, ways: Sequence[Sequence[GroupStrategy]] | None = None) -> Graph:
        """What they cost, alone and in pairs.

        Args:
            rule: the sharding rule.
            ways: the strategies, where they are at hand.

        Returns:
            The graph, whose first nodes are the groups.
        """
        every = ways or self.ways(rule)
        return StageGraph(
            self.groups,
            [[way.strategy for way in of_one] for of_one in every],
            [np.array([way.memory_bytes for way in of_one]) for of_one in every],
            self.home,
            self.costs,
        ).graph()

    def solve(self, rule: str, time_limit: float) -> StageSharding | None:
        """The best choice under a sharding rule; None where none fits."""
        every = self.ways(rule)
        graph = self.graph(rule, every)
        solution = solve_alike(graph, self.devices.memory_bytes, time_limit=time_limit)
        if solution is None:
            return None
        chosen = [ways[k] for ways, k in zip(every, solution.choice, strict=False)]
        pairs = list(zip(self.groups, chosen, strict=True))
        return StageSharding(
            mesh_shape=self.mesh_shape,
            sharding=rule,
            parameters={
                self.program.parameter_names[self.parts[group.value].leaf]: way.spec
                for group, way in pairs
                if group.value in self.parts
            },
            values=self._values(way.strategy for way in chosen),
            seconds=solution.seconds,
            memory_bytes=solution.memory_bytes,
            is_optimal=solution.is_optimal,
        )

    def _values(self, strategies: Iterable[Strategy]) -> dict[int, Spec]:
        """Of what leaders make, and of what goes from one group to another."""
        layouts: dict[int, Layout] = {}
        for strategy in strategies:
            layouts |= strategy.layouts
        parts = StageParts(self.operations, self.groups, self.home)
        own = parts.told(self.program, self.stage, self.strategies)
        return {value: self._spec(value, layouts[value]) for value in sorted(own)}

    def _ways(
        self, group: Group, strategies: Sequence[Strategy], rule: str
    ) -> Iterator[GroupStrategy]:
        """The strategies of a group."""
        for way in strategies:
            lies = way.layouts[group.value]
            sending = sum(self._giving(value, way) for value in self.stage.sends)
            if group.leader is None:
                sending += self._taking(group.value, lies)
            way = replace(way, seconds=way.seconds + sending)
            memory = self._kept_bytes(way) * self.training.live_microbatches
            spec = self._spec(group.value, lies)
            if group.value not in self.parts:
                yield GroupStrategy(way, memory, spec)
                continue
            for spec in self._parameter_specs(group.value, lies):
                seconds, held = self._parameter(group.value, spec, rule)
                yield GroupStrategy(
                    replace(way, seconds=way.seconds + seconds), memory + held, spec
                )

    def _giving(self, value: int, way: Strategy) -> float:
        """Seconds to make a value whole that the stage after takes; its cotangent comes whole."""
        if value not in way.layouts:
            return 0.0
        return self.costs.ring.move(self.costs.size(value), way.layouts[value], None)

    def _taking(self, value: int, lies: Layout) -> float:
        """Seconds to make the cotangent of a received value whole, which comes whole itself."""
        if value in self.parts or value not in self.operations.moving:
            return 0.0
        return self.costs.ring.move(self.costs.size(value), lies, None)

    def _kept_bytes(self, way: Strategy) -> float:
        """Bytes that a microbatch keeps of a group's values; what the stage is given is whole."""
        total = 0.0
        for value, lies in way.layouts.items():
            if value not in self.kept or value in self.parts:
                continue
            divided = lies is not None and value not in self.operations.sources
            total += self.costs.size(value) / (self.mesh_shape[1] if divided else 1)
        return total

    def _spec(self, value: int, lies: Layout) -> Spec:
        spec: list[str | None] = [None] * len(self.operations.shape(value))
        if self.costs.data_division(value) > 1:
            spec[self.operations.examples[value]] = DATA
        if lies is not None:
            spec[lies] = TENSOR
        return tuple(spec)

    def _parameter_specs(self, value: int, lies: Layout) -> list[Spec]:
        """A parameter whole along the data axis, and divided."""
        whole = self._spec(value, lies)
        shape = self.operations.shape(value)
        divided = state_spec("state_sharded", PartitionSpec(*whole), shape, self.mesh_shape)
        return list(dict.fromkeys((whole, tuple(divided))))

    def _parameter(self, value: int, spec: Spec, rule: str) -> tuple[float, float]:
        """Seconds of a microbatch's share of its collectives, and bytes on one device."""
        leaf = self.parts[value].leaf
        part = part_kind(part_shape(self.program, self.parts[value]), leaf, self.program.frozen)
        tensor = self.mesh_shape[1] if TENSOR in spec else 1
        size = self.operations.size(value) / tensor
        # Gathered in either pass and its gradients scattered, or these added up.
        seconds = (
            2 * self.data_ring.all_gather(size) + self.data_ring.add_up(size, 0) * part.has_gradient
            if DATA in spec
            else self.data_ring.all_reduce(size) / self.sums * part.has_gradient
        )
        held, _ = state_bytes(
            part, PartitionSpec(*spec), rule, self.mesh_shape, self.training.optimizer_bytes
        )
        return seconds, held


def _operations(program: Program, stage: Stage, microbatch_size: int) -> Operations:
    """The operations of a stage on the values of its program."""
    parameters = [program.parameters[part.leaf] for part in stage.parameters]
    batch = [program.batch[leaf] for leaf in stage.batch]
    given = [*batch, *stage.receives]
    avals = list(stage.avals)
    for part in stage.parameters:
        avals[program.parameters[part.leaf]] = part_shape(program, part)
    examples = {value: 0 for value in given if avals[value].shape[:1] == (microbatch_size,)}
    moving = [stage.receives[place] for place in stage.moving]
    learned = [
        *(parameters[place] for place in stage.trained),
        *(value for value in moving if np.issubdtype(avals[value].dtype, np.inexact)),
    ]
    return Operations(
        avals,
        stage.steps,
        [*parameters, *given],
        learned,
        examples,
        set(parameters),
    )
