"""HexiSeq's figure 5: its simulations, by the paper's cost model and by ours.

Rows have `ratio`, by how many times the schedule is faster than the best of ring attention, Ulysses
and USP by the same model, both at their best number of sequences at once; or `refused`, why the
schedule, or all of these, do not fit. The last row of each cost model has the `mean`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import mean
from typing import Any

from context_simulations import COSTS, LENGTHS, MODELS, SEQUENCES, simulated

from hetjax.errors import DoesNotFitError
from hetjax.planner.hexiseq.context_devices import ContextDevices
from hetjax.planner.hexiseq.context_work import transformer_work
from hetjax.planner.hexiseq.costs_of_rows import ContextCosts
from hetjax.planner.hexiseq.scheduler import ContextSchedule, schedule_context, schedule_even

BATCHES = tuple(each for each in range(1, SEQUENCES + 1) if SEQUENCES % each == 0)


def figure_rows(efficiency: float) -> Iterator[dict[str, Any]]:
    """A row for each cost model, cluster, model and length."""
    for costs in COSTS:
        ratios = []
        for number in (1, 2, 3):
            devices = ContextDevices(simulated(number), efficiency=efficiency or None)
            for name in MODELS:
                for length in LENGTHS:
                    row = _row(costs, devices, name, length)
                    ratios += [row["ratio"]] if "ratio" in row else []
                    yield {"costs": costs, "simulation": number, **row}
        yield {"costs": costs, "mean": mean(ratios), "cases": len(ratios), "least": min(ratios)}


def _row(costs: str, devices: ContextDevices, name: str, length: int) -> dict[str, Any]:
    models = {
        batch: COSTS[costs](
            devices, transformer_work(length, sequences=SEQUENCES, batch=batch, **MODELS[name])
        )
        for batch in BATCHES
    }
    row = {"model": name, "length": length}
    try:
        batch, found = _best(models, schedule_context)
        row |= {"seconds": found.seconds, "batch": batch, "groups": _told(devices, found)}
        even_batch, even = _best(models, schedule_even)
    except DoesNotFitError as error:
        return row | {"refused": str(error)}
    return row | {
        "baseline": f"{even.system} {len(even.split.groups)} x {len(even.split.groups[0].devices)}",
        "baseline_seconds": even.seconds,
        "baseline_batch": even_batch,
        "ratio": even.seconds / found.seconds,
    }


def _best(
    models: dict[int, ContextCosts], schedule: Callable[[ContextCosts], ContextSchedule]
) -> tuple[int, ContextSchedule]:
    """The fastest schedule over the numbers of sequences at once."""
    found: dict[int, ContextSchedule] = {}
    refused: DoesNotFitError | None = None
    for batch, model in models.items():
        try:
            found[batch] = schedule(model)
        except DoesNotFitError as error:
            # That of one sequence at once comes nearest to fitting.
            refused = refused or error
    if refused and not found:
        raise refused
    return min(found.items(), key=lambda each: each[1].seconds)


def _told(devices: ContextDevices, schedule: ContextSchedule) -> list[str]:
    """Groups that are alike, with the tokens and heads of their first."""
    told: dict[str, int] = {}
    for group in schedule.split.groups:
        names = [devices.name(device).split("[")[0] for device in group.devices]
        kinds = " + ".join(f"{names.count(each)} {each}" for each in dict.fromkeys(names))
        heads = sorted(group.head_counts, reverse=True)
        text = f"{kinds}: {max(group.head_counts)} to {heads[-1]} heads"
        told[text] = told.get(text, 0) + 1
    return [f"{count} x ({text})" for text, count in told.items()]
