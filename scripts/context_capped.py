"""Hosts of the lab with little memory, on which an even split ends: `bench_context.py capped`.

Two hosts as fast as each other share a long sequence. What an even half takes on the second host is
found first, and what all of it takes on the first one, without a limit, both with layers that are
made again, which takes the least. Then both may have less: 0.9 of that, beside what their
processes have before. The planner, which counts what a step holds and not the processes, is told of
as large parts of what it predicts.

Rows: of each `plan` its `tokens`, `predicted_bytes` and the `most_bytes` that hosts had, and which
worker was `lost`, if any; then what every host had `before`, its `limit_bytes`, and by how much the
even plan and the first host alone go over it, by what was measured without a limit. The even plan
is run on the capped hosts, too, until its worker is killed. `even_plans_that_fit` by prediction,
whatever they do with layers, are those of ring attention, Ulysses and USP.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from benchmarking import WARM_UP_STEPS, Size, check_losses, size_flags
from lab import Lab, Specification, read_specification
from lab_process import UNCOUNTED, FirstHost

SIZE = Size(
    blocks=2, width=256, heads=4, sequence=16384, vocabulary=256, microbatches=1, microbatch_size=1
)
"""Of the GPT: its activations are most of what a process has."""

PART = 0.9
"""Of what the first host takes for all, and of what the second one takes for half."""

EVEN, UNEVEN = "ulysses", "hexiseq"

ANSWER_SECONDS = 1800.0


def capped_rows() -> Iterator[dict[str, Any]]:
    """The rows; see the module."""
    specification = read_specification("two_hosts")
    with contextlib.ExitStack() as ends:
        lab, asked, names = _begun(specification, [UNCOUNTED] * 2, {}, ends)
        before = _most(lab)
        told = {EVEN: asked("plan_repeating", system=EVEN)}
        told["alone"] = asked("force", name="alone", groups=[[0]], repeating=True)
        losses, most = {}, {}
        for name in told:
            asked("start", system=name)
            losses[name] = asked("steps", system=name, count=WARM_UP_STEPS)
            asked("end", system=name)
            most[name] = _most(lab)
    taken = most["alone"][0], most[EVEN][1]
    limits = [b + PART * (t - b) for b, t in zip(before, taken, strict=True)]
    predicted = told["alone"]["memory_bytes"][0], told[EVEN]["memory_bytes"][1]
    known = dict(zip(names, (PART * each for each in predicted), strict=True))
    with contextlib.ExitStack() as ends:
        lab, asked, _ = _begun(specification, limits, known, ends)
        told[UNEVEN] = asked("plan", system=UNEVEN)
        evens = {system: asked("plan", system=system) for system in ("ring", EVEN, "usp")}
        asked("start", system=UNEVEN)
        losses[UNEVEN] = asked("steps", system=UNEVEN, count=WARM_UP_STEPS)
        most[UNEVEN] = _most(lab)
        asked("end", system=UNEVEN)
        asked("find", memory={})
        asked("plan_repeating", system=EVEN)
        asked("start", system=EVEN)
        lost = asked("steps_or_lost", system=EVEN, count=WARM_UP_STEPS).get("lost")
    for name, each in told.items():
        row = {"plan": name, "tokens": each["tokens"], "predicted_bytes": each["memory_bytes"]}
        yield row | {"most_bytes": most[name], "lost": lost if name == EVEN else None}
    yield {
        "before": before,
        "limit_bytes": limits,
        "planned_over_limit": [m / b for m, b in zip(most[UNEVEN], limits, strict=True)],
        "even_over_limit": most[EVEN][1] / limits[1],
        "alone_over_limit": most["alone"][0] / limits[0],
        "even_plans_that_fit": [system for system, plan in evens.items() if plan is not None],
        "largest_loss_difference": check_losses(losses),
    }


def _begun(
    specification: Specification,
    limits: list[float],
    memory: dict[str, float],
    ends: contextlib.ExitStack,
) -> tuple[Lab, FirstHost, list[str]]:
    """A lab whose hosts have so much memory, the process on its first host, and their names."""
    names = [host.name for host in specification.hosts]
    limited = specification.with_memory(dict(zip(names, limits, strict=True)))
    lab = ends.enter_context(Lab.up(limited))
    for link in specification.links:
        lab.set_link(link.name, None)
    asked = FirstHost(lab, "context_hosts_trainer.py", size_flags(SIZE), ends, ANSWER_SECONDS)
    return lab, asked, asked("find", memory=memory)


def _most(lab: Lab) -> list[int]:
    """The most bytes that each host has had."""
    return [lab.most_memory(host.name) for host in lab.specification.hosts]
