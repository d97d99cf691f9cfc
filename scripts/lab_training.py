"""What processes on the first host of a lab have in common that train what they predicted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import jax
import optax
from benchmarking import RequestServer
from lab_profile import measure_missing
from prediction_pace import Pace

import hetjax
from hetjax.commands.profiling import with_profile
from hetjax.planner import Plan, PlanningProblem, predict
from hetjax.planner.profiler import Measured, ProfileDatabase
from hetjax.runtime import RayOptions, measure_cluster
from hetjax.runtime.ray.ray_executor import connect_to_ray


@dataclass(frozen=True)
class OneBatch:
    """A source that gives the same batch at every step, of which workers read their own rows.

    Args:
        whole: the batch.
    """

    whole: Any

    def batch(self, step: int, batch_size: int, rows: slice | None = None) -> Any:
        """The batch, or some rows of it."""
        return jax.tree.map(lambda leaf: leaf[rows or slice(None)], self.whole)

    def held_out_batches(self, batch_size: int) -> list[Any]:
        """Nothing is held out."""
        return []


@dataclass
class Training:
    """A plan in training.

    Args:
        trainer: trains by it.
        plan: the plan, with a prediction.
        problem: what that solves.
    """

    trainer: hetjax.Trainer
    plan: Plan
    problem: PlanningProblem


class TrainingServer(RequestServer):
    """What is asked of the process, whatever it trains."""

    def __init__(self) -> None:
        self.cluster: hetjax.Cluster | None = None
        self.database: ProfileDatabase | None = None
        self.pace: Pace | None = None
        self.training: dict[str, Training] = {}
        connect_to_ray(RayOptions())

    @property
    def found(self) -> hetjax.Cluster:
        """The lab's cluster."""
        assert self.cluster is not None, "measure the lab first"
        return self.cluster

    def do_measure(self) -> dict[str, float]:
        """Measure the lab; the FLOP/s of its hosts."""
        self.cluster = measure_cluster()
        return {each.name: each.kind.flops("float32") for each in self.cluster.subclusters}

    def do_links(self) -> list[float]:
        """Measure the links again; their bytes/s."""
        self.cluster = replace(self.found, links=measure_cluster().links)
        return [link.bandwidth for _, _, link in self.cluster.links]

    def profile(self, folder: str, wanted: Iterable[tuple[PlanningProblem, Measured]]) -> int:
        """Measure runs of programs' layers on all hosts, where that was not done before.

        Args:
            folder: the profile database.
            wanted: of each program its problem, and what is measured.

        Returns:
            How many measurements were made.
        """
        self.database = ProfileDatabase(Path(folder))
        return sum(measure_missing(*each, self.database) for each in wanted)

    def profiled(self, problem: PlanningProblem) -> PlanningProblem:
        """A problem with what was measured."""
        return problem if self.database is None else with_profile(problem, self.database)

    def start_pace(self, problem: PlanningProblem, measured: Measured) -> None:
        """Start what measures the hosts' pace, by a program that was profiled."""
        self.pace = Pace(self.profiled(problem), measured)

    def do_pace(self) -> dict[str, float]:
        """Measure by what each host's passes take longer now than when it was profiled."""
        assert self.pace is not None, "start it first"
        return self.pace.now()

    def do_at_pace(self, name: str, moments: Sequence[Mapping[str, float]]) -> float:
        """Predict a step again, by the hosts' pace at some moments; its seconds."""
        each = self.training[name]
        pace = {host: mean(moment[host] for moment in moments) for host in moments[0]}
        paced = replace(each.problem, profile=each.problem.profile.at_pace(pace))
        return predict(each.plan, paced).predicted.step_time

    def train(
        self,
        name: str,
        plan: Plan,
        problem: PlanningProblem,
        what: tuple[Any, Any, Any],
        optimizer: optax.GradientTransformation,
    ) -> None:
        """Make the trainer of a plan, of a loss, parameters and a batch."""
        function, parameters, batch = what
        where: dict[str, Any] = {"source": OneBatch(batch), "runtime": RayOptions()}
        trainer = hetjax.Trainer(plan, function, parameters, optimizer, batch, **where)
        self.training[name] = Training(trainer, plan, problem)

    def do_steps(self, name: str, count: int) -> list[float]:
        """Run steps; their losses."""
        return [self.training[name].trainer.train_step().loss for _ in range(count)]

    def do_step(self, name: str) -> float:
        """Run one step; its seconds."""
        return self.training[name].trainer.train_step().seconds

    def do_end(self, name: str) -> None:
        """End a trainer."""
        self.training.pop(name).trainer.close()

    def close(self) -> None:
        """End all trainers, and what measures the hosts' pace."""
        if self.pace is not None:
            self.pace.close()
        for each in self.training.values():
            each.trainer.close()
