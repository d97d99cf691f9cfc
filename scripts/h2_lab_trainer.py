"""Three unlike hosts of the lab: the process on the first one, which plans and trains for `h2_lab`.

It measures the hosts, the links and the layers of a GPT; plans for all hosts by each planner, and
for each host alone; and trains by these plans, in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from baselines import model_of, optimizer
from benchmarking import RequestServer, Size, add_size, serve_until_end, size_of
from images_trainer import with_memory
from lab_profile import measure_missing
from prediction_pace import Pace, at_pace

import hetjax
from hetjax.commands.profiling import with_profile
from hetjax.errors import InputError, WorkerLostError
from hetjax.mesh import Cluster, SubMesh
from hetjax.pipeline.program.traced_program import with_examples
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.pipeline.timeline.simulate import simulate_schedule
from hetjax.planner import (
    DynamicProgram,
    HeteroAuto,
    Member,
    PartAlone,
    Plan,
    PlanningProblem,
    PlanOptions,
    StagePlan,
    complete,
    make_problem,
    predict,
    side_by_side,
)
from hetjax.planner.h2.module_ways import Modules
from hetjax.planner.harp.candidate_plans import pipeline_plan
from hetjax.planner.profiler import Measured, ProfileDatabase
from hetjax.runtime import RayOptions, measure_cluster
from hetjax.runtime.ray.ray_executor import connect_to_ray

Solve = Callable[[PlanningProblem], Plan]


def by_hetero_auto(problem: PlanningProblem) -> Plan:
    """HeteroAuto's plan, as it is: 1F1B."""
    return predict(HeteroAuto().find(problem)[0], problem)


def by_hetero_auto_refined(problem: PlanningProblem) -> Plan:
    """HeteroAuto's plan, refined by hetjax's own schedules."""
    return complete(HeteroAuto().plan(problem), problem)


def by_harp(problem: PlanningProblem) -> Plan:
    """The plan of Harp's search."""
    return complete(DynamicProgram().plan(problem), problem)


