"""What the parts of a backward pass take, where it is made in two halves or made again."""

from __future__ import annotations

from dataclasses import dataclass

from hetjax.pipeline.program.costs import Cost
from hetjax.planner.costs.cost_model import handling_seconds
from hetjax.planner.costs.measured_times import measured_times, share_of
from hetjax.planner.costs.pass_cost import backward_passes, roofline, sums_of_examples, tensor_pass
from hetjax.planner.costs.update_cost import parameter_passes
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.execution import Execution
from hetjax.planner.work.layer_runs import Runs
from hetjax.planner.work.rates import TASK_SECONDS
from hetjax.planner.work.stage_work import Work


@dataclass(frozen=True)
class HalfTimes:
    """What the parts of a stage's backward pass take, on one device.

    Args:
        recompute_seconds: the recomputation; 0 where there is none.
        input_gradient_seconds: the first half.
        weight_gradient_seconds: the second half.
        recomputed_bytes: what a recomputation leaves for the backward pass.
        deferred_bytes: what the first half leaves for the second.
    """

    recompute_seconds: float
    input_gradient_seconds: float
    weight_gradient_seconds: float
    recomputed_bytes: int
    deferred_bytes: int


def estimate_halves(
    problem: PlanningProblem, work: Work, runs: Runs, execution: Execution
) -> HalfTimes:
    """Estimate a backward pass in parts, by the rules of `estimate`.

    The gathers of matrix products over the tensor axis are divided evenly; what ``fully_sharded``
    gathers and scatters is the second half's, but for what it gathers to make layers again. Where
    the whole pass was measured, the halves are as much longer or shorter as it is.

    Args:
        problem: the planning problem.
        work: the work, with that of the halves.
        runs: the same as `one_run` has it.
        execution: where and how.

    Returns:
        The estimate.
    """
    assert work.split is not None, "the work of the halves was not measured"
    if not work.backward_passes:
        return HalfTimes(0.0, 0.0, 0.0, 0, 0)
    data = execution.example_parts
    gathering, scattering = map(float, parameter_passes(problem, runs, execution))
    product_pass = float(tensor_pass(problem, runs, execution))

    slower, slower_backward = problem.profile.slowness(execution.subcluster, execution.shape)
    passes = float(backward_passes(runs))
    is_divided = execution.sharding == "fully_sharded"
    scattered = (gathering + scattering) * is_divided
    gathered_again = float(runs.again_share) * gathering * is_divided

    def seconds(cost: Cost) -> float:
        return float(roofline(problem, execution, cost.matmul_flops, cost.bytes))

    handling = float(handling_seconds(problem, runs, execution)[1])
    again = slower * seconds(work.recompute) + product_pass - TASK_SECONDS
    again += gathering * is_divided
    repeated, summing = map(float, sums_of_examples(runs, execution))
    again, summing = again + repeated, summing - repeated * execution.recompute
    times = measured_times(problem, runs, execution)
    if times is not None:
        again = float(share_of(times.forward.of(runs.layers), execution))
        expected = seconds(_difference(work.backward, work.recompute)) + passes * product_pass
        measured = float(share_of(times.backward.of(runs.layers), execution))
        slower_backward = measured / (expected + scattered)
        product_pass, scattered = slower_backward * product_pass, slower_backward * scattered
        summing = gathered_again = 0.0
    first = slower_backward * seconds(work.split.input_gradient)
    second = slower_backward * seconds(work.split.weight_gradient)
    kept = work.residual_bytes / data if execution.recompute else 0.0
    of_inputs = min(passes, 1.0) + float(runs.again_share)
    of_weights = max(passes - 1.0, 0.0)
    return HalfTimes(
        recompute_seconds=again if execution.recompute else 0.0,
        input_gradient_seconds=(
            first + of_inputs * product_pass + gathered_again + summing + handling
        ),
        weight_gradient_seconds=second + of_weights * product_pass + scattered,
        recomputed_bytes=int(kept),
        deferred_bytes=int(work.split.deferred_bytes / data),
    )


def _difference(whole: Cost, part: Cost) -> Cost:
    return Cost(
        whole.flops - part.flops, whole.matmul_flops - part.matmul_flops, whole.bytes - part.bytes
    )
