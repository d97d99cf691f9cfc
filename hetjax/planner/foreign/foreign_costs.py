"""What stages take by the profile of another tool, for every run of layers at once.

Passes and what they keep are the profile's, layer by layer; a stage takes the sum. What a profile
does not say is hetjax's own: transfers between stages, the exchange of gradients along the data
axis, the update and the memory that may be used, by the figures of the cluster.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hetjax.mesh.cluster import Cluster, SubMesh
from hetjax.mesh.links import Link
from hetjax.mesh.subcluster import Subcluster
from hetjax.planner.costs.cost_model import Estimate
from hetjax.planner.costs.exchange_cost import ExchangedBytes
from hetjax.planner.costs.union_cost import UnionExecution
from hetjax.planner.foreign.foreign_profile import ForeignProfile, LayerTimes, MeshShape
from hetjax.planner.harp.candidate_clock import StageSeconds, Tied
from hetjax.planner.harp.stage_table import Slice, StageTable, Transfers
from hetjax.planner.harp.table_making import (
    ALL_ORDERS_UP_TO,
    memory_first_order,
    submesh_shapes,
)
from hetjax.planner.problem.options import PlanOptions
from hetjax.planner.work.alike_runs import sums_of_runs
from hetjax.planner.work.arrays import FloatArray
from hetjax.planner.work.execution import Execution
from hetjax.planner.work.profile import Way
from hetjax.planner.work.rates import (
    TASK_SECONDS,
    USABLE_MEMORY,
    collective_link,
    ring_seconds,
    transfer_seconds,
)
from hetjax.planner.work.repeating_layers import Repetition
from hetjax.sharding.annotation.rules import REDUCTION_GROUPS

_REPETITIONS: tuple[Repetition, ...] = ("nothing", "layers", "stage")
"""What a stage may make again, that which takes the least time first."""


class ForeignCosts:
    """What runs of layers take with microbatches of one size.

    Args:
        profile: the profile.
        cluster: the devices.
        microbatch_size: examples of a microbatch.
    """

    def __init__(self, profile: ForeignProfile, cluster: Cluster, microbatch_size: int):
        self._profile, self._cluster, self._size = profile, cluster, microbatch_size
        self._known: dict[tuple[Way, Repetition], Estimate] = {}
        self._sums: dict[tuple[str, MeshShape], _Sums] = {}
        layers = profile.layers
        sent = np.array([0.0, *(each.sent_bytes for each in layers[:-1]), 0.0])
        self.received = sent * microbatch_size
        returned = np.array([0.0, *(each.returned_bytes for each in layers[:-1]), 0.0])
        self.returned = returned * microbatch_size
        self._parameters = self._held([each.parameter_bytes for each in layers])
        self._gradients = self._held([each.gradient_bytes for each in layers])
        self._state = self._held([each.optimizer_bytes for each in layers])

    @property
    def tied(self) -> list[Tied]:
        """The parameters that several layers use."""
        layers = self._profile.layers
        found: list[Tied] = []
        for owner in sorted({each.tied_to for each in layers if each.tied_to is not None}):
            users = np.array(
                [place == owner or e.tied_to == owner for place, e in enumerate(layers)]
            )
            told = layers[owner].gradient_bytes, layers[owner].parameter_bytes
            found.append((users, ExchangedBytes(*map(round, told))))
        return found

    def executions(self, part: Subcluster, shape: tuple[int, int]) -> Iterator[Execution]:
        """The ways to run a stage on a submesh, as far as there are times of them.

        Args:
            part: what the submesh is cut from.
            shape: its nodes, and devices in each.

        Yields:
            Every logical mesh whose data axis divides the microbatch and whose tensor axis stays in
            a node, and is no wider than the subcluster allows. Along the data axis the optimizer's
            state is divided, too (ZeRO-1).
        """
        link = collective_link(self._cluster, SubMesh(part.name, 0, shape))
        devices = shape[0] * shape[1]
        for tensor in range(1, part.devices_per_node + 1):
            data = devices // tensor
            if devices % tensor or part.devices_per_node % tensor or self._size % data:
                continue
            if not part.allows_tensor_axis(tensor):
                continue
            if self._of_mesh(part.kind.name, (data, tensor)) is None:
                continue
            for repeats in _REPETITIONS:
                yield Execution(
                    part.kind,
                    link,
                    (data, tensor),
                    "state_sharded" if data > 1 else "data",
                    repeats,
                    subcluster=part.name,
                    shape=shape,
                )

    def estimate(self, execution: Execution | UnionExecution) -> Estimate:
        """What every run of layers takes in one way.

        Args:
            execution: one of `executions`.

        Returns:
            Arrays ``[L + 1, L + 1]``: the entry ``[i, j]`` is for layers i to j - 1.
        """
        assert isinstance(execution, Execution), "a foreign profile knows no unions"
        key = execution.way, execution.repeats
        if key not in self._known:
            self._known[key] = self._estimate(execution)
        return self._known[key]

    def stage_seconds(self, execution: Execution | UnionExecution, length: int) -> StageSeconds:
        """What stages of so many layers take in one way.

        Args:
            execution: one of `executions`.
            length: how many layers.
        """
        found = self.estimate(execution)
        every = found.paced_forward_seconds, found.paced_backward_seconds, found.update_seconds
        every = *every, found.exchange_seconds
        return StageSeconds(*(np.diagonal(each, length) for each in every))

    def kept(self, execution: Execution) -> FloatArray:
        """What every run of layers keeps of a microbatch on a device, were nothing made again.

        Args:
            execution: one of `executions`.
        """
        sums = self._of_mesh(execution.kind.name, execution.mesh_shape)
        assert sums is not None, "there are times of every execution"
        return sums.kept

    def _estimate(self, execution: Execution) -> Estimate:
        data, tensor = execution.mesh_shape
        sums = self._of_mesh(execution.kind.name, execution.mesh_shape)
        assert sums is not None, "there are times of every execution"
        first_input = (self.received / data)[:, None]
        kept, working, again = sums.kept, sums.most_working, 0.0
        if execution.repeats == "stage":
            kept, working, again = first_input, working + sums.kept, sums.forward
        elif execution.repeats == "layers":
            kept = sums_of_runs(self.received[:-1] / data)
            working, again = working + sums.most_kept, sums.forward
        boundary = (self.received[:, None] + self.received[None, :]) / data
        gradients, state = self._gradients / tensor, self._state / tensor / data
        parameters = self._parameters / tensor
        scattered = gradients / data / REDUCTION_GROUPS * (data > 1)
        exchange = self._exchange(execution.data_link, parameters, gradients, data)
        updated = (parameters + gradients) / data + state
        rate = execution.kind.memory_bandwidth / 2
        nothing = np.zeros_like(sums.kept)
        return Estimate(
            state_bytes=parameters + gradients + state + scattered,
            activation_bytes=kept + 0 * sums.kept,
            working_bytes=boundary + working,
            update_bytes=nothing,
            host_bytes=nothing,
            offloaded_bytes=nothing,
            forward_seconds=sums.forward,
            backward_seconds=sums.backward + again,
            update_seconds=TASK_SECONDS + updated / rate + exchange,
            exchange_seconds=exchange,
            copy_seconds=nothing,
            paced_forward_seconds=sums.forward,
            paced_backward_seconds=sums.backward + again,
        )

    def _exchange(
        self, link: Link, parameters: FloatArray, gradients: FloatArray, data: int
    ) -> FloatArray:
        """A scatter of gradients over the data axis, and a gather of new parameters."""
        return ring_seconds(link, gradients, data) + ring_seconds(link, parameters, data)

    def _of_mesh(self, kind: str, mesh: MeshShape) -> _Sums | None:
        if (kind, mesh) not in self._sums:
            times = self._profile.times_on(kind, mesh, self._size)
            if times is None:
                return None
            self._sums[kind, mesh] = _Sums(times)
        return self._sums[kind, mesh]

    def _held(self, each: list[float]) -> FloatArray:
        """The sums over runs, tied parameters counted once."""
        sums = sums_of_runs(each)
        last_user: dict[int, int] = {}
        for place, layer in enumerate(self._profile.layers):
            owner = place if layer.tied_to is None else layer.tied_to
            if owner in last_user:
                # A run that has the user before it has them already, with the owner or without.
                sums[: last_user[owner] + 1, place + 1 :] -= each[place]
            last_user[owner] = place
        return sums

    def table(self, num_microbatches: int, schedule: str, options: PlanOptions) -> StageTable:
        """What a search needs to know.

        Args:
            num_microbatches: microbatches in a step.
            schedule: the schedule, which sets the warm-up counts.
            options: what a plan may be.
        """
        subclusters = self._cluster.subclusters
        names = [each.name for each in subclusters]
        num_layers = len(self._profile.layers)
        return StageTable(
            num_layers=num_layers,
            num_microbatches=num_microbatches,
            schedule=schedule,
            nodes=tuple((each.nodes, each.devices_per_node) for each in subclusters),
            slices=tuple(
                tuple(
                    self._slice(each, shape, num_microbatches, options)
                    for shape in submesh_shapes(each.nodes, each.devices_per_node)
                    if any(True for _ in self.executions(each, shape))
                )
                for each in subclusters
            ),
            within=tuple(self._transfers(each.intra_node) for each in subclusters),
            between=tuple(
                tuple(self._transfers(self._cluster.node_link(a, b)) for b in names) for a in names
            ),
            order=None
            if len(names) <= ALL_ORDERS_UP_TO
            else memory_first_order(self._cluster, "float32"),
            min_stages=options.min_stages,
            max_stages=options.max_stages and min(options.max_stages, num_layers),
        )

    def _slice(
        self,
        part: Subcluster,
        shape: tuple[int, int],
        num_microbatches: int,
        options: PlanOptions,
    ) -> Slice:
        size = len(self._profile.layers) + 1
        usable = part.kind.memory_bytes * USABLE_MEMORY
        is_run = np.triu(np.ones((size, size), dtype=bool), k=1)
        is_later = np.arange(size)[:, None] > 0
        kept: list[tuple[Execution, FloatArray, NDArray[np.int64], FloatArray]] = []
        full: set[MeshShape] = set()
        for each in self.executions(part, shape):
            if each.mesh_shape in full or not (
                options.allow_recompute or each.repeats == "nothing"
            ):
                continue
            found = self.estimate(each)
            limits = found.live_limit(usable, num_microbatches) * is_run
            if (limits[is_run] == num_microbatches).all():
                # Whatever a stage makes again of that, it only takes longer.
                full.add(each.mesh_shape)
            seconds = found.forward_seconds + found.backward_seconds
            seconds = seconds + found.update_seconds / num_microbatches * is_later
            seconds = np.where(limits > 0, np.round(seconds, 9), np.inf)
            kept.append((each, seconds, limits, found.update_seconds[0]))
        runs = np.zeros((size, size), dtype=np.int64)
        runs[is_run] = 1 + np.arange(is_run.sum())
        # The first entry stands for what is no run.
        seconds = [np.append(np.inf, seconds[is_run]) for _, seconds, _, _ in kept]
        limits = [np.append(0, limits[is_run]) for _, _, limits, _ in kept]
        return Slice(
            shape,
            runs,
            np.array(seconds).reshape(-1, 1 + is_run.sum()),
            np.array(limits, dtype=np.int64).reshape(-1, 1 + is_run.sum()),
            tuple(each for each, _, _, _ in kept),
            np.array([closing for _, _, _, closing in kept]).reshape(-1, size),
        )

    def _transfers(self, link: Link) -> Transfers:
        return Transfers(
            np.array([transfer_seconds(link, each) for each in self.received]),
            np.array([transfer_seconds(link, each) for each in self.returned]),
        )


class _Sums:
    """What runs of layers take together, ``[L + 1, L + 1]`` each."""

    def __init__(self, times: LayerTimes):
        self.forward = sums_of_runs(times.forward_seconds)
        self.backward = sums_of_runs(times.backward_seconds)
        self.kept = sums_of_runs(times.kept_bytes)
        self.most_kept = _most_of_runs(times.kept_bytes)
        self.most_working = _most_of_runs(times.working_bytes)


def _most_of_runs(values: FloatArray) -> FloatArray:
    """The largest value of each run of layers, ``[L + 1, L + 1]``."""
    size = len(values) + 1
    most = np.zeros((size, size))
    for first in range(size - 1):
        most[first, first + 1 :] = np.maximum.accumulate(values[first:])
    return most
