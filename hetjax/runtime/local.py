"""The local executor: all stages in one process, each on its own devices and its own thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import jax
from jaxtyping import PyTree

from hetjax.mesh.cluster import Cluster
from hetjax.mesh.hetero import HeteroMesh
from hetjax.runtime.instructions import Tag
from hetjax.runtime.placement import Placement, named
from hetjax.runtime.state import StageState
from hetjax.runtime.transport import InProcessTransport
from hetjax.runtime.worker import Feed, StageWorker, StepReport
from hetjax.sharding.rules import MESH_AXES

Result = TypeVar("Result")


class LocalExecutor:
    """Runs every stage of a pipeline in this process.

    Args:
        placement: the pipeline's programs, plan and shardings.
        cluster: the cluster that the plan names.
        devices: the process's devices, as many as the cluster has or more; ``jax.devices()`` where
            none are given.
        deadline: seconds after which a stage that waits for another gives up.

    Raises:
        InputError: there are fewer devices than the cluster has.
    """

    def __init__(
        self,
        placement: Placement,
        cluster: Cluster,
        devices: Sequence[Any] | None = None,
        *,
        deadline: float = 300.0,
    ):
        stages = placement.plan.stages
        union = HeteroMesh.bind(
            cluster, tuple(stage.submesh for stage in stages), devices or jax.devices()
        )
        meshes = [union.mesh(i, MESH_AXES, stage.mesh_shape) for i, stage in enumerate(stages)]

        def shardings(tag: Tag) -> list[jax.sharding.NamedSharding]:
            target = tag.route.target
            specs = placement.route_specs(tag.route, tag.microbatch, target)
            return named(meshes[target], specs)

        self.transport = InProcessTransport(shardings, deadline)
        self.workers = [
            StageWorker(placement, stage, mesh, self.transport) for stage, mesh in enumerate(meshes)
        ]
        self._threads = ThreadPoolExecutor(len(stages), thread_name_prefix="stage")

    def start(self, parameters: PyTree | Callable[[], PyTree]) -> None:
        """Make the initial state on every stage."""
        for worker in self.workers:
            worker.start(parameters)

    def train_step(self, step: int, feed: Feed, *, timed: bool = False) -> list[StepReport]:
        """Run one step on all stages.

        Returns:
            The report of each stage.
        """
        return self._all(lambda worker: worker.train_step(step, feed, timed=timed))

    def evaluate(self, step: int, feed: Feed) -> tuple[float, float]:
        """The summed loss of one batch, and the count."""
        results = self._all(lambda worker: worker.evaluate(step, feed))
        result = results[-1]
        assert result is not None
        return result

    def states(self) -> list[StageState]:
        """The state of every stage."""
        return [worker.state() for worker in self.workers]

    def restore(self, states: Sequence[StageState]) -> None:
        """Take over a state for every stage."""
        for worker, state in zip(self.workers, states, strict=True):
            worker.restore(state)

    def close(self) -> None:
        """End the threads and forget all arrays."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.transport.close()
        for worker in self.workers:
            worker.buffers.clear()

    def _all(self, call: Callable[[StageWorker], Result]) -> list[Result]:
        if len(self.workers) == 1:
            return [call(self.workers[0])]

        def run(worker: StageWorker) -> Result:
            try:
                return call(worker)
            except BaseException as error:
                self.transport.fail(error)
                raise

        futures = [self._threads.submit(run, worker) for worker in self.workers]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        return [future.result() for future in futures]
