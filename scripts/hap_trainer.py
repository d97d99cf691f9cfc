"""Synthesised programs in the lab, for real: the process on the first host that `hap_lab` asks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import optax
from benchmarking import serve_until_end
from hap_gathers import Method, gather_plan, loss
from hap_models import HapModel, bert, initial, vgg19, vit
from hap_systems import SYSTEMS
from lab_training import TrainingServer

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
)

MODELS = {"VGG19": vgg19, "ViT": vit, "BERT": bert, "BERT-MoE": bert}


def optimizer() -> optax.GradientTransformation:
    """The benchmark's optimizer."""
    return optax.adam(1e-3)


class Server(TrainingServer):
    """What is asked of the process."""

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
        made = [MODELS[name](**sizes) for name, sizes in models]
        problems = ((model, self._problem(model, microbatches)) for model in made)
        return self.profile(folder, ((each, _measured(model, each)) for model, each in problems))

    def do_start_pace(self, model: str, sizes: Mapping[str, int]) -> None:
        """Start what measures the hosts' pace: runs of a model that was profiled."""
        made = MODELS[model](**sizes)
        problem = self._problem(made)
        self.start_pace(problem, _measured(made, problem))

    def _problem(self, model: HapModel, microbatches: int = 1) -> PlanningProblem:
        where: dict[str, Any] = {"cluster": self.found, "optimizer": optimizer()}
        return make_problem(
            model.loss, model.parameters, model.batch, num_microbatches=microbatches, **where
        )

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
        count, system = len(self.found.subclusters), SYSTEMS[of]
        if system.is_padded:
            sizes = {**sizes, "padded": -(-sizes["experts"] // count) * count}
        made = MODELS[model](**sizes)
        parameters, batch = initial(made)
        problem = self.profiled(self._problem(made, microbatches))
        even = (1 / count,) * count if system.is_even else ()
        if system.stages == "one":
            plan = predict(HapPlanner(system.forced, even).plan(problem), problem)
        else:
            synthesised = system.stages == "either"
            options = replace(problem.options, synthesised_stages=synthesised, max_pipelines=1)
            problem = replace(problem, options=options)
            plan = complete(DynamicProgram().plan(problem), problem)
        self.train(name, plan, problem, (made.loss, parameters, batch), optimizer())
        return _told(plan)

    def do_make_gather(
        self, name: str, num_bytes: int, largest: float, method: Method
    ) -> dict[str, Any]:
        """Make a trainer whose step is one gather of uneven parts; see `gather_plan`.

        Returns:
            As `do_make`.
        """
        plan, weight, batch = gather_plan(self.found, num_bytes, largest, method)
        where: dict[str, Any] = {"cluster": self.found, "optimizer": optimizer()}
        problem = make_problem(loss, weight, batch, num_microbatches=1, **where)
        plan = predict(plan, problem)
        self.train(name, plan, problem, (loss, weight, batch), optimizer())
        return _told(plan)


def _measured(model: HapModel, problem: PlanningProblem) -> Measured:
    layers, size = problem.layers, problem.microbatch_size
    batch = with_examples(model.batch, size)
    return Measured(model.loss, model.parameters, batch, optimizer(), layers, size)


def _told(plan: Plan) -> dict[str, Any]:
    return {
        "predicted_step_time": plan.predicted.step_time,
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
