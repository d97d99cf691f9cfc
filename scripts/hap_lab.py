"""Synthesised programs in the lab, for real: parts of `bench_hap.py` that need root.

Mostly two hosts, one at half the speed of the other. What computing takes on them is measured
first, on models of sizes that are not trained by (`PROFILED`); it is kept in a folder where one is
given.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from statistics import correlation, median
from typing import Any

from benchmarking import WARM_UP_STEPS, check_losses, median_ratio, take_turns
from hap_gathers import METHODS
from lab import Lab, read_specification
from lab_process import FirstHost

Row = dict[str, Any]

SPEEDS = (1.0, 0.5)

RATES = (1000, 200, 100, 50, 20)
"""Of the link, in Mbit/s."""

ANSWER_SECONDS = 1800.0

PROFILED = [
    ("VGG19", {"examples": 64, "hidden": 1024, "narrower": 4}),
    ("VGG19", {"examples": 32, "hidden": 2048, "narrower": 2}),
    ("VGG19", {"examples": 64, "hidden": 512, "narrower": 8}),
    (
        "BERT",
        {"examples": 16, "layers": 2, "tokens": 64, "width": 256, "hidden": 1024, "heads": 4}
        | {"vocabulary": 2048},
    ),
    (
        "BERT",
        {"examples": 32, "layers": 2, "tokens": 32, "width": 128, "hidden": 512, "heads": 4}
        | {"vocabulary": 1024},
    ),
]

TRAINED = ("VGG19", {"examples": 256, "hidden": 512, "narrower": 8})
"""The model of `lab`: large dense layers after small convolutions."""

PIPELINED = (
    "BERT",
    {"examples": 128, "layers": 3, "tokens": 32, "width": 192, "hidden": 768, "heads": 3}
    | {"vocabulary": 24576},
)
"""The model of `one-space`: one layer of it, the head, is most of the work."""

MICROBATCHES = 8
"""How many of them a step of `one-space` has."""

EXPERTS = {"examples": 8, "layers": 2, "tokens": 128, "width": 256, "hidden": 2048, "heads": 4}

GATHERED_BYTES = (1 << 18, 1 << 22)

LARGEST_PARTS = (0.25, 0.3, 0.4, 0.55, 0.7, 0.85)
"""What one of four members has of what is gathered; the others have as much as each other."""

FORCED = ("data parallel", "columns", "rows", "gathered factors")


class Asked(FirstHost):
    """The process on the lab's first host, and the lab.

    Args:
        options: the command line.
        ends: what ends both.
        lab: the lab's name.
    """

    def __init__(
        self, options: argparse.Namespace, ends: contextlib.ExitStack, lab: str = "two_hosts"
    ):
        self.lab = ends.enter_context(Lab.up(read_specification(lab)))
        super().__init__(self.lab, "hap_trainer.py", [], ends, ANSWER_SECONDS)
        self._folder = options.profile or ends.enter_context(tempfile.TemporaryDirectory())

    def two_profiled(self) -> None:
        """Set the speeds of two hosts, and measure them with a link as fast as it can be."""
        for host, speed in zip(self.lab.specification.hosts, SPEEDS, strict=True):
            self.lab.set_speed(host.name, speed)
        self.set_rate(None)
        self("measure")
        self.profile(PROFILED)

    def profile(self, models: Sequence[tuple[str, Mapping[str, int]]], microbatches: int = 1):
        """Measure models on the hosts, where the folder has no measurement of them."""
        self("profile", folder=str(self._folder), models=models, microbatches=microbatches)

    def set_rate(self, mbit: float | None) -> None:
        """Limit the link to so many Mbit/s, or not at all."""
        rate = None if mbit is None else mbit * 1e6 / 8
        self.lab.set_link(self.lab.specification.links[0].name, rate)

    def timed(
        self,
        model: str,
        sizes: Mapping[str, int],
        systems: Sequence[str],
        rounds: int,
        microbatches: int = 1,
    ) -> tuple[dict[str, Any], dict[str, list[float]]]:
        """Train by several programs of a model in turn.

        Args:
            model: which.
            sizes: its sizes.
            systems: the programs; see `hap_systems.SYSTEMS`.
            rounds: how many.
            microbatches: of a step.

        Returns:
            For each what was told of its plan, and the seconds of a step in each round.
        """
        asked = {"model": model, "sizes": sizes, "microbatches": microbatches}
        told = {of: self("make", name=of, of=of, **asked) for of in systems}
        check_losses(self.warmed_up(systems))
        return told, self.in_turn(systems, rounds)

    def warmed_up(self, names: Sequence[str]) -> dict[str, list[float]]:
        """Run the first steps of trainers; their losses."""
        return {name: self("steps", name=name, count=WARM_UP_STEPS) for name in names}

    def in_turn(self, names: Sequence[str], rounds: int) -> dict[str, list[float]]:
        """Run steps of trainers in turn, and end them; the seconds of a step in each round."""
        times = take_turns(
            {name: lambda name=name: self("step", name=name) for name in names},
            rounds=rounds,
            steps=1,
        )
        for name in names:
            self("end", name=name)
        return times


def lab_rows(options: argparse.Namespace) -> Iterator[Row]:
    """The synthesised program beside even data parallelism, and beside programs of one kind."""
    model, sizes = TRAINED
    with contextlib.ExitStack() as ends:
        asked = Asked(options, ends)
        asked.two_profiled()
        for mbit in options.rates:
            asked.set_rate(mbit)
            asked("links")
            systems = ("synthesised", "even data parallel", *FORCED)
            told, times = asked.timed(model, sizes, systems, options.rounds)
            best = min(FORCED, key=lambda of: median(times[of]))
            for of in systems:
                yield {
                    "mbit": mbit,
                    "system": of,
                    "step_time": median(times[of]),
                    "predicted_step_time": told[of]["predicted_step_time"],
                    "over_synthesised": median_ratio(times, of, "synthesised"),
                    "synthesised_over_best_forced": median_ratio(times, "synthesised", best),
                    "stored": told[of]["stored"],
                }


def experts_lab_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Three experts of two hosts as two and one, beside four of which one is idle."""
    with contextlib.ExitStack() as ends:
        asked = Asked(options, ends)
        asked.two_profiled()
        sizes = {**EXPERTS, "vocabulary": 512, "experts": 3}
        systems = ("experts", "padded experts")
        told, times = asked.timed("BERT-MoE", sizes, systems, options.rounds)
        for of in systems:
            yield {
                "system": of,
                "step_time": median(times[of]),
                "predicted_step_time": told[of]["predicted_step_time"],
                "stored": {name: each for name, each in told[of]["stored"].items() if "up" in name},
                "padded_over_uneven": median_ratio(times, "padded experts", "experts"),
            }


