"""HexiSeq's scheduler: groups, tokens and heads for one long sequence over unlike devices.

Three stages, from coarse to fine. Stage I makes partitions of the devices into groups. Stage II
gives each partition several divisions of the sequence, and keeps the best of them all. Stage III
descends from each of these, coarsely from all and finely from the few that are left. Even splits
are among what is compared, so that nothing is worse than the best of them.

Source: HexiSeq, section 4.3 and algorithm 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetjax.errors import DoesNotFitError
from hetjax.mesh.quantities import format_bytes
from hetjax.planner.hexiseq.costs_of_rows import UNFIT, Candidates, ContextCosts
from hetjax.planner.hexiseq.even_contexts import EvenContext, even_contexts
from hetjax.planner.hexiseq.group_layout import GroupLayout
from hetjax.planner.hexiseq.partitions import SMALL, choices_of_devices, partitions
from hetjax.planner.hexiseq.refinement import (
    RefinedSplit,
    best_double_moves,
    best_single_moves,
    best_weights,
)
from hetjax.planner.hexiseq.typed_layout import TypedLayout, Weights
from hetjax.sharding.context.context_split import ContextGroup, ContextSplit, check_num_groups

PARTITIONS, PLANS, MOVES = 64, 16, 100
"""How many partitions and plans are kept, and the most moves from a plan (M1, M2 and I_max)."""

COARSE_MOVES, FINE_PLANS, SINGLE_PLANS = 8, 4, 2
"""Moves from each plan kept, from how many of these all moves are made, and single ones."""

SMALL_STARTS, SMALL_PLANS, DOUBLE_PLANS = 3, 64, 32
"""Of few devices: how many divisions of a partition are begun with, how many plans are kept for
single moves, and how many of these for two moves at once."""

POWERS = (1.0, 0.75, 0.5, 0.25, 0.0)
"""To which powers of its speed a group has tokens in the divisions of stage II."""

NEAR, COARSELY_NEAR = 1.3, 1.15
"""How many times as slow as the best a plan may be for more divisions of the sequence, and for a
descent; none has been seen to win so much."""

CAPPING_ROUNDS = 3


class NoLegalSplitError(DoesNotFitError):
    """Even splits divide heads or devices in no way that is allowed."""


@dataclass(frozen=True)
class ContextSchedule:
    """A context split, and what it is predicted to take.

    Args:
        system: ``"hexiseq"``, or the even system that it is one of.
        split: the split, by the numbers of the cost model's devices.
        seconds: of a step.
        memory: bytes of each device, in the order of the split's groups.
    """

    system: str
    split: ContextSplit
    seconds: float
    memory: tuple[float, ...]


def schedule_context(model: ContextCosts) -> ContextSchedule:
    """The best context split that is found for a cluster.

    Args:
        model: the cost model of its devices and of the work.

    Returns:
        The schedule. By the same model it is never slower than an even split that fits.

    Raises:
        DoesNotFitError: nothing that was tried fits into memory; with the device that lacks most,
            its bytes and what it has.

    Example:
        >>> from hetjax.mesh import Cluster, Link, Subcluster, kind
        >>> from hetjax.planner.hexiseq.context_devices import ContextDevices
        >>> from hetjax.planner.hexiseq.context_model import ContextModel
        >>> from hetjax.planner.hexiseq.context_work import transformer_work
        >>> near, far = Link(300e9, 5e-6), Link(25e9, 1e-5)
        >>> parts = [Subcluster(n, kind(n), 1, 2, near, far) for n in ("H100", "A100-80")]
        >>> cluster = Cluster("two islands", parts, [("H100", "A100-80", far)])
        >>> work = transformer_work(2**16, width=2048, layers=16, query_heads=16)
        >>> schedule = schedule_context(ContextModel(ContextDevices(cluster), work))
        >>> schedule.split.groups[0].devices, schedule.split.groups[0].head_counts
        ((0,), (16,))
    """
    return best_schedules(model, 1)[0]


def best_schedules(model: ContextCosts, count: int) -> tuple[ContextSchedule, ...]:
    """The best context splits that are found for a cluster, each with other groups.

    Args:
        model: as for `schedule_context`.
        count: how many at most.

    Returns:
        The schedules, the best first; one or more.

    Raises:
        DoesNotFitError: as for `schedule_context`.
    """
    ordered = sorted(_refined(model), key=lambda each: each.score)
    best, system = ordered[0], "hexiseq"
    for even in _evens(model):
        if _least_even(model, even) < best.score:
            made = _even(model, even, best.score)
            if made.score < best.score:
                system, best = even.system, made
    first = _schedule(model, system if best.score < UNFIT else "hexiseq", best)
    others, known = [], {frozenset(best.layout.groups)}
    for each in ordered:
        groups = frozenset(each.layout.groups)
        if each.score < UNFIT and groups not in known:
            known.add(groups)
            others.append(each)
    return (first, *(_schedule(model, "hexiseq", each) for each in others[: count - 1]))


def schedule_even(model: ContextCosts, system: str | None = None) -> ContextSchedule:
    """The best even split: ring attention, Ulysses or USP at its best settings.

    Args:
        model: the cost model.
        system: ``"ring"``, ``"ulysses"`` or ``"usp"``; the best of all unless given.

    Returns:
        The schedule.

    Raises:
        DoesNotFitError: no legal one fits into memory, or none is legal.
    """
    best: RefinedSplit | None = None
    name = ""
    for even in _evens(model):
        is_slow = best is not None and _least_even(model, even) >= best.score
        if (system is None or even.is_of(system)) and not is_slow:
            made = _even(model, even, best.score if best else np.inf)
            if best is None or made.score < best.score:
                best, name = made, system or even.system
    if best is None:
        raise NoLegalSplitError(
            f"{system}: there is no legal even split of {len(model.devices.usable)} devices with "
            f"{model.work.query_heads} query heads"
        )
    return _schedule(model, name, best)


def schedule_groups(model: ContextCosts, groups: Sequence[Sequence[int]]) -> ContextSchedule:
    """The best tokens and heads for given groups of devices.

    Args:
        model: the cost model.
        groups: in the order of the ring, the numbers of each one's devices; other devices have
            nothing to do.

    Returns:
        The schedule.

    Raises:
        DoesNotFitError: nothing that was tried fits into memory.
    """
    typed = TypedLayout(GroupLayout(model.devices, groups), model.work)
    starts = [typed.start(power) for power in POWERS]
    starts += [_capped(model, typed, each) for each in starts]
    place, score = model.best(typed.layout, typed.fill(starts))
    found = _as_split(typed, *best_weights(model, typed, starts[place], score, MOVES))
    return _schedule(model, "hexiseq", best_single_moves(model, found, COARSE_MOVES))


def _refined(model: ContextCosts) -> list[RefinedSplit]:
    """What the three stages end with."""
    is_small = len(model.devices.usable) <= SMALL
    plans = _plans(model)
    best = plans[0][2]
    coarse = []
    for typed, weights, score in plans:
        if is_small or score <= COARSELY_NEAR * best or score >= UNFIT:
            coarse.append((typed, *best_weights(model, typed, weights, score, COARSE_MOVES)))
            best = min(best, coarse[-1][2])
    coarse.sort(key=lambda each: each[2])
    fine = [
        (typed, *best_weights(model, typed, weights, score, MOVES))
        for typed, weights, score in coarse[:FINE_PLANS]
    ]
    # Where tokens and heads are few, weights say too little to choose by.
    made = fine + coarse[FINE_PLANS:] if is_small else sorted(fine, key=lambda each: each[2])
    found = [_as_split(*each) for each in made]
    if not is_small:
        single = [best_single_moves(model, each, MOVES) for each in found[:SINGLE_PLANS]]
        return single + found[SINGLE_PLANS:]
    found = [best_single_moves(model, each, COARSE_MOVES) for each in found]
    found.sort(key=lambda each: each.score)
    near = [each for each in found[:DOUBLE_PLANS] if each.score <= NEAR * found[0].score]
    return [best_double_moves(model, each, COARSE_MOVES) for each in near]


def _as_split(typed: TypedLayout, weights: Weights, score: float) -> RefinedSplit:
    filled = typed.fill([weights])
    return RefinedSplit(typed.layout, filled.tokens[0], filled.heads[0], score)


def _plans(model: ContextCosts) -> list[tuple[TypedLayout, Weights, float]]:
    """Stages I and II: the best divisions of the sequence among groups, of unlike partitions."""
    devices, work = model.devices, model.work
    check_num_groups(1, work.length)
    firsts, best = [], np.inf
    is_small = len(devices.usable) <= SMALL
    for members in choices_of_devices(devices):
        everyone = list(itertools.chain(*members))
        if model.least_seconds(float(devices.flops[everyone].sum())) >= best:
            continue
        for partition in partitions(devices, members, work.length):
            typed = TypedLayout(GroupLayout(devices, partition), work)
            weights = typed.start()
            below = np.inf if is_small or best >= UNFIT else 2 * NEAR * best
            made = typed.fill([weights])
            _, score = model.best(typed.layout, made, below)
            if score >= below:
                filled = model.memory(typed.layout, made)[0] / typed.layout.of(devices.memory)
                score = UNFIT * float(filled.max()) if filled.max() > 1 else score
            best = min(best, score)
            if score < below or score >= UNFIT:
                firsts.append((typed, weights, score))
    firsts.sort(key=lambda each: each[2])
    plans = []
    for typed, weights, score in firsts[:PARTITIONS]:
        starts = [weights]
        if score < NEAR * best or score >= UNFIT:
            starts += [typed.start(power) for power in POWERS[1:]]
        if score >= UNFIT:
            starts += [_capped(model, typed, each) for each in starts[::2]]
        if is_small:
            plans += _starts_of_small(model, typed)
            continue
        if len(starts) > 1:
            place, score = model.best(typed.layout, typed.fill(starts))
            weights = starts[place]
        plans.append((typed, weights, score))
    plans.sort(key=lambda each: each[2])
    count = SMALL_PLANS if is_small else PLANS
    fitting = [each for each in plans if each[2] < UNFIT]
    # What does not fit yet may be fast when it does.
    return fitting[:count] + plans[len(fitting) :][:count]


def _starts_of_small(
    model: ContextCosts, typed: TypedLayout
) -> list[tuple[TypedLayout, Weights, float]]:
    """Plans of few devices, for which descents are begun at unlike places."""
    starts = [
        typed.start(power, tokens=tokens, heads=heads)
        for power in POWERS[::2]
        for tokens, heads in itertools.product((0.0, 1.0, 2.0), (0.0, 1.0))
    ]
    found = model.costs(typed.layout, typed.fill(starts)).scores
    best = np.argsort(found, kind="stable")[:SMALL_STARTS]
    return [(typed, starts[each], float(found[each])) for each in best.tolist()]


def _capped(model: ContextCosts, typed: TypedLayout, weights: Weights) -> Weights:
    """Weights that leave fewer tokens to devices that would be too full."""
    layout = typed.layout
    room = layout.of(model.devices.memory)
    for _ in range(CAPPING_ROUNDS):
        made = typed.fill([weights])
        least = made._replace(tokens=np.ones_like(made.tokens))
        fixed, needed = (model.memory(layout, each)[0] for each in (least, made))
        share = np.clip((room - fixed) / np.maximum(needed - fixed, 1.0), 0.01, 1.0)
        of_class = np.ones(len(weights.tokens))
        np.minimum.at(of_class, typed.device_class, share)
        capped = weights.tokens * of_class
        kept = np.bincount(typed.class_type, capped) / np.bincount(typed.class_type, weights.tokens)
        weights = weights._replace(tokens=capped, groups=weights.groups * kept)
    return weights


def _evens(model: ContextCosts) -> Iterator[EvenContext]:
    """All even splits, of all devices and of some."""
    for members in choices_of_devices(model.devices):
        yield from even_contexts(model.devices, model.work, members)


def _least_even(model: ContextCosts, even: EvenContext) -> float:
    """What an even split takes at least: all devices are as slow as the slowest."""
    rates = model.devices.flops[list(itertools.chain(*even.partition))]
    return model.least_seconds(float(len(rates) * rates.min()))


def _even(model: ContextCosts, even: EvenContext, below: float) -> RefinedSplit:
    layout = GroupLayout(model.devices, even.partition)
    tokens, heads = even.tokens(model.work.length), even.heads(model.work.query_heads)
    _, score = model.best(layout, Candidates.one(tokens, heads), below)
    return RefinedSplit(layout, tokens, heads, score)


def _schedule(model: ContextCosts, system: str, found: RefinedSplit) -> ContextSchedule:
    layout, candidates = found.layout, Candidates.one(found.tokens, found.heads)
    memory = model.memory(layout, candidates)[0]
    if found.score >= UNFIT:
        room = layout.of(model.devices.memory)
        worst = int((memory / room).argmax())
        raise DoesNotFitError(
            f"{system}: {model.work.length} tokens do not fit into memory by any split that was "
            f"tried. In the one that comes nearest, {model.devices.name(int(layout.order[worst]))} "
            f"needs {format_bytes(memory[worst])} of {format_bytes(room[worst])} "
            f"({model.memory_told(layout, candidates, worst)}), all devices together "
            f"{format_bytes(memory.sum())} of {format_bytes(room.sum())}"
        )
    return ContextSchedule(system, context_split(model, found), found.score, tuple(memory.tolist()))


def context_split(model: ContextCosts, found: RefinedSplit) -> ContextSplit:
    """Arrays of a layout as a context split.

    Args:
        model: the cost model that it was found by.
        found: tokens and heads of the layout's devices.

    Returns:
        The split; in each group, devices have their heads in order.
    """
    layout, work = found.layout, model.work
    groups = []
    for start, members in zip(layout.starts.tolist(), layout.groups, strict=True):
        columns = slice(start, start + len(members))
        counts = found.heads[columns]
        stops = np.cumsum(counts)
        ranges = zip((stops - counts).tolist(), stops.tolist(), strict=True)
        groups.append(ContextGroup(members, tuple(found.tokens[columns].tolist()), tuple(ranges)))
    return ContextSplit(
        work.length, work.query_heads, work.key_value_heads, tuple(groups), work.is_causal
    )
