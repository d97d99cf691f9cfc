"""Context splits in the lab, for real: the process on the first host that `context_lab` asks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from benchmarking import serve_until_end
from context_cases import Case, Group, optimizer, plan_of, problem_of, tokens_of
from lab_training import TrainingServer

from hetjax.pipeline.program.traced_program import with_examples
from hetjax.planner import PlanningProblem, predict
from hetjax.planner.profiler import Measured


class Server(TrainingServer):
    """What is asked of the process."""

    def do_profile(self, folder: str, models: Sequence[tuple[str, int]]) -> int:
        """Measure runs of models' layers on all hosts, where that was not done before.

        Args:
            folder: the profile database.
            models: of each its name and its tokens.

        Returns:
            How many measurements were made.
        """
        cases = [Case(model, sequence, ()) for model, sequence in models]
        problems = ((case, problem_of(case, self.found)) for case in cases)
        return self.profile(folder, ((each, _measured(case, each)) for case, each in problems))

    def do_start_pace(self, model: str, sequence: int) -> None:
        """Start what measures the hosts' pace: runs of a model that was profiled."""
        case = Case(model, sequence, ())
        problem = problem_of(case, self.found)
        self.start_pace(problem, _measured(case, problem))

    def do_make(self, name: str, case: Mapping[str, Any]) -> float:
        """Predict a case, and make its trainer; the predicted seconds of a step."""
        told = _case_of(case)
        problem = self.profiled(problem_of(told, self.found))
        plan = predict(plan_of(told, problem), problem)
        parameters = jax.jit(told.language.init)(jax.random.key(0))
        what = told.language.loss, parameters, tokens_of(told)
        self.train(name, plan, problem, what, optimizer())
        return plan.predicted.step_time


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
