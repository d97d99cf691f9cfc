"""What layers of a program take on the hosts of a lab, measured by the runtime's own profiler."""

from __future__ import annotations

from hetjax.planner import PlanningProblem
from hetjax.planner.profiler import Measured, Measurement, ProfileDatabase, Wanted, merged, survey
from hetjax.runtime.ray.ray_profiling import measure_on_ray


def measure_missing(problem: PlanningProblem, measured: Measured, database: ProfileDatabase) -> int:
    """Measure what a problem's plans want to know on all hosts, where that was not done before.

    Args:
        problem: the problem, without a profile.
        measured: its program.
        database: what is known; what is found is put there.

    Returns:
        How many measurements were made.
    """
    missing = survey(problem).missing(database)
    if not missing:
        return 0
    found: dict[Wanted, list[Measurement]] = {}
    for wanted, measurement in measure_on_ray(problem.cluster, measured, missing):
        found.setdefault(wanted, []).append(measurement)
    for wanted, measurements in found.items():
        database.put(wanted.key, merged(measurements))
    return len(found)
