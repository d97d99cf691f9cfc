"""Plans in the lab, predicted and run: the process on the first host that `bench_predictions` asks.

It profiles a configuration's model on the hosts, predicts plans of it, and trains by them.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarking import RequestServer, serve_until_end
from prediction_pace import Pace, at_pace

import hetjax
from hetjax.commands.prepare import problem_to_profile
from hetjax.commands.profiling import measure_profile, measured_program, with_profile
from hetjax.configuration import read_configuration
from hetjax.configuration.make import make_ingredients
from hetjax.mesh import SubMesh
from hetjax.pipeline.schedules.warm_up import from_warm_up_counts
from hetjax.pipeline.timeline.measured_times import measured_times
from hetjax.pipeline.timeline.simulate import simulate_schedule
from hetjax.planner import (
    DynamicProgram,
    PipelinePlan,
    Plan,
    PlanningProblem,
    StagePlan,
    choose_schedule,
    complete,
    predict,
)
from hetjax.planner.profiler import ProfileDatabase
from hetjax.runtime import RayOptions, measure_cluster
from hetjax.runtime.ray.ray_executor import connect_to_ray

_MOVES = (-2, -1, 1, 2)
"""By how many layers cuts of the planner's choice are moved, for plans that are nearly as good."""


class Server(RequestServer):
    """What is asked of the process.

    Args:
        config: a gin file.
        overrides: settings that override it.
    """

    def __init__(self, config: str, overrides: Sequence[str]):
        configuration = read_configuration(config, [*overrides, "runtime.name = 'ray'"])
        self.ingredients = make_ingredients(configuration)
        self.plans: dict[str, dict[str, Plan]] = {}
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.trainer: hetjax.Trainer | None = None
        self.pace: Pace | None = None
        connect_to_ray(RayOptions())

    def do_profile(self) -> dict[str, Any]:
        """Measure the hosts, the links and the model's layers."""
        cluster = measure_cluster()
        problem = problem_to_profile(self.ingredients, cluster)
        options = replace(problem.options, max_pipelines=1, union_stages=False)
        problem = replace(problem, options=options)
        with tempfile.TemporaryDirectory() as folder:
            database = ProfileDatabase(Path(folder))
            profiled = measure_profile(self.ingredients, problem, database, lambda *_: None)
            self.problem = with_profile(problem, database)
        self.end_pace()
        self.pace = Pace(self.problem, measured_program(self.ingredients, self.problem))
        return {
            "layers": problem.num_layers,
            "hosts": {each.name: each.kind.flops(problem.dtype) for each in cluster.subclusters},
            "measurements": profiled.measured,
            "seconds": profiled.seconds,
            "composition_error": self.problem.profile.composition_error,
        }

    def do_links(self) -> list[float]:
        """Measure the links again; their bytes/s."""
        cluster = replace(self.problem.cluster, links=measure_cluster().links)
        self.problem = replace(self.problem, cluster=cluster)
        return [link.bandwidth for _, _, link in cluster.links]

    def do_predict(self, rate: str, hand_made: int, best: int) -> list[dict[str, Any]]:
        """Predict plans: the planner's choice, the best ones beside it, and some made by hand.

        Once they are chosen for a rate they are predicted again, by the newest profile.

        Args:
            rate: what the links' rate is called.
            hand_made: how many are made by hand.
            best: how many of the best ones count, with the choice.

        Returns:
            For each its name, what it is and its predicted step time; the choice comes first.
        """
        if rate not in self.rows:
            self._choose(rate, hand_made, best)
        again = {
            name: predict(replace(plan, cluster=self.problem.cluster), self.problem)
            for name, plan in self.plans[rate].items()
        }
        self.plans[rate] = again
        return [{**row, "predicted": _step_time(again[row["plan"]])} for row in self.rows[rate]]

    def _choose(self, rate: str, hand_made: int, best: int) -> None:
        found = DynamicProgram().find(self.problem)
        assert found is not None, "the models of this benchmark fit"
        chosen = complete(found.plan, self.problem)
        by_hand = [self._predicted(plan) for plan in _by_hand(self.problem, hand_made)]
        near = [self._predicted(plan) for plan in _neighbours(self.problem, chosen)]
        sorted_plans = sorted((*near, *by_hand), key=_step_time)
        others = [plan for plan in sorted_plans if _name(plan) != _name(chosen)]
        shown = {_name(plan): plan for plan in (chosen, *others[: best - 1], *by_hand)}
        self.plans[rate] = shown
        best_names = {_name(plan) for plan in (chosen, *others[: best - 1])}
        hand_names = {_name(plan) for plan in by_hand}
        self.rows[rate] = [
            {
                "plan": name,
                "among_best": name in best_names,
                "by_hand": name in hand_names,
                "chosen": name == _name(chosen),
            }
            for name in shown
        ]

    def _predicted(self, plan: Plan) -> Plan:
        made = predict(plan, self.problem)
        return choose_schedule(made, self.problem.options.schedule)

    def do_start(self, rate: str, plan: str) -> float:
        """Start a trainer by a plan; the seconds until its stages are compiled."""
        began = time.perf_counter()
        ingredients = self.ingredients
        self.trainer = hetjax.Trainer(
            self.plans[rate][plan],
            ingredients.model.loss,
            ingredients.parameters,
            ingredients.optimizer,
            ingredients.batch,
            source=ingredients.dataset,
            runtime=hetjax.RayOptions(),
        )
        return time.perf_counter() - began

    def do_steps(self, rate: str, plan: str, count: int) -> list[dict[str, float]]:
        """Run steps by the schedule that a plan has at a rate.

        Args:
            rate: what the links' rate is called.
            plan: the plan's name.
            count: how many steps.

        Returns:
            Of each its seconds, and what is predicted where passes take what they took in it.
        """
        assert self.trainer is not None, "start a trainer first"
        predicted = self.plans[rate][plan]
        self.trainer.use_schedule(predicted.pipeline.schedule)
        return [_step(self.trainer, predicted) for _ in range(count)]

    def do_pace(self) -> dict[str, float]:
        """Measure by what each host's passes take longer now than the profile says."""
        assert self.pace is not None, "measure a profile first"
        return self.pace.now()

    def do_at_pace(self, rate: str, plan: str, moments: Sequence[Mapping[str, float]]) -> float:
        """Predict a plan's step by the pace of some moments; its seconds.

        Args:
            rate: what the links' rate is called.
            plan: the plan's name.
            moments: what `do_pace` found then.
        """
        predicted = self.plans[rate][plan]
        times = at_pace(predicted, moments)
        return simulate_schedule(predicted.pipeline.schedule, times).makespan

    def do_end(self) -> None:
        """End the trainer."""
        if self.trainer is not None:
            self.trainer.close()
            self.trainer = None

    def end_pace(self) -> None:
        """End the workers that measure hosts' pace."""
        if self.pace is not None:
            self.pace.close()
            self.pace = None

    def close(self) -> None:
        """End the trainer, and the workers that measure hosts' pace."""
        self.do_end()
        self.end_pace()