def one_space_rows(options: argparse.Namespace) -> Iterator[Row]:
    """A pipeline whose last stage is a program, found by the search, beside both planners' own."""
    model, sizes = PIPELINED
    with contextlib.ExitStack() as ends:
        asked = Asked(options, ends, "near_and_far")
        asked("measure")
        asked.profile([PIPELINED], MICROBATCHES)
        systems = ("Harp with programs", "Harp", "synthesised")
        told, times = asked.timed(model, sizes, systems, options.rounds, MICROBATCHES)
        for of in systems:
            yield {
                "system": of,
                "step_time": median(times[of]),
                "predicted_step_time": told[of]["predicted_step_time"],
                "over_harp_with_programs": median_ratio(times, of, "Harp with programs"),
                "stages": told[of]["stages"],
            }


def methods_rows(options: argparse.Namespace) -> Iterator[Row]:
    """A gather among four hosts by each method, from even parts to nearly all on one of them.

    What is chosen is what is predicted to be faster. Each step has a product beside it, and an
    update, which take next to nothing.
    """
    with contextlib.ExitStack() as ends:
        asked = Asked(options, ends, "four_hosts")
        asked("measure")
        for num_bytes, largest in itertools.product(GATHERED_BYTES, LARGEST_PARTS):
            of = {"num_bytes": num_bytes, "largest": largest}
            told = {each: asked("make_gather", name=each, method=each, **of) for each in METHODS}
            asked.warmed_up(METHODS)
            times = asked.in_turn(METHODS, options.rounds)
            predicted = {each: told[each]["predicted_step_time"] for each in METHODS}
            chosen = min(METHODS, key=predicted.__getitem__)
            best = min(METHODS, key=lambda each: median(times[each]))
            for each in METHODS:
                yield {
                    **of,
                    "method": each,
                    "step_time": median(times[each]),
                    "predicted_step_time": predicted[each],
                    "chosen": chosen,
                    "chosen_over_best": median_ratio(times, chosen, best),
                }


