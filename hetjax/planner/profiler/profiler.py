"""From a planning problem to what has to be measured for it, and from measurements to a profile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from hetjax.mesh.subcluster import Subcluster
from hetjax.planner.harp.stage_table import Slice, StageTable
from hetjax.planner.harp.table_making import make_stage_table
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.profiler.calibration import calibration
from hetjax.planner.profiler.class_rates import MeasuredPass, fit_class_rates
from hetjax.planner.profiler.composition import RunFigure, compose, composition_error
from hetjax.planner.profiler.database import Key, ProfileDatabase
from hetjax.planner.profiler.measured_runs import Unit, layer_classes, num_structures, units
from hetjax.planner.profiler.measurement import Measurement, Request
from hetjax.planner.profiler.structure import structure_digest
from hetjax.planner.work.execution import Execution
from hetjax.planner.work.profile import Composition, Profile, Way, WayTimes

_NOTHING = 1e-9
"""What a figure of 0 counts as: relative errors are fitted."""


@dataclass(frozen=True)
class Wanted:
    """A measurement that a profile is made of.

    Args:
        way: the devices, and how they share the run.
        key: where the database keeps it.
        request: what is asked of those who measure.
        checks: whether it only checks what is composed of the others.
        same: ways on other subclusters of the kind, which it measures, too.
    """

    way: Way
    key: Key
    request: Request
    checks: bool
    same: tuple[Way, ...] = ()


_MeasuredRuns = dict[Way, list[tuple[Wanted, Measurement]]]
_MeasuredKinds = dict[str, list[tuple[Key, Measurement]]]


@dataclass(frozen=True)
class Survey:
    """What a profile of a problem takes.

    Args:
        wanted: the measurements.
        classes: of the layers, those of one class being alike.
        candidates: stages that there are: runs of layers on any submesh in any way.
        pruned: those of them that do not fit into memory.
        structures: runs of layers that differ in structure.
    """

    wanted: tuple[Wanted, ...]
    classes: tuple[int, ...]
    candidates: int
    pruned: int
    structures: int

    def missing(self, database: ProfileDatabase) -> tuple[Wanted, ...]:
        """What a database does not have."""
        return tuple(each for each in self.wanted if database.get(each.key) is None)

    def share(self, measured: int) -> float:
        """The share of the candidates that fit that so many measurements are."""
        return measured / max(1, self.candidates - self.pruned)


def survey(problem: PlanningProblem) -> Survey:
    """What there is to measure for a problem: what fits, and nothing twice.

    Ways to run a stage are those that are the best for some run of layers by the analytic model, on
    the devices of one node. Recomputation is composed: it is a forward pass and a backward pass.

    Args:
        problem: the planning problem.

    Returns:
        The survey.
    """
    analytic = replace(problem, profile=Profile())
    table = make_stage_table(analytic, problem.runs)
    classes = layer_classes(problem)
    wanted: dict[Key, Wanted] = {}
    found = units(problem, classes)
    updated = _updated(found)
    for unit in found:
        cotangents = _cotangents(problem, unit)
        digest = _digest(problem, unit)
        for subcluster, slices in zip(problem.cluster.subclusters, table.slices, strict=True):
            for way in _ways(slices, unit.layers):
                key = _key(problem, subcluster, way, digest, updates=unit == updated)
                request = Request(
                    unit.layers, way.mesh_shape, way.sharding, cotangents, unit == updated
                )
                known = wanted.setdefault(key, Wanted(way, key, request, unit.checks))
                if way not in (known.way, *known.same):
                    wanted[key] = replace(known, same=(*known.same, way))
    runs = problem.num_layers * (problem.num_layers + 1) // 2
    cuts = [cut for slices in table.slices for cut in slices]
    candidates = sum(len(cut.options) * runs for cut in cuts)
    fitting = sum(cut.num_candidates for cut in cuts)
    return Survey(
        wanted=tuple(wanted.values()),
        classes=classes,
        candidates=candidates,
        pruned=candidates - fitting,
        structures=num_structures(classes),
    )


def _updated(found: Sequence[Unit]) -> Unit:
    """The longest run, which tells how fast parameters are updated that no cache holds."""
    return max(found, key=lambda unit: unit.layers[1] - unit.layers[0])


def _cotangents(problem: PlanningProblem, unit: Unit) -> tuple[int, ...]:
    """Which of the values that a run sends have a cotangent."""
    end = unit.layers[1]
    after = problem.works[end : end + 1]
    # The loss has a cotangent, the count that it is divided by has none.
    return tuple(after[0].returned) if after else (0,)


def _digest(problem: PlanningProblem, unit: Unit) -> str:
    cotangents = _cotangents(problem, unit)
    return structure_digest(problem.program, problem.layers, unit.layers, cotangents)


def num_to_measure(problem: PlanningProblem, table: StageTable) -> int:
    """How many measurements a profile of a problem takes, without stating them.

    Runs are traced to compare them only where others compute as much.

    Args:
        problem: the planning problem, of which nothing was measured.
        table: its stage table.

    Returns:
        As many as `survey` wants: few of the candidates, since the others are composed of them.
    """
    by_flops: dict[tuple[float, ...], list[Unit]] = {}
    found = units(problem, layer_classes(problem))
    updated = _updated(found)
    for unit in found:
        by_flops.setdefault(_forward_flops(problem, unit), []).append(unit)
    structures = {
        unit: _digest(problem, unit) if len(alike) > 1 else str(flops)
        for flops, alike in by_flops.items()
        for unit in alike
    }
    return len(
        {
            _key(problem, subcluster, way, structure, updates=unit == updated)
            for unit, structure in structures.items()
            for subcluster, slices in zip(problem.cluster.subclusters, table.slices, strict=True)
            for way in _ways(slices, unit.layers)
        }
    )


def _forward_flops(problem: PlanningProblem, unit: Unit) -> tuple[float, ...]:
    """What runs of one structure have in common at least, each figure to nine digits."""
    costs = [work.forward for work in problem.works[slice(*unit.layers)]]
    sums = (sum(each.flops for each in costs), sum(each.matmul_flops for each in costs))
    return tuple(float(f"{figure:.9g}") for figure in sums)


def _ways(slices: Sequence[Slice], run: tuple[int, int]) -> Sequence[Way]:
    """The ways in which a run of layers fits on a node of a subcluster."""
    found: dict[Way, None] = {}
    for cut in slices:
        if cut.shape[0] > 1:
            continue
        for option, limit in zip(cut.options, cut.limits_of(run), strict=True):
            if limit > 0 and isinstance(option, Execution):
                found[option.way] = None
    return list(found)


def _key(
    problem: PlanningProblem, subcluster: Subcluster, way: Way, structure: str, *, updates: bool
) -> Key:
    return Key(
        structure=structure,
        kind=_kind_name(subcluster),
        dtype=problem.dtype,
        shape=way.shape,
        mesh_shape=way.mesh_shape,
        sharding=way.sharding,
        update=problem.update_digest if updates else None,
    )


def _kind_name(subcluster: Subcluster) -> str:
    """What the database calls a subcluster's devices: hosts' processors are seldom alike."""
    name = subcluster.kind.name
    return f"{name} of {subcluster.name}" if subcluster.kind.is_processor else name


def make_profile(
    problem: PlanningProblem, surveyed: Survey, database: ProfileDatabase, seconds: float = 0.0
) -> Profile:
    """The profile of a problem, of what a database has.

    A way is in it where every class of layers was measured in it. Where none was, the cost model's
    seconds are corrected by the measurements of the same devices, of this program or of others. All
    are as at a moment when the devices were as fast as they usually are.

    Args:
        problem: the planning problem.
        surveyed: what it takes.
        database: the database.
        seconds: how long it took to measure.

    Returns:
        The profile; empty where the database has nothing of it.

    Raises:
        InputError: a file of the database is corrupt.
    """
    found: _MeasuredRuns = {}
    measurements = 0
    for each in surveyed.wanted:
        measurement = database.get(each.key) or _passes(database, each.key)
        if measurement is None:
            continue
        measurements += 1
        for way in (each.way, *each.same):
            found.setdefault(way, []).append((each, measurement))
    found = _at_usual_speed(found)
    ways = {
        way: _way_times(surveyed.classes, measured)
        for way, measured in found.items()
        if _covers(surveyed.classes, measured)
    }
    of_kinds = _of_kinds(problem, database)
    classes = _classes(problem, of_kinds)
    return Profile(
        ways=ways,
        calibration=calibration(problem, ways, classes),
        updates=_updates(problem, found, of_kinds),
        classes=classes,
        measurements=measurements,
        seconds=seconds,
    )


def _passes(database: ProfileDatabase, key: Key) -> Measurement | None:
    """A run as it was measured with another optimizer's update, which its passes do not know."""
    if key.update is None:
        return None
    of_kind = database.of_kind(key.kind)
    found = (each for other, each in of_kind if replace(other, update=key.update) == key)
    measurement = next(found, None)
    return measurement and replace(measurement, update_bytes_per_second=0.0)


