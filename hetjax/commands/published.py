"""A plan that others made, rated beside ours: as it is given, and in ways that are fair to it.

Where layers run is published, what is recomputed seldom. A plan that must recompute to fit into
memory, as our model counts it, pays for that; so it is said, and shown without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hetjax.collecting import seldom_collected
from hetjax.commands.prepare import Prepared, problems_beside
from hetjax.planner import Plan, predict
from hetjax.planner.harp.refit import can_be_refitted, keeping_all, refitted, ways_of
from hetjax.report import format_seconds


@dataclass(frozen=True)
class Published:
    """A published plan, with what is predicted of it.

    Args:
        given: as its file has it.
        refitted: its stages in the fastest ways that fit, as the planner would run them; None where
            none fits, or its schedule is none that a search knows.
        keeping: its stages recomputing nothing, whether they fit or not; None likewise.
    """

    given: Plan
    refitted: Plan | None = None
    keeping: Plan | None = None


@seldom_collected()
def rated(prepared: Prepared, given: Plan | None) -> Published | None:
    """Rate a published plan in all ways.

    Args:
        prepared: the plan that was found beside it.
        given: the plan; None where there is none.

    Returns:
        Its ratings.

    Raises:
        InputError: the plan was made for another model.
    """
    if given is None:
        return None
    problem, *others = problems_beside(prepared, given)
    plan = predict(given, problem, *others)
    if not can_be_refitted(plan):
        return Published(plan)
    known = ways_of(plan, problem)
    return Published(plan, refitted(plan, problem, known), keeping_all(plan, problem, known))


def published_lines(published: Published | None, step_time: float) -> Iterator[str]:
    """What is to be said of a published plan beside ours.

    Args:
        published: its ratings; None where there is none.
        step_time: seconds of our plan's step.

    Yields:
        A line for each rating that differs from the one before.
    """
    if published is None:
        return
    given = published.given
    yield f"published plan ({given.planner}), as given: {_rating(given, step_time)}"
    before = _seconds(given)
    if published.refitted is not None and _seconds(published.refitted) != before:
        before = _seconds(published.refitted)
        yield f"its stages run as the planner would: {_rating(published.refitted, step_time)}"
    if published.keeping is not None and _seconds(published.keeping) != before:
        yield f"if nothing had to be recomputed: {_rating(published.keeping, step_time)}"


def published_figures(published: Published | None) -> dict[str, Any]:
    """The ratings as plain values, for ``--json``.

    Args:
        published: the ratings; None where there are none.

    Returns:
        Of each rating the step's seconds, whether it fits, and how many stages recompute.
    """
    if published is None:
        return {}
    ratings = {
        "published": published.given,
        "published_refitted": published.refitted,
        "published_keeping_all": published.keeping,
    }
    return {
        f"{name}_{figure}": value
        for name, plan in ratings.items()
        if plan is not None
        for figure, value in (
            ("step_time", _seconds(plan)),
            ("fits", not _full(plan)),
            ("recomputing_stages", _recomputing(plan)),
        )
    }


def _rating(plan: Plan, step_time: float) -> str:
    seconds, again, full = _seconds(plan), _recomputing(plan), _full(plan)
    of = f"of {len(plan.stages)} stages"
    said = f"{format_seconds(seconds)}, {seconds / step_time:.2f} times as long as ours, "
    said += f"{again} {of} recomput{'es' if again == 1 else 'e'}" if again else "nothing recomputed"
    return said + (f"; {full} {of} need more memory than there is" if full else "")


def _recomputing(plan: Plan) -> int:
    return sum(stage.repeats != "nothing" for stage in plan.stages)


def _full(plan: Plan) -> int:
    """How many stages do not fit."""
    return sum(not stage.fits for stage in plan.predicted.stages)


def _seconds(plan: Plan) -> float:
    return plan.predicted.step_time
