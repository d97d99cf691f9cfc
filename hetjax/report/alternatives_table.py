"""The next best plans, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetjax.report.quantities import format_seconds
from hetjax.report.tables import empty_table

if TYPE_CHECKING:
    from rich.table import Table


def alternatives_table(alternatives: Sequence[tuple[str, float]], step_time: float) -> Table:
    """What else could be done, and what it would cost.

    Args:
        alternatives: what other plans do differently, and how many times as long a step of them
            takes.
        step_time: seconds of a step of the plan that is chosen.

    Returns:
        A table for rich to print.

    Example:
        >>> alternatives_table([("7 stages instead of 8", 1.07)], 9.14).row_count
        1
    """
    from rich.text import Text

    table = empty_table("The next best", left=("what is different",))
    for heading in ("step time", "costs"):
        table.add_column(heading, justify="right")
    for words, ratio in alternatives:
        table.add_row(Text(words), format_seconds(ratio * step_time), f"{ratio - 1:+.1%}")
    return table
