"""What messages take by each carrier, and which one a run chooses: `bench_h2.py transports`.

Two workers send each other messages on one machine, and on two hosts of the lab (which needs root)
with links of several rates. The run has measured and chosen its carriers before, in the two
seconds that it takes for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from benchmarking import Child, median_ratio
from lab import Lab, read_specification

Row = dict[str, Any]

LAB = "two_hosts"

SIZES = (1_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000)
"""Bytes of messages, most of them not among those that a run measures."""

RATES = (None, 1000.0, 200.0)
"""Of the lab's link, in Mbit/s; None for no limit."""

LONGEST_SECONDS = 0.5
"""Messages that would take longer on a link are left out there."""

MESSAGES = 5
"""Of a size by each carrier in a round; their median counts."""

KINDS = {"wire": "direct", "stream": "through the hosts", "host": "object store"}
"""What carriers are; Ray's calls take what is larger than 100 KB through its object store."""

ANSWER_SECONDS = 300.0


def transport_rows(rounds: int, labs: bool = True) -> Iterator[Row]:
    """For each link and size what each carrier takes, and how the choice stands to the best.

    Args:
        rounds: how many.
        labs: whether links of the lab are measured, besides two workers on one machine.
    """
    with contextlib.ExitStack() as ends:
        child = ends.enter_context(contextlib.closing(Child("h2_transports_trainer.py", [])))
        yield from _rows(child, "one machine", SIZES, rounds)
    if not labs:
        return
    with contextlib.ExitStack() as ends:
        lab = ends.enter_context(Lab.up(read_specification(LAB)))
        first = lab.specification.hosts[0].name
        child = Child(
            "h2_transports_trainer.py",
            ["--lab", LAB],
            lab.environment(),
            lambda command: lab.command(first, command),
        )
        ends.enter_context(contextlib.closing(child))
        for mbit in RATES:
            rate = None if mbit is None else mbit * 1e6 / 8
            lab.set_link(lab.specification.links[0].name, rate)
            sizes = [size for size in SIZES if rate is None or size / rate <= LONGEST_SECONDS]
            name = "two hosts" if mbit is None else f"two hosts, {mbit:g} Mbit/s"
            yield from _rows(child, name, sizes, rounds)


def _rows(child: Child, link: str, sizes: Sequence[int], rounds: int) -> Iterator[Row]:
    def asked(do: str, **arguments: Any) -> Any:
        child.ask({"do": do, **arguments})
        return child.answer(ANSWER_SECONDS)

    told, names = asked("start", sizes=sizes), asked("carriers")
    yield {"link": link, "curves": told["curves"]}
    times: dict[int, dict[str, list[float]]] = {size: {n: [] for n in names} for size in sizes}
    for turn in range(rounds):
        for size in sizes:
            # Backwards every other time, so that none always follows the same neighbour.
            for name in names[:: -1 if turn % 2 else 1]:
                seconds = asked("exchange", size=size, carrier=name, count=MESSAGES)
                times[size][name].append(median(seconds))
    for size, chosen in zip(sizes, told["chosen"], strict=True):
        found = times[size]
        best = min(names, key=lambda name: median(found[name]))
        yield {
            "link": link,
            "bytes": size,
            "seconds": {f"{name}, {KINDS[name]}": median(found[name]) for name in names},
            "chosen": chosen,
            "best": best,
            "chosen_over_best": median_ratio(found, chosen, best),
        }