def _at_usual_speed(found: _MeasuredRuns) -> _MeasuredRuns:
    """Measurements as if all of a subcluster's had been made when its devices were equally fast."""
    moments: dict[str, list[float]] = {}
    for way, measured in found.items():
        moments.setdefault(way.subcluster, []).extend(
            each.yardstick_seconds for _, each in measured if each.yardstick_seconds
        )
    usual = {name: median(seconds) for name, seconds in moments.items() if seconds}
    return {
        way: [
            (wanted, each.at_yardstick(usual.get(way.subcluster, 0.0))) for wanted, each in measured
        ]
        for way, measured in found.items()
    }


def _covers(classes: Sequence[int], measured: Sequence[tuple[Wanted, Measurement]]) -> bool:
    runs = [wanted.request.layers for wanted, _ in measured if not wanted.checks]
    return {classes[layer] for run in runs for layer in range(*run)} == set(classes)


def _way_times(classes: Sequence[int], measured: Sequence[tuple[Wanted, Measurement]]) -> WayTimes:
    forward, forward_error = _composed(classes, measured, "forward_seconds")
    backward, backward_error = _composed(classes, measured, "backward_seconds")
    temporary, _ = _composed(classes, measured, "backward_bytes")
    checked = any(wanted.checks for wanted, _ in measured)
    error = max(forward_error, backward_error) if checked else None
    return WayTimes(forward, backward, temporary, error)


