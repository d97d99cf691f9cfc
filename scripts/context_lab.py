"""Predicted beside measured steps of context splits on hosts of the lab; needs root.

Hosts are a core each or half of one, in network namespaces that links of a limited rate join. Their
processors are measured on the models themselves, on one host at a time; what is predicted of a
split follows from that, from the links and from the split alone. A round is some steps of a case,
with the hosts' pace measured before and after them.

Rows of `bench_context.py accuracy`: `case`, `predicted_step_time` by the profile, `at_pace` by the
hosts' pace beside the steps (processors that others use too are faster at one time than at
another), `step_time` as measured, and the errors of both; sorted by the error at pace, none left
out. Then a row for each sort of prediction: how many are `within` 10%, the `median_error`, and of
pairs of cases that were trained by one after the other and differ by more than 3%, how many are
ranked wrongly.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarking import WARM_UP_STEPS
from context_cases import HEADS, Case, Group, exchange, ring
from lab import Lab, read_specification
from lab_process import FirstHost

Row = dict[str, Any]

ANSWER_SECONDS = 1800.0

SPEEDS = {"two_hosts": (1.0, 0.5), "four_hosts": (0.5, 0.5, 0.25, 0.25)}
"""The hosts of a lab, in parts of a core."""

CLOSE, CLEAR = 0.10, 0.03
"""What errors are allowed, and by how much two cases must differ to be ranked."""

LENGTHS = (1024, 2048)

STEPS = 3
"""Steps of a round, before the hosts' pace is measured again."""


def cases(lab: str) -> list[Case]:
    """The cases of a lab.

    Args:
        lab: "two_hosts" or "four_hosts".
    """
    found: list[Case] = []
    if lab == "two_hosts":
        splits = (
            ring(1, 1),
            ring(2, 1),
            ring(3, 1),
            exchange((1, 4), (1, 4)),
            exchange((2, 5), (1, 3)),
            exchange((3, 6), (1, 2)),
        )
        for split, sequence in itertools.product(splits, LENGTHS):
            found.append(Case("gpt", sequence, (split,)))
        for split in splits[1:5]:
            found.append(Case("gpt", LENGTHS[-1], (split,), mbit=100))
            found.append(Case("llama", LENGTHS[-1], (split,), mbit=200))
        found.append(Case("gpt", LENGTHS[-1], (splits[1],), recompute=True))
        found.append(Case("llama", LENGTHS[-1], (splits[4],), recompute=True))
        return found
    even: Group = ((1, HEADS // 2), (1, HEADS // 2))
    fast: Group = ((2, HEADS // 2), (2, HEADS // 2))
    uneven: Group = ((2, 5), (1, 3))
    for split in (
        ring(1, 1, 1, 1),
        ring(2, 2, 1, 1),
        exchange((1, 2), (1, 2), (1, 2), (1, 2)),
        exchange((2, 3), (2, 3), (1, 1), (1, 1)),
        (even, even),
        (fast, even),
        (uneven, uneven),
    ):
        found.append(Case("gpt", LENGTHS[-1], (split,)))
        found.append(Case("llama", LENGTHS[-1], (split,), mbit=200))
    found.append(Case("gpt", LENGTHS[-1], (ring(1, 1), ring(1, 1)), microbatches=2))
    found.append(Case("gpt", LENGTHS[-1], (ring(1, 1), exchange((1, 4), (1, 4))), microbatches=2))
    return found


class Asked(FirstHost):
    """The process on the lab's first host, and the lab.

    Args:
        options: the command line.
        ends: what ends both.
        lab: the lab's name.
    """

    def __init__(self, options: argparse.Namespace, ends: contextlib.ExitStack, lab: str):
        self.lab = ends.enter_context(Lab.up(read_specification(lab)))
        for host, speed in zip(self.lab.specification.hosts, SPEEDS[lab], strict=True):
            self.lab.set_speed(host.name, speed)
        super().__init__(self.lab, "context_trainer.py", [], ends, ANSWER_SECONDS)
        self._folder = ends.enter_context(tempfile.TemporaryDirectory())
        self._mbit: float | None = -1.0

    def prepare(self, models: Sequence[tuple[str, int]]) -> None:
        """Measure the hosts, with links as fast as they can be."""
        self.set_rate(None)
        self("measure")
        self("profile", folder=self._folder, models=models)
        self("start_pace", model=models[0][0], sequence=models[0][1])

    def set_rate(self, mbit: float | None) -> None:
        """Limit the links to so many Mbit/s, or not at all, and measure them."""
        if mbit == self._mbit:
            return
        is_first, self._mbit = self._mbit == -1.0, mbit
        for link in self.lab.specification.links:
            self.lab.set_link(link.name, None if mbit is None else mbit * 1e6 / 8)
        if not is_first:
            self("links")


def accuracy_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Predicted beside measured steps, sorted by their errors; see the module."""
    found: list[Row] = []
    for lab in SPEEDS:
        wanted = cases(lab)[:: options.every]
        with contextlib.ExitStack() as ends:
            asked = Asked(options, ends, lab)
            asked.prepare(list(dict.fromkeys((case.model, case.sequence) for case in wanted)))
            for case in sorted(wanted, key=lambda case: case.mbit or 0.0):
                found.append({"lab": lab, **_measured(asked, case, options.rounds)})
                print(found[-1], file=sys.stderr, flush=True)
    yield from sorted(found, key=lambda row: abs(row["error_at_pace"]))
    for name in ("predicted_step_time", "at_pace"):
        yield {"predictions": name, **judged([(row[name], row["step_time"]) for row in found])}


def _measured(asked: Asked, case: Case, rounds: int) -> Row:
    asked.set_rate(case.mbit)
    predicted = asked("make", name=case.name, case=asdict(case))
    asked("steps", name=case.name, count=WARM_UP_STEPS)
    moments, seconds = [asked("pace")], []
    for _ in range(rounds):
        seconds += [asked("step", name=case.name) for _ in range(STEPS)]
        moments.append(asked("pace"))
    paced = asked("at_pace", name=case.name, moments=moments)
    asked("end", name=case.name)
    measured = median(seconds)
    return {
        "case": case.name,
        "predicted_step_time": predicted,
        "at_pace": paced,
        "step_time": measured,
        "error": predicted / measured - 1,
        "error_at_pace": paced / measured - 1,
    }


def judged(pairs: Sequence[tuple[float, float]]) -> Row:
    """What predictions are worth.

    Args:
        pairs: predicted and measured seconds, in the order in which they were measured.

    Returns:
        How many are close, the usual error, and how many clear pairs are ranked wrongly.

    Example:
        >>> judged([(1.0, 1.0), (2.0, 2.5), (3.0, 3.0)])["within"]
        2
    """
    clear = [
        (one, other)
        for one, other in itertools.combinations(pairs, 2)
        if max(one[1], other[1]) > (1 + CLEAR) * min(one[1], other[1])
    ]
    wrong = sum((one[0] - other[0]) * (one[1] - other[1]) < 0 for one, other in clear)
    errors = [abs(predicted / measured - 1) for predicted, measured in pairs]
    return {
        "cases": len(pairs),
        "within": sum(error <= CLOSE for error in errors),
        "median_error": median(errors),
        "largest_error": max(errors),
        "clear_pairs": len(clear),
        "wrong_pairs": wrong,
    }
