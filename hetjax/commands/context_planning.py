"""How a plan is found whose devices share long sequences, by HexiSeq's planner."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hetjax.configuration import Configuration
from hetjax.errors import DoesNotFitError, InputError
from hetjax.planner import Found, PlanningProblem
from hetjax.planner.harp.microbatches import notes_of
from hetjax.planner.hexiseq.hexiseq_planner import ContextChoice, HexiSeqPlanner, context_plan
from hetjax.planner.problem.problems import Problems


@dataclass(frozen=True)
class ContextFound:
    """A context split that was found, and what it is compared with.

    Args:
        problem: the problem that it is for.
        found: the plan.
        choice: the split.
        beside: ring attention, Ulysses and USP, each with its best number of microbatches; those
            that are legal and fit.
    """

    problem: PlanningProblem
    found: Found
    choice: ContextChoice
    beside: Mapping[str, ContextChoice]


def check_context_settings(settings: Configuration) -> None:
    """Check that nothing is asked for that a plan of HexiSeq's does not have.

    Args:
        settings: the configuration.

    Raises:
        InputError: naming the setting, its value and what is allowed.
    """
    train, planner = settings.train, settings.planner
    what = "planner.name is 'hexiseq', whose plan is one stage of devices that share sequences"
    if planner.objective == "cost":
        raise InputError(
            f"planner.objective is 'cost', and {what}, whatever they cost; set planner.name = "
            f"'harp'"
        )
    if settings.cluster.play and settings.runtime.name == "local":
        raise InputError(
            f"cluster.play is True, and {what}, which no played cluster holds back; set "
            f"cluster.play = False"
        )
    if train.tune or train.beside:
        name = "train.tune" if train.tune else "train.beside"
        raise InputError(f"{name} is given, and {what}: there is no other schedule; leave it out")
    if planner.min_stages > 1:
        raise InputError(
            f"planner.min_stages is {planner.min_stages}, and {what}; allowed is 1: leave it out"
        )
    if planner.profile is not None:
        raise InputError(
            f"planner.profile is {planner.profile!r}, and {what}, planned by the devices' figures; "
            f"leave it out"
        )
    if settings.model.scan_blocks:
        raise InputError(
            f"model.scan_blocks is True, and {what}: attentions in a scan cannot be shared; set "
            f"model.scan_blocks = False"
        )


def find_context(problems: Problems, counts: Sequence[int], system: str) -> ContextFound:
    """The best context split for some numbers of microbatches.

    Args:
        problems: the problem for each of them, with sequences that may be divided.
        counts: the numbers.
        system: as `HexiSeqPlanner` takes it.

    Returns:
        The plan, and what it is compared with.

    Raises:
        InputError: the model has no attention, something in it goes along the sequence, or nothing
            fits.
    """
    began = time.perf_counter()
    planner = HexiSeqPlanner(system)
    found: list[tuple[int, ContextChoice]] = []
    beside: dict[str, ContextChoice] = {}
    errors: list[DoesNotFitError] = []
    for count in counts:
        problem = problems.of(count)
        try:
            found.append((count, planner.choose(problem)))
        except DoesNotFitError as error:
            errors.append(error)
            continue
        for name, even in planner.beside(problem).items():
            known = beside.get(name)
            if known is None or even.schedule.seconds < known.schedule.seconds:
                beside[name] = even
        if notes_of(problem):
            # Another number of microbatches is another loss: the fewest that fit.
            break
    if not found:
        raise errors[-1]
    count, choice = min(found, key=lambda each: each[1].schedule.seconds)
    problem = problems.traced(count)
    searched = time.perf_counter() - began
    plan = replace(context_plan(problem, choice), notes=notes_of(problem))
    seconds = choice.schedule.seconds
    return ContextFound(
        problem,
        Found(plan, seconds, seconds, 0, problem.profile_seconds, searched),
        choice,
        beside,
    )
