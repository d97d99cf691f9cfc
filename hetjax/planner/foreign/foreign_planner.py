"""Plans made of another tool's profile alone: Harp's search, over all numbers of microbatches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetjax.errors import DoesNotFitError, InputError, check_count, is_whole, shown, unknown_name
from hetjax.limits import MAX_MICROBATCHES, MAX_TASKS
from hetjax.mesh.cluster import Cluster
from hetjax.mesh.quantities import format_bytes
from hetjax.pipeline.schedules.schedule import WARM_UP_SCHEDULES
from hetjax.pipeline.schedules.warm_up import is_countable
from hetjax.planner.foreign.foreign_costs import ForeignCosts
from hetjax.planner.foreign.foreign_profile import ForeignProfile
from hetjax.planner.harp.candidate_clock import CandidateClock
from hetjax.planner.harp.candidate_plans import candidate_ends, candidate_stages, slice_of
from hetjax.planner.harp.cost_search import search_by_cost
from hetjax.planner.harp.search import Candidate, search
from hetjax.planner.harp.simulated_search import Judged, search_by_clock
from hetjax.planner.plan.plan import Plan, validate
from hetjax.planner.plan.prediction import Prediction, StagePrediction
from hetjax.planner.plan.prices import node_prices
from hetjax.planner.plan.stage_plan import PipelinePlan
from hetjax.planner.predictions.schedule_choice import reschedule
from hetjax.planner.problem.options import PlanOptions, check_options
from hetjax.planner.work.execution import Execution
from hetjax.planner.work.rates import USABLE_MEMORY

_PROMISING = 0.15
"""Numbers of microbatches that each worse than the best by more than this are not improved."""

_EFFORT = 0.05
"""The search by the clock times this share of the candidates that it times of a traced program, of
all numbers of microbatches together: a plan is wanted within a second."""

_FIRST = 4
"""So many candidates of each number of microbatches are timed at first."""


@dataclass(frozen=True)
class ForeignFound:
    """A plan by a foreign profile, and what it was chosen among.

    Args:
        plan: the plan, with its prediction.
        profile: what it was made of.
        step_times: for each number of microbatches that was tried, seconds of the best step, and
            the widths of data parallelism of its stages; None where nothing fits.
        candidates: how many stages the search chose among.
        seconds: what it took.
    """

    plan: Plan
    profile: ForeignProfile
    step_times: dict[int, tuple[float, tuple[int, ...]] | None]
    candidates: int
    seconds: float


def _divides(count: object, batch_size: int) -> bool:
    """Whether something is a number of microbatches that a batch has."""
    return is_whole(count) and count >= 1 and batch_size % count == 0


@dataclass(frozen=True)
class ForeignPlanner:
    """Plans one pipeline by what a profile says, for the best number of microbatches.

    Args:
        profile: what the layers take.
        cluster: the devices.
        options: what a plan may be; it has one pipeline, and stages of one member.

    Raises:
        InputError: the profile lacks a kind of the cluster, a stage has no layer, or the schedule
            splits backward passes, of which a profile knows no halves.

    Example:
        >>> from hetjax.planner import PlanOptions, read_foreign_profile
        >>> profile = read_foreign_profile("configs/foreign/opt_350m.json")  # doctest: +SKIP
        >>> cluster = Cluster.from_file("configs/clusters/mixed_rack.yaml")  # doctest: +SKIP
        >>> found = ForeignPlanner(profile, cluster, PlanOptions()).find(512, (8, 16, 32))
        ... # doctest: +SKIP
        >>> found.plan.pipeline.num_microbatches  # doctest: +SKIP
        16

    Source: the search is Harp's, section 5.2.
    """

    profile: ForeignProfile
    cluster: Cluster
    options: PlanOptions

    def __post_init__(self) -> None:
        check_options(self.options)
        if self.options.schedule not in WARM_UP_SCHEDULES:
            raise InputError(
                f"{unknown_name('planner.schedule', self.options.schedule, WARM_UP_SCHEDULES)}; a "
                f"profile of another tool tells whole backward passes"
            )
        for part in self.cluster.subclusters:
            if part.kind.name not in self.profile.kinds:
                raise InputError(
                    f"{self.profile.path}: it has no times of kind {part.kind.name!r}, which "
                    f"subcluster {part.name!r} of cluster {self.cluster.name!r} has; it has those "
                    f"of {', '.join(self.profile.kinds)}"
                )
        layers, least = len(self.profile.layers), self.options.min_stages
        if least > min(layers, self.cluster.num_devices):
            raise InputError(
                f"min_stages is {least}; a stage needs a layer and a device, and there are "
                f"{layers} layers and {self.cluster.num_devices} devices"
            )

    def find(self, batch_size: int, counts: Sequence[int]) -> ForeignFound:
        """The best plan for one of some numbers of microbatches.

        Args:
            batch_size: examples in a step.
            counts: the numbers, each of which divides the batch; those that are more than a step
                may have are not tried.

        Returns:
            The plan.

        Raises:
            InputError: a number does not divide the batch, all are more than a step may have, or
                there are no times for such microbatches.
            DoesNotFitError: the model fits in no way.
        """
        began = time.perf_counter()
        check_count("batch_size", batch_size)
        is_some = isinstance(counts, Sequence) and len(counts) > 0
        if not is_some or not all(_divides(count, batch_size) for count in counts):
            raise InputError(
                f"counts is {shown(counts)}; it must be one or more numbers of microbatches that "
                f"divide batch_size, {batch_size}"
            )
        tried = [count for count in counts if self._may_have(count)]
        searches = [_CountSearch(self, batch_size // count, count) for count in tried]
        if not any(each.num_ways for each in searches):
            raise self._no_times(batch_size, counts, tried)
        judged = {each.count: found for each in searches if (found := each.first())}
        if not judged:
            raise self._does_not_fit()
        least = min(found[0].score for found in judged.values())
        near = [n for n, found in judged.items() if found[0].score <= least * (1 + _PROMISING)]
        for each in searches:
            if each.count in near:
                judged[each.count] = each.improved(judged[each.count], _EFFORT / len(near))
        fitting = (each for each in searches if each.count in judged)
        best = min(fitting, key=lambda each: judged[each.count][0].score)
        plan = best.plan(judged[best.count][0].candidate)
        plan = replace(plan, notes=(self._told(), *self._left_out(searches)))
        step_times = {
            each.count: each.told(judged[each.count][0]) if each.count in judged else None
            for each in searches
        }
        seconds = time.perf_counter() - began
        candidates = sum(each.num_candidates for each in searches)
        return ForeignFound(plan, self.profile, step_times, candidates, seconds)

    def _may_have(self, count: int) -> bool:
        """Whether a step may have so many microbatches in a pipeline of the fewest stages."""
        return count <= MAX_MICROBATCHES and is_countable(self.options.min_stages, count)

    def _told(self) -> str:
        return (
            f"a prediction by the profile of {self.profile.model} in {self.profile.path}, which "
            f"says how its figures were made; hetjax has no such model to train"
        )

    def _left_out(self, searches: Sequence[_CountSearch]) -> Iterator[str]:
        """What the search did not look at, since there are no times of it."""
        for part in {each.kind.name: each for each in self.cluster.subclusters}.values():
            known = {tensor for _, tensor in self.profile.meshes(part.kind.name)}
            widths = range(1, part.devices_per_node + 1)
            possible = (n for n in widths if part.devices_per_node % n == 0)
            missing = [n for n in possible if part.allows_tensor_axis(n) and n not in known]
            if missing:
                yield (
                    f"left out, for want of times on {part.kind.name}: tensor parallelism of "
                    f"{', '.join(map(str, missing))} devices"
                )
            sizes = [each.size for each in searches if not each.has_ways_on(part.name)]
            if sizes:
                yield (
                    f"left out, for want of times on {part.kind.name}: microbatches of "
                    f"{', '.join(map(str, sorted(sizes)))} examples"
                )

    def _no_times(self, batch_size: int, counts: Sequence[int], tried: Sequence[int]) -> InputError:
        most = (
            f"a step may have {MAX_MICROBATCHES:,} microbatches at most, and {MAX_TASKS // 2:,} in "
            f"all stages together"
        )
        if not tried:
            return InputError(f"counts is {shown(counts)}; {most}")
        told = []
        for kind in dict.fromkeys(part.kind.name for part in self.cluster.subclusters):
            for mesh in self.profile.meshes(kind):
                least, largest = self.profile.sizes(kind, mesh)
                sizes = f"{least} to {largest}" if least <= largest else "none that all layers have"
                told.append(f"{kind}, mesh {list(mesh)}: {sizes}")
        asked = ", ".join(map(str, sorted(batch_size // count for count in tried)))
        return InputError(
            f"{self.profile.path}: there are no times for microbatches of {asked} examples, nor "
            f"for shares of them along a data axis; it has times of all layers for sizes on "
            f"{'; '.join(told)}{f'; {most}' if len(tried) < len(counts) else ''}"
        )

    def _does_not_fit(self) -> DoesNotFitError:
        layers = self.profile.layers
        held = sum(
            each.parameter_bytes + each.gradient_bytes + each.optimizer_bytes
            for each in layers
            if each.tied_to is None
        )
        memory = sum(each.num_devices * each.kind.memory_bytes for each in self.cluster.subclusters)
        return DoesNotFitError(
            f"{self.profile.model} fits on cluster {self.cluster.name!r} by no plan that there are "
            f"times for: its parameters, gradients and optimizer state are "
            f"{format_bytes(int(held))}, and devices have together "
            f"{format_bytes(int(USABLE_MEMORY * memory))} that may be used; what would help: more "
            f"microbatches, times on meshes with a wider tensor axis, or devices with more memory"
        )


def _countable(planner: ForeignPlanner, count: int) -> PlanOptions:
    """The options, with no more stages than may have so many microbatches each."""
    options = planner.options
    most = min(len(planner.profile.layers), planner.cluster.num_devices)
    if is_countable(min(most, options.max_stages or most), count):
        return options
    return replace(options, max_stages=MAX_TASKS // (2 * count))


class _CountSearch:
    """The search for one number of microbatches."""

    def __init__(self, planner: ForeignPlanner, size: int, count: int):
        self.size, self.count = size, count
        self._planner = planner
        cluster, options = planner.cluster, _countable(planner, count)
        self._costs = ForeignCosts(planner.profile, cluster, size)
        self._table = self._costs.table(count, options.schedule, options)
        self._prices = node_prices(cluster) if options.objective == "cost" else None
        self._clock = CandidateClock(
            self._table, cluster, (), self._costs.stage_seconds, self._costs.tied
        )

    @property
    def num_ways(self) -> int:
        """How many ways there are to run a stage, of all submeshes."""
        return sum(len(cut.options) for cuts in self._table.slices for cut in cuts)

    def has_ways_on(self, subcluster: str) -> bool:
        names = [each.name for each in self._planner.cluster.subclusters]
        return any(cut.options for cut in self._table.slices[names.index(subcluster)])

    @property
    def num_candidates(self) -> int:
        """How many stages the search chooses among."""
        return sum(
            int(np.isfinite(cut.seconds).sum()) for cuts in self._table.slices for cut in cuts
        )

    def first(self) -> tuple[Judged, ...]:
        """The best by the closed form, timed; empty where nothing fits."""
        table = self._table
        met = search(table) if self._prices is None else search_by_cost(table, self._prices)
        return search_by_clock(table, met[:_FIRST], self._clock, self._prices, 0.0) if met else ()

    def improved(self, judged: Sequence[Judged], effort: float) -> tuple[Judged, ...]:
        """The best by the clock."""
        met = [each.candidate for each in judged]
        return search_by_clock(self._table, met, self._clock, self._prices, effort)

    def told(self, judged: Judged) -> tuple[float, tuple[int, ...]]:
        """Seconds of a step, and the widths of data parallelism of its stages."""
        pairs = zip(judged.candidate.places, judged.candidate.options, strict=True)
        ways = [slice_of(self._table, place).options[option] for place, option in pairs]
        widths = (way.mesh_shape[0] for way in ways if isinstance(way, Execution))
        return judged.makespan, tuple(widths)

    def plan(self, candidate: Candidate) -> Plan:
        """The plan of a candidate, with its prediction."""
        profile, cluster, table = self._planner.profile, self._planner.cluster, self._table
        ends = candidate_ends(table, cluster, (), candidate)
        pieces = [(layer, layer + 1) for layer in range(table.num_layers)]
        stages, schedule = candidate_stages(table, candidate, ends, pieces, self.size)
        sharing = self._clock.sharing(candidate.places, ends)
        predicted = tuple(self._stage(candidate, s, sharing[s]) for s in range(len(stages)))
        plan = Plan(
            model=f"{profile.model} (profile {profile.fingerprint})",
            layers=tuple(range(table.num_layers + 1)),
            cluster=cluster,
            pipelines=(PipelinePlan(tuple(stages), self.count, self.size, schedule),),
            planner=ForeignPlanner.__name__,
            prediction=Prediction(0.0, 0.0, predicted),
        )
        validate(plan)
        times = self._clock.times(candidate, ends)
        again = [each.recompute_seconds for each in predicted]
        backward = [each - more for each, more in zip(times.backward, again, strict=True)]
        return reschedule(
            plan,
            schedule,
            replace(
                times,
                backward=backward,
                recompute=again,
                input_gradient=backward,
                weight_gradient=[0.0] * len(stages),
            ),
        )

    def _stage(self, candidate: Candidate, stage: int, sharing: float) -> StagePrediction:
        """What a stage takes and holds; `reschedule` adds what depends on the schedule."""
        place, option = candidate.places[stage], candidate.options[stage]
        execution = slice_of(self._table, place).options[option]
        assert isinstance(execution, Execution), "a stage has one member"
        found, run = self._costs.estimate(execution), place.layers
        again = float(found.forward_seconds[run]) if execution.repeats == "stage" else 0.0
        backward = float(found.backward_seconds[run]) - again
        # What is made again at once is there from its recomputation on.
        recomputed = float(self._costs.kept(execution)[run]) if again else 0.0
        return StagePrediction(
            forward_seconds=float(found.forward_seconds[run]),
            backward_seconds=backward,
            recompute_seconds=again,
            input_gradient_seconds=backward,
            weight_gradient_seconds=0.0,
            update_seconds=float(found.update_seconds[run]),
            exchange_seconds=float(found.exchange_seconds[run]),
            communication_seconds=0.0,
            return_seconds=0.0,
            state_bytes=int(found.state_bytes[run]),
            working_bytes=int(found.working_bytes[run] - recomputed),
            activation_bytes=int(found.activation_bytes[run]),
            recomputed_bytes=int(recomputed),
            deferred_bytes=0,
            memory_bytes=0,
            memory_limit_bytes=execution.kind.memory_bytes,
            bubble=0.0,
            sharing_seconds=sharing,
        )
