"""The next best plans, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetjax.mesh.quantities import format_seconds
from hetjax.report.tables import empty_table

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class OtherPlan:
    """A plan that was not chosen, as the table shows it.

    Args:
        difference: what it does differently, in words.
        step_time: seconds of a step.
        ratio: how many times as much it is as the chosen plan by the objective.
    """

    difference: str
    step_time: float
    ratio: float


def alternatives_table(alternatives: Sequence[OtherPlan]) -> Table:
    """What else could be done, and what it would cost.

    Args:
        alternatives: the other plans.

    Returns:
        A table for rich to print.

    Example:
        >>> alternatives_table([OtherPlan("7 stages instead of 8", 9.8, 1.07)]).row_count
        1
    """
    from rich.text import Text

    table = empty_table("The next best", left=("what is different",))
    for heading in ("step time", "costs"):
        table.add_column(heading, justify="right")
    for each in alternatives:
        costs = f"{each.ratio - 1:+.1%}"
        table.add_row(Text(each.difference), format_seconds(each.step_time), costs)
    return table