def _composed(
    classes: Sequence[int], measured: Sequence[tuple[Wanted, Measurement]], name: str
) -> tuple[Composition, float]:
    """A figure of runs composed, and the error of doing so.

    The error is that of the composition of short runs; then those that checked it count, too.
    """
    runs: dict[bool, list[RunFigure]] = {False: [], True: []}
    without: set[int] = set()
    for wanted, measurement in measured:
        layers = wanted.request.layers
        if name.startswith("backward") and not measurement.backward_seconds:
            without.update(classes[slice(*layers)])
            continue
        value = max(float(getattr(measurement, name)), _NOTHING)
        runs[wanted.checks].append(RunFigure(layers, value))
    error = composition_error(compose(classes, runs[False], without), runs[True])
    return compose(classes, [*runs[False], *runs[True]], without), error


def _updates(
    problem: PlanningProblem, found: _MeasuredRuns, of_kinds: _MeasuredKinds
) -> dict[str, float]:
    """The rate of the optimizer's update of each subcluster; of another program's, without this."""

    def rates_of(measured: Iterable[tuple[Key, Measurement]]) -> list[float]:
        of_it = (each for key, each in measured if key.update == problem.update_digest)
        return [each.update_bytes_per_second for each in of_it if each.update_bytes_per_second]

    rates: dict[str, list[float]] = {}
    for way, measured in found.items():
        here = rates_of((wanted.key, each) for wanted, each in measured)
        rates.setdefault(way.subcluster, []).extend(here)
    for name, measured in of_kinds.items():
        if not rates.get(name):
            rates[name] = rates_of(measured)
    return {name: median(found) for name, found in rates.items() if found}


def _of_kinds(problem: PlanningProblem, database: ProfileDatabase) -> _MeasuredKinds:
    """What was measured on one device of each subcluster, of any program."""
    found: _MeasuredKinds = {}
    for subcluster in problem.cluster.subclusters:
        measured = [
            (key, each)
            for key, each in database.of_kind(_kind_name(subcluster))
            if key.dtype == problem.dtype and key.mesh_shape == (1, 1)
        ]
        moments = [each.yardstick_seconds for _, each in measured if each.yardstick_seconds]
        if measured:
            usual = median(moments) if moments else 0.0
            found[subcluster.name] = [(key, each.at_yardstick(usual)) for key, each in measured]
    return found


def _classes(problem: PlanningProblem, measured: _MeasuredKinds) -> dict[str, Mapping[str, float]]:
    """What classes of work take on a device of each subcluster."""
    found: dict[str, Mapping[str, float]] = {}
    for name, each in measured.items():
        passes = [
            MeasuredPass(work, seconds)
            for _, one in each
            for work, seconds in (
                (one.forward_work, one.forward_seconds),
                (one.backward_work, one.backward_seconds),
            )
            if work
        ]
        if passes:
            kind = problem.cluster.subcluster(name).kind
            rates = kind.product_flops(problem.dtype), kind.memory_bandwidth
            found[name] = fit_class_rates(passes, *rates)
    return found