def _step(trainer: hetjax.Trainer, plan: Plan) -> dict[str, float]:
    seconds = trainer.train_step(timed=True).seconds
    schedule, expected = plan.pipeline.schedule, plan.predicted.times
    took = measured_times([(trainer.timeline(), schedule)], expected)
    # Transfers as predicted: what remains is the error of these and of the timeline.
    given = replace(took, sends=expected.sends, returns=expected.returns)
    return {
        "measured": seconds,
        "given_passes": simulate_schedule(schedule, given).makespan,
    }


def _step_time(plan: Plan) -> float:
    return plan.predicted.step_time


def _name(plan: Plan) -> str:
    """The plan as a person says it: which layers on which host, in order."""
    return " | ".join(
        f"{stage.submesh.subcluster} {stage.layers[0]}-{stage.layers[1] - 1}"
        for stage in plan.pipeline.stages
    )


def _plan(problem: PlanningProblem, hosts: Sequence[str], cuts: Sequence[int]) -> Plan:
    """A plan of a stage on each host."""
    edges = (0, *cuts, problem.num_layers)
    stages = tuple(
        StagePlan.on(layers=layers, submesh=SubMesh(host, 0, (1, 1)), mesh_shape=(1, 1))
        for host, layers in zip(hosts, itertools.pairwise(edges), strict=True)
    )
    count = problem.num_microbatches
    schedule = from_warm_up_counts(
        [min(len(stages) - s, count) for s in range(len(stages))], count, "1f1b"
    )
    pipeline = PipelinePlan(stages, count, problem.microbatch_size, schedule)
    return Plan(problem.program.fingerprint, problem.layers, problem.cluster, (pipeline,))


def _by_hand(problem: PlanningProblem, count: int) -> list[Plan]:
    """Plans as people make them: all hosts in each order, cut in plain shares of the layers."""
    names = [each.name for each in problem.cluster.subclusters]
    orders = list(itertools.permutations(names))
    plans = [_plan(problem, [name], []) for name in names]
    shares = _shares(len(names))
    for share, order in itertools.product(shares, orders):
        cuts = [round(problem.num_layers * each) for each in itertools.accumulate(share)][:-1]
        if len({0, *cuts, problem.num_layers}) == len(cuts) + 2:
            plans.append(_plan(problem, order, cuts))
    unlike = {_name(plan): plan for plan in plans}
    return list(unlike.values())[:count]


def _shares(hosts: int) -> Iterator[tuple[float, ...]]:
    """Shares of the layers, the even ones first."""
    whole = 12
    found = [
        parts for parts in itertools.product(range(1, whole), repeat=hosts) if sum(parts) == whole
    ]
    for parts in sorted(found, key=lambda parts: (max(parts) - min(parts), parts)):
        yield tuple(part / whole for part in parts)


def _neighbours(problem: PlanningProblem, chosen: Plan) -> Iterator[Plan]:
    """The plan with cuts moved by a few layers."""
    stages = chosen.pipeline.stages
    hosts = [stage.submesh.subcluster for stage in stages]
    cuts = [stage.layers[0] for stage in stages[1:]]
    for moves in itertools.product((0, *_MOVES), repeat=len(cuts)):
        moved = [cut + move for cut, move in zip(cuts, moves, strict=True)]
        edges = [0, *moved, problem.num_layers]
        if any(moves) and all(a < b for a, b in itertools.pairwise(edges)):
            yield _plan(problem, hosts, moved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--gin", action="append", default=[])
    options = parser.parse_args()
    serve_until_end(Server(options.config, options.gin))


if __name__ == "__main__":
    main()