def even_split(problem: PlanningProblem) -> Plan:
    """As many blocks on each host, the fastest one first; 1F1B, and nothing is made again."""
    modules, parts = Modules.of(problem), problem.cluster.subclusters
    counts = [len(modules.runs) // len(parts)] * len(parts)
    order = sorted(parts, key=lambda part: -part.kind.flops(problem.dtype))
    stages = [
        StagePlan(layers, (Member(SubMesh(part.name, 0, (1, 1)), (1, 1)),))
        for part, layers in zip(order, modules.layers_of(counts), strict=True)
    ]
    schedule = one_f_one_b(len(stages), problem.num_microbatches)
    return predict(pipeline_plan(problem, stages, schedule, "even"), problem)


PLANNERS: Mapping[str, Solve] = {
    "heteroauto": by_hetero_auto,
    "heteroauto, refined": by_hetero_auto_refined,
    "harp": by_harp,
    "even": even_split,
}


@dataclass
class Training:
    """A plan in training.

    Args:
        plan: the plan.
        trainer: what trains by it.
    """

    plan: Plan
    trainer: hetjax.Trainer


class Server(RequestServer):
    """What is asked of the process.

    Args:
        size: sizes of the model and its batch.
    """

    def __init__(self, size: Size):
        self.size, self.model = size, model_of(size)
        self.batch = {"tokens": size.tokens()}
        self.parameters = jax.jit(self.model.init)(jax.random.key(0))
        self.training: dict[str, Training] = {}
        self.plans: dict[str, Plan] = {}
        self.pace: Pace | None = None
        connect_to_ray(RayOptions())

    def do_measure(self) -> list[dict[str, Any]]:
        """Measure hosts and links; what was found."""
        self.cluster = measure_cluster()
        hosts = [
            {"host": each.name, "flops": each.kind.flops("float32")}
            for each in self.cluster.subclusters
        ]
        links = [
            {"link": [a, b], "bandwidth": link.bandwidth, "latency": link.latency}
            for a, b, link in self.cluster.links
        ]
        return [*hosts, *links]

    def do_profile(self) -> dict[str, Any]:
        """State the problem, and measure its layers on the hosts."""
        problem = self._problem(self.cluster)
        examples = with_examples(self.batch, problem.microbatch_size)
        measured = Measured(
            self.model.loss,
            self.parameters,
            examples,
            optimizer(),
            problem.layers,
            problem.microbatch_size,
        )
        with tempfile.TemporaryDirectory() as folder:
            database = ProfileDatabase(Path(folder))
            count = measure_missing(problem, measured, database)
            self.problem = with_profile(problem, database)
        self.pace = Pace(self.problem, measured)
        return {"layers": problem.num_layers, "measurements": count}

    def do_plan(self, small: str, share: float) -> dict[str, Any]:
        """Plan for all hosts, and for each alone; what is predicted.

        Args:
            small: the host that has little memory.
            share: of what the even split is predicted to take there, what plans may use.

        Returns:
            ``"memory"``: how many bytes that is; ``"plans"``: of each its stages and figures;
            ``"alone"``: for each host that can hold the model, the plan for it alone;
            ``"ratios"``: each planner's HeteroSpeedupRatio.
        """
        memory = {small: share * _memory_on(small, even_split(self.problem))}
        cluster = with_memory(self.problem.cluster, memory)
        self.problem = replace(self.problem, cluster=cluster)
        self.plans = {name: solve(self.problem) for name, solve in PLANNERS.items()}
        hosts = [part.name for part in self.problem.cluster.subclusters]
        found = {host: self._alone(host) for host in hosts}
        alone = {host: f"{host} alone" for host, plan in found.items() if plan is not None}
        self.plans |= {alone[host]: plan for host, plan in found.items() if plan is not None}
        # Each host is as another kind: its processor is as fast as the lab lets it be.
        parts = [
            PartAlone((host,), 1, _step_time(self.plans[of]), host) for host, of in alone.items()
        ]
        together = side_by_side(parts)
        ratios = {name: together and together / _step_time(self.plans[name]) for name in PLANNERS}
        plans = {name: _told(plan) for name, plan in self.plans.items()}
        return {"memory": memory, "plans": plans, "alone": alone, "ratios": ratios}

    def _alone(self, host: str) -> Plan | None:
        """The fastest plan of any planner's for a host alone; None where the model does not fit."""
        problem = replace(self.problem, cluster=self.problem.cluster.part((host,)))
        found: list[Plan] = []
        for solve in (by_hetero_auto_refined, by_harp):
            with contextlib.suppress(InputError):
                found.append(solve(problem))
        found = [plan for plan in found if plan.prediction and plan.prediction.fits]
        return min(found, key=_step_time, default=None)

    def do_save(self, name: str, path: str) -> None:
        """Write a plan to a file."""
        self.plans[name].save(path)

    def do_load(self, name: str, path: str) -> None:
        """Read a plan from a file."""
        self.plans[name] = Plan.load(path)

    def do_start(self, name: str) -> None:
        """Make the trainer of a plan."""
        plan = self.plans[name]
        what = (self.model.loss, self.parameters, optimizer(), self.batch)
        self.training[name] = Training(plan, hetjax.Trainer(plan, *what, runtime=RayOptions()))

    def do_steps(self, name: str, count: int) -> list[float]:
        """Run steps; their losses."""
        trainer = self.training[name].trainer
        return [trainer.train_step(self.batch).loss for _ in range(count)]

    def do_steps_or_lost(self, name: str, count: int) -> dict[str, Any]:
        """Run steps; their losses, or which worker was lost and why."""
        try:
            self.do_start(name)
            return {"losses": self.do_steps(name, count), "lost": None}
        except WorkerLostError as error:
            return {"losses": [], "lost": error.worker, "message": str(error)}

    def do_step(self, name: str) -> float:
        """Run one step; its seconds."""
        return self.training[name].trainer.train_step(self.batch).seconds

    def do_pace(self) -> dict[str, float]:
        """By what each host's passes take longer now than when they were measured."""
        assert self.pace is not None, "measure a profile first"
        return self.pace.now()

    def do_at_pace(self, name: str, moments: Sequence[Mapping[str, float]]) -> float:
        """Predict a step again by the hosts' pace at some moments; its seconds."""
        plan = self.plans[name]
        return simulate_schedule(plan.pipeline.schedule, at_pace(plan, moments)).makespan

    def do_end(self, name: str) -> None:
        """End a trainer."""
        self.training.pop(name).trainer.close()

    def do_end_pace(self) -> None:
        """End the workers that measure the hosts' pace."""
        if self.pace is not None:
            self.pace.close()
            self.pace = None

    def _problem(self, cluster: Cluster) -> PlanningProblem:
        return make_problem(
            self.model.loss,
            self.parameters,
            self.batch,
            cluster=cluster,
            optimizer=optimizer(),
            num_microbatches=self.size.microbatches,
            options=PlanOptions(max_pipelines=1, union_stages=False),
        )

    def close(self) -> None:
        """End all workers."""
        self.do_end_pace()
        for each in self.training.values():
            each.trainer.close()


def _step_time(plan: Plan) -> float:
    return plan.predicted.step_time


def _memory_on(host: str, plan: Plan) -> int:
    stages = zip(plan.stages, plan.predicted.stages, strict=True)
    return max(each.memory_bytes for stage, each in stages if stage.submesh.subcluster == host)


def _told(plan: Plan) -> dict[str, Any]:
    stages = [
        {
            "host": stage.submesh.subcluster,
            "layers": stage.layers,
            "recompute": stage.recompute,
            "recompute_layers": sum(end - start for start, end in stage.recompute_layers),
            "memory_bytes": predicted.memory_bytes,
            "fits": predicted.fits,
        }
        for stage, predicted in zip(plan.stages, plan.predicted.stages, strict=True)
    ]
    schedule = plan.pipeline.schedule
    return {
        "stages": stages,
        "schedule": schedule.name,
        "warm_up_counts": list(schedule.warm_up_counts),
        "predicted_step_time": plan.predicted.step_time,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_size(parser)
    serve_until_end(Server(size_of(parser.parse_args())))


if __name__ == "__main__":
    main()
