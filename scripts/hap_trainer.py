"""Synthesised programs in the lab, for real: the process on the first host that `hap_lab` asks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import jax
import optax
from benchmarking import RequestServer, serve_until_end
from hap_gathers import Method, gather_plan, loss
from hap_models import HapModel, bert, initial, vgg19, vit
from hap_systems import SYSTEMS
from lab_profile import measure_missing
from prediction_pace import Pace

import hetjax
from hetjax.commands.profiling import with_profile
from hetjax.pipeline.program.traced_program import with_examples
from hetjax.planner import (
    DynamicProgram,
    HapPlanner,
    Plan,
    PlanningProblem,
    complete,
    make_problem,
    predict,
)
from hetjax.planner.profiler import (
    Measured,
    ProfileDatabase,
)
from hetjax.runtime import RayOptions, measure_cluster
from hetjax.runtime.ray.ray_executor import connect_to_ray

MODELS = {"VGG19": vgg19, "ViT": vit, "BERT": bert, "BERT-MoE": bert}


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


def optimizer() -> optax.GradientTransformation:
    """The benchmark's optimizer."""
    return optax.adam(1e-3)


@dataclass
class Training:
    """A model in training.

    Args:
        trainer: trains it.
        plan: its plan.
        problem: what that solves.
    """

    trainer: hetjax.Trainer
    plan: Plan
    problem: PlanningProblem


