"""Context splits in the lab, for real: the process on the first host that `context_lab` asks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import jax
from benchmarking import RequestServer, serve_until_end
from context_cases import Case, Group, optimizer, plan_of, problem_of, tokens_of
from lab_profile import measure_missing
from prediction_pace import Pace

import hetjax
from hetjax.commands.profiling import with_profile
from hetjax.pipeline.program.traced_program import with_examples
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
    """A case in training.

    Args:
        trainer: trains it.
        plan: its plan, with a prediction.
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

    def do_links(self) -> list[float]:
        """Measure the links again; their bytes/s."""
        self.cluster = replace(self._found, links=measure_cluster().links)
        return [link.bandwidth for _, _, link in self.cluster.links]

    def do_profile(self, folder: str, models: Sequence[tuple[str, int]]) -> int:
        """Measure runs of models' layers on all hosts, where that was not done before.

        Args:
            folder: the profile database.
            models: of each its name and its tokens.

        Returns:
            How many measurements were made.
        """
        self.database, count = ProfileDatabase(Path(folder)), 0
        for model, sequence in models:
            case = Case(model, sequence, ())
            problem = problem_of(case, self._found)
            count += measure_missing(problem, _measured(case, problem), self.database)
        return count

    def do_start_pace(self, model: str, sequence: int) -> None:
        """Start what measures the hosts' pace: runs of a model that was profiled."""
        case = Case(model, sequence, ())
        problem = self._profiled(problem_of(case, self._found))
        self.pace = Pace(problem, _measured(case, problem))

    def do_pace(self) -> dict[str, float]:
        """Measure by what each host's passes take longer now than when it was profiled."""
        assert self.pace is not None, "start it first"
        return self.pace.now()

    def do_make(self, name: str, case: Mapping[str, Any]) -> float:
        """Predict a case, and make its trainer; the predicted seconds of a step."""
        told = _case_of(case)
        problem = self._profiled(problem_of(told, self._found))
        plan = predict(plan_of(told, problem), problem)
        batch = tokens_of(told)
        parameters = jax.jit(told.language.init)(jax.random.key(0))
        where: dict[str, Any] = {"source": OneBatch(batch), "runtime": hetjax.RayOptions()}
        arguments = (plan, told.language.loss, parameters, optimizer(), batch)
        self.training[name] = Training(hetjax.Trainer(*arguments, **where), plan, problem)
        assert plan.prediction is not None, "it is predicted"
        return plan.prediction.step_time

    def do_at_pace(self, name: str, moments: Sequence[Mapping[str, float]]) -> float:
        """Predict a step again, by the hosts' pace at some moments; its seconds."""
        each = self.training[name]
        pace = {host: mean(moment[host] for moment in moments) for host in moments[0]}
        slower = replace(each.problem, profile=each.problem.profile.at_pace(pace))
        prediction = predict(each.plan, slower).prediction
        assert prediction is not None, "it is predicted"
        return prediction.step_time

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

    def _profiled(self, problem: PlanningProblem) -> PlanningProblem:
        return problem if self.database is None else with_profile(problem, self.database)

    @property
    def _found(self) -> hetjax.Cluster:
        assert self.cluster is not None, "measure the lab first"
        return self.cluster


def _case_of(told: Mapping[str, Any]) -> Case:
    """A case as JSON has it."""
    stages: Sequence[Sequence[Group]] = told["stages"]
    groups = tuple(
        tuple(tuple((part, heads) for part, heads in group) for group in stage) for stage in stages
    )
    return Case(**{**told, "stages": groups})


def _measured(case: Case, problem: PlanningProblem) -> Measured:
    language, size = case.language, problem.microbatch_size
    shapes = jax.eval_shape(language.init, jax.random.key(0))
    batch = with_examples(tokens_of(case), size)
    return Measured(language.loss, shapes, batch, optimizer(), problem.layers, size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    serve_until_end(Server())


if __name__ == "__main__":
    main()
