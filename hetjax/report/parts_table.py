"""A whole cluster beside parts of it, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetjax.mesh.cluster import Cluster
from hetjax.mesh.quantities import format_seconds
from hetjax.report.tables import empty_table

if TYPE_CHECKING:
    from rich.table import Table

    from hetjax.planner.harp.mixing import PartAlone


def parts_table(
    alone: Sequence[PartAlone], cluster: Cluster, step_time: float, used: int | None = None
) -> Table:
    """Whether it pays to mix: the step time of the cluster, and of parts of it alone.

    Args:
        alone: the parts.
        cluster: the whole.
        step_time: seconds of a step on the whole.
        used: how many of its devices the plan uses; None for all.

    Returns:
        A table for rich to print.
    """
    from rich.text import Text

    table = empty_table("Does it pay to mix?", left=("devices",))
    for heading in ("step time", "the whole is faster by"):
        table.add_column(heading, justify="right")
    table.add_row(name_of_whole(cluster, used), format_seconds(step_time), "")
    for part in alone:
        name = Text(f"{' + '.join(part.subclusters)} ({part.num_devices})")
        if part.step_time is None:
            table.add_row(name, "does not fit", "")
        else:
            table.add_row(
                name, format_seconds(part.step_time), f"{part.step_time / step_time:.2f} times"
            )
    together = side_by_side_row(alone, step_time)
    if together is not None:
        table.add_row(*together)
    return table


def side_by_side_row(alone: Sequence[PartAlone], step_time: float) -> tuple[str, str, str] | None:
    """All kinds on which the model fits, with plans of their own, beside the whole.

    Args:
        alone: the parts.
        step_time: seconds of a step on the whole.

    Returns:
        What they are called, what a step's examples take, and by how much the whole is faster; None
        unless the model fits on several kinds by themselves.
    """
    # Not at the top: whoever only reads reports does not wait for the planner.
    from hetjax.planner.harp.mixing import side_by_side

    together = side_by_side(alone)
    if together is None:
        return None
    ratio = f"{together / step_time:.2f} times"
    return "each kind by itself, side by side", format_seconds(together), ratio


def name_of_whole(cluster: Cluster, used: int | None) -> str:
    """How the whole cluster is called beside its parts, by how many of its devices are used."""
    whole = cluster.num_devices
    return f"all {whole}" if used in (None, whole) else f"of all {whole} the {used} used"
