"""Hosts of the lab that share long sequences: the process on the first one, for `context_hosts`."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from baselines import model_of, optimizer
from benchmarking import RequestServer, Size, add_size, serve_until_end, size_of
from images_trainer import with_memory
from lab_profile import measure_missing

import hetjax
from hetjax.commands.profiling import with_profile
from hetjax.errors import DoesNotFitError, WorkerLostError
from hetjax.pipeline.program.traced_program import with_examples
from hetjax.planner import HexiSeqPlanner, Plan, PlanningProblem, make_problem, predict
from hetjax.planner.hexiseq.context_choice import ContextChoice, context_models
from hetjax.planner.hexiseq.predicted_choice import one_stage_plan
from hetjax.planner.hexiseq.scheduler import schedule_groups
from hetjax.planner.profiler import Measured, ProfileDatabase
from hetjax.runtime import RayOptions, measure_cluster
from hetjax.runtime.ray.ray_executor import connect_to_ray

PROFILED = 4096
"""The tokens of the sequences that layers are measured with: what classes of work take there is
what they take in longer ones."""


class Server(RequestServer):
    """What is asked of the process.

    Args:
        size: sizes of the model and its batch.
    """

    def __init__(self, size: Size):
        self.size, self.model = size, model_of(size)
        self.batch = {"tokens": size.tokens()}
        self.parameters = jax.jit(self.model.init)(jax.random.key(0))
        self.plans: dict[str, Plan] = {}
        self.trainers: dict[str, hetjax.Trainer] = {}
        connect_to_ray(RayOptions())

    def close(self) -> None:
        """End all trainers."""
        for trainer in self.trainers.values():
            trainer.close()

    def do_measure(self) -> dict[str, Any]:
        """Measure hosts and links, and what the model's layers take on each host.

        Returns:
            The seconds of a step on each host by itself, by what was measured; and the links.
        """
        cluster = measure_cluster()
        with tempfile.TemporaryDirectory() as folder:
            database = ProfileDatabase(Path(folder))
            short = replace(self.size, sequence=min(PROFILED, self.size.sequence))
            known = _problem(short, cluster)
            measure_missing(known, _measured(short, known), database)
            self.problem = with_profile(_problem(self.size, cluster), database)
        self.model_of_costs = context_models(self.problem)[0]
        work, paces = self.model_of_costs.work, self.model_of_costs.paces
        assert paces is not None, "models of problems have them"
        return {
            "alone": {name: pace.step_seconds(work) for name, pace in paces.items()},
            "links": [[a, b, link.bandwidth, link.latency] for a, b, link in cluster.links],
        }

    def do_find(self, memory: Mapping[str, float]) -> list[str]:
        """Find the hosts, whose layers are not measured.

        Args:
            memory: bytes that a host may have by the planner, of some.

        Returns:
            Their names.
        """
        self.problem = _problem(self.size, with_memory(measure_cluster(), memory))
        self.model_of_costs = context_models(self.problem)[0]
        return [part.name for part in self.problem.cluster.subclusters]

    def do_plan(self, system: str) -> dict[str, Any] | None:
        """Plan by a system; None where it is not legal."""
        try:
            self.plans[system] = HexiSeqPlanner(system).plan(self.problem)
        except DoesNotFitError:
            return None
        return self._told(system)

    def do_plan_repeating(self, system: str) -> dict[str, Any]:
        """Plan by a system, with layers that are made again whether or not that is faster."""
        choices = HexiSeqPlanner(system).choices(self.problem)
        return self._chosen(system, next(e for e in choices if e.model.work.is_recomputed))

    def do_force(
        self, name: str, groups: Sequence[Sequence[int]], repeating: bool = False
    ) -> dict[str, Any]:
        """Plan the best tokens and heads for given groups of hosts.

        Args:
            name: what the plan is called.
            groups: the numbers of their hosts.
            repeating: whether layers are made again.
        """
        model = context_models(self.problem)[1] if repeating else self.model_of_costs
        return self._chosen(name, ContextChoice(schedule_groups(model, groups), model))

    def _chosen(self, name: str, choice: ContextChoice) -> dict[str, Any]:
        self.plans[name] = predict(one_stage_plan(self.problem, choice), self.problem)
        return self._told(name)

    def _told(self, name: str) -> dict[str, Any]:
        plan = self.plans[name]
        (stage,), (predicted,) = plan.stages, plan.predicted.stages
        split = stage.shares.context
        return {
            "devices": stage.devices_text,
            "groups": [] if split is None else [group.devices for group in split.groups],
            "tokens": [] if split is None else split.tokens,
            "heads": [] if split is None else split.head_ranges,
            "predicted": plan.predicted.step_time,
            "memory_bytes": [each.memory_bytes for each in predicted.members or [predicted]],
        }

    def do_start(self, system: str) -> None:
        """Make the trainer of a plan."""
        what = (self.model.loss, self.parameters, optimizer(), self.batch)
        self.trainers[system] = hetjax.Trainer(self.plans[system], *what, runtime=RayOptions())

    def do_steps(self, system: str, count: int) -> list[float]:
        """Run steps; their losses."""
        return [self.trainers[system].train_step(self.batch).loss for _ in range(count)]

    def do_steps_or_lost(self, system: str, count: int) -> dict[str, Any]:
        """Run steps; their losses, or the name of the worker that was lost."""
        try:
            return {"losses": self.do_steps(system, count)}
        except WorkerLostError as error:
            return {"lost": error.worker}

    def do_step(self, system: str, in_step: bool = False) -> float:
        """Run one step; its seconds.

        Args:
            system: of which plan.
            in_step: whether hosts wait for each thing that they compute before they go on, so that
                nothing is computed while arrays are given or awaited.
        """
        return self.trainers[system].train_step(self.batch, timed=in_step).seconds

    def do_end(self, system: str) -> None:
        """End a trainer."""
        self.trainers.pop(system).close()


def _problem(size: Size, cluster: hetjax.Cluster) -> PlanningProblem:
    model = model_of(size)
    return make_problem(
        model.loss,
        jax.eval_shape(model.init, jax.random.key(0)),
        {"tokens": size.tokens()},
        cluster=cluster,
        optimizer=optimizer(),
        num_microbatches=size.microbatches,
        divides_sequences=True,
    )


def _measured(size: Size, problem: PlanningProblem) -> Measured:
    """The program whose layers are measured."""
    model = model_of(size)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    rows = size.microbatch_size
    examples = with_examples({"tokens": size.tokens()}, rows)
    return Measured(model.loss, shapes, examples, optimizer(), problem.layers, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_size(parser)
    serve_until_end(Server(size_of(parser.parse_args())))


if __name__ == "__main__":
    main()
