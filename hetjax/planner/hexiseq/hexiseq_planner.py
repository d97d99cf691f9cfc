"""The planner of HexiSeq: one stage whose members share the tokens and heads of long sequences."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from hetjax.errors import DoesNotFitError, InputError, unknown_name
from hetjax.planner.hexiseq.context_choice import (
    ContextChoice,
    context_models,
    offloading,
)
from hetjax.planner.hexiseq.context_model import ContextModel
from hetjax.planner.hexiseq.predicted_choice import (
    FINALISTS,
    Chosen,
    best_that_fits,
    has_few_devices,
)
from hetjax.planner.hexiseq.scheduler import NoLegalSplitError, best_schedules, schedule_even
from hetjax.planner.plan.plan import Plan
from hetjax.planner.problem.problem import PlanningProblem

EVEN_SYSTEMS = ("ring", "ulysses", "usp")
"""What all devices have as many tokens and heads by, as `schedule_even` knows them."""


@dataclass(frozen=True)
class HexiSeqPlanner:
    """Plans one stage whose members share tokens and heads unevenly.

    A member is a device, or several of a node with a tensor axis.
    Layers are made again in the backward pass where that is the only way to fit, or is faster.
    Where not all can be kept and hosts give memory, the optimizer's state may wait there.
    Devices that would only be in the way are left out.

    Args:
        system: ``"hexiseq"``, or the even system that the plan is to be of: ``"ring"``,
            ``"ulysses"`` or ``"usp"``.

    Raises:
        InputError: there is no such system.

    Source: HexiSeq, section 4.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import hetjax
        >>> from hetjax.mesh import Cluster, Link, Subcluster, kind
        >>> link = Link(25e9, 1e-5)
        >>> parts = tuple(Subcluster(n, kind(n), 1, 1, link, link) for n in ("H100", "A100-80"))
        >>> cluster = Cluster("two cards", parts, (("H100", "A100-80", link),))
        >>> def loss(weight, x):
        ...     heads = (x @ weight).reshape(*x.shape[:2], 8, 64)
        ...     return jnp.mean(hetjax.attention(heads, heads, heads, causal=True) ** 2)
        >>> made = hetjax.plan(
        ...     loss,
        ...     jax.ShapeDtypeStruct((512, 512), jnp.float32),
        ...     jax.ShapeDtypeStruct((1, 2**16, 512), jnp.float32),
        ...     cluster=cluster,
        ...     optimizer=optax.sgd(1e-3),
        ...     num_microbatches=1,
        ...     planner=HexiSeqPlanner(),
        ... )
        >>> made.stages[0].shares.context.tokens, made.stages[0].devices_text
        ((49703, 15833), 'H100[0:1] 1x1 + A100-80[0:1] 1x1')
    """

    system: str = "hexiseq"

    def __post_init__(self) -> None:
        systems = ("hexiseq", *EVEN_SYSTEMS)
        if self.system not in systems:
            raise InputError(unknown_name("system", self.system, systems))

    def plan(self, problem: PlanningProblem) -> Plan:
        """A plan for the problem.

        Args:
            problem: what to plan; its program was traced with `divides_sequences`.

        Returns:
            A valid plan, with its prediction.

        Raises:
            InputError: the model has no attention, or something that goes along the sequence, or it
                fits in no way that was tried.
        """
        models, count = context_models(problem), problem.num_microbatches
        found = [Chosen(count, each) for each in _choices(problem, models, self.system)]
        others = _evens(problem, models).values() if self.system == "hexiseq" else ()
        evens = [Chosen(count, each) for each in others]
        is_even = self.system != "hexiseq"
        return best_that_fits(found, evens, lambda _: problem, is_even=is_even)[1]

    def choose(self, problem: PlanningProblem) -> ContextChoice:
        """The best context split.

        Args:
            problem: as for `plan`.

        Returns:
            The split, whether layers are made again, and what it is predicted to take.

        Raises:
            InputError: as for `plan`.
        """
        return self.choices(problem)[0]

    def choices(self, problem: PlanningProblem) -> tuple[ContextChoice, ...]:
        """The best context splits of layers that are kept, and of layers that are made again.

        Of few devices there are several of each, with unlike groups.

        Args:
            problem: as for `plan`.

        Returns:
            Those that fit, the fastest first; one or more.

        Raises:
            InputError: as for `plan`.
        """
        return _choices(problem, context_models(problem), self.system)

    def beside(self, problem: PlanningProblem) -> Mapping[str, ContextChoice]:
        """Ring attention, Ulysses and USP at their best, by the same model.

        Args:
            problem: as for `plan`.

        Returns:
            Those that are legal and fit, by name.

        Raises:
            InputError: the model has no attention, or something that goes along the sequence.
        """
        return _evens(problem, context_models(problem))


def _evens(problem: PlanningProblem, models: list[ContextModel]) -> dict[str, ContextChoice]:
    found = {}
    for system in EVEN_SYSTEMS:
        with contextlib.suppress(DoesNotFitError):
            found[system] = _choices(problem, models, system)[0]
    return found


def _choices(
    problem: PlanningProblem, models: list[ContextModel], system: str
) -> tuple[ContextChoice, ...]:
    """The best splits of a system, the fastest first.

    Where none fits that keeps all, those that offload optimizer state are among them.
    """
    found: tuple[ContextChoice, ...] = ()
    short: DoesNotFitError | None = None
    try:
        found = _choices_by(models, system)
    except DoesNotFitError as error:
        short = error
    keeps_all = any(each.model.work.keeps_all for each in found[:1])
    if not keeps_all and (away := offloading(problem, models)):
        with contextlib.suppress(DoesNotFitError):
            found += _choices_by(away, system)
    if short is not None and not found:
        raise short
    return tuple(sorted(found, key=lambda each: each.schedule.seconds))


def _choices_by(models: list[ContextModel], system: str) -> tuple[ContextChoice, ...]:
    found: list[ContextChoice] = []
    errors: list[DoesNotFitError] = []
    for model in models:
        try:
            if system == "hexiseq":
                count = FINALISTS if has_few_devices(model) else 1
                schedules = best_schedules(model, count)
            else:
                schedules = (schedule_even(model, system),)
        except DoesNotFitError as error:
            errors.append(error)
            continue
        found += [ContextChoice(schedule, model) for schedule in schedules]
    if not found:
        # What lacks memory says more than that longer tensor axes leave nothing to divide.
        legal = [each for each in errors if not isinstance(each, NoLegalSplitError)]
        raise (legal or errors)[-1]
    return tuple(sorted(found, key=lambda each: each.schedule.seconds))
