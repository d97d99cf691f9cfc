"""What was measured of a model on a cluster, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hetjax.mesh.quantities import format_seconds
from hetjax.report.tables import empty_table

if TYPE_CHECKING:
    from rich.table import Table

    from hetjax.planner.work.profile import Profile, Way


def profile_table(profile: Profile, measurements: Mapping[Way, int]) -> Table:
    """What layers take on each subcluster.

    Args:
        profile: the profile.
        measurements: how many measurements each way consists of.

    Returns:
        A table for rich to print, one row for each way that was measured.
    """
    from rich.text import Text

    table = empty_table("What was measured", left=("devices", "sharding"))
    for heading in ("measurements", "forward", "backward", "composed to within"):
        table.add_column(heading, justify="right")
    for way, times in sorted(profile.ways.items()):
        error = times.composition_error
        nodes, devices = way.shape
        table.add_row(
            Text(f"{way.subcluster} {nodes}x{devices}"),
            way.sharding,
            str(measurements.get(way, 0)),
            format_seconds(times.forward.start + float(times.forward.layers.sum())),
            format_seconds(times.backward.start + float(times.backward.layers.sum())),
            "" if error is None else f"{error:.1%}",
        )
    return table
