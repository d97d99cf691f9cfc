"""What runs inside a Ray actor: one host of one stage, with its own JAX client."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtyping import PyTree

from hetjax.runtime.transfer_server import Peer


def pin_to_core(core: int) -> None:
    """Keep every thread of this process on one core, and so those it starts later."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})


class HostWorker:
    """One process of a stage's submesh.

    It is created before JAX is imported; `build` starts JAX, `connect` joins the other workers.

    Args:
        peer: its stage, and its place among the stage's hosts.
        core: the CPU core to stay on; None for any.
    """

    def __init__(self, peer: Peer, core: int | None):
        self.peer = peer
        if core is not None:
            pin_to_core(core)

    def ping(self) -> Peer:
        """Answer, as long as the process runs."""
        return self.peer

    def host(self) -> tuple[str, int]:
        """This host's address in the cluster, and a free port on it."""
        import ray

        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, probe.getsockname()[1]

    def join_world(self, coordinator: str, num_processes: int) -> None:
        """Join the other hosts of the submesh in one `jax.distributed` world."""
        import jax

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            coordinator,
            num_processes,
            self.peer[1],
            coordinator_bind_address=coordinator if self.peer[1] == 0 else None,
        )

    def build(self, job: Any, devices_per_process: list[int]) -> str:
        """Trace, compile and listen.

        Args:
            job: the training job.
            devices_per_process: for each stage, how many devices each of its processes has.

        Returns:
            The address where other workers reach this one.
        """
        import jax
        import numpy as np
        import ray

        from hetjax.runtime.feed import BatchReader
        from hetjax.runtime.job import build, transfers
        from hetjax.runtime.transfer_server import TransferServerTransport
        from hetjax.runtime.worker import StageWorker
        from hetjax.sharding.rules import MESH_AXES

        stage, process = self.peer
        placement = build(job)
        plan = placement.plan
        wanted = plan.stages[stage].submesh.num_devices
        devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))[:wanted]
        shape = plan.stages[stage].mesh_shape
        mesh = jax.sharding.Mesh(np.array(devices).reshape(shape), MESH_AXES)
        self.transport = TransferServerTransport(
            placement,
            self.peer,
            mesh,
            devices_per_process,
            transfers(placement.pipeline, plan),
            ray.util.get_node_ip_address(),
            job.deadline,
        )
        self.worker = StageWorker(placement, stage, mesh, self.transport)
        self.job = job
        self.reader = (
            None if job.source is None else BatchReader(job.source, job.plan.batch_size, job.batch)
        )
        return self.transport.address

    def connect(self, addresses: Mapping[Peer, str]) -> None:
        """Connect to the workers that this one receives from."""
        self.transport.connect(addresses)

    def start(self) -> None:
        """Make the initial state."""
        self.worker.start(self.job.parameters)

    def train_step(self, call: int, step: int, batch: PyTree | None, timed: bool) -> Any:
        """Run one training step.

        Args:
            call: a number that grows with every step of any kind.
            step: the training step, which says which batch.
            batch: the batch, where it does not come from the job's source.
            timed: whether to record when each operation ran.

        Returns:
            The worker's report.
        """
        return self.worker.train_step(call, self._feed(step, batch), timed=timed)

    def _feed(self, step: int, batch: PyTree | None) -> Any:
        from hetjax.runtime.feed import feed_of

        if batch is not None:
            return feed_of(batch, self.job.batch, self.job.plan.batch_size)
        assert self.reader is not None, "a job without a source is given its batches"
        return self.reader.training(step)

    def num_held_out(self) -> int:
        """How many held-out batches there are."""
        return 0 if self.reader is None else self.reader.num_held_out

    def evaluate(self, call: int, index: int) -> tuple[float, float] | None:
        """The summed loss and the count of a held-out batch; None except in the last stage."""
        assert self.reader is not None
        return self.worker.evaluate(call, self.reader.held_out(index))

    def save(self, folder: str) -> None:
        """Start saving the state; what is trained meanwhile is not in it."""
        self.saver.save(Path(folder), self.worker.state())

    def wait_saved(self) -> Any:
        """Finish saving, and say what was written."""
        return self.saver.wait()

    def load(self, folder: str) -> None:
        """Take over the state of a checkpoint."""
        self.worker.restore(self.saver.load(Path(folder), self.worker.compiled))

    @property
    def saver(self) -> Any:
        """What writes and reads this worker's part of checkpoints."""
        from hetjax.runtime.checkpoint import StageSaver

        if not hasattr(self, "_saver"):
            self._saver = StageSaver(self.worker.placement, self.peer[0])
        return self._saver

    def parameters(self) -> list[Any]:
        """The stage's parameter parts as NumPy arrays."""
        import numpy as np

        return [np.asarray(array) for array in self.worker.state().parameters]
