"""What moves cost: a stage of two members, with 48 moves of 256 KB in every microbatch.

The Transformer of `moves_trainer.py` trains on two hosts of the lab with a core each and a link
without a limit, and then on two devices of one process. Its step is compared with what it cannot be
faster than: the slower member's computation, as a timed step shows it, and by wire the bytes that a
member gets at the rate that was measured of the link. Beside the steps in one process runs the same
model as one program of both devices, with and without XLA's own sums. The lab needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from benchmarking import (
    KEPT_MEMORY,
    WARM_UP_STEPS,
    Child,
    Size,
    add_size,
    check_losses,
    positive,
    size_flags,
    size_of,
)
from lab import Lab, read_specification
from lab_trainer import trainers
from moves_model import MOVES, MOVES_OF_A_BLOCK
from moves_trainer import one_device

from hetjax.commands.devices import host_device_flags

Ask = Callable[..., Any]
"""Has a trainer do something."""


def measure_wire(size: Size, rounds: int) -> dict[str, Any]:
    """The step on two hosts of the lab, over what it cannot be faster than."""

    def without_limit(lab: Lab) -> None:
        lab.set_link("a-b", None)

    with trainers(read_specification("two_hosts"), size, without_limit) as (_, ours):
        ours("measure_cluster")
        bandwidth = ours("make_moves", "moves")
        found = _measured(lambda do, **options: ours(do, "moves", **options), size, rounds)
    sent = found["bytes"] / bandwidth
    bound = found["compute_seconds"] + sent
    over = {"bandwidth": bandwidth, "bytes_seconds": sent, "bound_seconds": bound}
    return {"carrier": "wire", **found, **over, "step_over_bound": found["step_time"] / bound}


def measure_in_process(size: Size, rounds: int) -> dict[str, Any]:
    """The step on two devices of one process: what a move adds, and what a sum of XLA's adds."""
    flags = {"XLA_FLAGS": host_device_flags("", 2)}
    with contextlib.closing(
        Child("moves_trainer.py", size_flags(size), {**KEPT_MEMORY, **flags})
    ) as child:

        def ask(do: str, **options: Any) -> Any:
            child.ask({"do": do, **options})
            return child.answer()

        def added_by_sums() -> float:
            return ask("one_program", sums=True) - ask("one_program", sums=False)

        added_by_sums()  # The first steps compile.
        sums: list[float] = []
        found = _measured(ask, size, rounds, lambda: sums.append(added_by_sums()))
    added = found["step_time"] - found["compute_seconds"]
    return {
        "carrier": "in process",
        **found,
        "seconds_a_move": added / found["moves"],
        "seconds_a_sum_in_one_program": median(sums) / found["moves"],
    }


def _measured(
    ask: Ask, size: Size, rounds: int, beside: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """What a trainer's steps take; timed ones, others and what runs beside them in turn."""
    losses = {"hetjax": ask("steps", count=WARM_UP_STEPS), "jax": one_device(size, WARM_UP_STEPS)}
    difference = check_losses(losses)
    found: list[tuple[Any, float]] = []
    for _ in range(rounds):
        busy = ask("busy")
        beside()
        found.append((busy, ask("step")))
    return {
        "moves": size.microbatches * size.blocks * MOVES_OF_A_BLOCK,
        "bytes_of_a_move": 4 * size.microbatch_size * size.sequence * size.width,
        "step_time": median(seconds for _, seconds in found),
        "compute_seconds": median(each["compute"] for each, _ in found),
        "bytes": found[-1][0]["bytes"],
        "largest_loss_difference": difference,
    }


def report(result: Mapping[str, Any]) -> None:
    """Print the result for people."""
    for row in result["rows"]:
        print(
            f"{row['carrier']:11}{row['step_time'] * 1e3:7.0f} ms a step of {row['moves']} moves, "
            f"computation {row['compute_seconds'] * 1e3:.0f} ms: "
            + (
                f"{row['step_over_bound']:.2f} of computation and bytes at "
                f"{row['bandwidth'] / 1e9:.2f} GB/s"
                if "step_over_bound" in row
                else f"{row['seconds_a_move'] * 1e3:.2f} ms a move; a sum of XLA's in one program "
                f"of both devices: {row['seconds_a_sum_in_one_program'] * 1e3:.2f} ms"
            )
        )


def main() -> None:
    """Measure both carriers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add_size(parser, MOVES)
    parser.add_argument("--rounds", type=positive, default=10, metavar="N")
    parser.add_argument("--carriers", nargs="+", default=["wire", "in_process"], metavar="CARRIER")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    parts = {"wire": measure_wire, "in_process": measure_in_process}
    rows = [parts[name](size_of(options), options.rounds) for name in options.carriers]
    result = {"rounds": options.rounds, "rows": rows}
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        report(result)


if __name__ == "__main__":
    main()