class Server(RequestServer):
    """What is asked of the process."""

    def __init__(self) -> None:
        self.cluster: hetjax.Cluster | None = None
        self.database: ProfileDatabase | None = None
        self.pace: Pace | None = None
        self.training: dict[str, Training] = {}
        connect_to_ray(RayOptions())

    def do_measure(self) -> dict[str, float]:
        """Measure the lab; the FLOP/s of its hosts."""
        self.cluster = measure_cluster()
        return {each.name: each.kind.flops("float32") for each in self.cluster.subclusters}

    def do_profile(
        self, folder: str, models: Sequence[tuple[str, Mapping[str, int]]], microbatches: int = 1
    ) -> int:
        """Measure runs of models' layers on all hosts, where that was not done before.

        Args:
            folder: the profile database.
            models: of each its name and its sizes.
            microbatches: of a step.

        Returns:
            How many measurements were made.
        """
        self.database, count = ProfileDatabase(Path(folder)), 0
        for name, sizes in models:
            model = MODELS[name](**sizes)
            problem = self._problem(model, microbatches)
            count += measure_missing(problem, _measured(model, problem), self.database)
        return count

    def do_start_pace(self, model: str, sizes: Mapping[str, int]) -> None:
        """Start what measures the hosts' pace: runs of a model that was profiled."""
        made = MODELS[model](**sizes)
        problem = self._profiled(self._problem(made))
        self.pace = Pace(problem, _measured(made, problem))

    def do_pace(self) -> dict[str, float]:
        """Measure by what each host's passes take longer now than when it was profiled."""
        assert self.pace is not None, "start it first"
        return self.pace.now()

    def do_at_pace(self, name: str, moments: Sequence[Mapping[str, float]]) -> float:
        """Predict a step again, by the hosts' pace at some moments; its seconds."""
        each = self.training[name]
        pace = {host: mean(moment[host] for moment in moments) for host in moments[0]}
        paced = each.problem.profile.at_pace(pace)
        prediction = predict(each.plan, replace(each.problem, profile=paced)).prediction
        assert prediction is not None, "it is predicted"
        return prediction.step_time

    def _profiled(self, problem: PlanningProblem) -> PlanningProblem:
        if self.database is None:
            return problem
        return with_profile(problem, self.database)

    def _problem(self, model: HapModel, microbatches: int = 1) -> PlanningProblem:
        where: dict[str, Any] = {"cluster": self._found, "optimizer": optimizer()}
        return make_problem(
            model.loss, model.parameters, model.batch, num_microbatches=microbatches, **where
        )

    def do_links(self) -> list[float]:
        """Measure the links again; their bytes/s."""
        self.cluster = replace(self._found, links=measure_cluster().links)
        return [link.bandwidth for _, _, link in self.cluster.links]

    @property
    def _found(self) -> hetjax.Cluster:
        assert self.cluster is not None, "measure the lab first"
        return self.cluster

    def do_make(
        self, name: str, model: str, sizes: Mapping[str, int], of: str, microbatches: int = 1
    ) -> dict[str, Any]:
        """Plan for a model, and make its trainer.

        Args:
            name: the trainer's.
            model: one of `MODELS`.
            sizes: its sizes.
            of: one of `SYSTEMS`.
            microbatches: of a step.

        Returns:
            What a step is predicted to take, and what is moved in it.
        """
        count, system = len(self._found.subclusters), SYSTEMS[of]
        if system.is_padded:
            sizes = {**sizes, "padded": -(-sizes["experts"] // count) * count}
        made = MODELS[model](**sizes)
        parameters, batch = initial(made)
        problem = self._profiled(self._problem(made, microbatches))
        even = (1 / count,) * count if system.is_even else ()
        if system.stages == "one":
            plan = predict(HapPlanner(system.forced, even).plan(problem), problem)
        else:
            synthesised = system.stages == "either"
            options = replace(problem.options, synthesised_stages=synthesised, max_pipelines=1)
            problem = replace(problem, options=options)
            plan = complete(DynamicProgram().plan(problem), problem)
        return self._train(name, plan, problem, (made.loss, parameters, batch))

    def do_make_gather(
        self, name: str, num_bytes: int, largest: float, method: Method
    ) -> dict[str, Any]:
        """Make a trainer whose step is one gather of uneven parts; see `gather_plan`.

        Returns:
            As `do_make`.
        """
        plan, weight, batch = gather_plan(self._found, num_bytes, largest, method)
        where: dict[str, Any] = {"cluster": self._found, "optimizer": optimizer()}
        problem = make_problem(loss, weight, batch, num_microbatches=1, **where)
        return self._train(name, predict(plan, problem), problem, (loss, weight, batch))

    def _train(
        self, name: str, plan: Plan, problem: PlanningProblem, what: tuple[Any, Any, Any]
    ) -> dict[str, Any]:
        """Make a trainer of a loss, parameters and a batch; what is told of its plan."""
        function, parameters, batch = what
        where: dict[str, Any] = {"source": OneBatch(batch), "runtime": hetjax.RayOptions()}
        trainer = hetjax.Trainer(plan, function, parameters, optimizer(), batch, **where)
        self.training[name] = Training(trainer, plan, problem)
        return _told(plan)

    def do_steps(self, name: str, count: int) -> list[float]:
        """Run steps; their losses."""
        each = self.training[name]
        return [each.trainer.train_step().loss for _ in range(count)]

    def do_step(self, name: str) -> float:
        """Run one step; its seconds."""
        each = self.training[name]
        return each.trainer.train_step().seconds

    def do_end(self, name: str) -> None:
        """End a trainer."""
        self.training.pop(name).trainer.close()

    def close(self) -> None:
        """End all trainers, and what measures the hosts' pace."""
        if self.pace is not None:
            self.pace.close()
        for each in self.training.values():
            each.trainer.close()


def _measured(model: HapModel, problem: PlanningProblem) -> Measured:
    layers, size = problem.layers, problem.microbatch_size
    batch = with_examples(model.batch, size)
    return Measured(model.loss, model.parameters, batch, optimizer(), layers, size)


def _told(plan: Plan) -> dict[str, Any]:
    assert plan.prediction is not None, "the plan is predicted"
    return {
        "predicted_step_time": plan.prediction.step_time,
        "stages": [
            {
                "hosts": [member.submesh.subcluster for member in stage.members],
                "layers": stage.layers,
                "is_synthesised": bool(stage.shares.modules),
            }
            for stage in plan.stages
        ],
        "stored": {
            name: [share.dimension, *share.sizes]
            for stage in plan.stages
            for name, share in stage.shares.parameters.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    serve_until_end(Server())


if __name__ == "__main__":
    main()
