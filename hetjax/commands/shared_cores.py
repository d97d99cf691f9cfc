"""Host CPU devices of one process share its cores, which no prediction knows: that is said."""

from __future__ import annotations

from collections.abc import Iterator

from hetjax.configuration import Configuration
from hetjax.mesh.host_cpu import usable_cores
from hetjax.planner import Plan


def shared_core_lines(plan: Plan, configuration: Configuration) -> Iterator[str]:
    """What is to be known of a plan whose stages compute on the same cores.

    A prediction gives each device an even share of the host, whatever the others do. Where a stage
    waits, its share goes to the others; so waiting costs less than predicted, and a schedule that
    avoids it gains less. A played cluster has its own pace, and so have workers with cores of their
    own.

    Args:
        plan: the plan.
        configuration: of the run.

    Yields:
        One line, where several stages run on host CPU devices of this process.
    """
    if configuration.runtime.name != "local" or configuration.cluster.play:
        return
    host = {each.name for each in plan.cluster.subclusters if each.kind.is_processor}
    stages = sum(
        any(submesh.subcluster in host for submesh in stage.submeshes) for stage in plan.stages
    )
    if stages > 1:
        yield (
            f"{stages} stages of this process share {usable_cores():g} cores, which the prediction "
            f"does not know: where one waits, others compute faster, so schedules that avoid "
            f"waiting, above all 'search', gain less here than predicted and can be slower than "
            f"'1f1b'"
        )