def variants(count: int, seed: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Models of sizes that were not measured."""
    rng = Random(seed)
    for number in range(count):
        if number % 2:
            sizes = {
                "examples": rng.choice([48, 64, 96, 128]),
                "hidden": rng.choice([768, 1280, 1536]),
                "narrower": rng.choice([2, 4]),
            }
            yield "VGG19", sizes
        else:
            heads = rng.choice([2, 3, 4, 6])
            sizes = {
                "examples": rng.choice([12, 16, 24, 32]),
                "layers": rng.choice([1, 2, 3]),
                "tokens": rng.choice([32, 48, 64]),
                "width": heads * rng.choice([48, 64]),
                "hidden": rng.choice([512, 768, 1024]),
                "heads": heads,
                "vocabulary": rng.choice([1024, 1536, 2048]),
            }
            yield "BERT", sizes


def accuracy_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Predicted beside measured steps of models that nothing was measured of.

    Processors that others use too are faster at one time than at another; so each prediction is
    made by the profile, and by the hosts' pace right before and after the steps.
    """
    pairs: dict[str, list[tuple[float, float]]] = {"by the profile": [], "at the hosts' pace": []}
    with contextlib.ExitStack() as ends:
        asked = Asked(options, ends)
        asked.two_profiled()
        asked.set_rate(options.mbit)
        asked("links")
        asked("start_pace", model=PROFILED[0][0], sizes=PROFILED[0][1])
        for model, sizes in variants(options.variants, options.seed):
            of = "synthesised"
            told = asked("make", name=of, model=model, sizes=sizes, of=of)
            asked("steps", name=of, count=WARM_UP_STEPS)
            moments = [asked("pace")]
            seconds = [asked("step", name=of) for _ in range(2 * options.rounds)]
            moments.append(asked("pace"))
            paced = asked("at_pace", name=of, moments=moments)
            asked("end", name=of)
            measured, predicted = median(seconds), told["predicted_step_time"]
            pairs["by the profile"].append((predicted, measured))
            pairs["at the hosts' pace"].append((paced, measured))
            yield {
                "model": model,
                "sizes": sizes,
                "predicted_step_time": predicted,
                "at_pace": paced,
                "step_time": measured,
                "error": predicted / measured - 1,
                "error_at_pace": paced / measured - 1,
            }
    for name, found in pairs.items():
        yield {"predictions": name, **judged(found)}


def judged(pairs: Sequence[tuple[float, float]]) -> Row:
    """What predictions are worth.

    Args:
        pairs: predicted and measured seconds.

    Returns:
        The correlation, the usual error, and how many pairs that differ by more than 5% are ranked
        wrongly.

    Example:
        >>> judged([(1.0, 1.0), (2.0, 2.2), (3.0, 3.0)])["wrong_pairs"]
        0
    """
    clear = [
        (one, other)
        for one, other in itertools.combinations(pairs, 2)
        if max(one[1], other[1]) > 1.05 * min(one[1], other[1])
    ]
    wrong = sum((one[0] - other[0]) * (one[1] - other[1]) < 0 for one, other in clear)
    return {
        "variants": len(pairs),
        "pearson": correlation(*zip(*pairs, strict=True)),
        "median_error": median(abs(predicted / measured - 1) for predicted, measured in pairs),
        "clear_pairs": len(clear),
        "wrong_pairs": wrong,
    }
